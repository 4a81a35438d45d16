"""Workloads of transformers: work, messages, groups and order of all ranks."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.generate import MODELS, MOST_GROUPS, ParallelPlan, Shapes, Transformer, generate
from foretrace.trace.workload import CommType, Program, WorkKind, Workload
from tests.generate.cluster import Cluster, dependencies
from tests.generate.plans import SMALL, models, plans

GRANULARITY = st.sampled_from(("operator", "layer"))
QUICK = settings(max_examples=40, deadline=None)


def flops_of(workload: Workload) -> int:
    """FLOPs of all ranks."""
    each = [int(program.nodes["flops"][program.nodes["kind"] == WorkKind.COMPUTE].sum()) for program in
            workload.programs]  # fmt: skip
    return sum(each[number] * count for number, count in Counter(workload.program_of.tolist()).items())


def names(program: Program) -> np.ndarray[Any, Any]:
    return np.array(program.strings.lookup(program.nodes["name"]))


def data_bytes(program: Program, kind: CommType, name: str) -> int:
    """Bytes of the collectives of a program whose name ends so."""
    rows = (program.nodes["collective"] == kind) & np.char.endswith(names(program), name)
    return int(program.nodes["bytes"][rows].sum())


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-2-13b", "llama-2-34b", "llama-2-70b"])
@pytest.mark.parametrize("granularity", ["operator", "layer"])
def test_flops_of_a_step(name: str, granularity: Any) -> None:
    """6 FLOPs for each parameter (without the embedding) and token, and those of attention, within 0.1 %."""
    model = MODELS[name]
    plan = ParallelPlan(tp=8, pp=4, dp=2, micro_batches=4)
    found = flops_of(generate(replace(model, layers=model.layers), plan, granularity))
    tokens = plan.sequences * model.sequence
    parameters = model.parameters() - model.vocabulary * model.hidden
    attention = (1 + 2.5) * model.attention_flops_per_token()  # flash attention computes the scores once more
    assert found == pytest.approx(tokens * (6 * parameters + attention), rel=3e-3)
    sequence_parallel = flops_of(generate(model, replace(plan, sequence_parallel=True), granularity))
    assert sequence_parallel == pytest.approx(tokens * (6 * parameters + attention), rel=1e-3)


def test_recomputation_repeats_the_forward_pass() -> None:
    model = MODELS["llama-2-7b"]
    found = {
        (kind, flash): flops_of(generate(model, ParallelPlan(recompute=kind, flash_attention=flash)))
        for kind in ("none", "selective", "full")
        for flash in (True, False)
    }
    layers = 2 * model.layers * model.layer_matrices * model.sequence
    for flash in (True, False):
        attention = model.attention_flops_per_token() * model.sequence * (1 if flash else 2)
        assert found["selective", flash] - found["none", flash] == pytest.approx(attention, rel=0.02)
        assert found["full", flash] - found["none", flash] == pytest.approx(layers + attention, rel=0.01)


@QUICK
@given(models(), plans())
def test_granularity_keeps_work_and_communication(model: Transformer, plan: ParallelPlan) -> None:
    fine, coarse = (generate(model, plan, granularity) for granularity in ("operator", "layer"))
    assert coarse.num_nodes <= fine.num_nodes
    assert coarse.program_of.tolist() == fine.program_of.tolist()
    for one, other in zip(fine.programs, coarse.programs, strict=True):
        for kind in (WorkKind.SEND, WorkKind.RECEIVE, WorkKind.COLLECTIVE):
            for column in ("bytes", "collective", "tag", "slot"):
                rows, others = (table["kind"] == kind for table in (one.nodes, other.nodes))
                assert one.nodes[column][rows].tolist() == other.nodes[column][others].tolist()
    lookups = plan.micro_batches * plan.tp * plan.dp  # count one operation each
    assert abs(flops_of(fine) - flops_of(coarse)) <= 2 * lookups


@QUICK
@given(models(), plans(), GRANULARITY)
def test_every_message_has_two_ends(model: Transformer, plan: ParallelPlan, granularity: Any) -> None:
    workload = generate(model, plan, granularity)
    ends: dict[WorkKind, Counter[tuple[int, ...]]] = {WorkKind.SEND: Counter(), WorkKind.RECEIVE: Counter()}
    for number, program in enumerate(workload.programs):
        ranks = np.flatnonzero(workload.program_of == number)
        for kind, found in ends.items():
            rows = np.flatnonzero(program.nodes["kind"] == kind)
            if not len(rows):
                continue
            for rank, peers in zip(ranks.tolist(), workload.peers[number], strict=True):
                there = peers[program.nodes["slot"][rows]].tolist()
                tags, sizes = (program.nodes[name][rows].tolist() for name in ("tag", "bytes"))
                pairs = [(rank, peer) if kind == WorkKind.SEND else (peer, rank) for peer in there]
                found.update((*pair, tag, size) for pair, tag, size in zip(pairs, tags, sizes, strict=True))
    assert ends[WorkKind.SEND] == ends[WorkKind.RECEIVE]
    assert all(count == 1 for count in ends[WorkKind.SEND].values())
    borders = plan.chunks - 1
    assert len(ends[WorkKind.SEND]) == 2 * borders * plan.micro_batches * plan.tp * plan.dp


@QUICK
@given(models(), plans(), GRANULARITY)
def test_programs_are_sound(model: Transformer, plan: ParallelPlan, granularity: Any) -> None:
    workload = generate(model, plan, granularity)
    for number, program in enumerate(workload.programs):
        nodes = program.nodes
        assert nodes["id"].tolist() == list(range(program.num_nodes))
        target = np.repeat(np.arange(program.num_nodes), np.diff(program.first_dependency))
        assert (program.dependency < target).all() and (program.dependency >= 0).all()
        assert len(np.unique(target * program.num_nodes + program.dependency)) == len(target)
        is_compute, is_collective = nodes["kind"] == WorkKind.COMPUTE, nodes["kind"] == WorkKind.COLLECTIVE
        assert (nodes["flops"][is_compute] > 0).all() and (nodes["bytes"] > 0).all()
        is_peer = (nodes["kind"] == WorkKind.SEND) | (nodes["kind"] == WorkKind.RECEIVE)
        assert (nodes["tag"][is_peer] >= 0).all() and (nodes["tag"][~is_peer] == -1).all()
        assert (nodes["slot"][is_peer] < workload.peers[number].shape[1]).all()
        assert (nodes["slot"][is_collective] < workload.groups_of[number].shape[1]).all()
        assert (nodes["slot"][is_peer | is_collective] >= 0).all()
        assert np.diff(program.first_dependency)[nodes["kind"] == WorkKind.RECEIVE].sum() == 0


@settings(max_examples=60, deadline=None)
@given(models(), plans(), GRANULARITY, st.integers(0, 1 << 30))
def test_no_deadlock(model: Transformer, plan: ParallelPlan, granularity: Any, seed: int) -> None:
    """Whatever the times are, all ranks of a cluster with one slot for communication finish."""
    model = replace(model, layers=plan.chunks)
    workload = generate(model, plan, granularity)
    chance = random.Random(seed)
    finished = Cluster(workload, lambda: chance.choice((1.0, chance.random(), 50 * chance.random()))).run()
    assert finished == [workload.programs[number].num_nodes for number in workload.program_of.tolist()]


@QUICK
@given(models(), plans())
def test_groups_part_the_ranks(model: Transformer, plan: ParallelPlan) -> None:
    workload = generate(model, plan)
    assert workload.groups[0].ranks.tolist() == list(range(plan.world_size))
    numbers = [group.number for group in workload.groups]
    assert numbers == list(range(len(numbers)))
    by_size: Counter[tuple[int, ...]] = Counter()
    at = 1
    wanted = [(plan.tp * plan.pp, plan.dp), (plan.tp * plan.dp, 2 if model.is_tied and plan.pp > 1 else 1),
              (plan.pp * plan.dp, plan.tp), (plan.tp * plan.dp, plan.pp)]  # fmt: skip
    for kind, (count, size) in enumerate(wanted):
        if size == 1:
            continue
        groups = workload.groups[at : at + count]
        at += count
        members = np.concatenate([group.ranks for group in groups])
        assert all(len(group.ranks) == size and (np.diff(group.ranks) > 0).all() for group in groups)
        assert len(np.unique(members)) == len(members)
        assert len(members) == (2 * count if kind == 1 else plan.world_size)
        by_size[size, count] += 1
    assert at == len(workload.groups)
    for number in range(len(workload.programs)):
        ranks = np.flatnonzero(workload.program_of == number)
        for rank, groups_of in zip(ranks.tolist(), workload.groups_of[number], strict=True):
            assert all(rank in workload.groups[group].ranks for group in groups_of.tolist())


@QUICK
@given(models(), plans())
def test_gradients_of_every_parameter_are_reduced(model: Transformer, plan: ParallelPlan) -> None:
    plan = replace(plan, dp=2, gradient_dtype_bytes=4)
    workload = generate(model, plan)
    shapes = Shapes(model, plan)
    coordinates = plan.coordinates(np.arange(plan.world_size))
    times = plan.micro_batches if plan.zero >= 2 else 1
    kind = CommType.REDUCE_SCATTER if plan.zero else CommType.ALL_REDUCE
    total = 0
    for stage in range(plan.pp):
        program = workload.programs[workload.program_of[np.flatnonzero(coordinates[:, 1] == stage)[0]]]
        own = (plan.virtual_stages - 1) * shapes.chunk_parameters(False, False)
        own += shapes.chunk_parameters(stage == 0, stage == plan.pp - 1)
        assert data_bytes(program, kind, " gradients") == 4 * own * times
        total += own
    # Norms are on all tensor-parallel ranks; a tied matrix is on two stages.
    norms = (2 * model.layers + 1) * model.norm_parameters
    again = model.vocabulary * model.hidden if model.is_tied and plan.pp > 1 else 0
    assert total == (model.parameters() + again - norms) // plan.tp + norms


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_gathers_weights(zero: Any) -> None:
    plan = ParallelPlan(tp=2, dp=4, micro_batches=3, zero=zero, bucket_bytes=3000)
    program = generate(SMALL, plan).programs[0]
    parameters = Shapes(SMALL, plan).chunk_parameters(True, True)
    gathered = data_bytes(program, CommType.ALL_GATHER, "weights")
    times = {0: 0, 1: 1, 2: 1, 3: 2 * plan.micro_batches}[zero]  # FSDP: forward and backward of every micro-batch
    assert gathered == pytest.approx(times * 2 * parameters / plan.dp, rel=1e-3)
    rows = np.flatnonzero(names(program) == "step optimizer")
    share = plan.dp if zero else 1
    assert program.nodes["flops"][rows].tolist() == [14 * -(-parameters // share)]


def test_weights_are_gathered_as_gradients_were_reduced() -> None:
    plan = ParallelPlan(tp=2, pp=2, dp=4, micro_batches=2, zero=1, bucket_bytes=3000)
    for program in generate(SMALL, plan).programs:
        name, sizes = names(program), program.nodes["bytes"]
        reduced = sizes[np.char.endswith(name, " gradients")]
        assert (reduced[:-1] >= 3000).all() and len(reduced) > 3
        assert sizes[name == "step weights"].tolist() == (reduced // 4).tolist()


def test_tensor_parallel_traffic() -> None:
    """Four all-reduces of the residual stream a layer, or as many pairs of reduce-scatter and all-gather."""
    plain = generate(SMALL, ParallelPlan(tp=4)).programs[0]
    size = SMALL.sequence * SMALL.hidden * 2
    # Embedding forward, logits backward, and the two sums of the cross entropy.
    assert data_bytes(plain, CommType.ALL_REDUCE, "all_reduce") == (4 * SMALL.layers + 2) * size
    assert data_bytes(plain, CommType.ALL_REDUCE, "logit") == SMALL.sequence * 4
    split = generate(SMALL, ParallelPlan(tp=4, sequence_parallel=True)).programs[0]
    assert data_bytes(split, CommType.REDUCE_SCATTER, "reduce_scatter") == (4 * SMALL.layers + 2) * size
    assert data_bytes(split, CommType.ALL_GATHER, "all_gather") == (4 * SMALL.layers + 2) * size // 4
    # The inputs of first products are gathered again: two a layer, and that of the logits.
    assert data_bytes(split, CommType.ALL_GATHER, "input") == (2 * SMALL.layers + 1) * size // 4


def test_gradients_overlap_with_the_backward_pass() -> None:
    """A bucket waits for its gradients, and the next computation does not wait for the bucket."""
    program = generate(SMALL, ParallelPlan(dp=2, micro_batches=2, bucket_bytes=1)).programs[0]
    rows = np.flatnonzero(program.nodes["kind"] == WorkKind.COLLECTIVE)
    assert len(rows) > 2 * SMALL.layers
    target = np.repeat(np.arange(program.num_nodes), np.diff(program.first_dependency))
    waiting = target[np.isin(program.dependency, rows)]
    optimizer = np.flatnonzero(names(program) == "step optimizer")
    assert set(waiting.tolist()) <= {*rows.tolist(), *optimizer.tolist()}
    # The buckets follow each other, and the optimizer waits for the last one.
    assert all(before in dependencies(program, row) for before, row in pairwise(rows.tolist()))
    assert rows[-1] in dependencies(program, int(optimizer[0]))
    # All of them belong to the last micro-batch.
    head = np.flatnonzero(names(program) == "backward cross_entropy gradient")
    assert len(head) == 2 and rows.min() > head[1]


def test_stages_of_equal_work_share_a_program() -> None:
    gpipe = generate(SMALL, ParallelPlan(pp=8, micro_batches=4, schedule="gpipe"))
    assert len(gpipe.programs) == 3
    assert gpipe.program_of.tolist() == [0, 1, 1, 1, 1, 1, 1, 2]
    # Stages 0 to 4 run all four forward passes first, and the first has the embedding.
    assert generate(SMALL, ParallelPlan(pp=8, micro_batches=4)).program_of.tolist() == [0, 1, 1, 1, 1, 2, 3, 4]
    assert len(generate(SMALL, ParallelPlan(tp=4, dp=8)).programs) == 1


def test_many_ranks() -> None:
    model = MODELS["llama-2-70b"]
    plan = ParallelPlan(tp=8, pp=16, dp=1024, micro_batches=32, sequence_parallel=True)
    workload = generate(model, plan)
    assert workload.num_ranks == 131_072
    assert len(workload.programs) == 16
    assert len(workload.groups) == 1 + 8 * 16 + 16 * 1024 + 8 * 1024
    assert sum(len(peers) for peers in workload.peers) == 131_072
    assert list(workload.notes.values()) == [8 * 16 + 16 * 1024 - MOST_GROUPS]
    assert "2147" in next(iter(workload.notes))
    assert sum(program.nodes["id"].nbytes for program in workload.programs) < 10e6
    rank = 8 * 5 + 3 + 128 * 77  # tp 3, pp 5, dp 77
    number = int(workload.program_of[rank])
    place = np.flatnonzero(np.flatnonzero(workload.program_of == number) == rank)[0]
    assert workload.peers[number][place].tolist() == [rank - 8, rank + 8]
    tp, dp = (workload.groups[group] for group in workload.groups_of[number][place].tolist())
    assert tp.ranks.tolist() == list(range(rank - 3, rank + 5))
    assert dp.ranks.tolist() == list(range(43, 131_072, 128))


def test_unknown_granularity() -> None:
    with pytest.raises(ValueError, match="granularity"):
        generate(SMALL, ParallelPlan(), "kernel")  # type: ignore[arg-type]
