"""Training steps as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretrace.analyze.tables import INT, TEXT, table_of, timelines_of
from foretrace.trace import Job, Timeline
from foretrace.trace.steps import device_steps

if TYPE_CHECKING:
    import pyarrow as pa

_TIMES = ("start_ns", "end_ns", "host_start_ns", "host_end_ns")


def steps(job: Job | Timeline) -> pa.Table:
    """One row a rank and step; see `device_steps` for what a step is.

    Columns: rank, step, name, start_ns, end_ns (the device period), host_start_ns, host_end_ns (the annotation).
    """
    rows = []
    for timeline in timelines_of(job):
        found = device_steps(timeline)
        times = [getattr(found, name).tolist() for name in _TIMES]
        rows += [(timeline.rank, *row) for row in zip(found.number.tolist(), found.name, *times, strict=True)]
    return table_of({"rank": INT, "step": INT, "name": TEXT, **dict.fromkeys(_TIMES, INT)}, rows)
