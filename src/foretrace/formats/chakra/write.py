"""`write_chakra` and `write_json`: a `ChakraTrace` as a file of v0.0.4, or in the JSON form."""

from __future__ import annotations

import gzip
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from foretrace.formats.chakra.json_form import to_json
from foretrace.formats.chakra.messages import FIELD_OF
from foretrace.formats.chakra.schema import messages
from foretrace.formats.chakra.trace import IO_COLUMNS, ChakraTrace, Wire, wire_of
from foretrace.formats.sources import PathLike

# Traces of fewer nodes, attributes and dependencies than this go through protobuf: compiling would take longer.
SMALL_ROWS = 1 << 13
_SIGNED = (Wire.INT32, Wire.SINT32, Wire.SFIXED32)
_UNSIGNED = (Wire.UINT32, Wire.FIXED32)


def write_chakra(trace: ChakraTrace, path: PathLike) -> None:
    """Write a trace as v0.0.4, as mlcommons' reader and ASTRA-sim's feeder take it; gzip if the name ends in ``.gz``.

    An existing file is replaced only when the new one is complete.

    Raises:
        OSError: if the folder cannot be written.
        ValueError: if an attribute's value does not fit its type.
    """
    _check(trace)
    with _replacing(path) as file:
        file.write(_frame(_metadata(trace)))
        if trace.num_nodes + trace.attributes.num_rows + len(trace.data.ids) + len(trace.control.ids) < SMALL_ROWS:
            file.writelines(_small(trace))
            return
        from foretrace.formats.chakra import encode  # imports Numba

        text, first, value = _texts(trace)
        for piece in encode.frames(trace, text, first, value):
            file.write(piece)


def write_json(trace: ChakraTrace, path: PathLike) -> Counter[str]:
    """Write a trace as ``{"workload_graph": [...]}``; gzip if the name ends in ``.gz``.

    Returns:
        What the form cannot carry, by reason: types of attributes that will be read as another, bytes, doc strings,
        numbers that are not finite, a second attribute of one name.
    """
    lost: Counter[str] = Counter()
    with _replacing(path) as file:
        for piece in to_json(trace, lost):
            file.write(piece.encode("utf-8", "replace"))
    return +lost


@contextmanager
def _replacing(path: PathLike) -> Iterator[IO[bytes]]:
    """A file that takes the name ``path`` when it is complete, and leaves nothing behind when it is not."""
    path = Path(path)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with unfinished.open("wb") as raw:
            if path.name.endswith(".gz"):
                # No name and no time within: equal traces make equal files.
                with gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
                    yield packed  # type: ignore[misc]
            else:
                yield raw
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _check(trace: ChakraTrace) -> None:
    """Refuse integers that their 32 bits do not hold."""
    wire, value = trace.attributes["wire"], trace.attributes["value"]
    signed, unsigned = (np.flatnonzero(_is_one_of(wire, wires)) for wires in (_SIGNED, _UNSIGNED))
    wrong = [rows[value[rows] != value[rows].astype(kind)] for rows, kind in ((signed, "i4"), (unsigned, "u4"))]
    for row in np.concatenate(wrong)[:1].tolist():
        name = trace.strings[int(trace.attributes["name"][row])]
        raise ValueError(f"attribute {name!r}: {int(value[row])} is no {Wire(int(wire[row])).name.lower()}")


def _is_one_of(wire: NDArray[Any], wires: tuple[Wire, ...]) -> NDArray[np.bool_]:
    table = np.zeros(256, np.bool_)
    table[list(wires)] = True
    found: NDArray[np.bool_] = table[wire]
    return found


def _frame(message: Any) -> bytes:
    content: bytes = message.SerializeToString()
    size, head = len(content), bytearray()
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes((*head, size)) + content


def _set(message: Any, wire: int, value: Any) -> None:
    """Give an AttributeProto its value."""
    if wire == Wire.NONE:
        return
    name = FIELD_OF[wire]
    if wire % 2:
        setattr(message, name, _clean(value))
        return
    values = getattr(message, name)
    values.SetInParent()
    values.values.extend(map(_clean, value))


def _clean(value: Any) -> Any:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _metadata(trace: ChakraTrace) -> Any:
    message = messages().GlobalMetadata()
    message.version = trace.wrote_version if trace.version == "v0.0.4" and trace.wrote_version else "0.0.4"
    for name, value in trace.metadata.items():
        wire = trace.metadata_wires.get(name)
        _set(message.attr.add(name=_clean(name)), wire_of(value) if wire is None else wire, value)
    return message


def _small(trace: ChakraTrace) -> Iterator[bytes]:
    """The frames of all nodes, through protobuf."""
    schema, nodes = messages(), trace.nodes
    names = [_clean(text) for text in nodes.texts("name")]
    io = {name: nodes.texts(name) for name in IO_COLUMNS if name in nodes}
    keys = trace.attributes.texts("name")
    docs = trace.attributes.texts("doc_string") if "doc_string" in trace.attributes else None
    for row in range(trace.num_nodes):
        node = schema.Node(
            id=int(nodes["id"][row]),
            name=names[row],
            type=int(nodes["type"][row]),
            ctrl_deps=trace.control.of(row).tolist(),
            data_deps=trace.data.of(row).tolist(),
            start_time_micros=int(nodes["start_micros"][row]),
            duration_micros=int(nodes["duration_micros"][row]),
        )
        for column, texts in io.items():
            if texts[row]:
                side, part = column.split("_")
                setattr(getattr(node, side), part, _clean(texts[row]))
        for attribute in range(int(trace.first_attribute[row]), int(trace.first_attribute[row + 1])):
            item = node.attr.add(name=_clean(keys[attribute]), doc_string=_clean(docs[attribute]) if docs else "")
            _set(item, int(trace.attributes["wire"][attribute]), trace.value(attribute))
        # A node of defaults alone would be a message of no length, at which readers stop: its id is written out.
        yield _frame(node) if node.ByteSize() else b"\x02\x08\x00"


def _texts(trace: ChakraTrace) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """What `encode.frames` wants: texts and encoded lists, where each begins, and the values that point to them."""
    text, first = trace.strings.to_utf8()
    wire, value = trace.attributes["wire"], trace.attributes["value"].copy()
    rows = np.flatnonzero(wire == Wire.FLOAT)
    value[rows] = value[rows].view(np.float64).astype(np.float32).view(np.uint32)
    rows = np.flatnonzero((wire == Wire.BYTES) | ((wire % 2 == 0) & (wire > 0)))
    kinds = value[rows] * 64 + wire[rows]
    distinct, place = np.unique(kinds, return_inverse=True)
    fields: list[bytes] = []
    for kind in distinct.tolist():
        message = messages().AttributeProto()
        _set(message, kind % 64, trace.objects[kind // 64])
        fields.append(message.SerializeToString())
    value[rows] = len(first) - 1 + place
    ends = np.cumsum([len(field) for field in fields], dtype=np.int64) + first[-1]
    return np.concatenate((text, np.frombuffer(b"".join(fields), np.uint8))), np.concatenate((first, ends)), value
