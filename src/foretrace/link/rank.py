"""The tasks and edges of one rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.link.blocking import Blocking, blocking_calls
from foretrace.link.device import NOISE_NS, DeviceWork, Flags, Ints, device_work, steps_at
from foretrace.link.handoffs import Handoffs, handoffs, launching_lanes
from foretrace.link.host import GAP, ISSUE, RETURN, START, HostSlices, host_slices
from foretrace.link.sorting import by_source
from foretrace.link.waits import RECENT_NS, Waits, event_waits, ready_with, wait_latency_ns
from foretrace.trace import Category, EdgeKind, TaskKind, Timeline
from foretrace.trace.graph import EDGE_COLUMNS, TASK_COLUMNS

OCCUPANCY = 0.3
_BY_TIME = 0.8  # which stream a synchronizing call waited for, told by when work ended
_QUEUE = 0.8
_LAST_PART = 0.5  # of a kernel, in which another one may find room


@dataclass
class RankPart:
    """Tasks and edges of one rank, as columns; ids count from 0 within the rank. See `ExecutionGraph`."""

    timeline: Timeline
    tasks: dict[str, NDArray[Any]]
    edges: dict[str, NDArray[Any]]
    waits: dict[str, NDArray[Any]]
    launched: dict[str, NDArray[Any]]
    arrival: Ints  # task at which the rank is ready for each collective
    transfer: Ints  # task of each collective's transfer
    collective_event: Ints  # event row of each
    notes: Counter[str] = field(default_factory=Counter)
    figures: dict[str, float] = field(default_factory=dict)


def rank_part(timeline: Timeline, begin_ns: int, leave_out: int | None = None) -> RankPart:
    """Link one timeline.

    Args:
        timeline: what to link.
        begin_ns: the beginning of the graph, not after the first event.
        leave_out: index of a step from which nothing is inferred: its inferred edges come from the other steps.
    """
    work = device_work(timeline)
    blocking = blocking_calls(work)
    slices = host_slices(timeline, blocking, begin_ns)
    # A gap belongs to what follows it, which may be in the next step.
    time_ns = np.where(np.isin(slices.part, (GAP, START)), slices.end_ns, slices.start_ns)
    slice_step, _ = steps_at(timeline, time_ns)
    launching = launching_lanes(slices, work.thread)
    found = handoffs(timeline, slices, launching, slice_step, leave_out)
    waits = event_waits(work, leave_out)
    device = _DeviceTasks(work, waits, begin_ns, leave_out, first_id=len(slices))
    host = _host_tasks(timeline, slices, found, blocking, slice_step)
    issue = _slice_of(slices, ISSUE, timeline.num_events)
    resume = _slice_of(slices, RETURN, timeline.num_events)
    part = RankPart(
        timeline,
        _joined(host, device.columns()),
        by_source(_edges(slices, found, blocking, device, issue, resume), len(slices) + device.total),
        {},
        {},
        device.arrival[work.is_communication],
        device.main[work.is_communication],
        work.event[work.is_communication],
    )
    part.waits = {"task": resume[blocking.wait_call], "issue": issue[blocking.wait_call], "lane": blocking.wait_lane}
    # What was launched before the trace is on its stream from the beginning, when the first thread starts.
    by = np.where(work.has_call, issue[work.call], 0 if len(slices) else -1)
    known = by >= 0
    part.launched = {
        "issue": by[known],
        "work": device.last[known],
        "lane": work.lane[known],
        "position": work.position[known],
    }
    _take_note(part, blocking, device)
    return part


def _joined(host: dict[str, NDArray[Any]], device: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Host tasks, then device tasks, in the types of the graph's columns."""
    joined = {}
    for name, column in host.items():
        joined[name] = np.empty(len(column) + len(device[name]), TASK_COLUMNS[name][0])
        joined[name][: len(column)], joined[name][len(column) :] = column, device[name]
    return joined


def _slice_of(slices: HostSlices, part: int, events: int) -> Ints:
    """The slice of the given part for each event, -1 where it has none."""
    found = np.full(events + 1, -1, np.int64)
    rows = np.flatnonzero(slices.part == part)
    found[slices.event[rows]] = rows
    return found


def _host_tasks(
    timeline: Timeline, slices: HostSlices, found: Handoffs, blocking: Blocking, step: Ints
) -> dict[str, NDArray[Any]]:
    """One task a slice; a gap that another thread explains keeps what is left after that thread."""
    is_event = slices.event >= 0
    is_call = is_event & (timeline.category[slices.event] == Category.RUNTIME)
    kind = np.where(is_call, TaskKind.RUNTIME, TaskKind.OPERATOR)
    kind[slices.part == GAP] = TaskKind.HOST_GAP
    kind[slices.part == START] = TaskKind.START
    unexplained = is_event & (slices.part == RETURN) & blocking.is_unexplained[slices.event]
    kind[unexplained] = TaskKind.BLOCKED
    kind[found.gap] = TaskKind.HANDOFF
    start = slices.start_ns.copy()
    start[found.gap] = np.maximum(slices.end_ns[found.source], start[found.gap])
    name = np.where(is_event, timeline.events["name"][slices.event], -1)
    return {
        "kind": kind,
        "name": name,
        "duration_ns": slices.end_ns - start,
        "lane": slices.lane,
        "event": slices.event,
        "step": step,
        "measured_start_ns": start,
        "measured_end_ns": slices.end_ns,
    }


class _DeviceTasks:
    """Tasks of device work: a delay before it where one is needed, an arrival for collectives, and the work itself,
    in pieces where other work starts in the middle of it.

    ``first``, ``arrival``, ``main`` and ``last`` are task ids, shape ``(n,)``; ``arrival`` is -1 for other work.
    """

    def __init__(self, work: DeviceWork, waits: Waits, begin_ns: int, leave_out: int | None, first_id: int) -> None:
        self.work, self.waits = work, waits
        self.wait_latency_ns = wait_latency_ns(work, waits)
        self.delay_kind, self.delay_ns = np.full(len(work), -1, np.int64), np.zeros(len(work), np.int64)
        self.ready = np.maximum(ready_with(work, waits, self.wait_latency_ns), begin_ns)
        occupied = self._explain(leave_out)
        self._cut(occupied)
        self._number(first_id)

    def _explain(self, leave_out: int | None) -> Ints:
        """Name what is later than its causes; gives the work whose tail each one waited for, -1 for none."""
        work = self.work
        late = (work.start_ns - self.ready > NOISE_NS) & ~work.overlaps
        kind = np.full(len(work), -1, np.int64)
        kind[late] = TaskKind.UNEXPLAINED
        kind[late & work.in_graph] = TaskKind.UNRECORDED_GRAPH_WORK
        # The first work of a device waits for work that was there before the trace, if it waits at all.
        kind[late & (~work.has_call | _is_first_of_device(work))] = TaskKind.BEFORE_TRACE
        occupied = np.full(len(work), -1, np.int64)
        if leave_out is not None:
            kind[(work.step == leave_out) & (kind == TaskKind.UNEXPLAINED)] = -1
        rows = np.flatnonzero(kind == TaskKind.UNEXPLAINED)
        occupied[rows] = _occupiers(work, rows)
        kind[occupied >= 0] = -1
        self.delay_kind = kind
        self.delay_ns = np.where(kind >= 0, work.start_ns - self.ready, 0)
        return occupied

    def _cut(self, occupied: Ints) -> None:
        """Where work is cut: at the start of what overlaps it on its stream, and of what waits for its tail."""
        work = self.work
        overlapping, waiting = np.flatnonzero(work.overlaps), np.flatnonzero(occupied >= 0)
        row = np.concatenate((work.previous[overlapping], occupied[waiting]))
        cause = np.concatenate((overlapping, waiting))
        kind = np.repeat([EdgeKind.ORDER, EdgeKind.OCCUPANCY], [len(overlapping), len(waiting)])
        at = np.clip(work.start_ns[cause], work.start_ns[row], work.end_ns[row])
        order = np.lexsort((at, row))
        self.cut_row, self.cut_cause, self.cut_kind = row[order], cause[order], kind[order]
        self.cut_ns = at[order]

    def _number(self, first_id: int) -> None:
        work = self.work
        self.cuts = np.bincount(self.cut_row, minlength=len(work))
        has_delay, has_arrival = self.delay_kind >= 0, work.is_communication
        count = has_delay.astype(np.int64) + has_arrival + 1 + self.cuts
        begins = first_id + np.concatenate(([0], np.cumsum(count)))
        self.first, self.last = begins[:-1], begins[1:] - 1
        self.main = self.first + has_delay + has_arrival
        self.arrival = np.where(has_arrival, self.main - 1, -1)
        self.first_id, self.total = first_id, int(count.sum())
        ordinal = np.arange(len(self.cut_row)) - np.searchsorted(self.cut_row, self.cut_row)
        self.cut_head = self.main[self.cut_row] + ordinal

    def columns(self) -> dict[str, NDArray[Any]]:
        """The tasks' columns."""
        work, timeline = self.work, self.work.timeline
        row = np.repeat(np.arange(len(work)), self.last - self.first + 1)
        task = np.arange(self.first_id, self.first_id + self.total)
        category = timeline.category[work.event]
        kind = np.full(len(work), TaskKind.KERNEL, np.int64)
        kind[category == Category.MEMCPY], kind[category == Category.MEMSET] = TaskKind.MEMCPY, TaskKind.MEMSET
        kind[work.is_communication] = TaskKind.COLLECTIVE_ALONE
        kind = kind[row]
        start, end = work.start_ns[row], work.end_ns[row]
        is_delay, is_arrival = task < self.first[row] + (self.delay_kind >= 0)[row], task == self.arrival[row]
        kind[is_delay], kind[is_arrival] = self.delay_kind[row[is_delay]], TaskKind.ARRIVAL
        start[is_delay], end[is_delay] = self.ready[row[is_delay]], work.start_ns[row[is_delay]]
        end[is_arrival] = start[is_arrival]
        head = self.cut_head - self.first_id
        end[head], start[head + 1] = self.cut_ns, self.cut_ns
        return {
            "kind": kind,
            "name": timeline.events["name"][work.event][row],
            "duration_ns": end - start,
            "lane": work.lane[row],
            "event": work.event[row],
            "step": work.step[row],
            "measured_start_ns": start,
            "measured_end_ns": end,
        }


def _is_first_of_device(work: DeviceWork) -> Flags:
    first = np.zeros(len(work), np.bool_)
    for device in np.unique(work.device).tolist():
        mine = np.flatnonzero(work.device == device)
        first[mine[work.start_ns[mine].argmin()]] = True
    return first


def _occupiers(work: DeviceWork, rows: Ints) -> Ints:
    """For late work a kernel of another stream of its device in whose later part, or soon after which, it starts.

    The multiprocessors become free one by one while a big kernel ends, and work of other streams starts there. Of
    several such kernels it is the one that ends first. -1 for none. Copies within a device are kernels, too.
    """
    start = work.start_ns[rows]
    best, best_end = np.full(len(rows), -1, np.int64), np.full(len(rows), np.iinfo(np.int64).max)
    occupies = ~work.is_communication & (work.timeline.category[work.event] != Category.MEMSET)
    for lane, part in work.lanes():
        at = np.searchsorted(work.start_ns[part], start, side="left") - 1
        for back in (0, 1):  # the kernel that is running, or else the one before it
            source = part.start + np.maximum(at - back, 0)
            end = work.end_ns[source]
            ok = (at >= back) & (work.lane[rows] != lane) & (work.device[rows] == work.device[part.start])
            ok &= occupies[source] & (end >= start - RECENT_NS) & (end < best_end)
            ok &= end - start <= _LAST_PART * (end - work.start_ns[source])
            best[ok], best_end[ok] = source[ok], end[ok]
    return best


def _edges(
    slices: HostSlices, found: Handoffs, blocking: Blocking, device: _DeviceTasks, issue: Ints, resume: Ints
) -> dict[str, NDArray[Any]]:
    """All edges of a rank; ``issue`` and ``resume`` are the slices of each event that is split."""
    work = device.work
    parts: list[tuple[Any, Any, Any, EdgeKind | Ints, Any]] = []
    following = np.flatnonzero(slices.lane[1:] == slices.lane[:-1])
    parts.append((following, following + 1, 0, EdgeKind.ORDER, 1.0))
    parts.append((found.source, found.gap, 0, EdgeKind.HANDOFF, found.confidence))
    # Device work: its own pieces one after the other, and after what precedes it on its stream.
    pieces = np.arange(device.first_id, device.first_id + device.total)
    inner = pieces[~np.isin(pieces, device.last)]
    parts.append((inner, inner + 1, 0, EdgeKind.ORDER, 1.0))
    after = np.flatnonzero((work.previous >= 0) & ~work.overlaps)
    parts.append((device.last[work.previous[after]], device.first[after], work.gap_ns[after], EdgeKind.ORDER, 1.0))
    early, late = _outlasting(work)
    parts.append((device.last[early], device.first[late], work.gap_ns[late], EdgeKind.ORDER, 1.0))
    heads = device.cut_kind == EdgeKind.OCCUPANCY
    confidence = np.where(heads, OCCUPANCY, 1.0)
    parts.append((device.cut_head, device.first[device.cut_cause], 0, device.cut_kind, confidence))
    launched = np.flatnonzero(work.has_call & (issue[work.call] >= 0))
    parts.append((issue[work.call[launched]], device.first[launched], work.latency_ns, EdgeKind.LAUNCH, 1.0))
    waits = device.waits
    source, target = device.last[waits.source], device.first[waits.target]
    parts.append((source, target, device.wait_latency_ns, EdgeKind.EVENT_WAIT, waits.confidence))
    sync = np.where(blocking.fixed_recorded, 1.0, _BY_TIME)
    parts.append((device.last[blocking.fixed_work], resume[blocking.fixed_call], 0, EdgeKind.SYNC, sync))
    parts.append((device.last[blocking.queue_work], resume[blocking.queue_call], 0, EdgeKind.QUEUE, _QUEUE))
    return _edge_columns(parts)


def _edge_columns(parts: list[tuple[Any, Any, Any, Any, Any]]) -> dict[str, NDArray[Any]]:
    """Parts of (source, target, lag, kind, confidence) one after the other, in the types of the graph's columns."""
    borders = np.concatenate(([0], np.cumsum([len(part[0]) for part in parts])))
    columns = {}
    for at, (name, (dtype, _)) in enumerate(EDGE_COLUMNS.items()):
        columns[name] = np.empty(borders[-1], dtype)
        for part, begin, end in zip(parts, borders[:-1], borders[1:], strict=True):
            columns[name][begin:end] = part[at]
    return columns


def _outlasting(work: DeviceWork) -> tuple[Ints, Ints]:
    """Work that outlasts its successor on the stream, and the first work after it has ended."""
    early, late = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    overlaps = work.overlaps
    for _, part in work.lanes():
        at = part.start + np.flatnonzero(overlaps[part])
        long = work.previous[at]
        end = work.end_ns[long]
        after = part.start + np.searchsorted(work.start_ns[part], end, side="left")
        use = (after < part.stop) & (end > work.end_ns[at])
        early.append(long[use])
        late.append(after[use])
    return np.concatenate(early), np.concatenate(late)


def _take_note(part: RankPart, blocking: Blocking, device: _DeviceTasks) -> None:
    """What was found, counted, with its time."""
    work = device.work
    slow: Flags = work.issue_ns > work.call_start_ns
    counted: dict[str, tuple[int, int]] = {
        "slow launch call": (int(slow.sum()), int((work.issue_ns - work.call_start_ns)[slow].sum())),
        "occupancy": _time(device, device.cut_cause[device.cut_kind == EdgeKind.OCCUPANCY]),
        "unexplained": _delays(device, TaskKind.UNEXPLAINED),
        "unrecorded graph work": _delays(device, TaskKind.UNRECORDED_GRAPH_WORK),
        "launched before the trace": _delays(device, TaskKind.BEFORE_TRACE),
        "work that overlaps the work before it on its stream": (int(work.overlaps.sum()), 0),
        "blocking call that nothing explains": (int(blocking.is_unexplained.sum()), 0),
    }
    for name, (count, time) in counted.items():
        if count:
            part.notes[name] += count
        if time:
            part.figures[f"{name} ns"] = time
    if len(work):
        part.figures["launch latency ns"] = work.latency_ns
    if len(device.waits):
        part.figures["event wait latency ns"] = device.wait_latency_ns
    if blocking.queue_depth:
        part.figures["launch queue depth"] = blocking.queue_depth


def _delays(device: _DeviceTasks, kind: TaskKind) -> tuple[int, int]:
    mine = device.delay_kind == kind
    return int(mine.sum()), int(device.delay_ns[mine].sum())


def _time(device: _DeviceTasks, rows: Ints) -> tuple[int, int]:
    return len(rows), int((device.work.start_ns - device.ready)[rows].sum())
