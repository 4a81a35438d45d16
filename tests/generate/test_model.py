"""Models, plans and schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from foretrace.generate import BACKWARD, FORWARD, MODELS, ParallelPlan, PlanError, Shapes, Transformer, schedule
from foretrace.generate.layers import operators
from tests.generate.plans import SMALL, plans


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-34b", 33_743_970_304),
        ("llama-2-70b", 68_976_648_192),
    ],
)
def test_parameters_of_llama(name: str, parameters: int) -> None:
    model = MODELS[name]
    assert model.parameters() == parameters
    assert model.parameter_bytes() == 2 * parameters
    # 2 FLOPs for each parameter and token, apart from the embedding and the norms.
    assert model.matrix_flops_per_token() == pytest.approx(2 * (parameters - 32000 * model.hidden), rel=1e-4)
    # 34B and 70B: 2 layers hidden sequence, as in "6 N + 12 L H Q T" with half of the pairs (arXiv 2204.02311, B).
    assert model.attention_flops_per_token() * 3 == 6 * model.layers * model.hidden * model.sequence


def test_tied_matrix_and_layer_norm() -> None:
    gpt_2 = Transformer(12, 768, 12, 12, 3072, 50257, 1024, is_gated=False, norm="layer", is_tied=True)
    # 124,439,808 with the positions (1024 x 768) and the biases of products, which this description leaves out.
    biases = 12 * (3 * 768 + 768 + 3072 + 768)
    assert gpt_2.parameters() == 124_439_808 - 1024 * 768 - biases


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"heads": 7}, "hidden 64 is no multiple of heads 7"),
        ({"kv_heads": 3}, "heads 8 is no multiple of kv_heads 3"),
        ({"norm": "batch"}, "norm 'batch'"),
        ({"dtype_bytes": 3}, "dtype_bytes 3"),
    ],
)
def test_models_that_contradict_themselves(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(SMALL, **change)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tp": 0}, "tp is 0"),
        ({"bucket_bytes": 0}, "bucket_bytes is 0"),
        ({"schedule": "zero bubble"}, "schedule 'zero bubble' is none of 1f1b"),
        ({"zero": 4}, "zero 4 is none of"),
        ({"virtual_stages": 2}, "2 virtual stages need the schedule 'interleaved'"),
        ({"schedule": "interleaved", "virtual_stages": 2}, "needs pp and virtual_stages"),
        ({"schedule": "interleaved", "virtual_stages": 2, "pp": 2, "micro_batches": 3}, "multiples of pp"),
        ({"gradient_dtype_bytes": 3}, "gradient_dtype_bytes 3"),
    ],
)
def test_plans_that_contradict_themselves(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        ParallelPlan(**options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pp": 3}, "8 layers cannot be spread evenly over 3 pipeline stages"),
        ({"tp": 3}, "heads 8 is no multiple of tp 3"),
        ({"tp": 8}, "kv_heads 4 is no multiple of tp 8"),
    ],
)
def test_plans_that_do_not_fit(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        ParallelPlan(**options).check(SMALL)
    with pytest.raises(PlanError, match="sequence 31 is no multiple"):
        ParallelPlan(tp=2, sequence_parallel=True).check(replace(SMALL, sequence=31))


@given(plans())
def test_ranks_and_coordinates(plan: ParallelPlan) -> None:
    ranks = plan.ranks()
    assert sorted(ranks.ravel().tolist()) == list(range(plan.world_size))
    assert plan.coordinates(ranks.ravel()).tolist() == np.argwhere(ranks >= 0).tolist()
    assert (np.diff(ranks, axis=0) == 1).all()


@given(plans())
def test_schedules_run_every_pass_once(plan: ParallelPlan) -> None:
    for stage in range(plan.pp):
        order = [tuple(row) for row in schedule(plan, stage).tolist()]
        every = {
            (direction, chunk, micro)
            for direction in (FORWARD, BACKWARD)
            for chunk in range(plan.virtual_stages)
            for micro in range(plan.micro_batches)
        }
        assert len(order) == len(every) and set(order) == every
        at = {one: place for place, one in enumerate(order)}
        assert all(at[FORWARD, chunk, micro] < at[BACKWARD, chunk, micro] for _, chunk, micro in every)


def test_one_forward_one_backward() -> None:
    plan = ParallelPlan(pp=3, micro_batches=4)
    text = ["".join(f"{'FB'[d]}{m}" for d, _, m in schedule(plan, stage).tolist()) for stage in range(3)]
    assert text == ["F0F1F2B0F3B1B2B3", "F0F1B0F2B1F3B2B3", "F0B0F1B1F2B2F3B3"]


def test_interleaved_as_in_megatron() -> None:
    plan = ParallelPlan(pp=2, micro_batches=4, schedule="interleaved", virtual_stages=2)
    text = [" ".join(f"{'FB'[d]}{c}.{m}" for d, c, m in schedule(plan, stage).tolist()) for stage in range(2)]
    assert text[0].startswith("F0.0 F0.1 F1.0 F1.1 F0.2 B1.0 F0.3 B1.1 F1.2 B0.0")
    assert text[1].startswith("F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0")


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_operators_share_out_the_work(tp: int) -> None:
    """Products have the FLOPs of the formula, a t-th on each rank."""
    shapes = Shapes(SMALL, ParallelPlan(tp=tp, micro_batch_size=3))
    found = {operator.name: operator for operator in operators(shapes.layer())}
    tokens = 3 * SMALL.sequence
    for name, size in {"qkv": 64 * 128, "output": 64 * 64, "gate_up": 2 * 64 * 96, "down": 64 * 96}.items():
        assert found[name].forward.flops == found[name].input_gradient.flops == 2 * tokens * size // tp
        assert found[name].parameters == size // tp
    # Reads both operands and writes the result, 2 bytes an element.
    assert found["down"].forward.bytes == 2 * (tokens * 96 // tp + 96 * 64 // tp + tokens * 64)
    assert found["attention"].forward.flops == SMALL.attention_flops_per_token() // SMALL.layers * tokens // tp
    assert found["attention"].backward.flops * 2 == found["attention"].forward.flops * 5


def test_attention_in_single_operators() -> None:
    shapes = Shapes(SMALL, ParallelPlan(tp=2, flash_attention=False))
    scores, softmax, values = shapes.attention_core()
    pairs = 4 * SMALL.sequence**2
    assert scores.forward.flops == values.forward.flops == 2 * pairs * SMALL.head_size
    assert scores.backward.flops == 2 * scores.forward.flops
    assert softmax.forward.bytes == 2 * 2 * pairs
    assert softmax.backward.bytes == 3 * 2 * pairs
