"""What-if questions and durations taken from elsewhere, on small traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import foretrace
from foretrace.estimate import validate, what_if_scaled
from foretrace.estimate.counterparts import by_rank, by_step
from foretrace.estimate.reproduction import all_errors, copy_everything, step_errors
from foretrace.estimate.what_if import host_work_at_median, straggler_what_ifs, tasks_matching
from foretrace.link import link
from foretrace.simulate import simulate
from foretrace.trace import Job, TaskKind
from tests.formats.builder import call, kernel, op, small_trace, step, write


@pytest.fixture
def three_ranks(tmp_path: Path) -> Job:
    for rank in range(3):
        write(tmp_path / f"rank{rank}.json", small_trace(rank, 3, late=100.0 * (rank == 2)))
    return foretrace.read(tmp_path)


def test_a_collective_starts_when_its_last_member_arrives(three_ranks: Job) -> None:
    graph = link(three_ranks)
    simulation = simulate(graph)
    assert graph.notes["coupled collectives"] == 2
    arrivals = simulation.start_ns[graph.tasks["kind"] == TaskKind.ARRIVAL].reshape(3, 2)
    transfers = simulation.start_ns[graph.tasks["kind"] == TaskKind.COLLECTIVE].reshape(3, 2)
    assert np.array_equal(transfers, np.broadcast_to(arrivals.max(axis=0), (3, 2)))
    assert (arrivals[2] > arrivals[0]).all()
    # The late rank's host costs the others exactly what it is late.
    quick = host_work_at_median(graph, [2], "", simulation)
    assert quick.before_ns - quick.after_ns >= 100_000


def test_a_rank_without_events_does_not_move_the_beginning(tmp_path: Path) -> None:
    traces = [small_trace(0, 2), {**small_trace(1, 2), "traceEvents": []}]
    for rank, trace in enumerate(traces):
        for event in trace["traceEvents"]:
            event["ts"] += 1.7e15
        write(tmp_path / f"rank{rank}.json", trace)
    assert simulate(link(foretrace.read(tmp_path))).finish_ns < 10_000_000


def test_ranks_without_their_peers_keep_the_whole_collective(three_ranks: Job) -> None:
    job = Job(three_ranks.timelines[:2], three_ranks.groups, 3)
    kinds = link(job).tasks["kind"]
    assert (kinds == TaskKind.COLLECTIVE).sum() == 0
    assert (kinds == TaskKind.COLLECTIVE_ALONE).sum() == 4


def test_scopes_and_patterns(three_ranks: Job) -> None:
    graph = link(three_ranks)
    kernels = tasks_matching(graph, "kernel:")
    gemms = tasks_matching(graph, "kernel:gemm")
    assert gemms.sum() == 6
    assert (kernels & ~gemms).any()
    assert not (tasks_matching(graph, "host:") & kernels).any()
    assert tasks_matching(graph, "collective:").sum() == 6
    assert tasks_matching(graph, "gap:").any()
    assert np.array_equal(tasks_matching(graph, "gemm"), gemms)


def test_scaling_what_limits_the_job_shortens_it(three_ranks: Job) -> None:
    graph = link(three_ranks)
    found = what_if_scaled(graph, {"collective:": 2.0})
    assert found.tasks == 6
    # Only the last transfer stands at the end; the host of the next step does not wait for the first.
    assert found.before_ns - found.after_ns == 100_000
    assert what_if_scaled(graph, {"kernel:gemm": 1.0}).change_pct == 0
    assert not found.is_anomaly


def test_factors_of_several_patterns_multiply(three_ranks: Job) -> None:
    graph = link(three_ranks)
    twice = what_if_scaled(graph, {"kernel:gemm": 2.0, "kernel:sgemm": 3.0, "host:": 2.0})
    duration = graph.tasks["duration_ns"].astype(float)
    duration[tasks_matching(graph, "kernel:gemm")] /= 6
    duration[tasks_matching(graph, "host:")] /= 2
    assert twice.after_ns == simulate(graph, np.rint(duration).astype(np.int64)).finish_ns
    slower = what_if_scaled(graph, {"host:": 0.5}, baseline=simulate(graph))
    assert slower.before_ns == twice.before_ns and slower.after_ns > slower.before_ns and slower.change_pct > 0


def test_what_the_stragglers_cost(three_ranks: Job) -> None:
    graph = link(three_ranks)
    simulation = simulate(graph)
    rows = foretrace.analyze.stragglers(three_ranks).to_pylist()
    caused = {row["rank"]: row["waiting_caused_ns"] for row in rows}
    worst, everyone = straggler_what_ifs(graph, caused, [2], simulation)
    assert worst.what.startswith("rank 2") and everyone.what.startswith("all ranks")
    assert worst.change_pct < 0 and everyone.after_ns <= worst.after_ns
    several = straggler_what_ifs(graph, caused, [1, 2], simulation)
    assert len(several) == 3 and several[1].what.startswith("stragglers (1, 2)")
    alone = link(three_ranks, coupled=False)
    assert straggler_what_ifs(alone, caused, [2], simulate(alone)) == []


def test_copying_everything_reproduces_and_knows_nothing(three_ranks: Job) -> None:
    graph = link(three_ranks)
    assert max(map(abs, all_errors(step_errors(three_ranks, copy_everything(graph).job)))) < 0.01


@pytest.mark.parametrize(
    ("pattern", "factor"), [("kernel:nothing", 2.0), ("kernel:", 0.0), ("kernel:", -1.0), ("(", 2.0)]
)
def test_what_makes_no_sense_is_refused(three_ranks: Job, pattern: str, factor: float) -> None:
    with pytest.raises(ValueError, match=r"fits no task|no speed-up|no regular expression"):
        what_if_scaled(link(three_ranks), {pattern: factor})


def three_steps(tmp_path: Path) -> Job:
    events = []
    for number, (gap, mm) in enumerate([(100, 60), (200, 80), (0, 100)]):
        at = 2000.0 * number
        events += [
            step(number, at, 1900),
            op("aten::add", at + 10, 40),
            op("aten::mm", at + 50 + gap, mm),
            call("cudaLaunchKernel", at + 60 + gap, 5, number + 1),
            kernel("gemm", at + 80 + gap, 300 + 10 * number, number + 1),
        ]
    return foretrace.read(write(tmp_path / "steps.json", {"traceEvents": events}))


def test_durations_of_other_steps(tmp_path: Path) -> None:
    graph = link(three_steps(tmp_path))
    instances = by_step(graph, 0)
    assert instances.work_ns.shape[0] == 3
    duration = instances.durations_from(0, np.array([1, 2]))
    of_gemm = np.flatnonzero(graph.tasks["kind"] == TaskKind.KERNEL)
    assert duration[of_gemm].tolist() == [315_000, 310_000, 320_000]
    # The gap before aten::mm: 200 us in one of the others, none in the other.
    names = np.array(graph.names(np.arange(graph.num_tasks)))
    mm = np.flatnonzero((names == "aten::mm") & (graph.tasks["step"] == 0))[0]
    assert graph.tasks["kind"][mm - 1] == TaskKind.HOST_GAP
    assert duration[mm - 1] == 100_000
    # Where a step lacks the gap, it is added to what follows.
    third = instances.durations_from(2, np.array([0, 1]))
    mm = np.flatnonzero((names == "aten::mm") & (graph.tasks["step"] == 2))[0]
    assert third[mm] == 150_000 + instances.work_ns[:2, instances.site[mm]].mean()


def test_durations_of_other_ranks(three_ranks: Job) -> None:
    graph = link(three_ranks)
    instances = by_rank(graph)
    same = instances.durations_from(0, np.array([1]))
    assert np.array_equal(same, graph.tasks["duration_ns"])  # ranks 0 and 1 are alike
    assert instances.unmatched(0, np.array([1])) == 0


def test_validate_says_why_a_part_is_missing(three_ranks: Job, tmp_path: Path) -> None:
    found = validate(three_ranks)
    assert found["reproduction"]["mean_abs_error_pct"] < 1
    assert found["cross_step"]["edges_only_pct"] is not None
    assert found["leave_one_rank_out"]["mean_abs_error_pct"] is not None
    alone = validate(three_steps(tmp_path))
    assert alone["leave_one_rank_out"]["mean_abs_error_pct"] is None
    assert "two ranks" in alone["leave_one_rank_out"]["reason"]
    assert alone["event_waits"]["contradicted_pct"] is None
    assert alone["event_waits"]["reason"]
