"""Why the device was idle: each gap between busy intervals is given to what ended it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foretrace.analyze.activity import Activity, Window, activity, window_rows
from foretrace.analyze.intervals import Intervals, Times
from foretrace.analyze.launch import Launches, launches_of
from foretrace.analyze.tables import INT, TEXT, table_of, timelines_of
from foretrace.trace import Job, Timeline
from foretrace.trace.steps import device_steps

if TYPE_CHECKING:
    import pyarrow as pa

CAUSES = ("host_late", "launch_latency", "queued_gap", "launch_queue_full", "unexplained")
QUEUED_GAP_NS = 10_000  # between two kernels that were both queued


@dataclass(frozen=True, slots=True)
class IdleCauses:
    """Idle time as disjoint intervals by cause; together they are the gaps of the busy time."""

    intervals: dict[str, Intervals]

    def within(self, start_ns: Times, end_ns: Times) -> dict[str, Times]:
        """Idle time by cause within each window."""
        return {cause: found.covered_within(start_ns, end_ns) for cause, found in self.intervals.items()}


def find_idle_causes(timeline: Timeline, window: Window = "all") -> IdleCauses:
    """Split every device-level gap (all streams idle) by cause.

    The device event that ends a gap decides. Launched after the gap began: up to the launch the host is late, then
    comes launch latency; a launch call that is itself slow submits at ``start - latency``. Launched before: a gap of
    at most 10 us between queued kernels is a queued gap. A call that waited because the launch queue was full, and
    whatever has no recorded reason, is named so. Waiting for a peer happens inside a collective, which is busy time.
    Without device work, all time in which no operator runs is time in which the host is late.
    """
    active = activity(timeline, window)
    gaps = active.busy.gaps_within(active.start_ns, active.end_ns)
    if not active.on_device:
        return _of_host(timeline, active)
    issue_ns, latency, cause = _explain(timeline, gaps, window_rows(timeline, window))
    found: dict[str, Intervals] = {
        name: Intervals(gaps.start_ns[cause == name], gaps.end_ns[cause == name]) for name in CAUSES[2:]
    }
    split = cause == "host_late"
    found["host_late"] = Intervals.union(gaps.start_ns[split], issue_ns[split])
    found["launch_latency"] = Intervals.union(issue_ns[split], (issue_ns + latency)[split])
    rest = Intervals.union((issue_ns + latency)[split], gaps.end_ns[split])
    found["unexplained"] = Intervals.union(
        np.append(found["unexplained"].start_ns, rest.start_ns), np.append(found["unexplained"].end_ns, rest.end_ns)
    )
    return IdleCauses({name: found[name] for name in CAUSES})


def _of_host(timeline: Timeline, active: Activity) -> IdleCauses:
    """Steps of a host reach beyond its first and last operator: what lies there is idle time, too."""
    steps = device_steps(timeline)
    first = min([active.start_ns, *steps.start_ns.tolist()])
    last = max([active.end_ns, *steps.end_ns.tolist()])
    gaps = active.busy.gaps_within(first, last)
    none = np.empty(0, np.int64)
    return IdleCauses({**dict.fromkeys(CAUSES, Intervals(none, none)), "host_late": gaps})


def _explain(timeline: Timeline, gaps: Intervals, rows: NDArray[np.intp]) -> tuple[Times, Times, NDArray[np.str_]]:
    """For every gap: when its end was issued, how much latency that explains, and the cause."""
    ender = rows[np.searchsorted(timeline.start_ns[rows], gaps.end_ns)]
    launches = launches_of(timeline)
    call = timeline.launch_row[ender]
    has_call = call >= 0
    call_start, call_end = timeline.start_ns[call], timeline.end_ns[call]
    latency = launches.idle_latency_ns
    # A launch call that is itself slow submits late: its kernel starts inside it, or right behind.
    is_slow = gaps.end_ns <= call_end + 2 * latency
    issue = np.where(is_slow, np.maximum(call_start, gaps.end_ns - latency), call_start)
    is_late = has_call & (issue > gaps.start_ns)
    issue = np.clip(issue, gaps.start_ns, gaps.end_ns)
    allowed = np.minimum(gaps.end_ns - issue, max(4 * latency, QUEUED_GAP_NS))
    recent = has_call & ~is_late & (call_start + latency > gaps.start_ns)
    queued = has_call & ~is_late & ~recent & (gaps.end_ns - gaps.start_ns <= QUEUED_GAP_NS)
    cause = np.full(len(gaps), "unexplained", dtype="<U20")
    cause[queued] = "queued_gap"
    cause[is_late | recent] = "host_late"
    cause[is_late & _is_queue_full(launches, call)] = "launch_queue_full"
    return issue, allowed, cause


def _is_queue_full(launches: Launches, call: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether these calls blocked on a full launch queue (about 1,000 entries on CUDA devices)."""
    limit = launches.outstanding.max(initial=0)
    if limit < 1000:
        return np.zeros(len(call), np.bool_)
    blocked = launches.call_row[(launches.outstanding >= 0.98 * limit) & (launches.call_duration_ns > 100_000)]
    return np.isin(call, blocked)


def idle_causes(job: Job | Timeline, *, window: Window = "all") -> pa.Table:
    """Idle time by cause, per rank (step -1) and per step; over the causes it adds up to ``idle_ns`` exactly.

    ``window`` (see `activity`) applies to the whole trace; steps cover all device work.

    Columns: rank, step, cause (see `find_idle_causes`), idle_ns, count (of intervals, whole trace only, else null).
    """
    rows: list[tuple[int, int, str, int, int | None]] = []
    for timeline in timelines_of(job):
        active, steps, causes = activity(timeline, window), device_steps(timeline), find_idle_causes(timeline, window)
        whole = causes.within(np.array([active.start_ns]), np.array([active.end_ns]))
        for cause, idle_ns in whole.items():
            rows.append((timeline.rank, -1, cause, int(idle_ns[0]), len(causes.intervals[cause])))
        of_steps = causes if window == "all" else find_idle_causes(timeline)
        by_step = of_steps.within(steps.start_ns, steps.end_ns)
        for at, step in enumerate(steps.number.tolist()):
            rows += [(timeline.rank, step, cause, int(idle_ns[at]), None) for cause, idle_ns in by_step.items()]
    return table_of({"rank": INT, "step": INT, "cause": TEXT, "idle_ns": INT, "count": INT}, rows)
