"""Columns -> nodes of v0.0.4, compiled. Imported only where a trace is worth compiling for.

Messages are written from their end to their beginning, so that a length is known when it is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from foretrace.formats.chakra.memory import get8, get32, get64, put8, put64
from foretrace.formats.chakra.trace import IO_COLUMNS, ChakraTrace, Wire

# Places in the table at ``room``: where the columns lie.
(
    ID, NAME, TYPE, START, DURATION, IO, FIRST_CONTROL, CONTROL, FIRST_DATA, DATA, FIRST_ATTRIBUTE, KEY, WIRE, VALUE,
    DOC, FIRST_TEXT, TEXT,
) = range(0, 136, 8)  # fmt: skip
ROOM_WORDS = 17
_FIRST_ROWS = 1 << 10  # nodes of the first piece; by its size the next ones are made about as large as a cache
_PIECE_BYTES = 1 << 20


@njit(cache=True, nogil=True)
def _varint(at: int, value: int) -> int:
    """Write a number that ends at ``at``; gives where it begins."""
    if 0 <= value < 0x80:
        put8(at - 1, value)
        return at - 1
    size, rest = 0, value
    while rest != 0 or size == 0:
        rest = (rest >> 7) & 0x1FFFFFFFFFFFFFF
        size += 1
    at -= size
    for index in range(size - 1):
        put8(at + index, (value & 0x7F) | 0x80)
        value = (value >> 7) & 0x1FFFFFFFFFFFFFF
    put8(at + size - 1, value)
    return at


@njit(cache=True, nogil=True)
def _text(room: int, at: int, string: int, tag: int) -> int:
    """Write the text ``string``, its length and, unless it is 0, ``tag``. There are 8 bytes before every text."""
    place = get64(room + FIRST_TEXT) + 8 * string
    begin = get64(place)
    size = get64(place + 8) - begin
    begin += get64(room + TEXT)
    at -= size
    offset = size
    while offset > 0:  # from the right, as what lies to the left is still free
        offset -= 8
        put64(at + offset, get64(begin + offset))
    return _varint(_varint(at, size), tag) if tag else at


@njit(cache=True, nogil=True)
def _attribute(room: int, at: int, row: int) -> int:
    stop = at
    wire, value = get8(get64(room + WIRE) + row), get64(get64(room + VALUE) + 8 * row)
    if wire == 29:
        at = _text(room, at, value, 234)
    elif wire == 31 or (wire & 1 == 0 and wire > 0):  # the text is the whole field
        at = _text(room, at, value, 0)
    elif wire == 3 or wire == 21 or wire == 25:
        put64(at - 8, value)
        at = _varint(at - 8, 8 * wire + 1)
    elif wire == 5 or wire == 19 or wire == 23:
        for index in range(4):
            put8(at - 4 + index, value >> (8 * index))
        at = _varint(at - 4, 8 * wire + 5)
    elif wire > 0:
        if wire == 15 or wire == 17:
            value = (value << 1) ^ (value >> 63)
        at = _varint(_varint(at, value), 8 * wire)
    doc, key = get32(get64(room + DOC) + 4 * row), get32(get64(room + KEY) + 4 * row)
    first = get64(room + FIRST_TEXT)
    if doc >= 0 and get64(first + 8 * doc + 8) > get64(first + 8 * doc):
        at = _text(room, at, doc, 18)
    if key >= 0 and get64(first + 8 * key + 8) > get64(first + 8 * key):
        at = _text(room, at, key, 10)
    return _varint(_varint(at, stop - at), 82)


@njit(cache=True, nogil=True)
def encode_nodes(room: int, rows: int, end: int) -> int:
    """Write the frames of ``rows`` nodes so that they end at address ``end``; gives where they begin."""
    at = end
    first = get64(room + FIRST_TEXT)
    for row in range(rows - 1, -1, -1):
        stop = at
        for attribute in range(
            get64(get64(room + FIRST_ATTRIBUTE) + 8 * row + 8) - 1,
            get64(get64(room + FIRST_ATTRIBUTE) + 8 * row) - 1,
            -1,
        ):
            at = _attribute(room, at, attribute)
        for side in range(1, -1, -1):
            io_stop = at
            for part in range(2, -1, -1):
                text = get32(get64(room + IO) + 24 * row + 12 * side + 4 * part)
                if text >= 0 and get64(first + 8 * text + 8) > get64(first + 8 * text):
                    at = _text(room, at, text, 10 + 8 * part)
            if at < io_stop:
                at = _varint(_varint(at, io_stop - at), 66 + 8 * side)
        for field in range(7, 5, -1):
            micros = get64(get64(room + (DURATION if field == 7 else START)) + 8 * row)
            if micros != 0:
                at = _varint(_varint(at, micros), 8 * field)
        for field in range(5, 3, -1):
            offsets, ids = (
                get64(room + (FIRST_DATA if field == 5 else FIRST_CONTROL)),
                get64(room + (DATA if field == 5 else CONTROL)),
            )
            ids_stop = at
            for index in range(get64(offsets + 8 * row + 8) - 1, get64(offsets + 8 * row) - 1, -1):
                at = _varint(at, get64(ids + 8 * index))
            if at < ids_stop:
                at = _varint(_varint(at, ids_stop - at), 8 * field + 2)
        kind = get32(get64(room + TYPE) + 4 * row)
        if kind != 0:
            at = _varint(_varint(at, kind), 24)
        name = get32(get64(room + NAME) + 4 * row)
        if name >= 0 and get64(first + 8 * name + 8) > get64(first + 8 * name):
            at = _text(room, at, name, 18)
        node_id = get64(get64(room + ID) + 8 * row)
        # A node of defaults alone would be a message of no length, at which readers stop: its id is written out.
        if node_id != 0 or at == stop:
            at = _varint(_varint(at, node_id), 8)
        at = _varint(at, stop - at)
    return at


def frames(trace: ChakraTrace, text: NDArray[np.uint8], first: NDArray[np.int64], value: Any) -> Iterator[memoryview]:
    """The frames of all nodes, in pieces; each is gone when the next one is asked for.

    Args:
        trace: the trace.
        text: all strings of the trace, and behind them the encoded fields of its lists and bytes.
        first: where each of these begins and ends.
        value: the column of values, in which a list or bytes is the number of its text, and a float32 its bits.
    """
    padded = np.concatenate((np.zeros(8, np.uint8), text))
    lengths = np.append(np.diff(first), 0)  # the last one is that of -1
    out = np.empty(0, np.uint8)
    begin, rows = 0, _FIRST_ROWS
    while begin < trace.num_nodes:
        end = min(begin + rows, trace.num_nodes)
        columns, bound = _columns(trace, padded, first + 8, lengths, value, begin, end)
        if bound > len(out):
            out = np.empty(bound, np.uint8)
        room = np.array([column.ctypes.data for column in columns], np.int64)
        stop = out.ctypes.data + len(out)
        size = stop - encode_nodes(room.ctypes.data, end - begin, stop)
        yield out[len(out) - size :].data
        rows = max(_FIRST_ROWS // 4, min(8 * _FIRST_ROWS, _PIECE_BYTES * (end - begin) // max(size, 1)))
        begin = end


def _columns(
    trace: ChakraTrace,
    text: NDArray[np.uint8],
    first: NDArray[np.int64],
    lengths: NDArray[np.int64],
    value: NDArray[np.int64],
    begin: int,
    end: int,
) -> tuple[list[NDArray[Any]], int]:
    """The columns of some nodes in the types and order that `encode_nodes` wants, and the bytes they need at most."""
    nodes, attributes = trace.nodes, trace.attributes
    rows = slice(begin, end)
    low, high = (int(row) for row in trace.first_attribute[[begin, end]])
    which = slice(low, high)
    io = np.full((end - begin, 6), -1, np.int32)
    for index, name in enumerate(IO_COLUMNS):
        if name in nodes:
            io[:, index] = nodes[name][rows]
    doc = attributes["doc_string"][which] if "doc_string" in attributes else np.full(high - low, -1)
    offsets = {kind: getattr(trace, kind).first[begin : end + 1].astype(np.int64) for kind in ("control", "data")}
    ids = {kind: getattr(trace, kind).ids[offsets[kind][0] : offsets[kind][-1]] for kind in offsets}
    columns: list[NDArray[Any]] = [
        nodes["id"][rows].astype(np.uint64),
        nodes["name"][rows].astype(np.int32),
        nodes["type"][rows].astype(np.int32),
        nodes["start_micros"][rows].astype(np.uint64),
        nodes["duration_micros"][rows].astype(np.uint64),
        io,
        offsets["control"] - offsets["control"][0],
        ids["control"].astype(np.uint64),
        offsets["data"] - offsets["data"][0],
        ids["data"].astype(np.uint64),
        trace.first_attribute[begin : end + 1] - low,
        attributes["name"][which].astype(np.int32),
        attributes["wire"][which].astype(np.uint8),
        value[which].astype(np.int64),
        doc.astype(np.int32),
        np.ascontiguousarray(first),
        text,
    ]
    wire = columns[12]
    texts = np.where((wire >= Wire.STRING) | ((wire % 2 == 0) & (wire > 0)), columns[13], -1)
    variable = [columns[1], io.ravel(), columns[11], columns[14], texts]
    bound = sum(int(lengths[part].sum()) for part in variable)
    bound += 128 * (end - begin) + 64 * (high - low) + 10 * (len(columns[7]) + len(columns[9])) + 8
    return columns, bound
