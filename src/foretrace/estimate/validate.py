"""`validate`: what an honest user would do before believing a prediction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.estimate.counterparts import Instances, by_rank, by_step
from foretrace.estimate.reproduction import (
    baselines,
    error_pct,
    mean_abs,
    part_errors,
    periods,
    reproduction,
    step_errors,
)
from foretrace.link import link
from foretrace.link.waits_check import held_out, recorded_edges
from foretrace.simulate import simulate
from foretrace.trace import EdgeKind, ExecutionGraph, Job, Timeline
from foretrace.trace.steps import device_steps

Progress = Callable[[str], None]
_RESAMPLES = 200


def validate(job: Job, *, progress: Progress | None = None) -> dict[str, Any]:
    """Everything that tells how far a simulation of this job can be trusted.

    Keys: ``reproduction`` (errors by rank, step and part, copied share), ``baselines``, ``cross_step`` (edges of the
    other steps with this step's durations; durations from the others, too; the mean of the others beside it),
    ``leave_one_rank_out`` and ``event_waits``. What does not apply is None with a ``reason``.

    Args:
        job: what to validate.
        progress: called with a line before each part.
    """
    say = progress or (lambda line: None)
    say("reproduction")
    graph = link(job)
    simulation = simulate(graph)
    document: dict[str, Any] = {"reproduction": reproduction(job, simulation)}
    document["reproduction"]["parts"] = part_errors(job, simulation.job)
    say("baselines")
    uncoupled = link(job, coupled=False) if len(job) > 1 else None
    document["baselines"] = baselines(job, graph, uncoupled)
    document["cross_step"] = _cross_step(job, say)
    document["leave_one_rank_out"] = _leave_one_rank_out(job, graph, say)
    document["event_waits"] = _event_waits(job, graph, say)
    return document


def _cross_step(job: Job, say: Progress) -> dict[str, Any]:
    """Each rank by itself: predict each step from the others."""
    rows: list[dict[str, Any]] = []
    for timeline in job:
        if len(device_steps(timeline).number) > 1:
            rows += _cross_steps_of(timeline, say)
    if not rows:
        nothing = dict.fromkeys(("edges_only_pct", "full_pct", "mean_of_others_pct"))
        return {**nothing, "reason": "needs at least two steps on a rank"}
    return {
        **{
            name: mean_abs([row[name] for row in rows]) for name in ("edges_only_pct", "full_pct", "mean_of_others_pct")
        },
        "interval_covers_pct": 100 * float(np.mean([row["is_covered"] for row in rows])),
        "steps": rows,
    }


def _cross_steps_of(timeline: Timeline, say: Progress) -> list[dict[str, Any]]:
    measured = device_steps(timeline)
    truth = periods(measured)
    rows = []
    for step in range(len(truth)):
        say(f"rank {timeline.rank}: step {int(measured.number[step])} from the others")
        graph = link(timeline, leave_out=step)
        instances = by_step(graph, timeline.rank, len(truth))
        others = np.delete(np.arange(len(truth)), step)
        edges_only = _period(graph, None, timeline, step)
        full = _period(graph, instances.durations_from(step, others), timeline, step)
        low, high = _interval(instances, timeline, step, others)
        rows.append(
            {
                "rank": timeline.rank,
                "step": int(measured.number[step]),
                "measured_ns": int(truth[step]),
                "edges_only_pct": error_pct(edges_only, truth[step]),
                "full_pct": error_pct(full, truth[step]),
                "mean_of_others_pct": error_pct(float(truth[others].mean()), truth[step]),
                "full_ns": full,
                "interval_ns": [low, high],
                "is_covered": bool(low <= truth[step] <= high),
                "tasks_without_counterpart": instances.unmatched(step, others),
            }
        )
    return rows


def _period(graph: ExecutionGraph, duration: NDArray[np.int64] | None, timeline: Timeline, step: int) -> int:
    return int(periods(device_steps(simulate(graph, duration).job.rank(timeline.rank)))[step])


def _interval(instances: Instances, timeline: Timeline, step: int, others: NDArray[np.int64]) -> tuple[int, int]:
    """95 % of what single steps may give, by resampling whole steps: the gaps of one step belong together."""
    single = [
        _period(instances.graph, instances.durations_from(step, np.array([one])), timeline, step)
        for one in others.tolist()
    ]
    generator = np.random.default_rng(0)
    drawn = generator.choice(single, (_RESAMPLES, len(single)))
    spread = np.std(single, ddof=1) if len(single) > 1 else 0.0
    # A new step differs from the mean by its own spread, too, which a handful of steps tells only roughly.
    values = drawn.mean(axis=1) + generator.standard_t(max(len(single) - 1, 1), _RESAMPLES) * spread
    low, high = np.percentile(values, [2.5, 97.5])
    return int(low), int(high)


def _leave_one_rank_out(job: Job, graph: ExecutionGraph, say: Progress) -> dict[str, Any]:
    """Each rank with the mean durations of the others, coupled with them."""
    if len(job) < 2:
        return {"mean_abs_error_pct": None, "ranks": None, "reason": "needs at least two ranks"}
    if not (graph.edges["kind"] == EdgeKind.COLLECTIVE).any():
        return {
            "mean_abs_error_pct": None,
            "ranks": None,
            "reason": "no collective was found on all ranks of its group",
        }
    instances = by_rank(graph)
    rows = []
    for at, rank in enumerate(graph.ranks):
        say(f"rank {rank} from the others")
        others = np.delete(np.arange(len(graph.ranks)), at)
        simulation = simulate(graph, instances.durations_from(at, others))
        steps = step_errors(job, simulation.job)[rank]
        rows.append(
            {
                "rank": rank,
                "error_pct": mean_abs([step["error_pct"] for step in steps]),
                "mean_of_others_pct": _mean_of_other_ranks(job, rank),
                "tasks_without_counterpart": instances.unmatched(at, others),
            }
        )
    return {
        "mean_abs_error_pct": mean_abs([row["error_pct"] for row in rows if row["error_pct"] is not None]),
        "ranks": rows,
    }


def _mean_of_other_ranks(job: Job, rank: int) -> float | None:
    own = periods(device_steps(job.rank(rank)))
    rest = [periods(device_steps(timeline)) for timeline in job if timeline.rank != rank]
    count = min(len(own), *(len(one) for one in rest))
    return mean_abs([error_pct(float(np.mean([one[at] for one in rest])), own[at]) for at in range(count)])


def _event_waits(job: Job, graph: ExecutionGraph, say: Progress) -> dict[str, Any]:
    """Inferred waits: how many, how many a step contradicts that had no say, and recorded ones as truth."""
    say("event waits")
    waits = graph.edges["kind"] == EdgeKind.EVENT_WAIT
    recorded = waits & (graph.edges["confidence"] >= 1)
    against = total = 0
    for timeline in job:
        one, other = held_out(timeline)
        against, total = against + one, total + other
    truth = [edge for timeline in job for edge in recorded_edges(timeline)]
    result: dict[str, Any] = {
        "recorded": int(recorded.sum()),
        "inferred": int((waits & ~recorded).sum()),
        "checked_in_held_out_steps": total,
        "contradicted": against,
        "contradicted_pct": 100 * against / total if total else None,
        "recorded_edges": truth,
        "recall_pct_of_recorded": 100 * sum(edge["found"] for edge in truth) / len(truth) if truth else None,
    }
    if not total:
        result["reason"] = "needs at least two steps with waits between streams"
    return result
