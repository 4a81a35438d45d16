"""Operators: who called whom, self time, and the device work launched under each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foretrace.analyze.tables import INT, TEXT, table_of, timelines_of
from foretrace.trace import Category, Job, Timeline
from foretrace.trace.nesting import callers
from foretrace.trace.steps import operator_rows

if TYPE_CHECKING:
    import pyarrow as pa

_Rows = NDArray[np.int64]


def operators(job: Job | Timeline, by_shape: bool = False, python: bool = False) -> pa.Table:
    """Operators by name (and input shapes and types), by self time, longest first within each rank.

    Args:
        job: what to look at.
        by_shape: keep calls with different input shapes or types apart.
        python: take Python functions, where recorded, for operators, too. They then own the time between operators
            and the device work that no operator launched.

    Columns: rank, name, input_shapes and input_types (``by_shape`` only; JSON text), count, total_ns (children
    included), self_ns (without operators called by it, but with its runtime calls; never negative), device_ns
    (device work that it launched itself, not through a child), outlasting (children that end after it).
    """
    rows: list[tuple[Any, ...]] = []
    for timeline in timelines_of(job):
        rows += _of_timeline(timeline, by_shape, python)
    shape = {"input_shapes": TEXT, "input_types": TEXT} if by_shape else {}
    times = dict.fromkeys(("count", "total_ns", "self_ns", "device_ns", "outlasting"), INT)
    return table_of({"rank": INT, "name": TEXT, **shape, **times}, rows)


def self_times(timeline: Timeline, rows: _Rows, parent: _Rows) -> tuple[_Rows, _Rows]:
    """Time of each event in which no event that began later runs on its thread, and its number of outlasting children.

    What outlasts its parent is taken from the parent up to the parent's end, and from there on from the parent's
    parent. Over a thread the self times add up to the time in which any of the events runs.

    Args:
        timeline: where the events are.
        rows: rows of ``timeline.events``.
        parent: `parents` of these, -1 for none.

    Returns:
        int64 ns and int64, shape ``(len(rows),)``; the time is never negative.
    """
    taken, outlasting = np.zeros(timeline.num_events, np.int64), np.zeros(timeline.num_events, np.int64)
    parent_of = np.full(timeline.num_events, -1, np.int64)
    parent_of[rows] = parent
    has_parent = parent >= 0
    begin, end, above = timeline.start_ns[rows[has_parent]], timeline.end_ns[rows[has_parent]], parent[has_parent]
    np.add.at(outlasting, above[end > timeline.end_ns[above]], 1)
    while len(above):  # a round for each level that the longest overhang reaches; mostly one
        until = np.minimum(end, timeline.end_ns[above])
        np.add.at(taken, above, np.maximum(until - begin, 0))
        begin, above = np.maximum(begin, until), parent_of[above]
        left = (end > begin) & (above >= 0)
        begin, end, above = begin[left], end[left], above[left]
    return np.maximum(timeline.duration_ns[rows] - taken[rows], 0), outlasting[rows]


def _of_timeline(timeline: Timeline, by_shape: bool, python: bool) -> list[tuple[Any, ...]]:
    rows = operator_rows(timeline).astype(np.int64)
    if python:
        rows = np.sort(np.concatenate((rows, timeline.rows(Category.PYTHON).astype(np.int64))))
    if not len(rows):
        return []
    device = timeline.device_rows
    parent, launcher = callers(timeline, rows, device)
    self_ns, outlasting = self_times(timeline, rows, parent)
    device_ns = np.zeros(timeline.num_events, np.int64)
    np.add.at(device_ns, launcher[launcher >= 0], timeline.duration_ns[device[launcher >= 0]])
    keys = _keys(timeline, rows, by_shape)
    first, group, count = _groups(keys)
    sums = [count]
    for column in (timeline.duration_ns[rows], self_ns, device_ns[rows], outlasting):
        total = np.zeros(len(first), np.int64)
        np.add.at(total, group, column)
        sums.append(total)
    order = np.argsort(-sums[2], kind="stable")
    texts = [timeline.strings.lookup(key[first[order]]) for key in keys]
    numbers = [total[order].tolist() for total in sums]
    return list(zip([timeline.rank] * len(order), *texts, *numbers, strict=True))


def _keys(timeline: Timeline, rows: _Rows, by_shape: bool) -> list[_Rows]:
    """String ids by which operators are told apart: name, or name, shapes and types."""
    names = timeline.events["name"][rows].astype(np.int64)
    if not by_shape:
        return [names]
    table = timeline.operators
    keys = [names]
    for column in ("input_shapes", "input_types"):
        ids = np.full(timeline.num_events, -1, np.int64)
        if table.num_rows:
            ids[table["event"]] = table[column]
        keys.append(ids[rows])
    return keys


def _groups(keys: Sequence[_Rows]) -> tuple[_Rows, _Rows, _Rows]:
    """Rows with equal keys: the first row of each group, the group of each row, the size of each group."""
    code = keys[0]
    for key in keys[1:]:
        _, code = np.unique(code, return_inverse=True)
        code = code.reshape(-1) * (key.max(initial=-1) + 2) + key + 1
    _, first, group, count = np.unique(code, return_index=True, return_inverse=True, return_counts=True)
    return first, group.reshape(-1), count
