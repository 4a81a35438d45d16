"""Operators: who called whom, self time, and the device work launched under each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foretrace.analyze.tables import INT, TEXT, table_of, timelines_of
from foretrace.trace import Category, Job, Timeline
from foretrace.trace.steps import operator_rows

if TYPE_CHECKING:
    import pyarrow as pa

ROUNDING_NS = 1000  # an overlap of at most this much with the event before is a rounded end, not a call

_Rows = NDArray[np.int64]


def parents(timeline: Timeline, rows: NDArray[np.integer]) -> _Rows:
    """The innermost of the given events that encloses each of them on its thread; -1 at the top.

    Of events that start together the longer one is the parent; of equal ones the earlier in the file. Events that
    cross (neither encloses the other) do occur: the later one belongs to the innermost event that is still running
    when it starts, unless they share no more than 1 us and half of the later one, which is rounding.

    Returns:
        rows of ``timeline.events``, shape ``(len(rows),)``.
    """
    rows = np.asarray(rows, np.int64)
    start, lane = timeline.start_ns[rows], timeline.events["lane"][rows]
    end = np.maximum(timeline.end_ns[rows], start + 1)  # an event without length lasts for its instant
    order = np.lexsort((rows, -timeline.end_ns[rows], start, lane))
    borders = np.flatnonzero(np.diff(lane[order])) + 1
    above = np.full(len(rows), -1, np.int64)  # positions within ``order``
    for part in np.split(np.arange(len(rows)), borders) if len(rows) else []:
        found = _parents_of_thread(start[order[part]], end[order[part]])
        above[part] = np.where(found >= 0, found + part[0], -1)
    result = np.full(len(rows), -1, np.int64)
    result[order] = np.where(above >= 0, rows[order[above]], -1)
    return result


def _parents_of_thread(start: _Rows, end: _Rows) -> _Rows:
    """Positions of the parents of one thread's events, which are sorted by start and descending end.

    The depth of an event is the number of earlier ones that still run when it starts; where all are nested, its
    parent is the last event before it that is one less deep.
    """
    count = len(start)
    at = np.arange(count)
    depth = at - np.searchsorted(np.sort(end), start, side="right")
    deepest = int(depth.max(initial=0))
    by_depth = np.argsort(depth.astype(np.int16) if deepest < 2**15 else depth, kind="stable")
    key = depth[by_depth] * count + by_depth
    before = by_depth[np.searchsorted(key, (depth - 1) * count + at) - 1]
    is_inner = depth > 0
    if np.any(is_inner & ((end[before] < end) | (depth[before] != depth - 1))):
        return _parents_among_crossing(start, end)
    return np.where(is_inner, before, -1)


def _parents_among_crossing(start: _Rows, end: _Rows) -> _Rows:
    """The same for events that are not all nested.

    Each event asks its predecessor; one that does not enclose it passes it on to whatever it was itself passed on to.
    Whoever does not enclose the predecessor does not enclose the event, so a round settles all events at once and
    their number is logarithmic for siblings.
    """
    candidate = np.arange(len(start)) - 1
    parent = np.full(len(start), -1, np.int64)
    rounding = np.minimum((end - start) // 2, ROUNDING_NS)
    asking = np.flatnonzero(candidate >= 0)
    while len(asking):
        above = candidate[asking]
        encloses = (end[above] >= end[asking]) | (end[above] - start[asking] > rounding[asking])
        parent[asking[encloses]] = above[encloses]
        asking, above = asking[~encloses], above[~encloses]
        candidate[asking] = np.where(parent[above] >= 0, parent[above], candidate[above])
        asking = asking[candidate[asking] >= 0]
    return parent


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
    parent, launcher = _calls(timeline, rows, device)
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


def _calls(timeline: Timeline, rows: _Rows, device: NDArray[np.intp]) -> tuple[_Rows, _Rows]:
    """For each operator its parent, for each device event the operator that launched it; -1 for none.

    The launching operator is the innermost one around the launch call. Device work without such a call goes to the
    operator with the same external id, if external ids mean that in this trace.
    """
    launch = timeline.launch_row[device]
    both = np.concatenate((rows, np.unique(launch[launch >= 0])))
    above = np.full(timeline.num_events + 1, -1, np.int64)  # the last one answers for -1
    above[both] = parents(timeline, both)
    is_operator = np.zeros(timeline.num_events + 1, np.bool_)
    is_operator[rows] = True
    is_operator[-1] = True
    parent, launcher = above[rows], np.where(launch >= 0, above[launch], -1)
    for found in (parent, launcher):  # out of a runtime call: up to the operator
        while len(nested := np.flatnonzero(~is_operator[found])):
            found[nested] = above[found[nested]]
    return parent, _with_external_ids(timeline, rows, device, launcher)


def _with_external_ids(timeline: Timeline, rows: _Rows, device: NDArray[np.intp], launcher: _Rows) -> _Rows:
    """``launcher``, and where it is unknown the only operator with the external id of the device event.

    Profilers of 2022 number operators and launches apart, so ids are believed only where they say the same as the
    launch calls do for most of the work that has both.
    """
    wanted = timeline.events["external_id"][device]
    missing = (launcher < 0) & (wanted > 0)
    if not missing.any():
        return launcher
    ids = timeline.events["external_id"][rows]
    distinct, first, count = np.unique(ids, return_index=True, return_counts=True)
    at = np.minimum(np.searchsorted(distinct, wanted), len(distinct) - 1)
    named = np.where((distinct[at] == wanted) & (wanted > 0) & (count[at] == 1), rows[first[at]], -1)
    checkable = (launcher >= 0) & (wanted > 0) & (timeline.events["external_id"][launcher] > 0)
    if 2 * np.count_nonzero(named[checkable] == launcher[checkable]) < np.count_nonzero(checkable):
        return launcher
    return np.where(missing, named, launcher)
