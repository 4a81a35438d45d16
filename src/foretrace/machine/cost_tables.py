"""Costs of all operators of a timeline or an operator trace, each distinct call computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
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
_LARGEST_KEY = 1 << 62
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

    Raises:
        ValueError: if ``list_dtype`` is no element type.
    """
    if list_dtype is not None:
        element_bytes(list_dtype)
    costs = _Costs()
    if timeline.operators.num_rows:
        costs.add(*_shape_costs(timeline, list_dtype))
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
    nodes = np.flatnonzero(_texts_that(trace.strings, names, lambda name: resolve(name) is not None))
    first, which = _distinct([names[nodes], _argument_keys(trace)[nodes]])
    costs.add(nodes, which, _trace_costs(trace, nodes[first]))
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


def _distinct(columns: Sequence[NDArray[Any]]) -> tuple[Ints, Ints]:
    """The first row of each distinct combination of values, and for each row which combination it has."""
    key = np.zeros(len(columns[0]), np.int64)
    span = 1
    for column in columns:
        number, count = _numbered(column)
        if span * count > _LARGEST_KEY:
            distinct, key = np.unique(key, return_inverse=True)
            span = len(distinct)
        key = key * count + number
        span *= count
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    return first, which


def _numbered(column: NDArray[Any]) -> tuple[Ints, int]:
    """The values of a column as numbers from 0 on, and how many there are."""
    least, most = int(column.min(initial=0)), int(column.max(initial=0))
    if most - least > 4 * len(column) + 1024:
        distinct, number = np.unique(column, return_inverse=True)
        return number, max(len(distinct), 1)
    shifted = column.astype(np.int64) - least
    order = np.cumsum(np.bincount(shifted, minlength=1) > 0) - 1
    return order[shifted], int(order[-1]) + 1


def _shape_costs(timeline: Timeline, list_dtype: str | None) -> tuple[NDArray[Any], Ints, list[OperatorCost | None]]:
    """Costs by the recorded arguments: events, for each of them which of the distinct costs it has, and these."""
    table = timeline.operators
    rows = np.flatnonzero(timeline.category[table["event"]] == Category.OPERATOR)
    rows = rows[timeline.are_named(table["event"][rows], lambda name: resolve(name) is not None)]
    events = table["event"][rows]
    keys = [timeline.events["name"][events], *(table[column][rows] for column in _ARGUMENTS)]
    first, which = _distinct(keys)
    texts = zip(*(timeline.strings.lookup(key[first]) for key in keys), strict=True)
    return events, which, [_kineto_cost(name, own, list_dtype) for name, *own in texts]


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
    first, which = _distinct([table["dtype"][rows], *(size[rows] for size in sizes)])
    numbers = zip(table.take(rows[first]).texts("dtype"), *(size[rows[first]].tolist() for size in sizes), strict=True)
    return table["event"][rows], which, [_collective_cost(*one) for one in numbers]


def _collective_cost(dtype: str, in_elements: int, out_elements: int) -> OperatorCost | None:
    if not normalize_dtype(dtype) or max(in_elements, out_elements) >= _LARGEST_KEY >> 4:
        return None
    size = element_bytes(dtype)
    return OperatorCost(0, in_elements * size, out_elements * size, "collective")


def _texts_that(strings: StringTable, ids: NDArray[Any], is_wanted: Callable[[str], bool]) -> NDArray[np.bool_]:
    """Which of the ids stand for a wanted text; each distinct one is asked once."""
    used = np.flatnonzero(np.bincount(ids + 1, minlength=1)) - 1
    is_hit = np.zeros(len(strings) + 1, np.bool_)  # the last one answers for -1
    is_hit[used] = [is_wanted(text) for text in strings.lookup(used)]
    return np.asarray(is_hit[ids])


def _argument_keys(trace: OperatorTrace) -> Ints:
    """A number for each node that two nodes share where their arguments are equal."""
    arguments, first = trace.arguments, trace.first_argument
    columns = [arguments[name] for name in ("is_output", "type", "shape", "strides")]
    # Of values only those of plain ones matter: those of tensors hold their ids.
    is_tensor = _texts_that(trace.strings, arguments["type"], lambda text: "Tensor(" in text)
    columns.append(np.where(is_tensor, -1, arguments["value"]))
    _, each = _distinct(columns)
    # Nodes of one number of arguments are compared column by column.
    count = np.diff(first)
    keys = np.zeros(trace.num_nodes, np.int64)
    used = 0
    for length in np.unique(count).tolist():
        nodes = np.flatnonzero(count == length)
        columns = [each[first[nodes] + at] for at in range(length)] or [np.zeros(len(nodes), np.int64)]
        keys[nodes] = _distinct(columns)[1] + used
        used += len(nodes)
    return keys


def _trace_costs(trace: OperatorTrace, nodes: NDArray[Any]) -> list[OperatorCost | None]:
    """The cost of each of these nodes."""
    begins, ends = trace.first_argument[nodes].tolist(), trace.first_argument[nodes + 1].tolist()
    rows = [row for begin, end in zip(begins, ends, strict=True) for row in range(begin, end)]
    chosen = trace.arguments.take(np.array(rows, np.int64))
    texts = [chosen.texts(name) for name in ("type", "shape", "strides", "value")]
    arguments = iter(zip(chosen["is_output"].tolist(), *texts, strict=True))
    return [
        _trace_cost(name, list(islice(arguments, end - begin)))
        for name, begin, end in zip(trace.names(nodes), begins, ends, strict=True)
    ]


def _trace_cost(name: str, arguments: Sequence[tuple[Any, ...]]) -> OperatorCost | None:
    inputs: list[Argument] = []
    outputs: list[Argument] = []
    try:
        for is_output, *texts in arguments:
            (outputs if is_output else inputs).append(trace_argument(*texts))
    except Unknown:
        return None
    return operator_cost(name, inputs, outputs)


def _has_above(parent: NDArray[np.integer[Any]], is_work: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether a node has an ancestor that works; one round for each level of the tree."""
    has = np.zeros(len(parent), np.bool_)
    works, next_above = np.append(is_work, False), np.append(parent, -1)  # the last ones answer for -1
    above = next_above[:-1]
    while np.any(above >= 0):
        has |= works[above]
        above = next_above[above]
    return has
