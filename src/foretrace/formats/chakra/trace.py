"""`ChakraTrace`: what one Chakra execution trace holds, whatever version of the format it was written in."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.trace import ReadReport, StringTable, Table
from foretrace.trace.workload import CommType as CommType


class NodeType(enum.IntEnum):
    """Chakra's node types, as v0.0.4 numbers them; a reader translates those of older files."""

    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


class Wire(enum.IntEnum):
    """Types of an attribute's value: the field numbers of the ``oneof`` in AttributeProto."""

    NONE = 0
    DOUBLE = 3
    DOUBLE_LIST = 4
    FLOAT = 5
    FLOAT_LIST = 6
    INT32 = 7
    INT32_LIST = 8
    INT64 = 9
    INT64_LIST = 10
    UINT32 = 11
    UINT32_LIST = 12
    UINT64 = 13
    UINT64_LIST = 14
    SINT32 = 15
    SINT32_LIST = 16
    SINT64 = 17
    SINT64_LIST = 18
    FIXED32 = 19
    FIXED32_LIST = 20
    FIXED64 = 21
    FIXED64_LIST = 22
    SFIXED32 = 23
    SFIXED32_LIST = 24
    SFIXED64 = 25
    SFIXED64_LIST = 26
    BOOL = 27
    BOOL_LIST = 28
    STRING = 29
    STRING_LIST = 30
    BYTES = 31
    BYTES_LIST = 32


INTEGER_WIRES = frozenset(Wire(n) for n in (7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27))
FLOAT_WIRES = frozenset((Wire.DOUBLE, Wire.FLOAT))
IO_COLUMNS = (
    "inputs_values", "inputs_shapes", "inputs_types", "outputs_values", "outputs_shapes", "outputs_types",
)  # fmt: skip


def wire_of(value: Any) -> Wire:
    """The type that a Python value has by itself: int64 (uint64 from 2^63 on), double, bool, string, bytes, or a list.

    Raises:
        TypeError: if no type of Chakra holds the value.
    """
    if isinstance(value, list | tuple):
        wires = {wire_of(element) for element in value}
        if wires == {Wire.INT64, Wire.UINT64} and min(value) >= 0:
            return Wire.UINT64_LIST
        if wires == {Wire.INT64, Wire.DOUBLE}:
            return Wire.DOUBLE_LIST
        single = wires.pop() if len(wires) == 1 else Wire.STRING if not wires else Wire.NONE
        if single == Wire.NONE or single % 2 == 0:
            raise TypeError(f"no Chakra attribute holds {value!r}")
        return Wire(single + 1)
    if isinstance(value, bool | np.bool_):
        return Wire.BOOL
    if isinstance(value, int | np.integer) and -(1 << 63) <= value < 1 << 64:
        return Wire.INT64 if value < 1 << 63 else Wire.UINT64
    if isinstance(value, float | np.floating):
        return Wire.DOUBLE
    if isinstance(value, str | bytes):
        return Wire.STRING if isinstance(value, str) else Wire.BYTES
    if value is None:
        return Wire.NONE
    raise TypeError(f"no Chakra attribute holds {value!r}")


@dataclass
class Dependencies:
    """Lists of node ids, one list a node.

    Attributes:
        first: where each node's list begins and ends, shape ``(nodes + 1,)``.
        ids: ids of nodes as the file has them (unsigned, the narrowest type that holds them).
    """

    first: NDArray[np.integer]
    ids: NDArray[np.unsignedinteger]

    def of(self, row: int) -> NDArray[np.unsignedinteger]:
        """The ids that node ``row`` depends on."""
        return self.ids[int(self.first[row]) : int(self.first[row + 1])]

    @property
    def nodes(self) -> NDArray[np.int64]:
        """The row that each id belongs to, shape ``(len(ids),)``."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))


@dataclass
class ChakraTrace:
    """Nodes of one rank's Chakra trace as columns.

    Attributes:
        nodes: one row a node, in file order. Columns ``id`` (uint64), ``name`` (string id), ``type`` (`NodeType`),
            ``start_micros`` and ``duration_micros`` (unsigned, microseconds as in the file), and, where any
            node has such, ``inputs_values``, ``inputs_shapes``, ``inputs_types``, ``outputs_values``,
            ``outputs_shapes``, ``outputs_types`` (string ids, -1 for none).
        control, data: the two kinds of dependencies.
        attributes: one row an attribute, sorted by node, in file order within. Columns ``node`` (row), ``name``
            (string id), ``wire`` (`Wire`), ``value`` (int64: an integer or bool as it is, uint64 as its bits, a float
            as the bits of a float64, a string as string id, bytes and lists as index into ``objects``). Parameters
            of v0.0.1, which were fields, stand here under today's names. Where any attribute has one, a column
            ``doc_string`` (string id, -1 for none).
        objects: lists and bytes that attributes hold; equal ones may be one object.
        metadata: the first message of the file: attributes by name, as Python values.
        metadata_wires: the types of these, where they are not the ones that `wire_of` gives.
        version: of the format, ``"v0.0.1"`` to ``"v0.0.4"``; which one a file has is told from its content, and the
            report says how.
        wrote_version: the ``version`` text of the file's metadata, as it stands there.
        rank: of the file's name (``x.3.et`` is rank 3), -1 if it has none.
    """

    nodes: Table
    control: Dependencies
    data: Dependencies
    attributes: Table
    strings: StringTable
    objects: list[Any] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    metadata_wires: dict[str, Wire] = field(default_factory=dict)
    version: str = "v0.0.4"
    wrote_version: str = ""
    rank: int = -1
    report: ReadReport = field(default_factory=lambda: ReadReport("", "chakra et"))

    def __repr__(self) -> str:
        return f"ChakraTrace(rank {self.rank}, {self.num_nodes} nodes, {self.version}, {self.report.path})"

    @property
    def num_nodes(self) -> int:
        """Nodes in the file."""
        return self.nodes.num_rows

    @cached_property
    def first_attribute(self) -> NDArray[np.int64]:
        """Where each node's attributes begin and end, shape ``(num_nodes + 1,)``."""
        counts = np.bincount(self.attributes["node"], minlength=self.num_nodes)
        return np.concatenate(([0], np.cumsum(counts))).astype(np.int64)

    def attribute_rows(self, name: str) -> NDArray[np.intp]:
        """Rows of ``attributes`` with that name, the first of each node only (as simulators read them)."""
        rows = np.flatnonzero(self.attributes["name"] == self.strings.find(name))
        node = self.attributes["node"][rows]
        return rows[np.append(True, node[1:] != node[:-1])] if len(rows) else rows

    def integers(self, name: str, absent: int = -1) -> NDArray[np.int64]:
        """An integer attribute of every node, of any integer type or bool; shape ``(num_nodes,)``."""
        found = np.full(self.num_nodes, absent, np.int64)
        rows = self.attribute_rows(name)
        rows = rows[np.isin(self.attributes["wire"][rows], list(INTEGER_WIRES))]
        found[self.attributes["node"][rows]] = self.attributes["value"][rows]
        return found

    def texts(self, name: str) -> list[str]:
        """A string attribute of every node, ``""`` where a node has none."""
        ids = np.full(self.num_nodes, -1, np.int64)
        rows = self.attribute_rows(name)
        rows = rows[self.attributes["wire"][rows] == Wire.STRING]
        ids[self.attributes["node"][rows]] = self.attributes["value"][rows]
        return self.strings.lookup(ids)

    def value(self, row: int) -> Any:
        """The value of attribute ``row`` as a Python object."""
        wire, value = int(self.attributes["wire"][row]), self.attributes["value"][row]
        if wire == Wire.BOOL:
            return bool(value)
        if wire in (Wire.UINT64, Wire.FIXED64):
            return int(value.astype(np.uint64))
        if wire in FLOAT_WIRES:
            return float(value.view(np.float64))
        if wire == Wire.STRING:
            return self.strings[int(value)]
        return None if wire == Wire.NONE else int(value) if wire in INTEGER_WIRES else self.objects[int(value)]
