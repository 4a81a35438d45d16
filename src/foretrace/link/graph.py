"""`link`: a job's timelines as one execution graph, collectives coupled across ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.link.rank import RankPart, rank_part
from foretrace.link.sorting import by_source
from foretrace.link.soundness import without_cycles
from foretrace.trace import EdgeKind, ExecutionGraph, GraphLane, Job, StringTable, TaskKind, Timeline
from foretrace.trace.graph import EDGE_COLUMNS, TASK_COLUMNS, table_with
from foretrace.trace.matching import Group, groups
from foretrace.trace.table import Table

Columns = dict[str, NDArray[Any]]


def link(
    job: Job | Timeline,
    *,
    coupled: bool = True,
    leave_out: int | None = None,
    clock_offsets_ns: Mapping[int, int] | None = None,
    executor: Executor | None = None,
) -> ExecutionGraph:
    """The execution graph of measured timelines.

    Args:
        job: one timeline or many.
        coupled: let a collective start when its last member arrives, where all members are there; else each rank
            keeps its measured durations.
        leave_out: index of a step from which nothing is inferred (for validation).
        clock_offsets_ns: by rank, how far its clock is ahead.
        executor: maps over ranks, where given.
    """
    if isinstance(job, Timeline):
        job = Job([job], world_size=1)
    if not len(job):
        return ExecutionGraph.from_columns({}, {}, source=job)
    offsets = dict(clock_offsets_ns or {})
    # A rank without events has no beginning.
    begins = {timeline.rank: _begin(timeline) for timeline in job if timeline.num_events}
    origin = min((begin - offsets.get(rank, 0) for rank, begin in begins.items()), default=0)
    timelines = list(job)
    one = partial(rank_part, leave_out=leave_out)
    starts = [origin + offsets.get(timeline.rank, 0) for timeline in timelines]
    parts = list((executor.map if executor else map)(one, timelines, starts))
    graph = _merged(job, parts, origin, offsets)
    if coupled and len(timelines) > 1:
        graph = _coupled(graph, job, parts, offsets)
    return without_cycles(graph)


def _begin(timeline: Timeline) -> int:
    """The first event that becomes a task."""
    rows = np.concatenate((timeline.device_rows, timeline.host_rows))
    return int(timeline.start_ns[rows].min()) if len(rows) else 0


def _merged(job: Job, parts: list[RankPart], origin: int, offsets: Mapping[int, int]) -> ExecutionGraph:
    """The parts of all ranks side by side."""
    strings = StringTable()
    lanes: list[GraphLane] = []
    columns: dict[str, list[Columns]] = {"tasks": [], "edges": [], "waits": [], "launched": []}
    notes: Counter[str] = Counter()
    figures: dict[str, float] = {}
    first = 0
    for part in parts:
        timeline = part.timeline
        shift = offsets.get(timeline.rank, 0)
        tasks = {**part.tasks, "name": _names(timeline, part.tasks["name"], strings)}
        tasks["lane"] = tasks["lane"] + len(lanes)
        for column in ("measured_start_ns", "measured_end_ns"):
            tasks[column] = tasks[column] - shift
        columns["tasks"].append(tasks)
        columns["edges"].append(_shifted(part.edges, first, ("source", "target")))
        for name in ("waits", "launched"):
            moved = _shifted(getattr(part, name), first, ("task", "issue", "work"))
            columns[name].append({**moved, "lane": moved["lane"] + len(lanes)})
        lanes += [GraphLane(timeline.rank, lane) for lane in timeline.lanes]
        notes.update(part.notes)
        for name, figure in part.figures.items():
            figures[f"rank {timeline.rank}: {name}"] = figure
        first += len(tasks["kind"])
    tasks = _stacked(columns["tasks"])
    tasks["priority"] = np.arange(first, dtype=np.int32)
    return ExecutionGraph(
        table_with(tasks, TASK_COLUMNS),
        table_with(_stacked(columns["edges"]), EDGE_COLUMNS),
        lanes,
        strings,
        Table({name: column.astype(np.int32) for name, column in _stacked(columns["waits"]).items()}),
        Table({name: column.astype(np.int32) for name, column in _stacked(columns["launched"]).items()}),
        origin,
        job,
        notes,
        figures,
    )


def _names(timeline: Timeline, ids: NDArray[np.integer], strings: StringTable) -> NDArray[np.int32]:
    """Name ids of a timeline as ids of the graph's table."""
    used = np.flatnonzero(np.bincount(ids + 1, minlength=1)[1:])
    new = np.full(len(timeline.strings) + 1, -1, np.int32)
    new[used] = strings.intern_all(timeline.strings.lookup(used))
    return np.asarray(new[ids])


def _shifted(columns: Columns, by: int, names: tuple[str, ...]) -> Columns:
    return {name: column + by if name in names else column for name, column in columns.items()}


def _stacked(parts: list[Columns]) -> Columns:
    if len(parts) == 1:
        return dict(parts[0])
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}


def _coupled(graph: ExecutionGraph, job: Job, parts: list[RankPart], offsets: Mapping[int, int]) -> ExecutionGraph:
    """Let the members of each collective that was found on all ranks of its group wait for the last of them."""
    first = 0
    arrival: dict[int, NDArray[np.int64]] = {}
    transfer: dict[int, NDArray[np.int64]] = {}
    for part in parts:
        for target, ids in ((arrival, part.arrival), (transfer, part.transfer)):
            by_event = np.full(part.timeline.num_events, -1, np.int64)
            by_event[part.collective_event] = ids + first
            target[part.timeline.rank] = by_event
        first += len(part.tasks["kind"])
    tasks = {name: column.copy() for name, column in graph.tasks.items()}
    hubs: list[Columns] = []
    edges: list[Columns] = []
    count = graph.num_tasks
    for group in groups(job, offsets):
        used = group.matched & group.overlaps
        if apart := int((group.matched & ~group.overlaps).sum()):
            graph.notes["collective whose members do not overlap in time"] += apart
        arrivals = np.stack([arrival[rank][row] for rank, row in zip(group.ranks.tolist(), group.event, strict=True)])
        transfers = np.stack([transfer[rank][row] for rank, row in zip(group.ranks.tolist(), group.event, strict=True)])
        used &= (arrivals >= 0).all(axis=0) & (transfers >= 0).all(axis=0)
        if not used.any():
            continue
        hub = count + np.arange(int(used.sum()))
        count += len(hub)
        hubs.append(_set_transfers(tasks, group, used, transfers[:, used]))
        edges.append(_rendezvous_edges(hub, arrivals[:, used], transfers[:, used]))
        graph.notes["coupled collectives"] += len(hub)
    if not hubs:
        return graph
    more = table_with(_stacked(hubs), TASK_COLUMNS)
    extended = {name: np.concatenate((column, more[name])) for name, column in tasks.items()}
    extended["priority"] = np.arange(count, dtype=np.int32)
    all_edges = _stacked([dict(graph.edges), dict(table_with(_stacked(edges), EDGE_COLUMNS))])
    return replace(graph, tasks=Table(extended), edges=Table(by_source(all_edges, count)))


def _set_transfers(tasks: Columns, group: Group, used: NDArray[np.bool_], transfers: NDArray[np.int64]) -> Columns:
    """Give the members their transfer time instead of waiting and transfer; returns the columns of the hubs."""
    ready = group.start_ns[:, used].max(axis=0)
    transfer_ns = group.transfer_ns[used]
    for member, rows in enumerate(transfers):
        tasks["kind"][rows] = TaskKind.COLLECTIVE
        tasks["duration_ns"][rows] = transfer_ns
        end = group.end_ns[member, used]
        tasks["measured_start_ns"][rows] = np.minimum(ready, end)
        tasks["measured_end_ns"][rows] = end
    size = len(ready)
    return {
        "kind": np.full(size, TaskKind.RENDEZVOUS),
        "name": tasks["name"][transfers[0]],
        "measured_start_ns": ready,
        "measured_end_ns": ready,
        "step": tasks["step"][transfers[0]],
        "lane": np.full(size, -1),
        "event": np.full(size, -1),
        "duration_ns": np.zeros(size, np.int64),
    }


def _rendezvous_edges(hub: NDArray[np.int64], arrivals: NDArray[np.int64], transfers: NDArray[np.int64]) -> Columns:
    members, size = arrivals.shape
    hubs = np.tile(hub, members)
    return {
        "source": np.concatenate((arrivals.ravel(), hubs)),
        "target": np.concatenate((hubs, transfers.ravel())),
        "kind": np.full(2 * members * size, EdgeKind.COLLECTIVE),
    }
