"""From simulated tasks to timelines: the measured events at new times, or new events where none were measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.trace import Category, ExecutionGraph, Job, LaneKind, ReadReport, Table, TaskKind, Timeline

Times = NDArray[np.int64]

# Tasks that are no part of an event: delays before it, and points in time.
_NO_EVENT = (TaskKind.UNRECORDED_GRAPH_WORK, TaskKind.BEFORE_TRACE, TaskKind.UNEXPLAINED, TaskKind.RENDEZVOUS)
_CATEGORY = {
    TaskKind.OPERATOR: Category.OPERATOR,
    TaskKind.RUNTIME: Category.RUNTIME,
    TaskKind.KERNEL: Category.KERNEL,
    TaskKind.COLLECTIVE: Category.KERNEL,
    TaskKind.COLLECTIVE_ALONE: Category.KERNEL,
    TaskKind.ARRIVAL: Category.KERNEL,
    TaskKind.MEMCPY: Category.MEMCPY,
    TaskKind.MEMSET: Category.MEMSET,
}
_TIMED_TABLES = ("flows", "memory", "counters", "instants")


def simulated_job(graph: ExecutionGraph, start_ns: Times, end_ns: Times) -> Job:
    """The timelines of a simulation, one a rank, on the clock of ``graph.origin_ns``."""
    start_ns, end_ns = start_ns + graph.origin_ns, end_ns + graph.origin_ns
    order = np.argsort(graph.rank, kind="stable")
    ranks = graph.rank[order]
    timelines = []
    for rank in graph.ranks if graph.source is None else graph.source.ranks:
        tasks = order[np.searchsorted(ranks, rank) : np.searchsorted(ranks, rank, side="right")]
        if graph.source is not None:
            timelines.append(_retimed(graph, graph.source.rank(rank), tasks, start_ns, end_ns))
        else:
            timelines.append(_from_tasks(graph, rank, tasks, start_ns, end_ns))
    if graph.source is None:
        return Job(timelines, world_size=len(timelines))
    return Job(timelines, graph.source.groups, graph.source.world_size, graph.source.warnings)


@dataclass(frozen=True, slots=True)
class _LaneClock:
    """How the measured time of one lane maps to simulated time: by its tasks, and linearly inside and between them."""

    measured_start: Times
    measured_end: Times
    start: Times
    end: Times

    def of_starts(self, time_ns: Times) -> Times:
        """Simulated times of starts: at a border they belong to what follows it."""
        at = np.searchsorted(self.measured_start, time_ns, side="right") - 1
        return self._at(time_ns, np.maximum(at, 0))

    def of_ends(self, time_ns: Times) -> Times:
        """Simulated times of ends: at a border they belong to what precedes it."""
        at = np.searchsorted(self.measured_end, time_ns, side="left")
        # The first task that reaches that far; before its beginning lies the stretch after the task before it.
        at = np.minimum(at, len(self.start) - 1)
        at = np.where((time_ns <= self.measured_start[at]) & (at > 0), at - 1, at)
        return self._at(time_ns, at)

    def _at(self, time_ns: Times, at: NDArray[np.intp]) -> Times:
        after = np.minimum(at + 1, len(self.start) - 1)
        into = time_ns - self.measured_start[at]
        length, new_length = self.measured_end[at] - self.measured_start[at], self.end[at] - self.start[at]
        inside = self.start[at] + _scaled(np.clip(into, 0, None), length, new_length) + np.minimum(into, 0)
        beyond = time_ns - self.measured_end[at]
        room = self.measured_start[after] - self.measured_end[at]
        new_room = self.start[after] - self.end[at]
        between = self.end[at] + np.where(after > at, _scaled(beyond, room, new_room), beyond)
        return np.where(beyond > 0, between, inside)


def _scaled(part: Times, whole: Times, new_whole: Times) -> Times:
    """``part`` of ``whole`` as the same part of ``new_whole``; exact where the two are equal."""
    scaled = np.rint(part * (new_whole / np.maximum(whole, 1))).astype(np.int64)
    return np.where(whole == new_whole, part, np.minimum(scaled, np.maximum(new_whole, 0)))


def _retimed(graph: ExecutionGraph, timeline: Timeline, tasks: Times, start_ns: Times, end_ns: Times) -> Timeline:
    """A copy of a measured timeline at simulated times."""
    clocks = _clocks(graph, timeline, tasks, start_ns, end_ns)
    lanes = timeline.events["lane"]
    start, end = timeline.start_ns.copy(), timeline.end_ns.copy()
    main = max(
        clocks,
        key=lambda lane: (timeline.lanes[lane].kind is LaneKind.HOST_THREAD, len(clocks[lane].start)),
        default=-1,
    )
    for lane in np.unique(lanes).tolist():
        clock = clocks.get(lane, clocks.get(main))
        if clock is not None:
            rows = np.flatnonzero(lanes == lane)
            start[rows] = clock.of_starts(timeline.start_ns[rows])
            end[rows] = np.maximum(clock.of_ends(timeline.end_ns[rows]), start[rows])
    device = tasks[graph.on_device[tasks] & ~np.isin(graph.tasks["kind"][tasks], _NO_EVENT)]
    events = graph.tasks["event"][device]
    device, events = device[events >= 0], events[events >= 0]
    start[events], end[events] = np.iinfo(np.int64).max, np.iinfo(np.int64).min
    np.minimum.at(start, events, start_ns[device])
    np.maximum.at(end, events, end_ns[device])
    columns = {**timeline.events, "start_ns": start, "duration_ns": end - start}
    tables = dict(timeline.tables)
    tables["events"] = Table(columns, timeline.events.strings)
    if main >= 0:
        for name in _TIMED_TABLES:
            if tables[name].num_rows:
                moved = {**tables[name], "time_ns": clocks[main].of_starts(tables[name]["time_ns"])}
                tables[name] = Table(moved, tables[name].strings)
    report = ReadReport(timeline.report.path, kind="simulated")
    result = Timeline(
        lanes=timeline.lanes,
        strings=timeline.strings,
        rank=timeline.rank,
        metadata=timeline.metadata,
        report=report,
        **tables,
    )
    result.classifier = timeline.classifier
    return result


def _clocks(
    graph: ExecutionGraph, timeline: Timeline, tasks: Times, start_ns: Times, end_ns: Times
) -> dict[int, _LaneClock]:
    """The clock of each lane of a timeline that has tasks."""
    lane_of = {lane: at for at, lane in enumerate(timeline.lanes)}
    measured_start, measured_end = graph.tasks["measured_start_ns"], graph.tasks["measured_end_ns"]
    tasks = tasks[~np.isin(graph.tasks["kind"][tasks], _NO_EVENT)]
    lanes = graph.tasks["lane"][tasks]
    tasks = tasks[np.lexsort((start_ns[tasks], measured_end[tasks], measured_start[tasks], lanes))]
    lanes = graph.tasks["lane"][tasks]
    clocks = {}
    for lane in np.unique(lanes[lanes >= 0]).tolist():
        mine = tasks[np.searchsorted(lanes, lane) : np.searchsorted(lanes, lane, side="right")]
        ends = np.maximum.accumulate(measured_end[mine])
        clocks[lane_of[graph.lanes[lane].lane]] = _LaneClock(measured_start[mine], ends, start_ns[mine], end_ns[mine])
    return clocks


def _from_tasks(graph: ExecutionGraph, rank: int, tasks: Times, start_ns: Times, end_ns: Times) -> Timeline:
    """A timeline of one event a task; tasks of one ``event`` become one event."""
    tasks = tasks[np.isin(graph.tasks["kind"][tasks], list(_CATEGORY))]
    own = graph.tasks["event"][tasks].astype(np.int64)
    key = np.where(own >= 0, own, own.max(initial=-1) + 1 + tasks)
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    start, end = np.full(len(first), np.iinfo(np.int64).max), np.full(len(first), np.iinfo(np.int64).min)
    np.minimum.at(start, which, start_ns[tasks])
    np.maximum.at(end, which, end_ns[tasks])
    shown = tasks[first]
    lane_ids = [at for at, lane in enumerate(graph.lanes) if lane.rank == rank]
    place = np.full(len(graph.lanes), -1, np.int32)
    place[lane_ids] = np.arange(len(lane_ids))
    category = np.zeros(len(TaskKind), np.int8)
    category[list(_CATEGORY)] = list(_CATEGORY.values())
    none = np.full(len(first), -1, np.int64)
    columns: dict[str, NDArray[Any]] = {
        "name": graph.tasks["name"][shown],
        "category_name": none.astype(np.int32),
        "category": category[graph.tasks["kind"][shown]],
        "lane": place[graph.tasks["lane"][shown]],
        "start_ns": start,
        "duration_ns": end - start,
        "correlation": _correlations(graph, tasks, which, len(first)),
        "external_id": none,
    }
    columns = _with_steps(columns, graph, rank, place, start_ns, end_ns)
    events = Table(columns, {"name": graph.strings, "category_name": graph.strings})
    lanes = [graph.lanes[at].lane for at in lane_ids]
    return Timeline(events, lanes, graph.strings, rank, report=ReadReport("", kind="simulated"))


def _with_steps(
    columns: dict[str, NDArray[Any]],
    graph: ExecutionGraph,
    rank: int,
    place: NDArray[np.int32],
    start_ns: Times,
    end_ns: Times,
) -> dict[str, NDArray[Any]]:
    """The columns of events, and an annotation for each step: from the first to the last of its host tasks."""
    step, lane = graph.tasks["step"], graph.tasks["lane"]
    works = np.isin(graph.tasks["kind"], (TaskKind.OPERATOR, TaskKind.RUNTIME))  # a gap is part of no step
    tasks = np.flatnonzero((step >= 0) & (graph.rank == rank) & works)
    if not len(tasks):
        return columns
    main = np.bincount(lane[tasks]).argmax()
    numbers, which = np.unique(step[tasks], return_inverse=True)
    start, end = np.full(len(numbers), np.iinfo(np.int64).max), np.full(len(numbers), np.iinfo(np.int64).min)
    np.minimum.at(start, which, start_ns[tasks])
    np.maximum.at(end, which, end_ns[tasks])
    names = graph.strings.intern_all([f"ProfilerStep#{number}" for number in numbers.tolist()])
    more: dict[str, NDArray[Any]] = {"name": names, "start_ns": start, "duration_ns": end - start}
    more |= {"category": np.full(len(numbers), Category.ANNOTATION), "lane": np.full(len(numbers), place[main])}
    none = np.full(len(numbers), -1)
    return {
        name: np.concatenate((column, more.get(name, none).astype(column.dtype))) for name, column in columns.items()
    }


def _correlations(graph: ExecutionGraph, tasks: Times, event_of: Times, count: int) -> Times:
    """Correlation ids for new events: a launch and the work that it puts on a stream share one."""
    found = np.full(count, -1, np.int64)
    event = np.full(graph.num_tasks, -1, np.int64)
    event[tasks] = event_of
    issue, work = event[graph.launched["issue"]], event[graph.launched["work"]]
    known = (issue >= 0) & (work >= 0)
    found[issue[known]] = issue[known]
    found[work[known]] = issue[known]
    return found
