"""Host threads as tasks: the parts of each event in which none that began later runs, and the gaps between."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from foretrace.link.blocking import Blocking
from foretrace.link.device import NEVER_NS, Ints, is_named, runs
from foretrace.trace import Category, LaneKind, Timeline
from foretrace.trace.steps import operator_rows

PLAIN, ISSUE, RETURN, GAP, START = 0, 1, 2, 3, 4
_POLLING = ("eventquery", "streamquery")


@dataclass
class HostSlices:
    """Slices of all host threads, by thread and time; shape ``(n,)``.

    Attributes:
        event: row of the timeline, -1 for gaps.
        lane, start_ns, end_ns: where and when.
        part: PLAIN (of an operator or call), ISSUE and RETURN (of a call that is split), GAP, or START (the gap
            before a thread's first event). Between ISSUE and RETURN of a call that was waiting is a hole.
    """

    event: Ints
    lane: Ints
    start_ns: Ints
    end_ns: Ints
    part: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.event)

    def lanes(self) -> list[tuple[int, slice]]:
        """Every thread with its rows."""
        return runs(self.lane)


def host_slices(timeline: Timeline, blocking: Blocking, begin_ns: int) -> HostSlices:
    """Cut the host's operators and runtime calls into slices.

    Calls that poll (``cudaEventQuery``) differ from step to step and are taken as work of whatever encloses them.

    Args:
        timeline: where the events are.
        blocking: which calls are split, and where.
        begin_ns: the beginning of the graph.
    """
    rows = np.concatenate((operator_rows(timeline), timeline.rows(Category.RUNTIME))).astype(np.int64)
    rows = rows[timeline.lane_kinds[timeline.events["lane"][rows]] == LaneKind.HOST_THREAD]
    is_poll = is_named(timeline, rows, *_POLLING) & (timeline.category[rows] == Category.RUNTIME)
    rows = rows[~is_poll]
    start, end, lane = timeline.start_ns[rows], timeline.end_ns[rows], timeline.events["lane"][rows]
    order = _by_lane_and_start(lane, start, end, rows)
    rows = rows[order]
    parts = _cut(
        lane[order].astype(np.int64),
        start[order],
        end[order],
        blocking.issue_end_ns[rows],
        blocking.resume_ns[rows],
        begin_ns,
    )
    event, first, last, part, of_lane = parts
    return HostSlices(np.where(event >= 0, rows[event], -1), of_lane, first, last, part)


def _by_lane_and_start(lane: Ints, start: Ints, end: Ints, rows: Ints) -> NDArray[np.intp]:
    """Order by lane, start, descending end, then file order.

    One key is sorted and its few ties are put right after, which is several times faster than sorting by four.
    """
    span = int(start.max(initial=0) - start.min(initial=0)) + 1 if len(start) else 1
    if span >= 1 << 47:
        return np.lexsort((rows, -end, start, lane))
    key = (lane.astype(np.int64) << 47) | (start - start.min(initial=start[0] if len(start) else 0))
    order = np.argsort(key, kind="stable")
    _order_ties(order, key, end, rows)
    return order


@njit(cache=True, nogil=True)
def _order_ties(order: Ints, key: Ints, end: Ints, rows: Ints) -> None:
    """Insertion sort by descending end and row among neighbors with equal keys."""
    for at in range(1, len(order)):
        one = order[at]
        to = at
        while to > 0 and key[order[to - 1]] == key[one]:
            other = order[to - 1]
            if end[other] > end[one] or (end[other] == end[one] and rows[other] < rows[one]):
                break
            order[to] = other
            to -= 1
        order[to] = one


@njit(cache=True, nogil=True)
def _cut(
    lane: Ints, start: Ints, end: Ints, issue_end: Ints, resume: Ints, begin_ns: int
) -> tuple[Ints, Ints, Ints, NDArray[np.int8], Ints]:
    """Slices of events sorted by lane, start and descending end: event index (-1: gap), start, end, part, lane."""
    count = len(lane)
    limit = 5 * count + 8
    event, first, last = np.empty(limit, np.int64), np.empty(limit, np.int64), np.empty(limit, np.int64)
    part, of_lane = np.empty(limit, np.int8), np.empty(limit, np.int64)
    stack = np.empty(count + 1, np.int64)
    size, depth, at = 0, 0, 0
    here = np.int64(begin_ns)
    for index in range(count + 1):
        is_new = index == count or (index > 0 and lane[index] != lane[index - 1])
        # Whatever ends before this event begins.
        while depth > 0 and (is_new or end[stack[depth - 1]] <= start[index]):
            top = stack[depth - 1]
            depth -= 1
            is_split = issue_end[top] != NEVER_NS
            if end[top] > here or is_split:
                event[size], first[size], last[size] = top, here, max(end[top], here)
                part[size], of_lane[size] = RETURN if is_split else PLAIN, lane[top]
                here = last[size]
                size += 1
        if index == count:
            break
        if is_new or index == 0:
            here = np.int64(begin_ns)
            at = START
        if start[index] > here or at == START:
            if depth > 0:
                event[size], part[size] = stack[depth - 1], PLAIN
            else:
                event[size], part[size] = -1, at
            first[size], last[size], of_lane[size] = here, max(start[index], here), lane[index]
            here = last[size]
            size += 1
        at = GAP
        if issue_end[index] != NEVER_NS:
            until = max(here, issue_end[index])
            event[size], first[size], last[size] = index, here, until
            part[size], of_lane[size] = ISSUE, lane[index]
            size += 1
            here = max(until, min(resume[index], end[index]))
        stack[depth] = index
        depth += 1
    return event[:size], first[:size], last[:size], part[:size], of_lane[:size]
