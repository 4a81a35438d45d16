"""Device work by name and by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foretrace.analyze.tables import FLOAT, INT, TEXT, table_of, timelines_of
from foretrace.trace import Job, Timeline
from foretrace.trace.classify import KernelKind

if TYPE_CHECKING:
    import pyarrow as pa


def grouped_durations(keys: NDArray[np.integer], duration_ns: NDArray[np.int64]) -> list[tuple[int, ...]]:
    """(key, count, total, min, max, sum of squared deviations) of each distinct key, by total, largest first."""
    distinct, inverse, count = np.unique(keys, return_inverse=True, return_counts=True)
    total = np.zeros(len(distinct), np.int64)
    np.add.at(total, inverse, duration_ns)
    least = np.full(len(distinct), np.iinfo(np.int64).max)
    np.minimum.at(least, inverse, duration_ns)
    most = np.zeros(len(distinct), np.int64)
    np.maximum.at(most, inverse, duration_ns)
    deviation = np.bincount(inverse, (duration_ns - (total / np.maximum(count, 1))[inverse]) ** 2, len(distinct))
    order = np.argsort(-total, kind="stable")
    return list(zip(*(c[order].tolist() for c in (distinct, count, total, least, most, deviation)), strict=True))


def kernels(job: Job | Timeline) -> pa.Table:
    """Kernels, copies and sets by name, longest total first within each rank.

    Columns: rank, name, kind, count, total_ns, mean_ns, min_ns, max_ns, std_ns, share_pct (of all device work).
    """
    rows = []
    for timeline in timelines_of(job):
        device = timeline.device_rows
        names, duration = timeline.events["name"][device], timeline.duration_ns[device]
        kind_of = dict(zip(names.tolist(), timeline.kernel_kind[device].tolist(), strict=True))
        all_ns = max(int(duration.sum()), 1)
        for name, count, total, least, most, deviation in grouped_durations(names, duration):
            spread = (total / count, least, most, float(np.sqrt(deviation / count)))
            text = timeline.strings[name] if name >= 0 else ""
            kind = KernelKind(kind_of[name]).label
            rows.append((timeline.rank, text, kind, count, total, *spread, 100 * total / all_ns))
    schema = {"rank": INT, "name": TEXT, "kind": TEXT, "count": INT, "total_ns": INT, "mean_ns": FLOAT}
    return table_of({**schema, "min_ns": INT, "max_ns": INT, "std_ns": FLOAT, "share_pct": FLOAT}, rows)


def kernel_kinds(job: Job | Timeline) -> pa.Table:
    """Device work by kind (GEMM, attention, communication, ...), longest total first within each rank.

    Columns: rank, kind, count, total_ns, share_pct.
    """
    rows = []
    for timeline in timelines_of(job):
        device = timeline.device_rows
        duration = timeline.duration_ns[device]
        all_ns = max(int(duration.sum()), 1)
        for kind, count, total, *_ in grouped_durations(timeline.kernel_kind[device], duration):
            rows.append((timeline.rank, KernelKind(kind).label, count, total, 100 * total / all_ns))
    return table_of({"rank": INT, "kind": TEXT, "count": INT, "total_ns": INT, "share_pct": FLOAT}, rows)
