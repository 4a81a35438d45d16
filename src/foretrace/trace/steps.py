"""Training steps: the host's ``ProfilerStep`` annotations, and the device periods that belong to them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretrace.trace.timeline import Category, Timeline

_STEP = re.compile(r"^ProfilerStep\s*#?\s*(\d{0,18})")


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps in order of time. ``start_ns``/``end_ns`` are the period, ``host_*`` the annotation; shape ``(n,)``."""

    number: NDArray[np.int64]
    name: list[str]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    host_start_ns: NDArray[np.int64]
    host_end_ns: NDArray[np.int64]


def profiler_steps(timeline: Timeline) -> Steps:
    """The host's ``ProfilerStep`` annotations (operators in traces of 2021); empty where there are none."""
    rows = timeline.rows(Category.ANNOTATION, Category.OPERATOR)
    names = timeline.events["name"][rows]
    distinct = np.flatnonzero(np.bincount(names + 1, minlength=1)) - 1
    found = {
        i: m
        for i, text in zip(distinct.tolist(), timeline.strings.lookup(distinct), strict=True)
        if (m := _STEP.match(text))
    }
    rows = rows[np.isin(names, list(found))]
    rows = rows[np.argsort(timeline.start_ns[rows], kind="stable")]
    # One annotation may be seen by several threads: the first of each number counts.
    matches = [found[i] for i in timeline.events["name"][rows].tolist()]
    number = np.array([int(m[1]) if m[1] else at for at, m in enumerate(matches)], np.int64)
    first_of = {step: at for at, step in reversed(list(enumerate(number.tolist())))}
    first = np.sort(np.fromiter(first_of.values(), np.int64, len(first_of)))
    rows, number = rows[first], number[first]
    start, end = timeline.start_ns[rows], timeline.end_ns[rows]
    return Steps(number, timeline.names(rows), start, end, start, end)


def device_steps(timeline: Timeline) -> Steps:
    """Steps as device periods, which follow each other without gap or overlap.

    Step i lasts from the last end of device work launched before it to the last end of device work launched in it.
    Device work without a launch in the trace counts as launched before the first step; where there is none, the
    first period begins with the first device event of a step. What was launched after the last step is in none.
    Without device work the host's steps are returned, without ``ProfilerStep`` the whole trace as one step.
    """
    host = profiler_steps(timeline)
    rows = timeline.device_rows
    if not len(host.number):
        return _whole(timeline)
    if not len(rows):
        return host
    launch = timeline.launch_row[rows]
    call_ns = np.where(launch >= 0, timeline.start_ns[launch], np.iinfo(np.int64).min)
    step = np.searchsorted(host.start_ns, call_ns, side="right") - 1
    step[call_ns >= host.end_ns[-1]] = len(host.number)
    ends = np.full(len(host.number) + 2, np.iinfo(np.int64).min)
    np.maximum.at(ends, step + 1, timeline.end_ns[rows])
    borders = np.maximum.accumulate(ends[:-1])
    if borders[0] == np.iinfo(np.int64).min:
        inside = rows[step < len(host.number)]
        if not len(inside):
            return host
        borders = np.maximum(borders, timeline.start_ns[inside].min())
    return Steps(host.number, host.name, borders[:-1], borders[1:], host.host_start_ns, host.host_end_ns)


def _whole(timeline: Timeline) -> Steps:
    rows = timeline.device_rows
    if not len(rows):
        rows = timeline.rows(Category.OPERATOR)
    if not len(rows):
        none = np.empty(0, np.int64)
        return Steps(none, [], none, none, none, none)
    start = np.array([timeline.start_ns[rows].min()])
    end = np.array([timeline.end_ns[rows].max()])
    return Steps(np.zeros(1, np.int64), ["whole trace"], start, end, start, end)


def operator_rows(timeline: Timeline) -> NDArray[np.intp]:
    """Rows of operators, without steps that traces of 2021 record as operators."""
    rows = timeline.rows(Category.OPERATOR)
    return rows[~timeline.are_named(rows, lambda name: name.startswith("ProfilerStep"))]
