"""Oddities of a timeline that reading leaves as they are: counted, and those that are faults as findings."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from foretrace.trace.findings import Finding, Rule, by_name, damage
from foretrace.trace.timeline import Category, Timeline

RULES = by_name(
    Rule(
        "overlap-on-stream",
        "Device events overlap on one stream, which runs one after the other: times or streams are wrong.",
        "Busy times count an overlap once; figures of the kernels concerned are doubtful.",
    ),
    Rule(
        "child-outlasts-parent",
        "A host event begins within another one of its thread and ends after it: the two do not nest.",
        "Self times of the two are doubtful.",
    ),
    Rule(
        "work-before-launch",
        "Device work starts before the call that launched it: the clocks of host and device are not aligned.",
        "Launch delays of the trace are doubtful; record it again with a newer driver.",
    ),
)
_LAUNCHING = ("Launch", "Memcpy", "Memset")
_OVERLAP, _OUTLAST, _EARLY = (
    "device events that overlap on one stream",
    "host events that outlast the event around them",
    "device work that starts before its launch call",
)
Rows = NDArray[np.intp]


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
    counts = {
        _OVERLAP: len(_overlapping(timeline)),
        _OUTLAST: len(_outlasting(timeline)),
        "device work without a launch in the trace": int((launch < 0).sum()),
        "launch calls without device work": int((~np.isin(launching, launched)).sum()) if len(device) else 0,
        _EARLY: len(_early(timeline)),
        "calls that launched several device events": int((work > 1).sum()),
    }
    return {name: count for name, count in counts.items() if count}


def check_timeline(timeline: Timeline) -> tuple[list[Finding], Counter[str]]:
    """What is wrong with one timeline, and what is odd and no fault."""
    report = timeline.report
    findings = damage(report)
    for name, rows in (
        ("overlap-on-stream", _overlapping(timeline)),
        ("child-outlasts-parent", _outlasting(timeline)),
        ("work-before-launch", _early(timeline)),
    ):
        if len(rows):
            first = rows[np.argmin(timeline.start_ns[rows])]
            lane = timeline.lanes[int(timeline.events["lane"][first])].label
            text = f"event {first} {timeline.names(rows[rows == first])[0][:60]!r} at {timeline.start_ns[first]} ns"
            findings.append(Finding(RULES[name], len(rows), f"{report.path}: {text} on {lane}", False))
    notes = Counter(consistency(timeline))
    for reason in (_OVERLAP, _OUTLAST, _EARLY):
        del notes[reason]
    return findings, notes + report.guessed + report.noted


def _overlapping(timeline: Timeline) -> Rows:
    """Device events that begin before an earlier one of their stream has ended."""
    rows = timeline.device_rows
    lane, start = timeline.events["lane"][rows], timeline.start_ns[rows]
    order = np.lexsort((start, lane))
    lane, start, end = lane[order], start[order], timeline.end_ns[rows][order]
    overlaps = np.zeros(len(rows), np.bool_)
    for first, last in _runs(lane):
        latest = np.maximum.accumulate(end[first:last])
        overlaps[first + 1 : last] = start[first + 1 : last] < latest[:-1]
    return rows[order[overlaps]]


def _outlasting(timeline: Timeline) -> Rows:
    """Host events that begin inside their predecessor on the thread and end after it."""
    rows = timeline.host_rows
    lane, start, end = timeline.events["lane"][rows], timeline.start_ns[rows], timeline.end_ns[rows]
    order = np.lexsort((-end, start, lane))
    lane, start, end = lane[order], start[order], end[order]
    same = lane[1:] == lane[:-1]
    outlasts = same & (start[1:] < end[:-1]) & (end[1:] > end[:-1])
    return np.asarray(rows[order[1:][outlasts]])


def _early(timeline: Timeline) -> Rows:
    """Device events that start before the call that launched them."""
    device = timeline.device_rows
    launch = timeline.launch_row[device]
    return np.asarray(device[(launch >= 0) & (timeline.start_ns[device] < timeline.start_ns[launch])])


def _runs(values: np.ndarray) -> list[tuple[int, int]]:
    if not len(values):
        return []
    borders = np.flatnonzero(np.append(True, values[1:] != values[:-1])).tolist()
    return list(zip(borders, [*borders[1:], len(values)], strict=True))
