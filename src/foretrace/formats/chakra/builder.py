"""Nodes one by one -> `ChakraTrace`: for small files, old versions and JSON, and for programs that make traces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.formats.chakra.trace import (
    FLOAT_WIRES,
    INTEGER_WIRES,
    IO_COLUMNS,
    ChakraTrace,
    Dependencies,
    NodeType,
    Wire,
)
from foretrace.trace import ReadReport, StringTable, Table

Attribute = tuple[str, int, Any, str]  # name, wire, value, doc string
_BITS, _DOUBLE = Struct("<q"), Struct("<d")


class Builder:
    """Collects nodes and makes the columns of a `ChakraTrace` of them."""

    def __init__(self) -> None:
        self.strings = StringTable()
        self.objects: list[Any] = []
        self._object_ids: dict[tuple[int, str], int] = {}
        self._nodes: list[tuple[int, int, int, int, int]] = []
        self._io: list[tuple[int, ...]] = []
        self._attributes: list[tuple[int, int, int, int, int]] = []
        self._ids: tuple[list[int], list[int]] = ([], [])
        self._counts: tuple[list[int], list[int]] = ([], [])

    def add(
        self,
        node_id: int,
        name: str = "",
        node_type: int = 0,
        *,
        control: Iterable[int] = (),
        data: Iterable[int] = (),
        start_micros: int = 0,
        duration_micros: int = 0,
        io: Sequence[str] = (),
        attributes: Iterable[Attribute] = (),
    ) -> int:
        """Add a node and return its row.

        Args:
            node_id: below 2^64, as all ids.
            name, node_type, start_micros, duration_micros: as the columns of `ChakraTrace.nodes`.
            control, data: ids that the node depends on.
            io: the texts of inputs and outputs in the order of `IO_COLUMNS`; an empty one is none.
            attributes: name, `Wire`, Python value and doc string of each.
        """
        row = len(self._nodes)
        for kind, ids in enumerate((control, data)):
            before = len(self._ids[kind])
            self._ids[kind].extend(ids)
            self._counts[kind].append(len(self._ids[kind]) - before)
        intern = self.strings.intern
        for key, wire, value, doc in attributes:
            name_id = intern(key)
            doc_id = intern(doc) if doc else -1
            self._attributes.append((row, name_id, wire, self._value(wire, value), doc_id))
        if any(io):
            self._io.append((row, *(intern(text) if text else -1 for text in io)))
        self._nodes.append((node_id, intern(name), node_type, start_micros, duration_micros))
        return row

    def _value(self, wire: int, value: Any) -> int:
        """What stands in the column ``value`` for a Python value of that type."""
        if wire in FLOAT_WIRES:
            return int(_BITS.unpack(_DOUBLE.pack(value))[0])
        if wire in INTEGER_WIRES:
            return value - (1 << 64) if value >= 1 << 63 else int(value)
        if wire == Wire.STRING:
            return self.strings.intern(value)
        if wire == Wire.NONE:
            return 0
        key = (wire, repr(value))  # not the value itself: 0.0 equals -0.0
        if key not in self._object_ids:
            self._object_ids[key] = len(self.objects)
            self.objects.append(value)
        return self._object_ids[key]

    def trace(self, report: ReadReport | None = None, **members: Any) -> ChakraTrace:
        """All nodes as a trace; ``members`` are further fields of `ChakraTrace`."""
        ids, names, types, starts, durations = zip(*self._nodes, strict=True) if self._nodes else [()] * 5
        columns: dict[str, NDArray[Any]] = {
            "id": np.array(ids, np.uint64),
            "name": narrow(np.array(names, np.int32)),
            "type": narrow(np.array(types, np.int32)),
            "start_micros": narrow(np.array(starts, np.uint64)),
            "duration_micros": narrow(np.array(durations, np.uint64)),
        }
        io = np.array(self._io, np.int32).reshape(-1, 7)
        for index, name in enumerate(IO_COLUMNS, 1):
            if (io[:, index] >= 0).any():
                column = np.full(len(self._nodes), -1, np.int32)
                column[io[:, 0]] = io[:, index]
                columns[name] = narrow(column)
        node, key, wire, value, doc = np.array(self._attributes, np.int64).reshape(-1, 5).T
        control, data = (
            Dependencies(offsets_of(counts), narrow(np.array(ids, np.uint64)))
            for counts, ids in zip(self._counts, self._ids, strict=True)
        )
        return ChakraTrace(
            nodes=Table(columns, dict.fromkeys(("name", *IO_COLUMNS), self.strings)),
            control=control,
            data=data,
            attributes=attribute_table(node, narrow(key), wire, value, narrow(doc), self.strings),
            strings=self.strings,
            objects=self.objects,
            report=report or ReadReport("", "chakra et"),
            **members,
        )


def count_types(trace: ChakraTrace) -> None:
    """Put into the report how many nodes of each type there are."""
    report = trace.report
    types = trace.nodes["type"]
    is_known = (types >= 0) & (types < len(NodeType))
    for kind, count in zip(NodeType, np.bincount(types[is_known], minlength=len(NodeType)).tolist(), strict=True):
        if count:
            report.events[kind.name] += count
    for number, count in zip(*np.unique(types[~is_known], return_counts=True), strict=True):
        report.events[f"type {number}"] += int(count)
        report.note("node of a type that v0.0.4 does not have", f"type {number}", int(count))


def attribute_table(
    node: NDArray[Any],
    name: NDArray[Any],
    wire: NDArray[Any],
    value: NDArray[Any],
    doc: NDArray[Any] | None,
    strings: StringTable,
) -> Table:
    """The table of attributes; ``doc`` is left out where there is none."""
    columns = {
        "node": node.astype(np.int32 if len(node) == 0 or int(node[-1]) < 1 << 31 else np.int64, copy=False),
        "name": name,
        "wire": wire.astype(np.uint8, copy=False),
        "value": value.astype(np.int64, copy=False),
    }
    if doc is not None and (doc >= 0).any():
        columns["doc_string"] = doc
    return Table(columns, dict.fromkeys(("name", "doc_string"), strings))


def offsets_of(counts: Any) -> NDArray[np.integer]:
    """Where lists of these lengths begin and end, in the narrower type that holds it."""
    first = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=first[1:])
    return first.astype(np.int32) if first[-1] < 1 << 31 else first


def narrow(column: NDArray[Any]) -> NDArray[Any]:
    """A copy in the narrowest type of the same signedness."""
    if not len(column):
        return np.empty(0, f"{column.dtype.kind}1")
    top, bottom = int(column.max()), 0 if column.dtype.kind == "u" else int(column.min())
    for size in (1, 2, 4):
        limits = np.iinfo(f"{column.dtype.kind}{size}")
        if limits.min <= bottom and top <= limits.max:
            return column.astype(limits.dtype)
    return column.copy()
