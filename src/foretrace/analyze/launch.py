"""Launches: how long work waits between its call and its start, and how much of it is queued."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foretrace.analyze.tables import FLOAT, INT, TEXT, table_of, table_of_columns, timelines_of
from foretrace.trace import Job, Timeline

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Launches:
    """One row per device event with a launch in the trace, in order of its call; shape ``(n,)``.

    Attributes:
        device_row, call_row: rows of the timeline's events.
        delay_ns: start of the work minus start of its call; negative where the clocks of host and device differ.
        outstanding: work launched and not finished when the call began.
        idle_latency_ns: lower quartile of the delay of launches to an idle stream, 5,000 where there is none.
    """

    device_row: NDArray[np.int64]
    call_row: NDArray[np.int64]
    delay_ns: NDArray[np.int64]
    call_duration_ns: NDArray[np.int64]
    outstanding: NDArray[np.int64]
    idle_latency_ns: int


def launches_of(timeline: Timeline) -> Launches:
    """All launches of a timeline."""
    rows = timeline.device_rows
    rows = rows[timeline.launch_row[rows] >= 0]
    calls = timeline.launch_row[rows]
    order = np.argsort(timeline.start_ns[calls], kind="stable")
    rows, calls = rows[order], calls[order]
    called_ns, started_ns = timeline.start_ns[calls], timeline.start_ns[rows]
    finished = np.sort(timeline.end_ns[rows])
    outstanding = np.arange(len(rows)) - np.searchsorted(finished, called_ns, side="right")
    idle = called_ns >= _previous_end(timeline, rows)
    delays = (started_ns - called_ns)[idle]
    latency = int(np.percentile(delays[delays >= 0], 25)) if (delays >= 0).any() else 5_000
    return Launches(
        rows, calls, started_ns - called_ns, timeline.duration_ns[calls], np.maximum(outstanding, 0), latency
    )


def _previous_end(timeline: Timeline, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The latest end of earlier work on the same stream, for each row."""
    lane = timeline.events["lane"][rows]
    order = np.lexsort((timeline.start_ns[rows], lane))
    previous = np.full(len(rows), np.iinfo(np.int64).min)
    lanes = lane[order]
    for one in np.unique(lanes):
        mine = order[np.searchsorted(lanes, one) : np.searchsorted(lanes, one, side="right")]
        previous[mine[1:]] = np.maximum.accumulate(timeline.end_ns[rows[mine]])[:-1]
    return previous


def launches(job: Job | Timeline) -> pa.Table:
    """Launch calls by name.

    Columns: rank, call, calls, work (device events that they started; more than the calls for graph launches),
    call_mean_ns, delay_mean_ns, delay_median_ns, delay_p95_ns, delay_max_ns, negative_delays.
    """
    rows = []
    for timeline in timelines_of(job):
        found = launches_of(timeline)
        names = timeline.events["name"][found.call_row]
        for name in np.unique(names).tolist():
            mine = names == name
            delay = found.delay_ns[mine]
            quantiles = [int(q) for q in np.percentile(delay, [50, 95, 100])]
            calls = len(np.unique(found.call_row[mine]))
            mean_ns = float(found.call_duration_ns[mine].mean())
            counts = (calls, int(mine.sum()), mean_ns, float(delay.mean()), *quantiles, int((delay < 0).sum()))
            rows.append((timeline.rank, timeline.strings[name], *counts))
    rows.sort(key=lambda row: (row[0], -row[3]))
    schema = {"rank": INT, "call": TEXT, "calls": INT, "work": INT, "call_mean_ns": FLOAT, "delay_mean_ns": FLOAT}
    schema |= {"delay_median_ns": INT, "delay_p95_ns": INT, "delay_max_ns": INT, "negative_delays": INT}
    return table_of(schema, rows)


def queue_length(job: Job | Timeline) -> pa.Table:
    """Work launched and not yet finished, over time, per stream.

    Columns: rank, device, stream, time_ns, length (from that time on).
    """
    import pyarrow as pa

    parts: list[pa.Table] = []
    for timeline in timelines_of(job):
        found = launches_of(timeline)
        lane = timeline.events["lane"][found.device_row]
        for one in np.unique(lane).tolist():
            mine = lane == one
            times = np.concatenate((timeline.start_ns[found.call_row[mine]], timeline.end_ns[found.device_row[mine]]))
            change = np.repeat([1, -1], int(mine.sum()))
            order = np.lexsort((change, times))
            count = len(order)
            columns = {
                "rank": np.full(count, timeline.rank),
                "device": np.full(count, timeline.lanes[one].device),
                "stream": np.full(count, timeline.lanes[one].stream),
                "time_ns": times[order],
                "length": np.maximum(np.cumsum(change[order]), 0),
            }
            parts.append(table_of_columns(columns))
    empty = table_of(dict.fromkeys(("rank", "device", "stream", "time_ns", "length"), INT), [])
    return pa.concat_tables(parts) if parts else empty
