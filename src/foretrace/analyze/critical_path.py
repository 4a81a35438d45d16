"""The critical path of a run: what the time up to an end consists of, and how much room everything else has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from foretrace.analyze.tables import FLOAT, INT, TEXT, table_of
from foretrace.trace import Category, EdgeKind, ExecutionGraph, GraphError, LanePolicy, StringTable, TaskKind, Timeline
from foretrace.trace.graph import COPIED_KINDS, HOST_KINDS, offsets
from foretrace.trace.steps import operator_rows

if TYPE_CHECKING:
    import pyarrow as pa

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
By = Literal["kind", "kernel", "layer", "rank", "operator"]
_Labels = tuple[Ints, StringTable]  # ids into the table, -1 for none

_LATENCIES = {EdgeKind.LAUNCH: "launch latency", EdgeKind.EVENT_WAIT: "event wait latency"}
KINDS = (
    *(kind.label.replace("_", " ") for kind in sorted(TaskKind)),
    *(_LATENCIES.get(kind, f"{kind.label} lag".replace("_", " ")) for kind in sorted(EdgeKind)),
    "back-to-back gap",
    "delay",
    "before the first task",
    "after the last task",
)
"""Labels of a segment's ``kind``: those of `TaskKind`, then those of lags by `EdgeKind`, then the rest."""
_FIRST_LAG = len(TaskKind)
BACK_TO_BACK, DELAY, BEFORE, AFTER = range(len(KINDS) - 4, len(KINDS))

_COPIED = (*COPIED_KINDS, DELAY, BEFORE, AFTER)
_NAMED = (TaskKind.KERNEL, TaskKind.MEMCPY, TaskKind.MEMSET, TaskKind.COLLECTIVE, TaskKind.COLLECTIVE_ALONE)
_MODULE, _STEP = "nn.Module: ", "ProfilerStep"
NONE = "(none)"


@dataclass(frozen=True, eq=False)
class CriticalPath:
    """What a stretch of time consists of: segments that follow each other without gap or overlap.

    Attributes:
        graph: whose tasks these are.
        task: the task that runs, -1 where none does; shape ``(n,)`` as all others.
        owner: the task that runs, or the one that waits; -1 before the first and after the last task.
        kind: index into `KINDS`.
        start_ns, end_ns: in ascending order, with the zero of the times that were given; never of length 0.
    """

    graph: ExecutionGraph
    task: Ints
    owner: Ints
    kind: Ints
    start_ns: Ints
    end_ns: Ints

    def __repr__(self) -> str:
        return f"CriticalPath({len(self.task)} segments, {self.length_ns} ns)"

    @property
    def duration_ns(self) -> Ints:
        """Length of each segment, shape ``(n,)``."""
        return np.asarray(self.end_ns - self.start_ns)

    @property
    def length_ns(self) -> int:
        """Length of the whole path, which is that of its window."""
        return int(self.duration_ns.sum())

    @property
    def copied_ns(self) -> int:
        """Time on the path that is copied from the measurement, not explained by work: see `COPIED_KINDS`.

        Delays and what lies before the first and after the last task are part of it.
        """
        return self._time_of(*_COPIED)

    @property
    def copied_share(self) -> float:
        """``copied_ns`` as a part of the length, from 0 to 1."""
        return self.copied_ns / self.length_ns if self.length_ns else 0.0

    @property
    def unexplained_ns(self) -> int:
        """Time on the path in which work was late and nothing says why."""
        return self._time_of(TaskKind.UNEXPLAINED, DELAY)

    def segments(self) -> pa.Table:
        """One row a segment, in order of time.

        Columns: rank, lane, name and layer (of the task that runs or waits; null where there is none), kind (one of
        `KINDS`), start_ns, end_ns, duration_ns. See `composition` for layers.
        """
        ids, layers = self._layers
        rank = [None if one < 0 else one for one in self._of_owner(self.graph.rank, -1).tolist()]
        labels = [*(lane.lane.label for lane in self.graph.lanes), None]
        lane = [labels[one] for one in self._of_owner(self.graph.tasks["lane"], -1).tolist()]
        name = [text or None for text in self.graph.strings.lookup(self._of_owner(self.graph.tasks["name"], -1))]
        kind = [KINDS[one] for one in self.kind.tolist()]
        times = [column.tolist() for column in (self.start_ns, self.end_ns, self.duration_ns)]
        layer = [text or None for text in layers.lookup(ids)]
        schema = {"rank": INT, "lane": TEXT, "kind": TEXT, "name": TEXT}
        schema |= {"start_ns": INT, "end_ns": INT, "duration_ns": INT, "layer": TEXT}
        return table_of(schema, zip(rank, lane, kind, name, *times, layer, strict=True))

    def composition(self, by: By) -> pa.Table:
        """What the path consists of, longest first; the times add up to the length exactly.

        Args:
            by: ``kind`` (see `KINDS`), ``kernel`` (name of device work; host time is "host", the rest by kind),
                ``rank``, or ``operator`` and ``layer``: the innermost operator, and the innermost user annotation
                (steps are none) or ``nn.Module``, around the host's part or the call that launched the device work.
                A latency counts for the work that waits.

        Columns: name ("(none)" where there is none), time_ns, share_pct, count (of segments).
        """
        if by not in get_args(By):
            raise ValueError(f"by is {by!r}, must be one of {', '.join(get_args(By))}")
        ids, texts = self._labels(by)
        distinct, group = np.unique(ids, return_inverse=True)
        time, count = np.zeros(len(distinct), np.int64), np.zeros(len(distinct), np.int64)
        np.add.at(time, group, self.duration_ns)
        np.add.at(count, group, 1)
        names = [text if one >= 0 else NONE for one, text in zip(distinct, texts.lookup(distinct), strict=True)]
        share = 100 * time / max(self.length_ns, 1)
        rows = sorted(zip(names, time.tolist(), share.tolist(), count.tolist(), strict=True), key=_longest_first)
        return table_of({"name": TEXT, "time_ns": INT, "share_pct": FLOAT, "count": INT}, rows)

    def _time_of(self, *kinds: int) -> int:
        return int(self.duration_ns[np.isin(self.kind, kinds)].sum())

    def _of_owner(self, column: NDArray[Any], default: int) -> NDArray[Any]:
        """The owners' values of a column of the tasks, shape ``(n,)``."""
        return np.append(column, default)[self.owner]

    def _labels(self, by: By) -> _Labels:
        match by:
            case "kind":
                return self.kind, StringTable(KINDS)
            case "kernel":
                return self._kernels()
            case "layer":
                return self._layers
            case "operator":
                return self._around(_host_operators)
            case "rank":
                ranks = self.graph.ranks
                rank = self._of_owner(self.graph.rank, -1)
                found = np.searchsorted(ranks, rank) if ranks else rank
                return np.where(rank >= 0, found, -1), StringTable(f"rank {one}" for one in ranks)

    def _kernels(self) -> _Labels:
        """Device work by name, everything else by what it is."""
        table = StringTable()
        names = self._of_owner(self.graph.tasks["name"], -1)
        is_named = np.isin(self.kind, _NAMED) & (names >= 0)
        by_name, by_kind = np.full(len(self.graph.strings) + 1, -1), np.full(len(KINDS), -1)
        used = np.unique(names[is_named])
        by_name[used] = table.intern_all(self.graph.strings.lookup(used))
        for kind in np.unique(self.kind[~is_named]).tolist():
            by_kind[kind] = table.intern("host" if kind in HOST_KINDS else KINDS[kind])
        return np.where(is_named, by_name[names], by_kind[self.kind]), table

    @cached_property
    def _layers(self) -> _Labels:
        return self._around(_layer_rows)

    def _around(self, candidates: Callable[[Timeline], Ints]) -> _Labels:
        """Names of the innermost of some events around each segment's owner."""
        table, ids = StringTable(), np.full(len(self.owner), -1, np.int64)
        ranks = self._of_owner(self.graph.rank, -1)
        for timeline in self.graph.source or ():
            mine = np.flatnonzero(ranks == timeline.rank)
            if not len(mine) or not timeline.num_events:
                continue
            found = _innermost_rows(timeline, candidates(timeline), *_anchors(self.graph, timeline, self.owner[mine]))
            names = np.where(found >= 0, timeline.events["name"][found], -1)
            used = np.unique(names[names >= 0])
            new = np.full(len(timeline.strings) + 1, -1, np.int64)
            new[used] = table.intern_all(timeline.strings.lookup(used))
            ids[mine] = new[names]
        return ids, table


def _longest_first(row: tuple[str, int, float, int]) -> tuple[int, str]:
    return -row[1], row[0]


# The path


def critical_path(
    graph: ExecutionGraph,
    start_ns: NDArray[np.integer],
    end_ns: NDArray[np.integer],
    *,
    last: int | None = None,
    window: tuple[int, int] | None = None,
) -> CriticalPath:
    """Walk back from a task along what each task waited for until the window's beginning.

    What a task waited for is the edge with the latest ``end + lag``; of equal ones device work counts before
    others, then the smaller ``priority``. What lies between that and the start is a "delay"; only measured times
    have such. A cause that ends after the start is cut there.

    Args:
        graph: what ran, without open waits (`Simulation.resolved`).
        start_ns, end_ns: of each task, shape ``(num_tasks,)``: simulated, or measured less ``graph.origin_ns``.
        last: the task to begin with; by default the one that ends last.
        window: what the path covers, exactly; by default from 0 to the end of ``last``.

    Raises:
        GraphError: if the graph has open waits, or tasks on the path wait for each other.
        ValueError: if times, task or window do not fit.
    """
    start, end = _times(graph, start_ns, end_ns)
    graph = _without_open_ends(graph, start, end)
    if last is None:
        last = _last_task(graph, end)
    elif not 0 <= last < graph.num_tasks:
        raise ValueError(f"last is {last}, must be a task from 0 to {graph.num_tasks - 1}")
    first, until = window or (0, int(end[last]) if last >= 0 else 0)
    if until < first:
        raise ValueError(f"the window ends at {until}, before it begins at {first}")
    path, edge = _walk_back(graph, start, end, last, first)
    return _segments(graph, path, edge, start, end, (first, until))


def _times(graph: ExecutionGraph, start_ns: NDArray[np.integer], end_ns: NDArray[np.integer]) -> tuple[Ints, Ints]:
    start, end = np.ascontiguousarray(start_ns, np.int64), np.ascontiguousarray(end_ns, np.int64)
    if start.shape != (graph.num_tasks,) or end.shape != (graph.num_tasks,):
        raise ValueError(f"starts and ends must be {graph.num_tasks} numbers each, one a task")
    return start, end


def _without_open_ends(graph: ExecutionGraph, start: Ints, end: Ints) -> ExecutionGraph:
    """The graph, with edges for the order in which lanes took tasks by priority.

    Such a task comes after the last one on its lane that began before it; with tasks of no length at the same moment
    the order is left open, as an edge among them could contradict the graph.
    """
    if graph.waits.num_rows:
        raise GraphError(f"{graph.waits.num_rows} waits are open: a path needs the graph that `resolved` gives")
    lane = graph.tasks["lane"]
    picks = np.array([*(one.policy is LanePolicy.PRIORITY for one in graph.lanes), False], np.bool_)[lane]
    if not picks.any():
        return graph
    rows = np.flatnonzero(picks)
    rows = rows[np.lexsort((end[rows], start[rows], lane[rows]))]
    is_new = np.append(True, (np.diff(start[rows]) != 0) | (np.diff(lane[rows]) != 0))
    before = np.maximum.accumulate(np.where(is_new, np.arange(len(rows)), 0)) - 1
    has_one = (before >= 0) & (lane[rows[before]] == lane[rows])
    count = int(has_one.sum())
    more: dict[str, Any] = {"source": rows[before[has_one]], "target": rows[has_one], "lag_ns": np.zeros(count)}
    more |= {"kind": np.full(count, EdgeKind.ORDER), "confidence": np.ones(count)}
    joined = {n: np.concatenate((column, more[n].astype(column.dtype))) for n, column in graph.edges.items()}
    return graph.with_columns(edges=joined)


def _last_task(graph: ExecutionGraph, end: Ints) -> int:
    """The task that ends last, by the rule of `critical_path` among equals; -1 of none."""
    if not len(end):
        return -1
    ends = np.flatnonzero(end == end.max())
    return int(ends[np.lexsort((graph.tasks["priority"][ends], ~graph.on_device[ends]))[0]])


def _walk_back(graph: ExecutionGraph, start: Ints, end: Ints, last: int, begin_ns: int) -> tuple[Ints, Ints]:
    """The path's tasks, last first, and the edge that each one waited for (-1: none), shape ``(length,)``."""
    if last < 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    edges, tasks = graph.edges, graph.tasks
    source, target = edges["source"], edges["target"]
    cause = _compiled(_causes)(source, target, edges["lag_ns"], edges["kind"], end, graph.on_device, tasks["priority"])
    path = _compiled(_walk)(cause, source, start, last, begin_ns)
    if not len(path):
        raise GraphError(f"tasks wait for each other on the way back from {graph.describe(last)}")
    return path, cause[path]


def _segments(
    graph: ExecutionGraph, path: Ints, edge: Ints, start: Ints, end: Ints, window: tuple[int, int]
) -> CriticalPath:
    """The path's tasks, lags and delays within a window.

    Four borders belong to each task: its cause's end, the end of the lag, its start and its end. The running minimum,
    seen from the end, cuts what outlasts the beginning of what waited for it.
    """
    begin_ns, end_ns = window
    borders = np.minimum.accumulate(np.stack((end[path], start[path]), axis=1).ravel())
    top, low = borders[0::2], borders[1::2]
    cause_end = np.append(top, begin_ns)[1:]
    lag, lag_kind = np.zeros_like(path), np.zeros_like(path)
    lag[:-1], lag_kind[:-1] = graph.edges["lag_ns"][edge[:-1]], _lag_kinds(graph, edge[:-1])
    nobody, rest_kind, waiting = np.full_like(path, -1), np.full_like(path, DELAY), path.copy()
    rest_kind[-1:], waiting[-1:] = BEFORE, -1  # the first task in time is what nothing precedes
    borders = _in_time(cause_end, np.minimum(cause_end + lag, low), low)
    borders = np.concatenate((borders, np.append(top, begin_ns)[:1], [end_ns]))
    borders = np.clip(borders, begin_ns, end_ns)
    keep = borders[1:] > borders[:-1]
    task = np.append(_in_time(nobody, nobody, path), -1)
    owner = np.append(_in_time(path, waiting, path), -1)
    kind = np.append(_in_time(lag_kind, rest_kind, graph.tasks["kind"][path]), AFTER)
    return CriticalPath(graph, task[keep], owner[keep], kind[keep], borders[:-1][keep], borders[1:][keep])


def _in_time(lags: Ints, rests: Ints, tasks: NDArray[np.integer]) -> Ints:
    """What belongs to the segments of each task, last task first, in ascending order of time."""
    return np.asarray(np.stack((lags, rests, tasks), axis=1)[::-1].ravel(), np.int64)


def _lag_kinds(graph: ExecutionGraph, edge: Ints) -> Ints:
    """`KINDS` of the lags of some edges, shape ``(len(edge),)``."""
    edges, on_device = graph.edges, graph.on_device
    is_inside = on_device[edges["source"][edge]] & on_device[edges["target"][edge]]
    kind = edges["kind"][edge].astype(np.int64)
    return np.where((kind == EdgeKind.ORDER) & is_inside, BACK_TO_BACK, kind + _FIRST_LAG)


# Room


def slack(
    graph: ExecutionGraph,
    start_ns: NDArray[np.integer],
    end_ns: NDArray[np.integer],
    finish_ns: int | None = None,
) -> Ints:
    """How much later each task could end without delaying the finish, ns, shape ``(num_tasks,)``.

    It is 0 on the critical path of a simulated run and negative nowhere, unless a task ends after the given finish.
    Delays of a measured run count as room.

    Args:
        graph, start_ns, end_ns: as `critical_path` takes them.
        finish_ns: by default the latest end.

    Raises:
        GraphError: if the graph has open waits, or tasks wait for each other.
        ValueError: if the times do not fit.
    """
    from foretrace.trace.topology import topological_order

    start, end = _times(graph, start_ns, end_ns)
    graph = _without_open_ends(graph, start, end)
    finish = int(end.max(initial=0)) if finish_ns is None else finish_ns
    count, edges = graph.num_tasks, graph.edges
    first_edge = offsets(edges["source"], count)
    order = topological_order(first_edge, edges["target"], np.bincount(edges["target"], minlength=count))
    if len(order) < count:
        raise GraphError(f"{count - len(order)} tasks wait for each other, or for tasks that do")
    latest = _compiled(_latest_ends)(first_edge, edges["target"], edges["lag_ns"], end - start, order, finish)
    return np.asarray(latest - end)


# What is around a task


def _host_operators(timeline: Timeline) -> Ints:
    rows = operator_rows(timeline)
    return np.asarray(rows[np.isin(rows, timeline.host_rows)], np.int64)


def _layer_rows(timeline: Timeline) -> Ints:
    """Rows of user annotations other than steps, and of calls of modules."""
    annotations, calls = timeline.rows(Category.ANNOTATION), timeline.rows(Category.PYTHON)
    annotations = annotations[~timeline.are_named(annotations, lambda name: name.startswith(_STEP))]
    modules = calls[timeline.are_named(calls, lambda name: name.startswith(_MODULE))]
    return np.asarray(np.concatenate((annotations, modules)), np.int64)


def _anchors(graph: ExecutionGraph, timeline: Timeline, tasks: Ints) -> tuple[Ints, Ints, Ints]:
    """Where to look for what is around some tasks of one rank, in the timeline's times; shape ``(len(tasks),)``.

    For a part of an event and for a launch call that is the moment at which it begins, for a gap of the host the
    whole gap: what ends or begins in it is not around it.

    Returns:
        lane (-1: nowhere), start_ns, and end_ns, the time up to which something around it lasts at least.
    """
    event = graph.tasks["event"][tasks].astype(np.int64)
    on_device, has_event = graph.on_device[tasks], event >= 0
    row = np.where(on_device, np.where(has_event, timeline.launch_row[event], -1), event)
    shift = _clock_shift(graph, timeline)
    start = np.where(on_device, timeline.start_ns[row], graph.tasks["measured_start_ns"][tasks] + shift)
    end = np.where(row >= 0, start + 1, np.maximum(graph.tasks["measured_end_ns"][tasks] + shift, start + 1))
    lanes: Mapping[Any, int] = {lane: at for at, lane in enumerate(timeline.lanes)}
    by_lane = np.array([lanes.get(lane.lane, -1) for lane in graph.lanes])
    host_lane = np.where(on_device, -1, by_lane[graph.tasks["lane"][tasks]])
    return np.where(row >= 0, timeline.events["lane"][row], host_lane), start, end


def _clock_shift(graph: ExecutionGraph, timeline: Timeline) -> int:
    """How far the rank's clock is ahead of the graph's: the first part of an operator begins with the operator."""
    tasks = graph.tasks
    mine = (graph.rank == timeline.rank) & (tasks["event"] >= 0) & np.isin(tasks["kind"], HOST_KINDS)
    ahead = timeline.start_ns[tasks["event"][mine]] - tasks["measured_start_ns"][mine]
    return int(ahead.max()) if len(ahead) else 0


def _innermost_rows(timeline: Timeline, rows: Ints, lane: Ints, start: Ints, end: Ints) -> Ints:
    """The innermost of the given events around each stretch of a lane, -1 for none; shape ``(len(lane),)``.

    Args:
        timeline: where the events are.
        rows: of ``timeline.events``.
        lane, start, end: the stretches; lane -1 for none.
    """
    of_rows = timeline.events["lane"][rows].astype(np.int64)
    first, last = timeline.start_ns[rows], timeline.end_ns[rows]
    order = np.lexsort((rows, -last, first, of_rows))
    asked = np.lexsort((start, lane))
    found = np.full(len(lane), -1, np.int64)
    found[asked] = _compiled(_innermost)(
        of_rows[order], first[order], last[order], lane[asked].astype(np.int64), start[asked], end[asked]
    )
    return np.where(found >= 0, np.append(rows[order], -1)[found], -1)


# Inner loops. They are compiled when first used, so that importing this module stays cheap.


@cache
def _compiled(function: Callable[..., Any]) -> Any:
    from numba import njit

    return njit(cache=True, nogil=True)(function)


def _causes(
    source: NDArray[np.int32],
    target: NDArray[np.int32],
    lag: Ints,
    kind: NDArray[np.int8],
    end: Ints,
    on_device: Flags,
    priority: NDArray[np.int32],
) -> Ints:
    """The edge that each task waited for, -1 for none; see `critical_path`."""
    cause = np.full(len(end), -1, np.int64)
    for edge in range(len(source)):
        after, one = target[edge], source[edge]
        best = cause[after]
        if best >= 0:
            other = source[best]
            ahead = (end[one] + lag[edge]) - (end[other] + lag[best])
            if ahead == 0:
                ahead = int(on_device[one]) - int(on_device[other])
            if ahead == 0:
                ahead = int(priority[other]) - int(priority[one])
            if ahead == 0:  # the same two tasks; the order of edges must not matter
                ahead = int(kind[best]) - int(kind[edge])
            if ahead <= 0:
                continue
        cause[after] = edge
    return cause


def _walk(cause: Ints, source: NDArray[np.int32], start: Ints, last: int, begin_ns: int) -> Ints:
    """The tasks from the last one back to the window's beginning; nothing where they go round in a circle."""
    path = np.empty(len(start), np.int64)
    task, at, size = last, start[last], 0
    while size < len(start):
        path[size] = task
        size += 1
        at = min(at, start[task])
        if cause[task] < 0 or at <= begin_ns:
            return path[:size].copy()
        task = source[cause[task]]
    return path[:0].copy()


def _latest_ends(
    first_edge: Ints, target: NDArray[np.int32], lag: Ints, duration: Ints, order: Ints, finish: int
) -> Ints:
    """The latest end of each task that delays nothing.

    Args:
        first_edge: offsets into the edges of each source, shape ``(tasks + 1,)``.
        target, lag: of the edges, sorted by source.
        duration: of the tasks.
        order: the tasks, sources before targets.
        finish: what must not be delayed.
    """
    latest = np.full(len(duration), finish, np.int64)
    for at in range(len(order) - 1, -1, -1):
        task = order[at]
        for edge in range(first_edge[task], first_edge[task + 1]):
            after = target[edge]
            latest[task] = min(latest[task], latest[after] - duration[after] - lag[edge])
    return latest


def _innermost(lane: Ints, start: Ints, end: Ints, asked_lane: Ints, asked_start: Ints, asked_end: Ints) -> Ints:
    """The innermost event that is running when each stretch begins and lasts as long, -1 for none.

    Events are sorted by lane, start and descending end, stretches by lane and start.
    """
    found = np.full(len(asked_lane), -1, np.int64)
    stack = np.empty(len(lane) + 1, np.int64)
    depth, at = 0, 0
    for asked in range(len(asked_lane)):
        on, moment = asked_lane[asked], asked_start[asked]
        while at < len(lane) and (lane[at] < on or (lane[at] == on and start[at] <= moment)):
            while depth > 0 and (lane[stack[depth - 1]] != lane[at] or end[stack[depth - 1]] <= start[at]):
                depth -= 1
            stack[depth] = at
            depth += 1
            at += 1
        while depth > 0 and (lane[stack[depth - 1]] != on or end[stack[depth - 1]] <= moment):
            depth -= 1
        for level in range(depth - 1, -1, -1):
            if end[stack[level]] >= asked_end[asked]:
                found[asked] = stack[level]
                break
    return found
