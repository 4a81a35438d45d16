"""`read_chakra`: a Chakra execution trace of any version, binary or JSON, plain or gzip -> `ChakraTrace`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.formats.chakra.builder import attribute_table, count_types, narrow, offsets_of
from foretrace.formats.chakra.json_form import JSON_START, read_json
from foretrace.formats.chakra.messages import BAD_UTF8, UNKNOWN_FIELD, Texts, attribute_value, messages, parse
from foretrace.formats.chakra.trace import IO_COLUMNS, ChakraTrace, Dependencies, Wire
from foretrace.formats.chakra.versions import BROKEN, CUT, EMPTY, MALFORMED, Frames, MessageReader, Told, tell
from foretrace.formats.sources import PathLike, Source, blocks
from foretrace.trace import FormatError, ReadReport, StringTable, Table

# Files below this size are read through protobuf: compiling, or loading what was compiled, would take longer.
SMALL_BYTES = 1 << 18
_RANK_IN_NAME = re.compile(r"\.(\d+)(?:\.(?:et|eg|json|pb|chakra))?(?:\.gz)?$", re.IGNORECASE)
_BLOCK_BYTES = 1 << 20


def read_chakra(source: PathLike | Source, on_bytes: Callable[[int], None] | None = None) -> ChakraTrace:
    """Read one rank's Chakra execution trace.

    Args:
        source: a file of v0.0.1 to v0.0.4, the JSON form, or the output of ``chakra_jsonizer``; plain or gzip.
        on_bytes: called with the number of bytes read, again and again.

    Returns:
        The trace. Its ``report`` says which version was told from what, and what was repaired or left out.

    Raises:
        FormatError: if the file does not exist or holds no Chakra trace.
    """
    from pathlib import Path

    try:
        found = source if isinstance(source, Source) else Source.of(Path(source))
        report = ReadReport(found.name, "chakra et", found.size_bytes)
        trace = _read(blocks(found, report, on_bytes), report)
    except OSError as error:
        name = source.name if isinstance(source, Source) else str(source)
        raise FormatError(name, error.strerror or str(error), "check the path and its permissions") from None
    trace.rank = _rank(found.name)
    return trace


def _rank(name: str) -> int:
    found = _RANK_IN_NAME.search(name)
    return int(found[1]) if found and int(found[1]) < 1 << 31 else -1


def _read(pieces: Iterator[bytes], report: ReadReport) -> ChakraTrace:
    head = b""
    is_whole = False
    while len(head) < SMALL_BYTES and not is_whole:
        piece = next(pieces, None)
        is_whole = piece is None
        head += piece or b""
    if not head:
        raise FormatError(report.path, "the file is empty", "record the trace again")
    if JSON_START.match(head):
        return read_json(b"".join((head, *pieces)), report)
    told = tell(Frames(head, is_whole=is_whole))
    if told.version != "v0.0.4":
        head, is_whole = b"".join((head, *pieces)), True
    reader = MessageReader(told, report)
    version, metadata, wires = reader.metadata()
    if is_whole:
        frames = Frames(head, told.nodes_at)
        reader.read(frames)
        report.repair(frames.problem or CUT, f"byte {frames.problem_at}", int(bool(frames.problem)))
        trace, bad = reader.builder.trace(report), reader.bad
    else:
        trace, bad = _decode(head[told.nodes_at :], told.nodes_at, pieces, report)
    if bad > trace.num_nodes or (trace.num_nodes == 0 and told.metadata is None):
        remedy = "name a Chakra execution trace (.et) or its JSON form"
        raise FormatError(report.path, "no Chakra trace: its messages are no nodes", remedy)
    trace.version, trace.wrote_version, trace.metadata, trace.metadata_wires = told.version, version, metadata, wires
    _describe(trace, told)
    return trace


def _describe(trace: ChakraTrace, told: Told) -> None:
    """Put into the report what was told."""
    report = trace.report
    report.kind = f"chakra et {told.version}"
    report.examples["version"] = f"{told.version}: {told.how}"
    if told.is_guess:
        report.guess(f"version {told.version}: nothing in the file tells it")
    count_types(trace)


def _decode(head: bytes, offset: int, pieces: Iterator[bytes], report: ReadReport) -> tuple[ChakraTrace, int]:
    """The compiled way: the trace, and how many messages were malformed."""
    from foretrace.formats.chakra import decode  # imports Numba

    decoder = decode.Decoder()
    rest, more = np.empty(0, np.uint8), [head]
    while more:
        data = _padded(rest, more)
        taken, status = decoder.feed(data[:-8])
        rest = data[taken:-8]
        if status == decode.BROKEN_FRAME:
            report.repair(BROKEN, f"byte {offset + decoder.taken}")
            rest = rest[:0]
            break
        # As much again as is waiting: a message that claims to be huge is not copied block by block.
        more = _take(pieces, max(_BLOCK_BYTES, len(rest)))
    report.repair(CUT, f"byte {offset + decoder.taken}", int(len(rest) > 0))
    decoder.flush()
    bad = decoder.count(decode.BAD)
    report.drop(MALFORMED, f"byte {offset + decoder.first_bad}", bad)
    report.drop(EMPTY, count=decoder.count(decode.EMPTY))
    report.note(UNKNOWN_FIELD, count=decoder.count(decode.UNKNOWN))
    return _trace(decoder, report), bad


def _take(pieces: Iterator[bytes], size: int) -> list[bytes]:
    """The next pieces, of that many bytes together or up to the end."""
    taken: list[bytes] = []
    while size > 0 and (piece := next(pieces, None)) is not None:
        taken.append(piece)
        size -= len(piece)
    return taken


def _padded(rest: NDArray[np.uint8], group: list[bytes]) -> NDArray[np.uint8]:
    """All bytes in one array, with 8 more behind them that the kernel may touch."""
    data = np.empty(len(rest) + sum(map(len, group)) + 8, np.uint8)
    data[: len(rest)] = rest
    at = len(rest)
    for piece in group:
        data[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    return data


def _trace(decoder: Any, report: ReadReport) -> ChakraTrace:
    """The columns of a decoder as a trace."""
    data, first, kinds = decoder.strings
    strings, remap = _strings(data, first, kinds, report)
    columns = {name: _column(decoder, name) for name in ("id", "name", "type", "start_micros", "duration_micros")}
    columns["name"] = _mapped(columns["name"], remap)
    io = decoder.column("io")
    for index, name in enumerate(IO_COLUMNS):
        if io is not None and (io[index] >= 0).any():
            columns[name] = _mapped(io[index], remap)
    control, data_ids = (
        Dependencies(offsets_of(_column(decoder, f"num_{kind}")), _column(decoder, kind))
        for kind in ("control", "data")
    )
    wire, value = _column(decoder, "wire"), _column(decoder, "value")
    objects = _objects(wire, value, data, first, remap, report)
    counts = _column(decoder, "num_attributes")
    node = np.repeat(np.arange(len(counts), dtype=np.int32 if len(counts) < 1 << 31 else np.int64), counts)
    doc = decoder.column("doc_string")
    names = _mapped(_column(decoder, "attribute_name"), remap)
    return ChakraTrace(
        nodes=Table(columns, dict.fromkeys(("name", *IO_COLUMNS), strings)),
        control=control,
        data=data_ids,
        attributes=attribute_table(node, names, wire, value, None if doc is None else _mapped(doc, remap), strings),
        strings=strings,
        objects=objects,
        report=report,
    )


_DTYPES = {"id": np.uint64, "value": np.int64, "name": np.int8, "type": np.int8, "attribute_name": np.int8}


def _column(decoder: Any, name: str) -> NDArray[Any]:
    found: NDArray[Any] | None = decoder.column(name)
    return np.empty(0, _DTYPES.get(name, np.uint8)) if found is None else found


def _mapped(ids: NDArray[Any], remap: NDArray[np.int32] | None) -> NDArray[Any]:
    """Ids of interned bytes as ids of strings; -1 stays."""
    if remap is None:
        return ids
    return narrow(np.append(remap, np.int32(-1))[ids])


def _strings(
    data: NDArray[np.uint8], first: NDArray[np.int64], kinds: NDArray[np.uint8], report: ReadReport
) -> tuple[StringTable, NDArray[np.int32] | None]:
    """The texts among interned bytes, and the text of each; None where they are all texts, each another."""
    is_text = kinds == 0
    if is_text.all() and _is_utf8(data, first):
        return StringTable.from_utf8(data.copy(), first.copy()), None
    text = Texts(report)
    remap = np.full(len(kinds), -1, np.int32)
    strings = StringTable()
    raw, ends = data.tobytes(), first.tolist()
    for at in np.flatnonzero(is_text).tolist():
        remap[at] = strings.intern(text(raw[ends[at] : ends[at + 1]]))
    return strings, remap


def _is_utf8(data: NDArray[np.uint8], first: NDArray[np.int64]) -> bool:
    """Whether every text is valid: all together are, and none begins in the middle of a character."""
    if not len(data) or int(data.max()) < 0x80:
        return True
    try:
        data.tobytes().decode()
    except UnicodeDecodeError:
        return False
    starts = first[:-1][first[:-1] < first[1:]]
    return not bool(((data[starts] & 0xC0) == 0x80).any())


def _objects(
    wire: NDArray[np.uint8], value: NDArray[np.int64], data: NDArray[np.uint8], first: NDArray[np.int64],
    remap: NDArray[np.int32] | None, report: ReadReport,
) -> list[Any]:  # fmt: skip
    """Lists and bytes of attributes; ``value`` of these becomes a place in the result, that of texts a string id."""
    is_text = wire == Wire.STRING
    if remap is None:
        return []
    value[is_text] = remap[value[is_text]]
    rows = np.flatnonzero((wire == Wire.BYTES) | ((wire % 2 == 0) & (wire > 0)))
    interned, place = np.unique(value[rows], return_inverse=True)
    is_bytes = np.zeros(len(interned), np.bool_)
    is_bytes[place] = wire[rows] == Wire.BYTES
    value[rows] = place
    text = Texts(report)
    objects: list[Any] = []
    for at, plain in zip(interned.tolist(), is_bytes.tolist(), strict=True):
        content = data[first[at] : first[at + 1]].tobytes()
        message = None if plain else parse(messages(lenient=True).AttributeProto, content)
        objects.append(content if message is None else attribute_value(message, text)[1])
    return objects


__all__ = ["BAD_UTF8", "SMALL_BYTES", "read_chakra"]
