"""Stragglers: the ranks that the others wait for, and what they were doing meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foretrace.analyze.activity import Activity, activity
from foretrace.analyze.intervals import Intervals
from foretrace.analyze.tables import BOOL, FLOAT, INT, TEXT, table_of
from foretrace.trace import Category, Job, Timeline
from foretrace.trace.classify import KernelKind
from foretrace.trace.matching import Group, groups
from foretrace.trace.nesting import parents
from foretrace.trace.steps import operator_rows

if TYPE_CHECKING:
    import pyarrow as pa

Windows = NDArray[np.int64]

_COMPUTING = "computing on the device"
_COMMUNICATING = "communicating or copying"
_HOST_RUNS = "device idle while the host runs operators"
_HOST_SILENT = "device idle and no host event"
_OPERATORS = "running operators"
_OUTSIDE = "outside any operator"

_SCHEMA = {
    "rank": INT,
    "waiting_caused_ns": INT,
    "share_pct": FLOAT,
    "last_arrivals": INT,
    "is_straggler": BOOL,
    "late_ns": INT,
    "doing": TEXT,
    "doing_pct": FLOAT,
    "doing_ns": INT,
    "doing_event": TEXT,
}


def stragglers(job: Job, clock_offsets_ns: Mapping[int, int] | None = None) -> pa.Table:
    """How much waiting each rank caused by arriving last.

    Columns: rank, waiting_caused_ns (all members' waiting in collectives at which it arrived last), share_pct,
    last_arrivals, is_straggler (more than 2/n of the waiting, with two ranks three quarters), late_ns (its start
    minus the median of the others', summed), doing (what took most of that time), doing_pct and doing_ns (how much
    of it), doing_event (the kernel or innermost host event that took most of that; null where none ran). Empty
    where no collective is matched. Host events count on the threads that launch device work.

    Args:
        job: any number of ranks.
        clock_offsets_ns: by rank, as `clock_offsets` estimates them. Who arrives last is told by corrected times
            where they are given; ranks on one node need no correction.
    """
    offsets = clock_offsets_ns or {}
    matched = [_only_matched(group) for group in groups(job, offsets)]
    caused: dict[int, int] = dict.fromkeys(job.ranks, 0)
    late: dict[int, list[Windows]] = {rank: [] for rank in job.ranks}
    for ranks, start, waits in matched:
        last, others = start.argmax(axis=0), _median_of_others(start)
        for member in np.unique(last).tolist():
            rank, mine = int(ranks[member]), last == member
            caused[rank] += int(waits[mine].sum())
            # Windows are in the rank's own time, as its events are.
            late[rank].append(np.stack((others[mine], start[member, mine]), axis=1) + offsets.get(rank, 0))
    if not any(late.values()):
        return table_of(_SCHEMA, [])
    total = sum(caused.values())
    rows: list[tuple[Any, ...]] = []
    for rank in job.ranks:
        windows = np.concatenate([np.empty((0, 2), np.int64), *late[rank]])
        share = caused[rank] / total if total else 0.0
        is_straggler = share > min(2 / len(job.ranks), 0.75)
        late_ns = int((windows[:, 1] - windows[:, 0]).sum())
        doing = _doing(job.rank(rank), windows)
        rows.append((rank, caused[rank], 100 * share, len(windows), is_straggler, late_ns, *doing))
    rows.sort(key=lambda row: -row[1])
    return table_of(_SCHEMA, rows)


def _only_matched(group: Group) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Ranks, starts (by rank and collective) and waiting (by collective) of what was found on every rank."""
    use = group.matched
    return group.ranks, group.start_ns[:, use], group.wait_ns[:, use].sum(axis=0)


def _median_of_others(start: NDArray[np.int64]) -> NDArray[np.int64]:
    """The median start of all members but the last to start, by collective. In whole ns, rounded down."""
    others = np.sort(start, axis=0)[:-1]
    if not others.size:
        return np.empty(0, np.int64)
    low, high = others[(len(others) - 1) // 2], others[len(others) // 2]
    return np.asarray(low + (high - low) // 2)  # np.median takes floats, which absolute nanoseconds do not fit


def _doing(timeline: Timeline, windows: Windows) -> tuple[str | None, float | None, int | None, str | None]:
    """What a rank did in most of the given windows: in words, its share in percent, its time, and the event."""
    start, end = windows[:, 0], windows[:, 1]
    total = int((end - start).sum())
    if total <= 0:
        return None, None, None, None
    active, host_rows = activity(timeline), _launching_host_rows(timeline)
    host = Intervals.union(timeline.start_ns[host_rows], timeline.end_ns[host_rows])

    def time(covered: Intervals) -> int:
        return int(covered.covered_within(start, end).sum())

    busy = time(active.busy)
    if not active.on_device:
        parts = {_OPERATORS: time(active.compute), _COMMUNICATING: busy - time(active.compute), _OUTSIDE: total - busy}
    else:
        compute, host_or_busy = time(active.compute), time(_joined(active.busy, host))
        parts = {
            _COMPUTING: compute,
            _COMMUNICATING: busy - compute,
            _HOST_RUNS: host_or_busy - busy,
            _HOST_SILENT: total - host_or_busy,
        }
    doing = max(parts, key=lambda name: parts[name])
    event = _main_event(timeline, doing, Intervals.union(start, end), active, host_rows)
    return doing, 100 * parts[doing] / total, parts[doing], event


def _launching_host_rows(timeline: Timeline) -> NDArray[np.int64]:
    """Operators and runtime calls on the threads that launch device work; on all threads if no launch is known."""
    rows = np.concatenate((operator_rows(timeline), timeline.rows(Category.RUNTIME))).astype(np.int64)
    launches = timeline.launch_row[timeline.device_rows]
    lanes = np.unique(timeline.events["lane"][launches[launches >= 0]])
    return rows[np.isin(timeline.events["lane"][rows], lanes)] if len(lanes) else rows


def _main_event(
    timeline: Timeline, doing: str, windows: Intervals, active: Activity, host_rows: NDArray[np.int64]
) -> str | None:
    """The name of the events that took most of the windows, among those that ``doing`` speaks of."""
    if doing in (_HOST_SILENT, _OUTSIDE):
        return None
    is_host = doing in (_HOST_RUNS, _OPERATORS)
    rows = host_rows
    if not is_host and active.on_device:
        rows = timeline.device_rows.astype(np.int64)
        kinds = timeline.kernel_kind[rows]
        is_other = np.isin(kinds, (KernelKind.COMMUNICATION, KernelKind.MEMORY))
        rows = rows[is_other == (doing == _COMMUNICATING)]
    start, end = timeline.start_ns[rows], timeline.end_ns[rows]
    spent = windows.covered_within(start, end)
    if is_host:
        if active.on_device:  # time in which the device was busy is not this case
            busy_inside = _intersection(active.busy, windows)
            spent = spent - busy_inside.covered_within(start, end)
        spent = _self_time(timeline, rows, spent)
    if not len(rows) or not spent.any():
        return None
    names, which = np.unique(timeline.events["name"][rows], return_inverse=True)
    by_name = np.zeros(len(names), np.int64)
    np.add.at(by_name, which.reshape(-1), spent)
    return timeline.strings.lookup(names[[by_name.argmax()]])[0]


def _self_time(timeline: Timeline, rows: NDArray[np.int64], spent: NDArray[np.int64]) -> NDArray[np.int64]:
    """Time of each event without that of the events inside it."""
    of_children = np.zeros(timeline.num_events, np.int64)
    above = parents(timeline, rows)
    np.add.at(of_children, above[above >= 0], spent[above >= 0])
    return np.asarray(np.maximum(spent - of_children[rows], 0))


def _joined(one: Intervals, other: Intervals) -> Intervals:
    return Intervals.union(np.concatenate((one.start_ns, other.start_ns)), np.concatenate((one.end_ns, other.end_ns)))


def _intersection(one: Intervals, other: Intervals) -> Intervals:
    """What both cover: the stretches between neighboring borders that lie in both."""
    borders = np.unique(np.concatenate((one.start_ns, one.end_ns, other.start_ns, other.end_ns)))
    start, end = borders[:-1], borders[1:]
    inside = (one.covered_within(start, end) > 0) & (other.covered_within(start, end) > 0)
    return Intervals.union(start[inside], end[inside])
