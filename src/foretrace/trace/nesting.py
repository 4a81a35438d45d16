"""Who called whom: the event around each event of a thread, and the operator that launched device work."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foretrace.trace.timeline import Timeline

ROUNDING_NS = 1000  # an overlap of at most this much with the event before is a rounded end, not a call

Rows = NDArray[np.int64]


def parents(timeline: Timeline, rows: NDArray[np.integer]) -> Rows:
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


def _parents_of_thread(start: Rows, end: Rows) -> Rows:
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


def _parents_among_crossing(start: Rows, end: Rows) -> Rows:
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


def callers(timeline: Timeline, rows: Rows, device: NDArray[np.intp]) -> tuple[Rows, Rows]:
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


def _with_external_ids(timeline: Timeline, rows: Rows, device: NDArray[np.intp], launcher: Rows) -> Rows:
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
