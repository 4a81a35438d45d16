"""`simulate`: run an execution graph, and say who waits for whom where it cannot run to its end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.simulate.retime import simulated_job
from foretrace.trace import EdgeKind, ExecutionGraph, GraphError, Job, LanePolicy, Table
from foretrace.trace.graph import offsets

_MAX_CHAIN = 12  # tasks of a cycle that a message shows


@dataclass(frozen=True)
class Simulation:
    """When each task of a graph ran.

    Attributes:
        graph: what was simulated.
        duration_ns: the durations used, shape ``(num_tasks,)``.
        start_ns: since the simulation's beginning, shape ``(num_tasks,)``.
        wait_source: for each row of ``graph.waits`` the task that it waited for, -1 for none.
    """

    graph: ExecutionGraph
    duration_ns: NDArray[np.int64]
    start_ns: NDArray[np.int64]
    wait_source: NDArray[np.int32]

    @cached_property
    def end_ns(self) -> NDArray[np.int64]:
        """End of each task since the simulation's beginning, shape ``(num_tasks,)``."""
        return np.asarray(self.start_ns + self.duration_ns)

    @property
    def finish_ns(self) -> int:
        """End of the last task."""
        return int(self.end_ns.max(initial=0))

    @cached_property
    def job(self) -> Job:
        """The simulated timelines: the measured events at simulated times, or one event a task without such."""
        return simulated_job(self.graph, self.start_ns, self.end_ns)

    @cached_property
    def resolved(self) -> ExecutionGraph:
        """The graph with what its blocking calls waited for as edges, and no waits left to resolve."""
        found, waits = self.wait_source >= 0, self.graph.waits
        task = np.concatenate((waits["task"][found], waits["task"]))
        return resolve(self.graph, task, np.concatenate((self.wait_source[found], waits["issue"])))


def resolve(graph: ExecutionGraph, task: NDArray[np.int32], source: NDArray[np.int32]) -> ExecutionGraph:
    """A copy of the graph in which ``task`` waits for ``source`` (rows, one pair each) instead of its open waits."""
    count = len(task)
    more: dict[str, NDArray[Any]] = {
        "source": source,
        "target": task,
        "lag_ns": np.zeros(count, np.int64),
        "kind": np.full(count, EdgeKind.SYNC, np.int8),
        "confidence": np.full(count, 1, np.float32),
    }
    edges = Table({name: np.concatenate((column, more[name])) for name, column in graph.edges.items()})
    return replace(graph, edges=edges, waits=Table(dict.fromkeys(graph.waits, np.empty(0, np.int32))))


def simulate(graph: ExecutionGraph, duration_ns: NDArray[np.int64] | None = None) -> Simulation:
    """Start every task as early as its edges, waits and lane allow.

    The rules are those of Algorithm 1 in Lumos (arXiv 2504.09307): a task starts when all that it depends on has
    ended; what a blocking call depends on is what has been launched when it starts. Deterministic, and independent
    of the order of tasks and edges as long as no two tasks of a lane with priorities have the same one.

    Args:
        graph: what to run.
        duration_ns: durations to use instead of the graph's, shape ``(num_tasks,)``.

    Raises:
        GraphError: if tasks wait for each other; the message shows the chain.
    """
    from foretrace.simulate import engine

    duration = graph.tasks["duration_ns"] if duration_ns is None else np.ascontiguousarray(duration_ns, np.int64)
    if duration.shape != (graph.num_tasks,) or (duration < 0).any():
        raise GraphError(f"durations must be {graph.num_tasks} numbers of at least 0")
    edges, waits, count = graph.edges, graph.waits, graph.num_tasks
    missing = np.bincount(edges["target"], minlength=count).astype(np.int32)
    first_edge = offsets(edges["source"], count)
    has_priorities = np.array([lane.policy is LanePolicy.PRIORITY for lane in graph.lanes], np.bool_)
    if not waits.num_rows and not has_priorities.any():
        start, done = engine.run_by_dependencies(first_edge, edges["target"], edges["lag_ns"], duration, missing)
        source = np.empty(0, np.int32)
    else:
        missing += np.bincount(waits["task"], minlength=count).astype(np.int32)
        launched = graph.launched.take(np.argsort(graph.launched["issue"], kind="stable"))
        order = np.argsort(waits["issue"], kind="stable")
        start, in_order, done = engine.run_by_time(
            first_edge,
            edges["target"],
            edges["lag_ns"],
            duration,
            missing,
            graph.tasks["lane"],
            has_priorities,
            graph.tasks["priority"],
            offsets(launched["issue"], count),
            launched["work"],
            launched["lane"],
            launched["position"],
            offsets(waits["issue"], count),
            waits["task"][order],
            waits["lane"][order],
        )
        source = np.empty(len(order), np.int32)
        source[order] = in_order
    if done < count:
        raise GraphError(_deadlock(graph, start, source))
    return Simulation(graph, duration, start, source)


def _deadlock(graph: ExecutionGraph, start: NDArray[np.int64], wait_source: NDArray[np.int32]) -> str:
    """The chain of tasks that wait for each other: from any stuck task back along stuck ones until one repeats."""
    stuck = start < 0
    source, target = graph.edges["source"], graph.edges["target"]
    waits = graph.waits
    if waits.num_rows:
        open_waits = wait_source >= 0
        source = np.concatenate((source, waits["issue"], wait_source[open_waits]))
        target = np.concatenate((target, waits["task"], waits["task"][open_waits]))
    both = stuck[source] & stuck[target]
    cause = np.full(graph.num_tasks, -1, np.int64)
    cause[target[both]] = source[both]
    seen: dict[int, int] = {}
    chain: list[int] = []
    task = int(np.flatnonzero(stuck & (cause >= 0))[0])
    while task not in seen:
        seen[task] = len(chain)
        chain.append(task)
        task = int(cause[task])
    cycle = chain[seen[task] :][::-1]
    shown = " -> ".join(graph.describe(one) for one in cycle[:_MAX_CHAIN])
    more = f" -> ... {len(cycle) - _MAX_CHAIN} more" if len(cycle) > _MAX_CHAIN else ""
    ranks = sorted({int(graph.rank[one]) for one in cycle} - {-1})
    return (
        f"deadlock: {int(stuck.sum())} of {graph.num_tasks} tasks can never start. "
        f"{len(cycle)} of them (ranks {ranks}) wait for each other: {shown}{more} -> (back to the first)"
    )
