"""What a rank is doing at any time: computing, communicating, copying. The base of breakdown, overlap and idle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from foretrace.analyze.intervals import Intervals
from foretrace.trace import Category, Timeline
from foretrace.trace.classify import KernelKind
from foretrace.trace.communication import host_communication
from foretrace.trace.steps import profiler_steps

Window = Literal["all", "launched", "hta"]
Memsets = Literal["memory", "compute"]
WINDOWS: tuple[Window, ...] = ("all", "launched", "hta")


@dataclass(frozen=True, slots=True)
class Activity:
    """Unions of the intervals of one timeline, and its span (both 0 where there are no events)."""

    compute: Intervals
    communication: Intervals
    working: Intervals  # compute or communication
    busy: Intervals  # anything, copies included
    start_ns: int
    end_ns: int
    on_device: bool


def activity(timeline: Timeline, window: Window = "all", memsets: Memsets = "memory") -> Activity:
    """The activity of the device; of the host's operators where there is no device work.

    Args:
        window: ``all`` device work; only what was ``launched`` by a call in the trace (as TraceLens has it); or
            what was launched before the host start of the last ``ProfilerStep`` (as ``hta`` has it).
        memsets: what device memory sets count as. HTA counts them with the copies, TraceLens with the kernels.

    Raises:
        ValueError: if ``window`` or ``memsets`` is none of these.
    """
    if window not in WINDOWS or memsets not in ("memory", "compute"):
        raise ValueError(
            f"window must be one of {WINDOWS} and memsets 'memory' or 'compute', got {window!r}, {memsets!r}"
        )
    rows = timeline.device_rows
    if not len(rows):
        return _of_host(timeline)
    rows = window_rows(timeline, window)
    kind = timeline.kernel_kind[rows]
    is_communication = kind == KernelKind.COMMUNICATION
    is_memory = timeline.category[rows] != Category.KERNEL
    if memsets == "compute":
        is_memory &= timeline.category[rows] != Category.MEMSET
    return _of(timeline, rows, ~is_communication & ~is_memory, is_communication, on_device=True)


def window_rows(timeline: Timeline, window: Window) -> NDArray[np.intp]:
    """Rows of the device work in a window, sorted by start; see `activity`."""
    rows = timeline.device_rows
    return rows[_in_window(timeline, rows, window)]


def _in_window(timeline: Timeline, rows: NDArray[np.intp], window: Window) -> NDArray[np.bool_]:
    if window == "launched":
        return np.asarray(timeline.launch_row[rows] >= 0)
    steps = profiler_steps(timeline)
    if window == "all" or len(np.unique(steps.number)) < 2:
        return np.ones(len(rows), np.bool_)
    calls = timeline.host_rows
    correlation = timeline.events["correlation"]
    calls = calls[(timeline.start_ns[calls] < steps.start_ns.max()) & (correlation[calls] >= 0)]
    return np.isin(correlation[rows], correlation[calls])


def _of(
    timeline: Timeline,
    rows: NDArray[np.intp],
    is_compute: NDArray[np.bool_],
    is_communication: NDArray[np.bool_],
    on_device: bool,
) -> Activity:
    start, end = timeline.start_ns[rows], timeline.end_ns[rows]

    def union(mask: NDArray[np.bool_]) -> Intervals:
        return Intervals.union(start[mask], end[mask])

    return Activity(
        compute=union(is_compute),
        communication=union(is_communication),
        working=union(is_compute | is_communication),
        busy=Intervals.union(start, end),
        start_ns=int(start.min()) if len(rows) else 0,
        end_ns=int(end.max()) if len(rows) else 0,
        on_device=on_device,
    )


def _of_host(timeline: Timeline) -> Activity:
    """On a host without device work operators compute; collectives are found by name."""
    is_communication = host_communication(timeline)
    rows = np.flatnonzero((timeline.category == Category.OPERATOR) | is_communication)
    return _of(timeline, rows, ~is_communication[rows], is_communication[rows], on_device=False)
