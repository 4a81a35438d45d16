"""Descriptions of workloads: what is written reads back, what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretrace import FormatError
from foretrace.generate import MODELS, ParallelPlan
from foretrace.generate.description import Description, read_description


@pytest.mark.parametrize("model_name", ["llama-2-7b", ""])
def test_what_is_written_reads_back(tmp_path: Path, model_name: str) -> None:
    plan = ParallelPlan(tp=2, pp=4, micro_batches=8, schedule="interleaved", virtual_stages=2, zero=1, recompute="full")
    description = Description(MODELS["llama-2-7b"], plan, "layer", model_name)
    (tmp_path / "job.yaml").write_text(description.to_yaml())
    assert read_description(tmp_path / "job.yaml") == description


def test_a_preset_may_be_changed(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: {preset: llama-2-7b, layers: 4}\nplan: {tp: 2}\n")
    found = read_description(tmp_path / "job.yaml")
    assert (found.model.layers, found.model.hidden) == (4, 4096)
    assert found.workload().num_ranks == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: llama-2-8b\nplan: {}\n", "model"),
        ("plan: {}\n", "'model' is missing"),
        ("model: llama-2-7b\n", "'plan' is missing"),
        ("model: {layers: 4}\nplan: {}\n", "'model.hidden' is missing"),
        ("model: llama-2-7b\nplan: {tp: 0}\n", "tp"),
        ("model: llama-2-7b\nplan: {tp: 3}\n", "3"),
        ("model: llama-2-7b\nplan: {tpp: 2}\n", "plan.tpp"),
        ("model: llama-2-7b\nplan: {schedule: 2f2b}\n", "plan.schedule"),
        ("model: llama-2-7b\nplan: {sequence_parallel: 3}\n", "plan.sequence_parallel"),
        ("model: llama-2-7b\nplan: {zero: 4}\n", "zero"),
        ("model: llama-2-7b\nplan: {}\ngranularity: fine\n", "granularity"),
        ("- a\n", "job.yaml"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(FormatError) as caught:
        read_description(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
