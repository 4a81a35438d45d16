"""Over time: how busy each device was, what memory was allocated, and whatever counters the trace recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from foretrace.analyze.intervals import Intervals
from foretrace.analyze.tables import FLOAT, INT, TEXT, table_of, table_of_columns, timelines_of
from foretrace.trace import Job, Timeline

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_BUCKETS = 1_000_000


def utilization(job: Job | Timeline, bucket_ns: int = 1_000_000) -> pa.Table:
    """The part of each bucket of time in which at least one stream of a device runs anything.

    Columns: rank, device, time_ns (start of the bucket), busy_pct, communication_pct.

    Raises:
        ValueError: if ``bucket_ns`` is not positive, or so small that more than a million buckets would result.
    """
    if bucket_ns <= 0:
        raise ValueError(f"bucket_ns must be positive, got {bucket_ns}")
    parts: list[pa.Table] = []
    for timeline in timelines_of(job):
        rows = timeline.device_rows
        devices = np.array([lane.device for lane in timeline.lanes], np.int64)[timeline.events["lane"][rows]]
        for device in np.unique(devices).tolist():
            mine = rows[devices == device]
            parts.append(_of_device(timeline, mine, device, bucket_ns))
    schema = {"rank": INT, "device": INT, "time_ns": INT, "busy_pct": FLOAT, "communication_pct": FLOAT}
    return _concatenated(parts, schema)


def _of_device(timeline: Timeline, rows: np.ndarray, device: int, bucket_ns: int) -> pa.Table:
    start, end = timeline.start_ns[rows], timeline.end_ns[rows]
    first, last = int(start.min()), int(end.max())
    if (last - first) // bucket_ns >= _MAX_BUCKETS:
        raise ValueError(f"bucket_ns {bucket_ns} gives more than {_MAX_BUCKETS} buckets over {last - first} ns")
    begins = np.arange(first, max(last, first + 1), bucket_ns)
    ends = np.minimum(begins + bucket_ns, max(last, first + 1))
    is_communication = timeline.is_communication[rows]
    busy = Intervals.union(start, end).covered_within(begins, ends)
    communication = Intervals.union(start[is_communication], end[is_communication]).covered_within(begins, ends)
    length = ends - begins
    columns = {
        "rank": np.full(len(begins), timeline.rank),
        "device": np.full(len(begins), device),
        "time_ns": begins,
        "busy_pct": 100 * busy / length,
        "communication_pct": 100 * communication / length,
    }
    return table_of_columns(columns)


def memory(job: Job | Timeline) -> pa.Table:
    """What the allocator held after each allocation and release, where the profiler recorded memory.

    Columns: rank, device_type (as PyTorch numbers them: 0 CPU, 1 CUDA), device, time_ns, allocated_bytes,
    reserved_bytes.
    """
    names = ("device_type", "device", "time_ns", "allocated_bytes", "reserved_bytes")
    parts = []
    for timeline in timelines_of(job):
        table = timeline.memory
        if not table.num_rows:
            continue
        known = table["allocated_bytes"] >= 0
        order = np.flatnonzero(known)[np.argsort(table["time_ns"][known], kind="stable")]
        columns = {name: table[name][order] for name in names}
        parts.append(table_of_columns({"rank": np.full(len(order), timeline.rank), **columns}))
    return _concatenated(parts, dict.fromkeys(("rank", *names), INT))


def counters(job: Job | Timeline) -> pa.Table:
    """Counter samples as recorded. Columns: rank, name, series, time_ns, value."""
    rows = []
    for timeline in timelines_of(job):
        table = timeline.counters
        if table.num_rows:
            columns = (table.texts("name"), table.texts("series"), table["time_ns"].tolist(), table["value"].tolist())
            rows += [(timeline.rank, *row) for row in zip(*columns, strict=True)]
    return table_of({"rank": INT, "name": TEXT, "series": TEXT, "time_ns": INT, "value": FLOAT}, rows)


def _concatenated(parts: list[pa.Table], schema: dict[str, str]) -> pa.Table:
    import pyarrow as pa

    return pa.concat_tables(parts) if parts else table_of(schema, [])
