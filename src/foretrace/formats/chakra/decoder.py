"""Blocks of a file of v0.0.4 -> `ChakraTrace`, by the compiled kernel: its buffers, and the columns out of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from foretrace.formats.chakra import decode as kernel
from foretrace.formats.chakra.builder import attribute_table, offsets_of
from foretrace.formats.chakra.messages import Texts, attribute_value, messages, parse
from foretrace.formats.chakra.trace import IO_COLUMNS, ChakraTrace, Dependencies, Wire
from foretrace.trace import ReadReport, StringTable, Table

# Rows of the buffers: small enough for a processor's second cache, large enough for few calls.
_NODES, _ATTRIBUTES, _IDS, _STRINGS, _TEXT = 1 << 13, 1 << 15, 1 << 16, 1 << 12, 1 << 17
_NODE_BUFFERS = (
    (kernel.ID, np.uint64, 1),
    (kernel.NAME, np.int32, 1),
    (kernel.TYPE, np.int32, 1),
    (kernel.START, np.uint64, 1),
    (kernel.DURATION, np.uint64, 1),
    (kernel.IO, np.int32, 6),
    (kernel.NUM_CONTROL, np.uint32, 1),
    (kernel.NUM_DATA, np.uint32, 1),
    (kernel.NUM_ATTRIBUTES, np.uint32, 1),
)
_ATTRIBUTE_BUFFERS = (
    (kernel.ATTRIBUTE_NAME, np.int32),
    (kernel.WIRE, np.uint8),
    (kernel.VALUE, np.int64),
    (kernel.DOC, np.int32),
)
_LIMITS = {
    np.dtype(f"{kind}{size}"): (int(np.iinfo(f"{kind}{size}").min), int(np.iinfo(f"{kind}{size}").max))
    for kind in "iu"
    for size in (1, 2, 4, 8)
}
# Columns and the buffer that each is filled from, by what counts their rows.
_COLUMNS = {
    kernel.NODES: {
        "id": kernel.ID,
        "name": kernel.NAME,
        "type": kernel.TYPE,
        "start_micros": kernel.START,
        "duration_micros": kernel.DURATION,
        "num_control": kernel.NUM_CONTROL,
        "num_data": kernel.NUM_DATA,
        "num_attributes": kernel.NUM_ATTRIBUTES,
    },
    kernel.CONTROL: {"control": kernel.CONTROL_IDS},
    kernel.DATA: {"data": kernel.DATA_IDS},
    kernel.ATTRIBUTES: {"attribute_name": kernel.ATTRIBUTE_NAME, "wire": kernel.WIRE, "value": kernel.VALUE},
}


class GrowingColumn:
    """A column of unknown length in the narrowest type that holds what came so far.

    Args:
        dtype: the narrowest type to begin with.
        is_fixed: stay with that type.
    """

    def __init__(self, dtype: DTypeLike, is_fixed: bool = False) -> None:
        self._data: NDArray[Any] = np.empty(0, dtype)
        self._used = 0
        self._is_fixed = is_fixed

    def append(self, part: NDArray[Any], share: float) -> None:
        """Add rows; ``share`` is how much of the whole is there with them, by which room is made for the rest."""
        if not len(part):
            return
        dtype = self._data.dtype if self._is_fixed else self._wide_enough(part)
        end = self._used + len(part)
        if end > len(self._data) or dtype != self._data.dtype:
            room = len(self._data)
            if end > room:
                room = max(int(1.02 * end / min(max(share, 1e-4), 1.0)), end + end // 8)
            data = np.empty(room, dtype)
            data[: self._used] = self._data[: self._used]
            self._data = data
        self._data[self._used : end] = part
        self._used = end

    def _wide_enough(self, part: NDArray[Any]) -> np.dtype[Any]:
        dtype = self._data.dtype
        top, bottom = int(part.max()), 0 if dtype.kind == "u" else int(part.min())
        while not _LIMITS[dtype][0] <= bottom <= top <= _LIMITS[dtype][1]:
            dtype = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")
        return dtype

    def column(self) -> NDArray[Any]:
        """All rows."""
        is_roomy = self._used < 0.9 * len(self._data)
        return self._data[: self._used].copy() if is_roomy else self._data[: self._used]


class Decoder:
    """Decodes one block after another into columns.

    Args:
        share: says how much of the file has been read, from 0 to 1.

    Attributes:
        taken: bytes of all blocks so far.
        first_bad: among them the place of the first malformed message, -1 if there is none.
    """

    def __init__(self, share: Callable[[], float] = lambda: 1.0) -> None:
        self._share = share
        self.taken = 0
        self.first_bad = -1
        self._room = np.zeros(kernel.ROOM_WORDS, np.int64)
        self._buffers: dict[int, NDArray[Any]] = {}
        for place, dtype, width in _NODE_BUFFERS:
            self._place(place, np.empty(_NODES * width, dtype))
        self._set(kernel.MAX_NODES, _NODES)
        self._attribute_room(_ATTRIBUTES)
        self._id_room(_IDS)
        self._place(kernel.SLOTS, np.zeros(2 * _STRINGS, np.int64))
        self._place(kernel.HASHES, np.empty(_STRINGS, np.int64))
        self._place(kernel.KINDS, np.empty(_STRINGS, np.uint8))
        self._place(kernel.FIRST, np.zeros(_STRINGS + 1, np.int64))
        self._place(kernel.NEXT_KEY, np.zeros(_STRINGS, np.int32))
        self._place(kernel.TEXT, np.zeros(_TEXT + 8, np.uint8))
        self._set(kernel.MAX_STRINGS, _STRINGS)
        self._set(kernel.SLOT_MASK, 2 * _STRINGS - 1)
        self._set(kernel.MAX_TEXT, _TEXT)
        signed = ("name", "type", "attribute_name")
        fixed = {"id": np.uint64, "wire": np.uint8, "value": np.int64}
        self._columns = {
            name: GrowingColumn(fixed.get(name, np.int8 if name in signed else np.uint8), name in fixed)
            for names in _COLUMNS.values()
            for name in names
        }
        self._rows = dict.fromkeys(_COLUMNS, 0)

    def _place(self, place: int, buffer: NDArray[Any]) -> None:
        self._buffers[place] = buffer  # which also keeps it alive
        self._set(place, buffer.ctypes.data)

    def _set(self, place: int, value: int) -> None:
        self._room[place // 8] = value

    def count(self, place: int) -> int:
        """One of the numbers at the head of the kernel's table, e.g. ``count(kernel.BAD)``."""
        return int(self._room[place // 8])

    def _attribute_room(self, rows: int) -> None:
        for place, dtype in _ATTRIBUTE_BUFFERS:
            self._place(place, np.empty(rows, dtype))
        self._set(kernel.MAX_ATTRIBUTES, rows)

    def _id_room(self, rows: int) -> None:
        self._place(kernel.CONTROL_IDS, np.empty(rows, np.uint64))
        self._place(kernel.DATA_IDS, np.empty(rows, np.uint64))
        self._set(kernel.MAX_CONTROL, rows)
        self._set(kernel.MAX_DATA, rows)

    def feed(self, block: NDArray[np.uint8]) -> tuple[int, int]:
        """Decode the frames of a block, behind which 8 more bytes may be read.

        Returns:
            How many bytes were taken, and why it stopped: `decode.END`, `decode.WANTS_BYTES` (the last frame goes
            on) or `decode.BROKEN_FRAME` (a length that cannot be one).
        """
        begin = at = block.ctypes.data
        while True:
            status, at = kernel.decode_nodes(self._room.ctypes.data, at, begin + len(block))
            if status == kernel.FULL:
                self._make_room()
            elif status == kernel.WANTS_STRINGS:
                self._more_strings()
            elif status == kernel.WANTS_TEXT:
                most = self.count(kernel.MAX_TEXT)
                self._place(kernel.TEXT, np.concatenate((self._buffers[kernel.TEXT], np.empty(most, np.uint8))))
                self._set(kernel.MAX_TEXT, 2 * most)
            else:
                break
        if self.first_bad < 0 and self.count(kernel.BAD):
            self.first_bad = self.taken + self.count(kernel.FIRST_BAD) - begin
        self.taken += at - begin
        return at - begin, status

    def _make_room(self) -> None:
        if self.count(kernel.NODES):
            self._flush()
        else:  # one node alone is larger than a buffer
            self._attribute_room(2 * self.count(kernel.MAX_ATTRIBUTES))
            self._id_room(2 * self.count(kernel.MAX_DATA))

    def _more_strings(self) -> None:
        count = self.count(kernel.STRINGS)
        for place in (kernel.HASHES, kernel.KINDS, kernel.FIRST, kernel.NEXT_KEY):
            old = self._buffers[place]
            self._place(place, np.concatenate((old, np.zeros(count, old.dtype))))
        slots = np.zeros(4 * count, np.int64)
        kernel.rehash(slots, self._buffers[kernel.HASHES], self._buffers[kernel.KINDS], count)
        self._place(kernel.SLOTS, slots)
        self._set(kernel.MAX_STRINGS, 2 * count)
        self._set(kernel.SLOT_MASK, 4 * count - 1)

    def _flush(self) -> None:
        """Move what the buffers hold to the columns."""
        share = self._share()
        nodes, attributes = self.count(kernel.NODES), self.count(kernel.ATTRIBUTES)
        self._widen_floats(attributes)
        for counter, names in _COLUMNS.items():
            for name, place in names.items():
                self._columns[name].append(self._buffers[place][: self.count(counter)], share)
        if self.count(kernel.HAS_IO):
            io = self._buffers[kernel.IO][: 6 * nodes].reshape(nodes, 6)
            for index, name in enumerate(IO_COLUMNS):
                self._append_late(name, io[:, index], self._rows[kernel.NODES], share)
        if self.count(kernel.HAS_DOC):
            part = self._buffers[kernel.DOC][:attributes]
            self._append_late("doc_string", part, self._rows[kernel.ATTRIBUTES], share)
        for counter in _COLUMNS:
            self._rows[counter] += self.count(counter)
            self._set(counter, 0)

    def _widen_floats(self, count: int) -> None:
        """Turn the 32 bits of floats into the bits of a float64."""
        rows = np.flatnonzero(self._buffers[kernel.WIRE][:count] == Wire.FLOAT)
        if len(rows):
            single = self._buffers[kernel.VALUE][rows].astype(np.uint32).view(np.float32)
            self._buffers[kernel.VALUE][rows] = single.astype(np.float64).view(np.int64)

    def _append_late(self, name: str, part: NDArray[Any], before: int, share: float) -> None:
        """Append to a column that there is only since it was needed: the rows before have none."""
        if name not in self._columns:
            self._columns[name] = GrowingColumn(np.int8)
            self._columns[name].append(np.full(before, -1, np.int8), share)
        self._columns[name].append(part, share)

    def trace(self, report: ReadReport, text: Texts) -> ChakraTrace:
        """All nodes as a trace. The decoder is used up."""
        self._flush()
        columns = {name: column.column() for name, column in self._columns.items()}
        strings, remap, objects = self._resolve(columns, text)
        nodes = {name: columns[name] for name in ("id", "name", "type", "start_micros", "duration_micros")}
        nodes["name"] = _mapped(nodes["name"], remap)
        for name in IO_COLUMNS:
            if name in columns and (columns[name] >= 0).any():
                nodes[name] = _mapped(columns[name], remap)
        counts, doc = columns["num_attributes"], columns.get("doc_string")
        node = np.repeat(np.arange(len(counts), dtype=np.int32 if len(counts) < 1 << 31 else np.int64), counts)
        return ChakraTrace(
            nodes=Table(nodes, dict.fromkeys(("name", *IO_COLUMNS), strings)),
            control=Dependencies(offsets_of(columns["num_control"]), columns["control"]),
            data=Dependencies(offsets_of(columns["num_data"]), columns["data"]),
            attributes=attribute_table(
                node,
                _mapped(columns["attribute_name"], remap),
                columns["wire"],
                columns["value"],
                None if doc is None else _mapped(doc, remap),
                strings,
            ),
            strings=strings,
            objects=objects,
            report=report,
        )

    def _resolve(
        self, columns: dict[str, NDArray[Any]], text: Texts
    ) -> tuple[StringTable, NDArray[np.int32] | None, list[Any]]:
        """The strings, for each interned text its string (None where these are the same), and the objects.

        In ``columns["value"]`` texts become strings, and lists and bytes places among the objects.
        """
        count = self.count(kernel.STRINGS)
        kinds, first = self._buffers[kernel.KINDS][:count], self._buffers[kernel.FIRST][: count + 1]
        data = self._buffers[kernel.TEXT][: int(first[-1])]
        if not kinds.any() and _is_utf8(data, first):
            return StringTable.from_utf8(data.copy(), first.copy()), None, []
        raw, ends = data.tobytes(), first.tolist()
        wire, value = columns["wire"], columns["value"]
        is_text = wire == Wire.STRING
        # Only what a row names: texts of messages that were left out are there as well.
        named = np.zeros(count + 1, np.bool_)
        for name in ("name", "attribute_name", "doc_string", *IO_COLUMNS):
            named[columns.get(name, kinds[:0])] = True
        named[value[is_text]] = True
        strings, remap = StringTable(), np.full(count, -1, np.int32)
        for at in np.flatnonzero(named[:count]).tolist():
            remap[at] = strings.intern(text(raw[ends[at] : ends[at + 1]]))
        value[is_text] = remap[value[is_text]]
        rows = np.flatnonzero((wire == Wire.BYTES) | ((wire & 1 == 0) & (wire > 0)))
        interned, place = np.unique(value[rows], return_inverse=True)
        value[rows] = place
        objects: list[Any] = []
        for at in interned.tolist():
            content = raw[ends[at] : ends[at + 1]]
            is_list = kinds[at] == kernel.LIST_KIND
            message = parse(messages(lenient=True).AttributeProto, content) if is_list else None
            objects.append(content if message is None else attribute_value(message, text)[1])
        return strings, remap, objects


def _mapped(ids: NDArray[Any], remap: NDArray[np.int32] | None) -> NDArray[Any]:
    """Interned texts as strings, of which there are not more; -1 stays."""
    return ids if remap is None else np.append(remap, np.int32(-1))[ids].astype(ids.dtype)


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
