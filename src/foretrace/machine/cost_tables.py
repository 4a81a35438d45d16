"""Costs of all operators of a timeline or an operator trace, each distinct call computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.machine.call import OperatorCost
from foretrace.machine.dtypes import element_bytes, normalize_dtype
from foretrace.machine.operands import Argument, Unknown, kineto_arguments, trace_argument
from foretrace.machine.operator_cost import operator_cost, resolve
from foretrace.trace import Category, StringTable, Table, Timeline
from foretrace.trace.nesting import parents
from foretrace.trace.operators import OperatorTrace

Ints = NDArray[np.int64]
_ARGUMENTS = ("input_shapes", "input_types", "input_strides", "concrete_inputs")


def timeline_costs(timeline: Timeline, *, list_dtype: str | None = None) -> Table:
    """FLOPs and bytes of every operator of a timeline whose cost is known.

    Args:
        list_dtype: element type of tensors in lists, which Kineto does not record (``aten::cat``, ``_foreach_*``);
            without one, such operators are left out.

    Returns:
        One row an operator, in the order of events. Columns ``event`` (row of ``timeline.events``), ``flops``,
        ``read_bytes``, ``written_bytes`` (int64), ``category`` (string id) and ``is_outermost``: no operator around it
        has a cost of its own, so that a sum over these rows counts nothing twice.
    """
    costs = _Costs()
    table = timeline.operators
    if table.num_rows:
        rows = np.flatnonzero(timeline.category[table["event"]] == Category.OPERATOR)
        rows = rows[timeline.are_named(table["event"][rows], lambda name: resolve(name) is not None)]
        names = timeline.events["name"][table["event"][rows]]
        key = _distinct([names, *(table[column][rows] for column in _ARGUMENTS)])

        def cost_of(row: int) -> OperatorCost | None:
            event = table["event"][row : row + 1]
            texts = [timeline.strings.lookup(table[column][row : row + 1])[0] for column in _ARGUMENTS]
            return _kineto_cost(timeline.names(event)[0], texts, list_dtype)

        costs.add(table["event"][rows], *_by_key(key, rows, cost_of))
    costs.replace(*_collective_costs(timeline))
    events, columns = costs.finish()
    is_work = columns["category"] != costs.categories.find("view")
    is_outermost = np.zeros(len(events), np.bool_)
    is_outermost[is_work] = parents(timeline, events[is_work]) < 0
    columns["is_outermost"] = is_outermost
    return Table({"event": events, **columns}, {"category": costs.categories})


def trace_costs(trace: OperatorTrace) -> Table:
    """FLOPs and bytes of every operator of a PyTorch execution trace whose cost is known.

    Returns:
        As `timeline_costs`, with ``node`` (row of ``trace.nodes``) in the place of ``event``.
    """
    costs = _Costs()
    names = trace.nodes["name"]
    used = np.flatnonzero(np.bincount(names + 1, minlength=1)) - 1
    is_known = np.zeros(len(trace.strings) + 1, np.bool_)  # the last one answers for -1
    is_known[used] = [resolve(name) is not None for name in trace.strings.lookup(used)]
    nodes = np.flatnonzero(is_known[names])
    key = _distinct([names[nodes], _argument_keys(trace)[nodes]])
    costs.add(nodes, *_by_key(key, nodes, lambda node: _trace_cost(trace, node)))
    rows, columns = costs.finish()
    is_work = np.zeros(trace.num_nodes, np.bool_)
    is_work[rows] = columns["category"] != costs.categories.find("view")
    columns["is_outermost"] = (is_work & ~_has_above(trace.nodes["parent"], is_work))[rows]
    return Table({"node": rows, **columns}, {"category": costs.categories})


class _Costs:
    """Columns of a table of costs in the making."""

    def __init__(self) -> None:
        self.categories = StringTable()
        self._rows: list[NDArray[Any]] = [np.empty(0, np.int64)]
        self._numbers: list[Ints] = [np.empty((0, 4), np.int64)]

    def add(self, rows: NDArray[Any], which: Ints, distinct: Sequence[OperatorCost | None]) -> None:
        """Rows, for each of them which of the distinct costs it has, and these; unknown ones are left out."""
        is_known = np.array([cost is not None for cost in distinct], np.bool_)
        numbers = np.zeros((len(distinct), 4), np.int64)
        for at, cost in enumerate(distinct):
            if cost is not None:
                category = self.categories.intern(cost.category)
                numbers[at] = (cost.flops, cost.read_bytes, cost.written_bytes, category)
        kept = is_known[which]
        self._rows.append(np.asarray(rows, np.int64)[kept])
        self._numbers.append(numbers[which[kept]])

    def replace(self, rows: NDArray[Any], which: Ints, distinct: Sequence[OperatorCost | None]) -> None:
        """As `add`, in place of what was added for these rows."""
        for at, before in enumerate(self._rows):
            kept = ~np.isin(before, rows)
            self._rows[at], self._numbers[at] = before[kept], self._numbers[at][kept]
        self.add(rows, which, distinct)

    def finish(self) -> tuple[Ints, dict[str, NDArray[Any]]]:
        """Rows in ascending order, and their columns."""
        rows, numbers = np.concatenate(self._rows), np.concatenate(self._numbers)
        order = np.argsort(rows, kind="stable")
        names = ("flops", "read_bytes", "written_bytes", "category")
        columns: dict[str, NDArray[Any]] = {
            name: np.ascontiguousarray(numbers[order, at]) for at, name in enumerate(names)
        }
        columns["category"] = columns["category"].astype(np.int32)
        return rows[order], columns


def _distinct(columns: Sequence[NDArray[Any]]) -> Ints:
    """A number for each row that two rows share where they are equal in all columns."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        _, number = np.unique(column, return_inverse=True)
        _, key = np.unique(key * (int(number.max(initial=0)) + 1) + number, return_inverse=True)
    return key


def _by_key(
    key: Ints, rows: NDArray[Any], cost_of: Callable[[int], OperatorCost | None]
) -> tuple[Ints, list[OperatorCost | None]]:
    """For each row which of the distinct costs it has, and these; each is asked for once."""
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    return which, [cost_of(row) for row in np.asarray(rows)[first].tolist()]


def _kineto_cost(name: str, texts: Sequence[str], list_dtype: str | None) -> OperatorCost | None:
    try:
        return operator_cost(name, kineto_arguments(texts[0], texts[1], texts[2], texts[3], list_dtype))
    except Unknown:
        return None


def _collective_costs(timeline: Timeline) -> tuple[NDArray[Any], Ints, list[OperatorCost | None]]:
    """Costs by the metadata that the profiler attached to ``record_param_comms``."""
    table = timeline.collectives
    if not table.num_rows:
        return np.empty(0, np.int64), np.empty(0, np.int64), []
    sizes = [table["in_elements"], table["out_elements"]]
    is_told = (timeline.category[table["event"]] == Category.OPERATOR) & (sizes[0] >= 0) & (sizes[1] >= 0)
    rows = np.flatnonzero(is_told)
    dtypes = table.texts("dtype")

    def cost_of(row: int) -> OperatorCost | None:
        dtype = normalize_dtype(dtypes[row])
        if not dtype:
            return None
        read, written = (int(size[row]) * element_bytes(dtype) for size in sizes)
        return OperatorCost(0, read, written, "collective")

    key = _distinct([table["dtype"][rows], *(size[rows] for size in sizes)])
    return table["event"][rows], *_by_key(key, rows, cost_of)


def _argument_keys(trace: OperatorTrace) -> Ints:
    """A number for each node that two nodes share where their arguments are equal; a stray equality is excluded."""
    arguments, first = trace.arguments, trace.first_argument
    columns = [arguments[name] for name in ("is_output", "type", "shape", "strides")]
    # Of values only those of plain ones matter: those of tensors hold their ids.
    texts = trace.strings.lookup(np.arange(len(trace.strings)))
    is_tensor = np.array([*("Tensor(" in text for text in texts), False], np.bool_)[arguments["type"]]
    columns.append(np.where(is_tensor, -1, arguments["value"]))
    each = _distinct(columns)
    # Nodes of one number of arguments are compared column by column.
    count = np.diff(first)
    keys = np.zeros(trace.num_nodes, np.int64)
    used = 0
    for length in np.unique(count).tolist():
        nodes = np.flatnonzero(count == length)
        columns = [each[first[nodes] + at] for at in range(length)] or [np.zeros(len(nodes), np.int64)]
        keys[nodes] = _distinct(columns) + used
        used += len(nodes)
    return keys


def _trace_cost(trace: OperatorTrace, node: int) -> OperatorCost | None:
    begin, end = trace.first_argument[node], trace.first_argument[node + 1]
    rows = slice(int(begin), int(end))
    columns = [trace.strings.lookup(trace.arguments[name][rows]) for name in ("type", "shape", "strides", "value")]
    inputs: list[Argument] = []
    outputs: list[Argument] = []
    try:
        for is_output, *texts in zip(trace.arguments["is_output"][rows].tolist(), *columns, strict=True):
            (outputs if is_output else inputs).append(trace_argument(*texts))
    except Unknown:
        return None
    return operator_cost(trace.names(np.array([node]))[0], inputs, outputs)


def _has_above(parent: NDArray[np.integer[Any]], is_work: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether a node has an ancestor that works; one round for each level of the tree."""
    has = np.zeros(len(parent) + 1, np.bool_)  # the last one answers for -1
    works = np.append(is_work, False)
    level = np.arange(len(parent))
    above = np.asarray(parent, np.int64)
    while len(level := level[above[level] >= 0] if len(level) else level):
        has[level] |= works[above[level]]
        above = np.where(above >= 0, np.append(parent, -1)[above], -1)
    return np.asarray(has[:-1])
