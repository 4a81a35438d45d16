"""Operators: call tree, self time, and the device work launched under each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foretrace.analyze.tables import INT, TEXT, table_of, timelines_of
from foretrace.trace import Category, Job, Timeline

if TYPE_CHECKING:
    import pyarrow as pa


def parents(timeline: Timeline, rows: NDArray[np.integer]) -> NDArray[np.int64]:
    """The innermost of the given events that encloses each of them on its thread; -1 at the top.

    Profilers round: a child may outlast its parent a little, so an event belongs to the innermost one that is
    still running when it starts. Of events that start together the longer one is the parent; of equal ones the
    earlier in the file.

    Returns:
        rows of ``timeline.events``, shape ``(len(rows),)``.
    """
    rows = np.asarray(rows, np.int64)
    start, end, lane = timeline.start_ns[rows], timeline.end_ns[rows], timeline.events["lane"][rows]
    order = np.lexsort((rows, -end, start, lane))
    found = np.full(len(rows), -1, np.int64)
    # Find the parent level by level: among those of one depth, an event follows its predecessor's chain upward
    # until it meets one that is still running. Each round settles all events at once.
    candidate = np.concatenate(([-1], np.arange(len(rows) - 1))) if len(rows) else np.empty(0, np.int64)
    s, e, lanes = start[order], end[order], lane[order]
    parent = np.full(len(rows), -1, np.int64)
    open_ = np.arange(len(rows))
    while len(open_):
        above = candidate[open_]
        running = above >= 0
        running &= lanes[above] == lanes[open_]
        encloses = running & (e[above] > s[open_])
        # Events without length at the border of their parent's start belong to it, too.
        encloses |= running & (e[above] >= s[open_]) & (s[above] == s[open_])
        parent[open_[encloses]] = above[encloses]
        again = running & ~encloses
        # One step up: to the parent of the candidate where that is settled, else to its candidate.
        settled = parent[above]
        candidate[open_[again]] = np.where(settled >= 0, settled, candidate[above])[again]
        open_ = open_[again]
    found[order] = np.where(parent >= 0, rows[order][np.maximum(parent, 0)], -1)
    return found


def operator_rows(timeline: Timeline) -> NDArray[np.intp]:
    """Rows of operators, without steps that traces of 2021 record as operators."""
    rows = timeline.rows(Category.OPERATOR)
    names = timeline.events["name"][rows]
    distinct = np.unique(names)
    texts = timeline.strings.lookup(distinct)
    steps = [i for i, text in zip(distinct.tolist(), texts, strict=True) if text.startswith("ProfilerStep")]
    return rows[~np.isin(names, steps)]


def operators(job: Job | Timeline, by_shape: bool = False) -> pa.Table:
    """Operators by name (and input shapes and types), by self time, longest first within each rank.

    Columns: rank, name, input_shapes and input_types (``by_shape`` only; JSON text), count, total_ns (children
    included), self_ns (without operators called by it; never negative), device_ns (device work that it launched
    itself), outlasting (children that end after it, by rounding; their time is clipped).
    """
    rows: list[tuple[Any, ...]] = []
    for timeline in timelines_of(job):
        rows += _of_timeline(timeline, by_shape)
    shape = {"input_shapes": TEXT, "input_types": TEXT} if by_shape else {}
    times = dict.fromkeys(("count", "total_ns", "self_ns", "device_ns", "outlasting"), INT)
    return table_of({"rank": INT, "name": TEXT, **shape, **times}, rows)


def _of_timeline(timeline: Timeline, by_shape: bool) -> list[tuple[Any, ...]]:
    rows = operator_rows(timeline).astype(np.int64)
    if not len(rows):
        return []
    parent = parents(timeline, rows)
    has_parent = parent >= 0
    child_ns, outlasting = np.zeros(timeline.num_events, np.int64), np.zeros(timeline.num_events, np.int64)
    clipped = np.minimum(timeline.end_ns[rows], timeline.end_ns[parent]) - timeline.start_ns[rows]
    np.add.at(child_ns, parent[has_parent], np.maximum(clipped, 0)[has_parent])
    late = has_parent & (timeline.end_ns[rows] > timeline.end_ns[parent])
    np.add.at(outlasting, parent[late], 1)
    device_ns = np.zeros(timeline.num_events, np.int64)
    device = timeline.device_rows
    launcher = _launching_operator(timeline, device, rows)
    np.add.at(device_ns, launcher[launcher >= 0], timeline.duration_ns[device[launcher >= 0]])
    columns = {
        "count": np.ones(len(rows), np.int64),
        "total_ns": timeline.duration_ns[rows],
        "self_ns": np.maximum(timeline.duration_ns[rows] - child_ns[rows], 0),
        "device_ns": device_ns[rows],
        "outlasting": outlasting[rows],
    }
    keys = _keys(timeline, rows, by_shape)
    distinct, inverse = np.unique(keys, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    sums = []
    for column in columns.values():
        total = np.zeros(len(distinct), np.int64)
        np.add.at(total, inverse, column)
        sums.append(total)
    texts = [timeline.strings.lookup(distinct[:, at]) for at in range(distinct.shape[1])]
    found = list(zip([timeline.rank] * len(distinct), *texts, *(total.tolist() for total in sums), strict=True))
    return sorted(found, key=lambda row: -row[-3])


def _keys(timeline: Timeline, rows: NDArray[np.int64], by_shape: bool) -> NDArray[np.int64]:
    names = timeline.events["name"][rows].astype(np.int64)
    if not by_shape or not timeline.operators.num_rows:
        return np.stack([names] + [np.full(len(rows), -1)] * (2 if by_shape else 0), axis=1)
    at = np.full(timeline.num_events, -1, np.int64)
    at[timeline.operators["event"]] = np.arange(timeline.operators.num_rows)
    detail = at[rows]
    shapes = [np.where(detail >= 0, timeline.operators[c][detail], -1) for c in ("input_shapes", "input_types")]
    return np.stack([names, *shapes], axis=1)


def _launching_operator(timeline: Timeline, device: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The innermost operator around the launch of each device event, -1 if there is none."""
    launch = timeline.launch_row[device]
    both = np.concatenate((rows, np.unique(launch[launch >= 0])))
    above = np.full(timeline.num_events, -1, np.int64)
    above[both] = parents(timeline, both)
    found = np.where(launch >= 0, above[launch], -1)
    is_operator = np.zeros(timeline.num_events + 1, np.bool_)
    is_operator[rows] = True
    for _ in range(8):  # a launch inside another runtime call: go up to the operator
        nested = (found >= 0) & ~is_operator[found]
        if not nested.any():
            break
        found[nested] = above[found[nested]]
    return np.where(is_operator[found], found, -1)
