"""The same task in another step or on another rank, and durations taken from there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretrace.trace import ExecutionGraph, LaneKind, TaskKind

Ints = NDArray[np.int64]

_GAPS = (TaskKind.HOST_GAP, TaskKind.HANDOFF, TaskKind.UNEXPLAINED, TaskKind.BEFORE_TRACE)


@dataclass(frozen=True)
class Instances:
    """Tasks of a graph by call site and by instance (a step, or a rank).

    The call site of a task is its lane, kind and name, and which one of these it is within its instance. Gaps belong
    to the task that follows them on the lane: an instance may lack a gap that others have.

    Attributes:
        site: number of the call site of each task, -1 for tasks outside of instances; shape ``(num_tasks,)``.
        instance: index of the instance of each task, -1 outside.
        gap: task that is the gap right before each task, -1 for none.
        work_ns, gap_ns: durations by instance and site, NaN where the instance has no such task;
            shape ``(instances, sites)``.
    """

    graph: ExecutionGraph
    site: Ints
    instance: Ints
    gap: Ints
    work_ns: NDArray[np.float64]
    gap_ns: NDArray[np.float64]

    def durations_from(self, instance: int, others: NDArray[np.integer]) -> Ints:
        """The graph's durations, with those of one instance replaced by the mean over other instances.

        Work that no other instance has keeps its duration (and is counted by `unmatched`).

        Returns:
            int64 ns, shape ``(num_tasks,)``.
        """
        duration = self.graph.tasks["duration_ns"].copy()
        work, gap = _mean(self.work_ns[others]), _mean(self.gap_ns[others])
        mine = np.flatnonzero((self.instance == instance) & (self.site >= 0))
        mine = mine[~np.isnan(work[self.site[mine]])]
        site, before = self.site[mine], self.gap[mine]
        has_gap = before >= 0
        expected = np.nan_to_num(gap[site])
        duration[before[has_gap]] = np.rint(expected[has_gap])
        # A gap that others have and this instance lacks is added to the task itself.
        duration[mine] = np.rint(work[site] + np.where(has_gap, 0, expected))
        return duration

    def unmatched(self, instance: int, others: NDArray[np.integer]) -> int:
        """Tasks of an instance that no other instance has."""
        mine = self.site[(self.instance == instance) & (self.site >= 0)]
        return int(np.isnan(self.work_ns[others][:, mine]).all(axis=0).sum())


def _mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    count = (~np.isnan(values)).sum(axis=0)
    total = np.nan_to_num(values).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def by_step(graph: ExecutionGraph, rank: int, steps: int | None = None) -> Instances:
    """The steps of one rank as instances; ``steps`` is their number, where some may have no task."""
    step = np.where(graph.rank == rank, graph.tasks["step"], -1).astype(np.int64)
    count = int(graph.tasks["step"].max(initial=-1)) + 1 if steps is None else steps
    return _instances(graph, step, graph.tasks["lane"].astype(np.int64), count)


def by_rank(graph: ExecutionGraph) -> Instances:
    """The ranks of a job as instances, in the order of ``graph.ranks``.

    Lanes correspond by stream number (by order where the numbers differ), threads by the number of their tasks.
    """
    ranks = graph.ranks
    place = np.searchsorted(ranks, graph.rank)
    instance = np.where(graph.rank >= 0, place, -1).astype(np.int64)
    role = np.append(_roles(graph), -1)
    return _instances(graph, instance, role[graph.tasks["lane"]], len(ranks))


def _roles(graph: ExecutionGraph) -> Ints:
    """A number for each lane that is the same for corresponding lanes of all ranks."""
    tasks = np.bincount(graph.tasks["lane"][graph.tasks["lane"] >= 0], minlength=len(graph.lanes))
    role = np.zeros(len(graph.lanes), np.int64)
    for rank in graph.ranks:
        lanes = [at for at, lane in enumerate(graph.lanes) if lane.rank == rank and tasks[at]]
        streams = sorted(
            (at for at in lanes if graph.lanes[at].lane.kind is LaneKind.DEVICE_STREAM),
            key=lambda at: graph.lanes[at].lane.stream,
        )
        threads = sorted((at for at in lanes if at not in streams), key=lambda at: -tasks[at])
        role[streams] = np.arange(len(streams))
        role[threads] = 10_000 + np.arange(len(threads))
    return role


def _instances(graph: ExecutionGraph, instance: Ints, lane: Ints, count: int) -> Instances:
    kind, name = graph.tasks["kind"].astype(np.int64), graph.tasks["name"].astype(np.int64)
    is_gap = np.isin(kind, _GAPS)
    usable = (instance >= 0) & (graph.tasks["lane"] >= 0) & ~is_gap
    gap = _gap_before(graph, is_gap)
    order = np.lexsort((graph.tasks["priority"], graph.tasks["measured_start_ns"], name, kind, lane, instance))
    order = order[usable[order]]
    keys = np.stack((instance, lane, kind, name))[:, order]
    begins = np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0))[: len(order)]
    first = np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0)) if len(order) else order
    ordinal = np.arange(len(order)) - first
    _, number = np.unique(np.vstack((keys[1:], ordinal)), axis=1, return_inverse=True)
    site = np.full(graph.num_tasks, -1, np.int64)
    site[order] = number.reshape(-1)
    shape = (count, int(site.max(initial=-1)) + 1)
    work_ns, gap_ns = np.full(shape, np.nan), np.full(shape, np.nan)
    duration = graph.tasks["duration_ns"]
    work_ns[instance[order], site[order]] = duration[order]
    before = gap[order]
    gap_ns[instance[order], site[order]] = np.where(before >= 0, duration[before], 0)
    return Instances(graph, site, instance, gap, work_ns, gap_ns)


def _gap_before(graph: ExecutionGraph, is_gap: NDArray[np.bool_]) -> Ints:
    """The gap that an ``ORDER`` edge leads from to each task, -1 for none."""
    source, target = graph.edges["source"], graph.edges["target"]
    same = (graph.tasks["lane"][source] == graph.tasks["lane"][target]) & is_gap[source] & ~is_gap[target]
    gap = np.full(graph.num_tasks, -1, np.int64)
    gap[target[same]] = source[same]
    return gap
