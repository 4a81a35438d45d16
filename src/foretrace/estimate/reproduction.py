"""A measured run simulated against itself: errors per step and part, and naive baselines beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.analyze import breakdown_by_step, critical_path
from foretrace.analyze.critical_path import CriticalPath
from foretrace.simulate import Simulation, simulate
from foretrace.trace import EdgeKind, ExecutionGraph, Job, TaskKind, Timeline
from foretrace.trace.steps import Steps, device_steps

Ints = NDArray[np.int64]

PARTS = ("exposed_compute_ns", "overlapped_ns", "exposed_communication_ns", "memory_ns", "idle_ns")


def step_errors(measured: Job, simulated: Job) -> dict[int, list[dict[str, Any]]]:
    """By rank, each step's measured and simulated period and the error in percent."""
    found = {}
    for timeline in measured:
        before, after = device_steps(timeline), device_steps(simulated.rank(timeline.rank))
        rows = zip(before.number.tolist(), periods(before).tolist(), periods(after).tolist(), strict=True)
        found[timeline.rank] = [
            {"step": step, "measured_ns": one, "simulated_ns": other, "error_pct": error_pct(other, one)}
            for step, one, other in rows
        ]
    return found


def periods(steps: Steps) -> Ints:
    """Lengths of the steps."""
    return np.asarray(steps.end_ns - steps.start_ns)


def error_pct(value: float, truth: float) -> float:
    """How far a value is above the truth, in percent of it; 0 where both are 0."""
    return 100.0 * (value - truth) / truth if truth else (0.0 if value == truth else float("inf"))


def mean_abs(errors: list[float]) -> float | None:
    """Mean absolute value, None of nothing."""
    return float(np.mean(np.abs(errors))) if errors else None


def all_errors(by_rank: dict[int, list[dict[str, Any]]]) -> list[float]:
    """The errors of all steps of all ranks."""
    return [step["error_pct"] for steps in by_rank.values() for step in steps]


def step_path(simulation: Simulation, rank: int, step: int | None = None) -> CriticalPath:
    """The critical path of one simulated step of a rank, or of all its steps (``step`` None), across ranks.

    It ends with the work that ends the step and covers the step's period exactly.
    """
    steps = device_steps(simulation.job.rank(rank))
    if not len(steps.number) or not (simulation.graph.rank == rank).any():
        raise ValueError(f"rank {rank} has no work to follow")
    first, last = (0, len(steps.number) - 1) if step is None else (step, step)
    origin = simulation.graph.origin_ns
    window = (int(steps.start_ns[first]) - origin, int(steps.end_ns[last]) - origin)
    return critical_path(
        simulation.resolved,
        simulation.start_ns,
        simulation.end_ns,
        last=last_task(simulation, rank, window[1]),
        window=window,
    )


def last_task(simulation: Simulation, rank: int, end_ns: int) -> int:
    """The task of a rank that ends at a time: device work where there is any."""
    graph, on_rank = simulation.graph, simulation.graph.rank == rank
    ends = np.flatnonzero(on_rank & (simulation.end_ns == end_ns))
    on_device = ends[graph.on_device[ends]]
    ends = on_device if len(on_device) else ends
    if not len(ends):  # a step that ends where no task does (an annotation's end): the last task before
        before = np.flatnonzero(on_rank & (simulation.end_ns <= end_ns))
        ends = before[simulation.end_ns[before] == simulation.end_ns[before].max(initial=0)]
    return int(ends[np.argmax(simulation.start_ns[ends])])


def reproduction(job: Job, simulation: Simulation) -> dict[str, Any]:
    """Summary of a reproduction: ``ranks`` with their steps, and ``mean_abs_error_pct`` over all steps of all ranks."""
    errors = step_errors(job, simulation.job)
    ranks = []
    for rank, steps in errors.items():
        measured, simulated = (sum(step[name] for step in steps) for name in ("measured_ns", "simulated_ns"))
        mine = simulation.graph.rank == rank
        path = step_path(simulation, rank) if steps and mine.any() else None
        ranks.append(
            {
                "rank": rank,
                "finish_ns": int(simulation.end_ns[mine].max(initial=0)),
                "measured_ns": measured,
                "simulated_ns": simulated,
                "error_pct": error_pct(simulated, measured),
                "copied_share": path.copied_share if path else None,
                "unexplained_ns": _unexplained(simulation.graph, job.rank(rank)),
                "steps": steps,
            }
        )
    return {"ranks": ranks, "mean_abs_error_pct": mean_abs(all_errors(errors))}


def _unexplained(graph: ExecutionGraph, timeline: Timeline) -> int:
    """Delays of device work within the measured steps that no cause was found for, on the path or not."""
    steps, tasks = device_steps(timeline), graph.tasks
    if not len(steps.number):
        return 0
    mine = (graph.rank == timeline.rank) & (tasks["kind"] == TaskKind.UNEXPLAINED)
    start = np.maximum(tasks["measured_start_ns"][mine], steps.start_ns[0])
    end = np.minimum(tasks["measured_end_ns"][mine], steps.end_ns[-1])
    return int(np.maximum(end - start, 0).sum())


def part_errors(measured: Job, simulated: Job) -> dict[str, Any]:
    """Errors of each part of the breakdown, in percent of the step and as total over all steps and ranks."""
    before, after = breakdown_by_step(measured).to_pylist(), breakdown_by_step(simulated).to_pylist()
    span = sum(row["span_ns"] for row in before)
    parts = {}
    for part in PARTS:
        one, other = (sum(row[part] for row in rows) for rows in (before, after))
        pairs = zip(before, after, strict=True)
        off = [100 * (b[part] - a[part]) / a["span_ns"] for a, b in pairs if a["span_ns"]]
        parts[part.removesuffix("_ns")] = {
            "measured_ns": one,
            "simulated_ns": other,
            "error_pct_of_step": 100 * (other - one) / span if span else 0.0,
            "mean_abs_pct_of_step": mean_abs(off),
        }
    return parts


def baselines(job: Job, graph: ExecutionGraph, uncoupled: ExecutionGraph | None) -> dict[str, Any]:
    """Mean absolute error over steps of what one would do without a model, and of a model with a part left out."""
    between = np.isin(graph.edges["kind"], (EdgeKind.EVENT_WAIT, EdgeKind.OCCUPANCY))
    no_waits = simulate(graph.without_edges(between))
    unexplained = graph.tasks["kind"] == TaskKind.UNEXPLAINED
    no_delays = simulate(graph, np.where(unexplained, 0, graph.tasks["duration_ns"]))
    found: dict[str, Any] = {
        "sum_of_kernels": _by_timeline(job, _sum_of_kernels),
        "longest_stream": _by_timeline(job, _longest_stream),
        "no_inter_stream_edges": mean_abs(all_errors(step_errors(job, no_waits.job))),
        "without_unexplained_delays": mean_abs(all_errors(step_errors(job, no_delays.job))),
        "copy_everything": mean_abs(all_errors(step_errors(job, copy_everything(graph).job))),
        "single_rank": None,
    }
    if uncoupled is None:
        found["single_rank_reason"] = "one rank only: nothing to couple"
    else:
        found["single_rank"] = mean_abs(all_errors(step_errors(job, simulate(uncoupled).job)))
    return found


def _by_timeline(job: Job, period: Any) -> float | None:
    errors = []
    for timeline in job:
        steps = device_steps(timeline)
        if not len(timeline.device_rows):
            return None
        for at, truth in enumerate(periods(steps).tolist()):
            errors.append(error_pct(period(timeline, steps, at), truth))
    return mean_abs(errors)


def _within(timeline: Timeline, steps: Steps, at: int) -> Ints:
    """Device work that ends in a step's period."""
    rows = timeline.device_rows
    end = timeline.end_ns[rows]
    return np.asarray(rows[(end > steps.start_ns[at]) & (end <= steps.end_ns[at])], np.int64)


def _sum_of_kernels(timeline: Timeline, steps: Steps, at: int) -> int:
    return int(timeline.duration_ns[_within(timeline, steps, at)].sum())


def _longest_stream(timeline: Timeline, steps: Steps, at: int) -> int:
    rows = _within(timeline, steps, at)
    return int(np.bincount(timeline.events["lane"][rows], weights=timeline.duration_ns[rows]).max(initial=0))


def copy_everything(graph: ExecutionGraph) -> Simulation:
    """The strawman: no edge between streams, and every start's distance to its causes copied as a lag.

    It reproduces any run exactly and knows nothing: an error near 0 proves no model right.
    """
    keep = np.isin(graph.edges["kind"], (EdgeKind.ORDER, EdgeKind.LAUNCH))
    bare = graph.without_edges(~keep)
    bare.waits = bare.waits.take(np.zeros(bare.waits.num_rows, np.bool_))
    tasks = bare.tasks
    start, end = tasks["measured_start_ns"] - graph.origin_ns, tasks["measured_end_ns"] - graph.origin_ns
    source, target = bare.edges["source"], bare.edges["target"]
    lag = np.maximum(start[target] - end[source], 0)  # each start copied over the one edge that is kept for it
    first = np.full(graph.num_tasks, -1, np.int64)
    order = np.argsort(end[source], kind="stable")
    first[target[order]] = order  # the latest cause
    chosen = np.zeros(len(source), np.bool_)
    chosen[first[first >= 0]] = True
    bare = bare.with_columns(
        tasks={"duration_ns": np.where(first < 0, np.maximum(end, 0), np.maximum(end - start, 0))},
        edges={"lag_ns": np.where(chosen, lag, 0)},
    )
    return simulate(bare.without_edges(~chosen))
