"""`OperatorTrace`: what was computed on one rank. The call tree of operators with their tensors; no times."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.trace.graph import offsets
from foretrace.trace.job import ProcessGroup
from foretrace.trace.reading import ReadReport
from foretrace.trace.strings import StringTable
from foretrace.trace.table import Table

# Nodes that PyTorch puts between an operator on a tensor subclass and what the subclass makes of it.
_SUBCLASS_MARKS = ("PythonSubclass", "PythonDispatchMode")

# Values of the column ``scope``, PyTorch's RecordScope.
FUNCTION_SCOPE, BACKWARD_SCOPE, USER_SCOPE = 0, 1, 7


@dataclass
class OperatorTrace:
    """Operators of one rank.

    Attributes:
        nodes: one row a node, in order of start, so that a parent stands before its children. Columns ``id`` (int64,
            as the file has it), ``parent`` (row, -1 for a root), ``completion`` (int32, place in the order of ends),
            ``name`` (string id), ``record_function_id``, ``forward_parent``, ``sequence`` (int64, -1 for none),
            ``scope`` (PyTorch's RecordScope), ``thread``, ``forward_thread`` (int64), ``schema``, ``kernel_backend``,
            ``kernel_file``, ``integer_statistics`` (string ids, -1 for none; the last is JSON text: what is known of
            integer tensors by position).
        arguments: inputs and outputs, sorted by node, inputs first, in order. Columns ``node`` (row), ``is_output``
            (bool), ``position`` (in its list), ``type``, ``shape``, ``strides``, ``value`` (string ids of the text in
            the file: JSON; strides are -1 before schema 1.1.1).
        tensors: one row for each tensor in an argument (lists hold many), in that order. Columns ``argument`` (row),
            ``node`` (row), ``is_output``, ``element`` (place in a list, -1 for a plain tensor), ``tensor_id``,
            ``storage_id``, ``offset`` (in elements), ``elements``, ``element_bytes``, ``device``, ``dtype``, ``shape``,
            ``strides`` (string ids), ``value`` (which tensor it is: ids in the file are used again after a tensor is
            freed, these numbers are not), ``version`` (times it had been written in place by then; an output has the
            version after the write) and ``producer`` (row of the node that wrote to its storage last, -1 for none in
            the trace).
        collectives: communication with what is known of it. Columns ``node`` (row), ``collective``, ``dtype``,
            ``group``, ``group_description``, ``group_ranks``, ``reduction``, ``in_split``, ``out_split`` (string ids;
            ranks and splits are JSON lists), ``in_elements``, ``out_elements``, ``group_size``, ``rank_start``,
            ``rank_stride``, ``source_rank``, ``target_rank``, ``tag`` (int64, -1 for none).
        storages: one row a storage and life, where the recorder noted them. Columns ``storage_id``, ``size_bytes``,
            ``allocated`` and ``freed`` (node id from which on it existed, and after which it was gone, -1 unknown),
            ``device`` (string id).
        strings: the texts of all string columns.
        groups: process groups by name.
        schema: version of the file's format, such as ``"1.1.1-chakra.0.0.4"``.
        rank: -1 if unknown.
        metadata: everything else at the top of the file (``pid``, ``time``, ``start_ts``, ...).
    """

    nodes: Table
    arguments: Table
    tensors: Table
    strings: StringTable
    collectives: Table = field(default_factory=lambda: Table({}))
    storages: Table = field(default_factory=lambda: Table({}))
    groups: dict[str, ProcessGroup] = field(default_factory=dict)
    schema: str = ""
    rank: int = -1
    metadata: dict[str, Any] = field(default_factory=dict)
    report: ReadReport = field(default_factory=lambda: ReadReport("", "pytorch et"))

    def __repr__(self) -> str:
        return f"OperatorTrace(rank {self.rank}, {self.num_nodes} nodes, schema {self.schema}, {self.report.path})"

    @property
    def num_nodes(self) -> int:
        """Nodes, operators and annotations alike."""
        return self.nodes.num_rows

    @cached_property
    def first_argument(self) -> NDArray[np.int64]:
        """Where each node's arguments begin and end, shape ``(num_nodes + 1,)``."""
        return offsets(self.arguments["node"], self.num_nodes)

    @cached_property
    def first_tensor(self) -> NDArray[np.int64]:
        """Where each node's tensors begin and end, shape ``(num_nodes + 1,)``."""
        return offsets(self.tensors["node"], self.num_nodes)

    @cached_property
    def is_operator(self) -> NDArray[np.bool_]:
        """Whether a node computes by itself: it has a schema, or names a kernel. Shape ``(num_nodes,)``."""
        has_schema = self._has_text("schema")
        return np.asarray(has_schema | self._has_text("kernel_backend"))

    @cached_property
    def is_wrapper(self) -> NDArray[np.bool_]:
        """Whether a node handed its work to a tensor subclass or a dispatch mode, as operators on DTensor do.

        Shapes and storages of such a node are those of the whole tensor, which no rank holds; the local work is done by
        operators below it. Shape ``(num_nodes,)``.
        """
        marks = [self.strings.find(name) for name in _SUBCLASS_MARKS]
        inner = np.isin(self.nodes["name"], [mark for mark in marks if mark >= 0])
        found = np.zeros(self.num_nodes + 1, np.bool_)
        found[self.nodes["parent"][inner]] = True
        return found[:-1]

    @cached_property
    def is_outermost(self) -> NDArray[np.bool_]:
        """Operators that no other operator called, where those on tensor subclasses count as none: running just these
        again does all the work once. Shape ``(num_nodes,)``.
        """
        parent = self.nodes["parent"]
        own = np.append(self.is_operator & ~self.is_wrapper, False)
        inside = np.zeros(self.num_nodes + 1, np.bool_)
        while True:
            deeper = own[parent] | inside[parent]
            if np.array_equal(deeper, inside[:-1]):
                return np.asarray(own[:-1] & ~inside[:-1])
            inside[:-1] = deeper

    def _has_text(self, column: str) -> NDArray[np.bool_]:
        ids = self.nodes[column]
        return np.asarray((ids >= 0) & (ids != self.strings.find("")))

    def names(self, rows: NDArray[np.integer]) -> list[str]:
        """Names of the given nodes."""
        return self.strings.lookup(self.nodes["name"][rows])
