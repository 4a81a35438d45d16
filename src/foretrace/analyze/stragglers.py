"""Stragglers: the ranks that the others wait for, and what they were doing meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foretrace.analyze.activity import activity
from foretrace.analyze.collectives import groups
from foretrace.analyze.intervals import Intervals
from foretrace.analyze.tables import BOOL, FLOAT, INT, TEXT, table_of
from foretrace.trace import Category, Job, Timeline

if TYPE_CHECKING:
    import pyarrow as pa


def stragglers(job: Job) -> pa.Table:
    """How much waiting each rank caused by arriving last.

    Columns: rank, waiting_caused_ns (all members' waiting in collectives at which it arrived last), share_pct,
    last_arrivals, is_straggler (more than 2/n of the waiting, with two ranks three quarters), late_ns (its start
    minus the median of all members', summed), doing (what took most of that time), doing_pct. Empty where no
    collective is matched.
    """
    caused: dict[int, int] = dict.fromkeys(job.ranks, 0)
    arrivals: dict[int, int] = dict.fromkeys(job.ranks, 0)
    late: dict[int, list[tuple[int, int]]] = {rank: [] for rank in job.ranks}
    matched = 0
    for group in groups(job):
        use = np.flatnonzero(group.matched)
        matched += len(use)
        last, waits = group.last[use], group.wait_ns[:, use].sum(axis=0)
        median = np.median(group.start_ns[:, use], axis=0).astype(np.int64)
        for at, member in enumerate(last.tolist()):
            rank = int(group.ranks[member])
            caused[rank] += int(waits[at])
            arrivals[rank] += 1
            late[rank].append((int(median[at]), int(group.start_ns[member, use[at]])))
    total = sum(caused.values())
    rows: list[tuple[Any, ...]] = []
    for rank in job.ranks if matched else []:
        share = caused[rank] / total if total else 0.0
        windows = np.array(late[rank], np.int64).reshape(-1, 2)
        doing, doing_pct = _doing(job.rank(rank), windows)
        is_straggler = share > min(2 / len(job.ranks), 0.75)
        late_ns = int((windows[:, 1] - windows[:, 0]).sum())
        rows.append((rank, caused[rank], 100 * share, arrivals[rank], is_straggler, late_ns, doing, doing_pct))
    rows.sort(key=lambda row: -row[1])
    schema = {"rank": INT, "waiting_caused_ns": INT, "share_pct": FLOAT, "last_arrivals": INT, "is_straggler": BOOL}
    return table_of({**schema, "late_ns": INT, "doing": TEXT, "doing_pct": FLOAT}, rows)


def _doing(timeline: Timeline, windows: NDArray[np.int64]) -> tuple[str | None, float | None]:
    """What a rank did in most of the given windows, and the share of it."""
    total = int((windows[:, 1] - windows[:, 0]).sum()) if len(windows) else 0
    if total <= 0:
        return None, None
    start, end = windows[:, 0], windows[:, 1]
    active = activity(timeline)
    rows = timeline.rows(Category.OPERATOR, Category.RUNTIME)
    host = Intervals.union(timeline.start_ns[rows], timeline.end_ns[rows])

    def time(covered: Intervals) -> int:
        return int(covered.covered_within(start, end).sum())

    compute, busy, host_or_busy = time(active.compute), time(active.busy), time(_joined(active.busy, host))
    if not active.on_device:
        parts = {"running operators": compute, "outside any operator": total - busy}
    else:
        parts = {
            "computing on the device": compute,
            "communicating or copying": busy - compute,
            "device idle while the host runs operators": host_or_busy - busy,
            "device idle and no host event": total - host_or_busy,
        }
    doing = max(parts, key=lambda name: parts[name])
    return doing, 100 * parts[doing] / total


def _joined(one: Intervals, other: Intervals) -> Intervals:
    return Intervals.union(np.concatenate((one.start_ns, other.start_ns)), np.concatenate((one.end_ns, other.end_ns)))
