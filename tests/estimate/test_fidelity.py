"""Simulations of recorded jobs: how true they are, and what copying the measurement could not fake."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

import foretrace
from foretrace.estimate import validate
from foretrace.estimate.reproduction import all_errors, copy_everything, periods, reproduction, step_errors, step_path
from foretrace.estimate.what_if import straggler_what_ifs
from foretrace.link import link
from foretrace.link.waits_check import held_out
from foretrace.simulate import Simulation, simulate
from foretrace.trace import ExecutionGraph, Job
from foretrace.trace.graph import HOST_KINDS
from foretrace.trace.steps import device_steps

MULTI_STEP = (
    "train-a100-8gpu-6steps",
    "train-v100-2gpu-6steps",
    "train-v100-ns-timestamps",
    "train-a100-2gpu-nccl-metadata",
    "resnet50-v100-2021-categories",
)
MEGATRON = "megatron-tp8-a100/kineto"
TRACES = (*MULTI_STEP, MEGATRON)


@functools.cache
def linked(folder: Path) -> tuple[Job, ExecutionGraph, Simulation]:
    job = foretrace.read(folder)
    graph = link(job)
    return job, graph, simulate(graph)


@functools.cache
def validated(folder: Path) -> dict:
    return validate(linked(folder)[0])


@pytest.mark.parametrize("name", TRACES)
def test_reproduction(shared: Path, name: str) -> None:
    job, _, simulation = linked(shared / "traces" / name)
    found = reproduction(job, simulation)
    assert found["mean_abs_error_pct"] <= 1.0
    for rank in found["ranks"]:
        assert all(abs(step["error_pct"]) <= 5 for step in rank["steps"])
        assert abs(rank["error_pct"]) <= 2 or name != MEGATRON
        assert rank["unexplained_ns"] <= 0.01 * rank["measured_ns"]
        assert 0 <= rank["copied_share"] <= 1


@pytest.mark.parametrize("name", TRACES)
def test_everything_scales(shared: Path, name: str) -> None:
    _, graph, simulation = linked(shared / "traces" / name)
    for factor in (2, 3):
        scaled = graph.with_columns(
            tasks={"duration_ns": factor * graph.tasks["duration_ns"]}, edges={"lag_ns": factor * graph.edges["lag_ns"]}
        )
        again = simulate(scaled)
        assert np.array_equal(again.start_ns, factor * simulation.start_ns)
        for before, after in zip(simulation.job, again.job, strict=True):
            assert np.array_equal(periods(device_steps(after)), factor * periods(device_steps(before)))


def longest_path(graph: ExecutionGraph, duration: np.ndarray) -> np.ndarray:
    """Ends of all tasks, by plain recursion over sources, without the engine."""
    sources: list[list[tuple[int, int]]] = [[] for _ in range(graph.num_tasks)]
    columns = (graph.edges[name].tolist() for name in ("source", "target", "lag_ns"))
    for source, target, lag in zip(*columns, strict=True):
        sources[target].append((source, lag))
    end: list[int] = [-1] * graph.num_tasks
    length = duration.tolist()
    for first in range(graph.num_tasks):
        stack = [first]
        while stack:
            task = stack[-1]
            missing = [source for source, _ in sources[task] if end[source] < 0]
            if missing:
                stack += missing
                continue
            if end[task] < 0:
                end[task] = max((end[source] + lag for source, lag in sources[task]), default=0) + length[task]
            stack.pop()
    return np.array(end)


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("side", ["host", "device"])
def test_one_side_for_free_leaves_the_longest_path_of_the_other(shared: Path, name: str, side: str) -> None:
    _, graph, simulation = linked(shared / "traces" / name)
    is_host = np.isin(graph.tasks["kind"], HOST_KINDS)
    duration = np.where(is_host == (side == "host"), 0, graph.tasks["duration_ns"])
    free = simulate(graph, duration)
    assert np.array_equal(free.end_ns, longest_path(free.resolved, duration))
    assert free.finish_ns < simulation.finish_ns
    if name == MEGATRON and side == "host":  # the hosts are what limits this job
        assert free.finish_ns < 0.5 * simulation.finish_ns


@pytest.mark.parametrize("name", TRACES)
def test_faster_tasks_never_make_it_longer(shared: Path, name: str) -> None:
    _, graph, simulation = linked(shared / "traces" / name)
    generator = np.random.default_rng(0)
    for share in (0.01, 0.3, 1.0):
        chosen = generator.random(graph.num_tasks) < share
        duration = np.where(chosen, graph.tasks["duration_ns"] // 2, graph.tasks["duration_ns"])
        assert simulate(graph, duration).finish_ns <= simulation.finish_ns


@pytest.mark.parametrize("name", TRACES)
def test_the_order_of_tasks_means_nothing(shared: Path, name: str) -> None:
    _, graph, simulation = linked(shared / "traces" / name)
    order = np.random.default_rng(1).permutation(graph.num_tasks)
    assert np.array_equal(simulate(graph.permuted(order)).start_ns, simulation.start_ns[order])


@pytest.mark.parametrize("name", TRACES)
def test_the_critical_path_of_every_step_is_the_step(shared: Path, name: str) -> None:
    job, _, simulation = linked(shared / "traces" / name)
    for rank in job.ranks:
        steps = device_steps(simulation.job.rank(rank))
        for at in range(len(steps.number)):
            path = step_path(simulation, rank, at)
            assert path.length_ns == steps.end_ns[at] - steps.start_ns[at]
            assert sum(path.composition("kind").to_pydict()["time_ns"]) == path.length_ns


@pytest.mark.parametrize("name", MULTI_STEP)
def test_a_step_from_the_others(shared: Path, name: str) -> None:
    cross = validated(shared / "traces" / name)["cross_step"]
    assert all(abs(step["edges_only_pct"]) <= 5 for step in cross["steps"])
    assert len(cross["steps"]) > 1


def test_steps_from_the_others_on_average(shared: Path) -> None:
    found = [validated(shared / "traces" / name)["cross_step"] for name in MULTI_STEP]
    assert np.mean([cross["edges_only_pct"] for cross in found]) <= 2
    assert np.mean([cross["full_pct"] for cross in found]) <= 5


@pytest.mark.parametrize("name", MULTI_STEP)
def test_held_out_steps_seldom_contradict_a_wait(shared: Path, name: str) -> None:
    for timeline in linked(shared / "traces" / name)[0]:
        against, checked = held_out(timeline)
        assert against <= 0.05 * checked


def test_baselines_tell_a_model_from_none(shared: Path) -> None:
    found = validated(shared / "traces" / "train-a100-8gpu-6steps")["baselines"]
    assert found["copy_everything"] < 0.01  # right, and worth nothing
    assert min(found["no_inter_stream_edges"], found["sum_of_kernels"], found["longest_stream"]) > 5


@pytest.mark.parametrize("name", TRACES)
def test_copying_reproduces_everything(shared: Path, name: str) -> None:
    job, graph, _ = linked(shared / "traces" / name)
    errors = all_errors(step_errors(job, copy_everything(graph).job))
    assert max(map(abs, errors)) < 0.05


def test_a_rank_from_the_others(shared: Path) -> None:
    found = validated(shared / "traces" / MEGATRON)["leave_one_rank_out"]
    assert found["mean_abs_error_pct"] <= 3
    assert [row["rank"] for row in found["ranks"]] == list(range(8))


def test_what_the_stragglers_cost(shared: Path) -> None:
    job, graph, simulation = linked(shared / "traces" / MEGATRON)
    rows = foretrace.analyze.stragglers(job).to_pylist()
    caused = {row["rank"]: row["waiting_caused_ns"] for row in rows}
    named = sorted(row["rank"] for row in rows if row["is_straggler"])
    changes = [one.change_pct for one in straggler_what_ifs(graph, caused, named, simulation)]
    for change, expected, tolerance in zip(changes, (-1, -3, -57), (0.5, 0.7, 4), strict=True):
        assert abs(change - expected) <= tolerance


def test_recorded_waits_are_found_without_the_record(shared: Path) -> None:
    found = validated(shared / "traces" / "cuda-sync-alexnet")["event_waits"]
    assert found["recorded"] == 6
    assert all(edge["found"] for edge in found["recorded_edges"])


@pytest.mark.parametrize("name", TRACES)
def test_a_simulated_run_can_be_linked_again(shared: Path, name: str) -> None:
    _, _, simulation = linked(shared / "traces" / name)
    again = simulate(link(simulation.job))
    found = reproduction(simulation.job, again)
    assert found["mean_abs_error_pct"] <= 1


def test_every_recorded_trace_can_be_simulated(shared: Path) -> None:
    for path in sorted((shared / "traces").rglob("*.json.gz")):
        try:
            job = foretrace.read(path)
        except foretrace.FormatError:  # execution traces without times
            continue
        for rank in reproduction(job, simulate(link(job)))["ranks"]:
            assert all(abs(step["error_pct"]) <= 5 for step in rank["steps"]), path
