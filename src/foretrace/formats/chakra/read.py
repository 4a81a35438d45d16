"""`read_chakra`: a Chakra execution trace of any version, binary or JSON, plain or gzip -> `ChakraTrace`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from foretrace.formats.chakra.builder import count_types
from foretrace.formats.chakra.json_form import JSON_START, read_json
from foretrace.formats.chakra.messages import UNKNOWN_FIELD, Texts
from foretrace.formats.chakra.trace import ChakraTrace
from foretrace.formats.chakra.versions import BROKEN, CUT, EMPTY, MALFORMED, Frames, MessageReader, Told, tell, varint
from foretrace.formats.sources import PathLike, Source, blocks
from foretrace.trace import FormatError, ReadReport

# Files below this size are read through protobuf: compiling, or loading what was compiled, would take longer.
SMALL_BYTES = 1 << 18
_HEAD_BYTES = 1 << 18  # from which the version is told
_RANK_IN_NAME = re.compile(r"\.(\d+)(?:\.repaired)?(?:\.(?:et|eg|json|pb|chakra))?(?:\.gz)?$", re.IGNORECASE)
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
    try:
        found = source if isinstance(source, Source) else Source.of(Path(source))
        meter = _Meter(found.size_bytes, on_bytes)
        report = ReadReport(found.name, "chakra et", found.size_bytes)
        with found.path.open("rb") as file:
            trace = _read(_Stream(file, found, report, meter), report)
    except OSError as error:
        name = source.name if isinstance(source, Source) else str(source)
        raise FormatError(name, error.strerror or str(error), "check the path and its permissions") from None
    trace.rank = rank_in_name(found.name)
    return trace


class _Meter:
    """How much of a file has been read."""

    def __init__(self, size_bytes: int, on_bytes: Callable[[int], None] | None) -> None:
        self._size, self._done, self._on_bytes = size_bytes, 0, on_bytes

    def add(self, count: int) -> None:
        self._done += count
        if self._on_bytes:
            self._on_bytes(count)

    def share(self) -> float:
        return self._done / max(self._size, 1)


class _Stream:
    """The content of a file, piece by piece into memory of the caller's.

    Gzip is inflated in a thread of its own; for a plain file a thread would only cost time.
    """

    def __init__(self, file: IO[bytes], source: Source, report: ReadReport, meter: _Meter) -> None:
        self.meter = meter
        self._file = file
        self._waiting = memoryview(file.read(2))
        self._pieces: Iterator[bytes] | None = None
        if self._waiting.tobytes() == b"\x1f\x8b":
            self._pieces = blocks(source, report, meter.add)
            self._waiting = memoryview(b"")
        else:
            meter.add(len(self._waiting))

    def readinto(self, room: memoryview) -> int:
        """Fill (a part of) ``room`` and return how many bytes; 0 at the end."""
        if not self._waiting and self._pieces is None:
            count = self._file.readinto(room)  # type: ignore[attr-defined]
            self.meter.add(count)
            return int(count)
        if not self._waiting:
            self._waiting = memoryview(next(self._pieces or iter(()), b""))
        count = min(len(room), len(self._waiting))
        room[:count] = self._waiting[:count]
        self._waiting = self._waiting[count:]
        return count

    def read(self, most: int = sys.maxsize) -> bytes:
        """The next bytes, ``most`` or all that there are."""
        found = bytearray()
        room = memoryview(bytearray(min(most, _BLOCK_BYTES)))
        while len(found) < most and (count := self.readinto(room[: most - len(found)])):
            found += room[:count]
        return bytes(found)


def rank_in_name(name: str) -> int:
    """The rank that a file name states (``x.3.et`` is 3), -1 for none."""
    found = _RANK_IN_NAME.search(name)
    return int(found[1]) if found and int(found[1]) < 1 << 31 else -1


def _read(stream: _Stream, report: ReadReport) -> ChakraTrace:
    head = stream.read(_HEAD_BYTES)
    size, begin = varint(head, 0, 5)
    if begin > 0:  # the first message as a whole, whatever its length
        head += stream.read(max(begin + min(size, 0x7FFFFFFF) - len(head), 0))
    rest = stream.read(1)
    is_whole = not rest
    head += rest
    if not head:
        raise FormatError(report.path, "the file is empty", "record the trace again")
    if JSON_START.match(head):
        return read_json(head + stream.read(), report)
    told = tell(Frames(head, is_whole=is_whole))
    if told.version != "v0.0.4":
        head, is_whole = head + stream.read(), True
    reader = MessageReader(told, report)
    version, metadata, wires = reader.metadata()
    if is_whole and (len(head) < SMALL_BYTES or told.version != "v0.0.4"):
        frames = Frames(head, told.nodes_at)
        reader.read(frames)
        report.repair(frames.problem or CUT, f"byte {frames.problem_at}", int(bool(frames.problem)))
        trace, bad = reader.builder.trace(report), reader.bad
    else:
        trace, bad = _decode(head[told.nodes_at :], told.nodes_at, stream, report, reader.text)
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


def _decode(head: bytes, offset: int, stream: _Stream, report: ReadReport, text: Texts) -> tuple[ChakraTrace, int]:
    """The compiled way: the trace, and how many messages were malformed."""
    from foretrace.formats.chakra import decode
    from foretrace.formats.chakra.decoder import Decoder  # imports Numba

    decoder = Decoder(stream.meter.share)
    # One block of memory for all: the kernel may touch 8 bytes behind what is used of it.
    data = np.empty(max(_BLOCK_BYTES, len(head)) + 8, np.uint8)
    used = len(head)
    data[:used] = np.frombuffer(head, np.uint8)
    while True:
        taken, status = decoder.feed(data[:used])
        used -= taken
        if status == decode.BROKEN_FRAME:
            report.repair(BROKEN, f"byte {offset + decoder.taken}")
            break
        data[:used] = data[taken : taken + used].copy()
        if 2 * used > len(data) - 8:  # a message that claims to be huge is not decoded anew for each block
            data = np.concatenate((data[:used], np.empty(2 * len(data), np.uint8)))
        count = stream.readinto(memoryview(data)[used:-8])  # type: ignore[arg-type]
        if not count:
            report.repair(CUT, f"byte {offset + decoder.taken}", int(used > 0))
            break
        used += count
    bad = decoder.count(decode.BAD)
    report.drop(MALFORMED, f"byte {offset + decoder.first_bad}", bad)
    report.drop(EMPTY, count=decoder.count(decode.EMPTY))
    report.note(UNKNOWN_FIELD, count=decoder.count(decode.UNKNOWN))
    return decoder.trace(report, text), bad
