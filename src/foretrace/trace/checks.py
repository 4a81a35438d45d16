"""Oddities of a timeline that reading leaves as they are, counted."""

from __future__ import annotations

import numpy as np

from foretrace.trace.lanes import LaneKind
from foretrace.trace.timeline import Category, Timeline

_LAUNCHING = ("Launch", "Memcpy", "Memset")


def consistency(timeline: Timeline) -> dict[str, int]:
    """Counts of what does not fit together; only those above zero.

    Counted are device events that overlap on one stream, host events that outlast the event around them, device
    work without a launch in the trace, launch calls without device work, work that starts before its launch call,
    and calls that launched several device events (graph launches).
    """
    device = timeline.device_rows
    launch = timeline.launch_row[device]
    calls = timeline.rows(Category.RUNTIME)
    names = timeline.names(calls)
    launching = calls[np.array([any(word in name for word in _LAUNCHING) for name in names], np.bool_)]
    launched, work = np.unique(launch[launch >= 0], return_counts=True)
    early = timeline.start_ns[device] < timeline.start_ns[launch]
    counts = {
        "device events that overlap on one stream": _overlapping(timeline),
        "host events that outlast the event around them": _outlasting(timeline),
        "device work without a launch in the trace": int((launch < 0).sum()),
        "launch calls without device work": int((~np.isin(launching, launched)).sum()) if len(device) else 0,
        "device work that starts before its launch call": int((early & (launch >= 0)).sum()),
        "calls that launched several device events": int((work > 1).sum()),
    }
    return {name: count for name, count in counts.items() if count}


def _overlapping(timeline: Timeline) -> int:
    rows = timeline.device_rows
    lane, start = timeline.events["lane"][rows], timeline.start_ns[rows]
    order = np.lexsort((start, lane))
    lane, start, end = lane[order], start[order], timeline.end_ns[rows][order]
    total = 0
    for first, last in _runs(lane):
        latest = np.maximum.accumulate(end[first:last])
        total += int((start[first + 1 : last] < latest[:-1]).sum())
    return total


def _outlasting(timeline: Timeline) -> int:
    """Host events that begin inside their predecessor on the thread and end after it."""
    rows = np.flatnonzero(timeline.lane_kinds[timeline.events["lane"]] == LaneKind.HOST_THREAD)
    lane, start, end = timeline.events["lane"][rows], timeline.start_ns[rows], timeline.end_ns[rows]
    order = np.lexsort((-end, start, lane))
    lane, start, end = lane[order], start[order], end[order]
    same = lane[1:] == lane[:-1]
    return int((same & (start[1:] < end[:-1]) & (end[1:] > end[:-1])).sum())


def _runs(values: np.ndarray) -> list[tuple[int, int]]:
    if not len(values):
        return []
    borders = np.flatnonzero(np.append(True, values[1:] != values[:-1])).tolist()
    return list(zip(borders, [*borders[1:], len(values)], strict=True))
