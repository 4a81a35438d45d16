"""Where the time goes: compute, communication, copies, idle. The parts add up to the span exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from foretrace.analyze.activity import Activity, Memsets, Window, activity
from foretrace.analyze.intervals import Times
from foretrace.analyze.tables import FLOAT, INT, TEXT, table_of, timelines_of
from foretrace.trace import Job, Timeline
from foretrace.trace.steps import device_steps

if TYPE_CHECKING:
    import pyarrow as pa

PARTS = ("exposed_compute_ns", "exposed_communication_ns", "overlapped_ns", "memory_ns", "idle_ns")


def parts_within(active: Activity, start_ns: Times, end_ns: Times) -> dict[str, Times]:
    """The five parts within each window, events clipped at its borders; they add up to its length.

    Precedence: overlapped is compute and communication at once; exposed compute and exposed communication are one
    without the other (copies beside them do not matter); memory is copies alone; idle is nothing at all.
    """
    compute = active.compute.covered_within(start_ns, end_ns)
    working = active.working.covered_within(start_ns, end_ns)
    busy = active.busy.covered_within(start_ns, end_ns)
    overlapped = compute + active.communication.covered_within(start_ns, end_ns) - working
    parts = (compute - overlapped, working - compute, overlapped, busy - working, end_ns - start_ns - busy)
    return dict(zip(PARTS, parts, strict=True))


def breakdown(job: Job | Timeline, *, window: Window = "all", memsets: Memsets = "memory") -> pa.Table:
    """The breakdown of each rank over its whole trace, from the first to the last device event of the window.

    Columns: rank, span_ns and the five `PARTS`. See `activity` for ``window`` and ``memsets``.
    """
    rows = []
    for timeline in timelines_of(job):
        active = activity(timeline, window, memsets)
        start, end = np.array([active.start_ns]), np.array([active.end_ns])
        parts = parts_within(active, start, end)
        rows.append((timeline.rank, active.end_ns - active.start_ns, *(int(part[0]) for part in parts.values())))
    return table_of({"rank": INT, "span_ns": INT, **dict.fromkeys(PARTS, INT)}, rows)


def breakdown_by_step(job: Job | Timeline) -> pa.Table:
    """The breakdown of each step of each rank.

    Columns: rank, step, name, start_ns, end_ns, span_ns and the five `PARTS`.
    """
    rows = []
    for timeline in timelines_of(job):
        active, steps = activity(timeline), device_steps(timeline)
        parts = parts_within(active, steps.start_ns, steps.end_ns)
        span = steps.end_ns - steps.start_ns
        columns = [c.tolist() for c in (steps.start_ns, steps.end_ns, span, *parts.values())]
        rows += [
            (timeline.rank, number, name, *values)
            for number, name, *values in zip(steps.number.tolist(), steps.name, *columns, strict=True)
        ]
    schema = {"rank": INT, "step": INT, "name": TEXT, "start_ns": INT, "end_ns": INT, "span_ns": INT}
    return table_of({**schema, **dict.fromkeys(PARTS, INT)}, rows)


def overlap(job: Job | Timeline) -> pa.Table:
    """How much of the communication is hidden by compute, per rank (step -1) and per step.

    Columns: rank, step, communication_ns, overlapped_ns, overlap_pct (null without communication).
    """
    rows: list[tuple[int, int, int, int, float | None]] = []
    for timeline in timelines_of(job):
        active, steps = activity(timeline), device_steps(timeline)
        start = np.append(active.start_ns, steps.start_ns)
        end = np.append(active.end_ns, steps.end_ns)
        parts = parts_within(active, start, end)
        hidden = parts["overlapped_ns"]
        total = parts["exposed_communication_ns"] + hidden
        for step, all_ns, hidden_ns in zip([-1, *steps.number.tolist()], total.tolist(), hidden.tolist(), strict=True):
            rows.append((timeline.rank, step, all_ns, hidden_ns, 100 * hidden_ns / all_ns if all_ns else None))
    schema = {"rank": INT, "step": INT, "communication_ns": INT, "overlapped_ns": INT, "overlap_pct": FLOAT}
    return table_of(schema, rows)
