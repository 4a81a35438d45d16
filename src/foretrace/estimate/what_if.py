"""What if named work were faster: change durations, simulate, compare."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.simulate import Simulation, simulate
from foretrace.trace import EdgeKind, ExecutionGraph, TaskKind
from foretrace.trace.graph import DEVICE_KINDS, HOST_KINDS
from foretrace.trace.steps import device_steps

Ints = NDArray[np.int64]
_SCOPES = {
    "kernel": DEVICE_KINDS,
    "collective": (TaskKind.COLLECTIVE, TaskKind.COLLECTIVE_ALONE),
    "host": HOST_KINDS,
    "gap": (TaskKind.HOST_GAP, TaskKind.HANDOFF, TaskKind.START),
}


@dataclass(frozen=True)
class WhatIf:
    """The outcome of a change.

    Attributes:
        what: the change in words.
        tasks: how many tasks it concerns.
        before_ns, after_ns: the job's simulated time.
        steps: of each rank and step ``rank``, ``step``, ``before_ns`` and ``after_ns`` (its device period), where
            they were asked for.
    """

    what: str
    tasks: int
    before_ns: int
    after_ns: int
    steps: tuple[dict[str, int], ...] = ()

    @property
    def change_pct(self) -> float:
        """Change of the time in percent; negative is faster."""
        return 100 * (self.after_ns - self.before_ns) / self.before_ns if self.before_ns else 0.0

    @property
    def is_anomaly(self) -> bool:
        """Faster work that makes the job slower, which only lanes with priorities can show."""
        return self.after_ns > self.before_ns

    def to_dict(self) -> dict[str, Any]:
        """For tables and JSON."""
        return {
            "what": self.what,
            "tasks": self.tasks,
            "before_ns": self.before_ns,
            "after_ns": self.after_ns,
            "gain_ns": self.before_ns - self.after_ns,
            "change_pct": self.change_pct,
            "is_anomaly": self.is_anomaly,
            **({"steps": list(self.steps)} if self.steps else {}),
        }


def what_if_scaled(
    graph: ExecutionGraph, factors: Mapping[str, float], *, baseline: Simulation | None = None
) -> WhatIf:
    """The time of the job and of each step if the named work were faster.

    Args:
        graph: as `link` gives it.
        factors: by pattern how many times faster. A pattern is ``SCOPE:REGEX``, with the scopes ``kernel`` (device
            work), ``collective``, ``host`` (operators and runtime calls) and ``gap`` (host time without events);
            without a scope it applies to names of any kind, without a regular expression to the whole scope.
        baseline: a simulation of ``graph``, where one exists.

    Raises:
        ValueError: if a pattern fits no task, or a factor is not positive.
    """
    duration = graph.tasks["duration_ns"].astype(np.float64)
    touched = np.zeros(graph.num_tasks, np.bool_)
    for pattern, factor in factors.items():
        if not factor > 0:
            raise ValueError(
                f"{pattern!r}: {factor} is no speed-up; give a number above 0, such as 2 for twice as fast"
            )
        mine = tasks_matching(graph, pattern)
        if not mine.any():
            raise ValueError(f"{pattern!r} fits no task; scopes are {', '.join(_SCOPES)}, as in kernel:gemm or gap:")
        duration[mine] /= factor
        touched |= mine
    before = baseline or simulate(graph)
    after = simulate(graph, np.rint(duration).astype(np.int64))
    what = ", ".join(f"{pattern} {factor:g} x faster" for pattern, factor in factors.items())
    return WhatIf(what, int(touched.sum()), before.finish_ns, after.finish_ns, _step_times(before, after))


def _step_times(before: Simulation, after: Simulation) -> tuple[dict[str, int], ...]:
    found: list[dict[str, int]] = []
    for timeline in before.job:
        one, other = device_steps(timeline), device_steps(after.job.rank(timeline.rank))
        times = zip(one.number, one.end_ns - one.start_ns, other.end_ns - other.start_ns, strict=True)
        found += [
            {"rank": timeline.rank, "step": int(step), "before_ns": int(old), "after_ns": int(new)}
            for step, old, new in times
        ]
    return tuple(found)


def tasks_matching(graph: ExecutionGraph, pattern: str) -> NDArray[np.bool_]:
    """Which tasks a pattern names; see `what_if_scaled`."""
    scope, _, expression = pattern.partition(":")
    if scope not in _SCOPES:
        scope, expression = "", pattern
    found = np.isin(graph.tasks["kind"], _SCOPES[scope]) if scope else np.ones(graph.num_tasks, np.bool_)
    if expression:
        try:
            search = re.compile(expression)
        except re.error as error:
            raise ValueError(f"{expression!r} is no regular expression: {error}") from None
        hits = np.array([bool(search.search(text)) for text in graph.strings] + [False], np.bool_)
        found &= hits[graph.tasks["name"]]
    return np.asarray(found)


def halved(graph: ExecutionGraph, tasks: NDArray[np.bool_], what: str, baseline: Simulation) -> WhatIf:
    """The job's time with the given tasks twice as fast."""
    duration = np.where(tasks, graph.tasks["duration_ns"] // 2, graph.tasks["duration_ns"])
    return WhatIf(what, int(tasks.sum()), baseline.finish_ns, simulate(graph, duration).finish_ns)


def improvements(
    graph: ExecutionGraph, on_path: Ints, path_ns: Ints, baseline: Simulation, top: int = 8
) -> list[WhatIf]:
    """What would shorten the job: the names with most time on a critical path halved, and waits on it removed.

    Args:
        graph: the graph of ``baseline``.
        on_path, path_ns: tasks of the path and their time on it.
        baseline: its simulation.
        top: how many names to try.
    """
    names = graph.tasks["name"].astype(np.int64)
    is_gap = np.isin(graph.tasks["kind"], _SCOPES["gap"])
    key = np.where(is_gap, -2 - graph.tasks["kind"], names)
    keys, which = np.unique(key[on_path], return_inverse=True)
    time = np.bincount(which.reshape(-1), weights=path_ns, minlength=len(keys))
    tried = []
    for at in np.argsort(-time, kind="stable")[:top].tolist():
        one = int(keys[at])
        what = TaskKind(-2 - one).label.replace("_", " ") if one < -1 else graph.strings[one] if one >= 0 else "(none)"
        tried.append(halved(graph, key == one, f"halve {what}", baseline))
    edges = graph.edges
    waits = edges["kind"] == EdgeKind.EVENT_WAIT
    on = np.zeros(graph.num_tasks, np.bool_)
    on[on_path] = True
    waits &= on[edges["source"]] & on[edges["target"]]
    if waits.any():
        after = simulate(graph.without_edges(waits)).finish_ns
        tried.append(WhatIf("remove the event waits on the path", int(waits.sum()), baseline.finish_ns, after))
    return sorted(tried, key=lambda one: one.after_ns)


def host_work_at_median(graph: ExecutionGraph, ranks: Sequence[int], what: str, baseline: Simulation) -> WhatIf:
    """The job's time if the host work of some ranks before each collective were the median over all ranks.

    Host work is the time of operators, calls and gaps, without blocked time; it belongs to the first collective that
    the rank launches after it, what follows the last collective to the end.
    """
    interval, host_ns = _host_work(graph)
    duration = graph.tasks["duration_ns"].astype(np.float64)
    median = np.median(host_ns, axis=0)
    for at, rank in enumerate(graph.ranks):
        if rank in ranks:
            mine = (graph.rank == rank) & (interval >= 0)
            factor = median / np.maximum(host_ns[at], 1)
            duration[mine] *= factor[interval[mine]]
    after = simulate(graph, np.rint(duration).astype(np.int64)).finish_ns
    changed = int((np.rint(duration) != graph.tasks["duration_ns"]).sum())
    return WhatIf(what, changed, baseline.finish_ns, after)


def _host_work(graph: ExecutionGraph) -> tuple[Ints, NDArray[np.float64]]:
    """The interval between collectives in which each host task lies, -1 for others; host time by rank and interval."""
    is_host = np.isin(graph.tasks["kind"], HOST_KINDS)
    start = graph.tasks["measured_start_ns"]
    launches = _collective_launches(graph)
    interval = np.full(graph.num_tasks, -1, np.int64)
    count = min((len(times) for times in launches.values()), default=0)
    host_ns = np.zeros((len(graph.ranks), count + 1))
    launching = np.unique(graph.tasks["lane"][graph.launched["issue"]])
    for at, rank in enumerate(graph.ranks):
        mine = np.flatnonzero(is_host & (graph.rank == rank) & np.isin(graph.tasks["lane"], launching))
        interval[mine] = np.searchsorted(launches[rank][:count], start[mine], side="left")
        host_ns[at] = np.bincount(interval[mine], weights=graph.tasks["duration_ns"][mine], minlength=count + 1)
    return interval, host_ns


def _collective_launches(graph: ExecutionGraph) -> dict[int, Ints]:
    """When each rank launched its coupled collectives, ascending."""
    kind = graph.tasks["kind"][graph.launched["work"]]
    issue = graph.launched["issue"][kind == TaskKind.COLLECTIVE]
    found = {}
    for rank in graph.ranks:
        mine = issue[graph.rank[issue] == rank]
        found[rank] = np.sort(graph.tasks["measured_start_ns"][mine])
    return found


def straggler_what_ifs(
    graph: ExecutionGraph, waiting_caused_ns: Mapping[int, int], stragglers: Sequence[int], baseline: Simulation
) -> list[WhatIf]:
    """What the worst rank's, the stragglers' and every rank's host work costs the job.

    Args:
        graph: of a coupled job.
        waiting_caused_ns: by rank, as `analyze.stragglers` tells.
        stragglers: the ranks that count as such.
        baseline: a simulation of ``graph``.
    """
    if len(graph.ranks) < 2 or not (graph.tasks["kind"] == TaskKind.COLLECTIVE).any():
        return []
    worst = max(graph.ranks, key=lambda rank: (waiting_caused_ns.get(rank, 0), -rank))
    cut = "host work before each collective set to the median over ranks"
    cases: list[tuple[Sequence[int], str]] = [([worst], f"rank {worst}: {cut}")]
    if len(stragglers) > 1:
        named = ", ".join(str(rank) for rank in stragglers)
        cases.append((stragglers, f"stragglers ({named}): {cut}"))
    cases.append((graph.ranks, f"all ranks: {cut}"))
    return [host_work_at_median(graph, ranks, what, baseline) for ranks, what in cases]
