"""Training: the paper's schedule, gradients by tokens, and the same run whether interrupted or not."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from foretrace.llama.config import CONFIGS
from foretrace.llama.data.packing import IGNORED, Batch, PackedRows
from foretrace.llama.data.store import TokenStore, write_store
from foretrace.llama.evaluate import evaluate
from foretrace.llama.model import Llama
from foretrace.llama.train.loop import Trainer
from foretrace.llama.train.metrics import Metrics, MetricsLog, read_metrics
from foretrace.llama.train.peak import peak_flops_per_s, training_flops
from foretrace.llama.train.run import Run, load_model, read_settings
from foretrace.llama.train.settings import Settings
from foretrace.trace import FormatError

TEXT = ("the quick brown fox jumps over the lazy dog. " * 40).encode()


def store_of(count: int = 24) -> TokenStore:
    documents = [list(TEXT[i : i + 40 + 7 * (i % 11)]) for i in range(count)]
    starts = np.concatenate(([0], np.cumsum([len(d) for d in documents]))).astype(np.int64)
    return TokenStore(np.array([t for d in documents for t in d], np.uint16), starts, 256)


def settings_of(**changes: Any) -> Settings:
    values = {"model": "llama-tiny", "steps": 8, "rows": 4, "row_length": 32, "micro_rows": 4, "peak_lr": 3e-3,
              "warmup_steps": 2, **changes}  # fmt: skip
    return Settings(**values)


def trainer_of(**changes: Any) -> Trainer:
    settings = settings_of(**changes)
    return Trainer(settings, PackedRows(store_of(), settings.row_length, settings.seed))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_the_learning_rate_is_the_papers() -> None:
    """2,000 steps of warm-up, then a cosine to a tenth of the peak."""
    settings = Settings("llama-2-7b", 500_000, 1024, 4096, 1)
    rates = [settings.learning_rate(step) for step in (0, 999, 1999, 2000, 250_999, 499_999, 600_000)]
    expected = [1.5e-7, 1.5e-4, 3e-4, 3e-4, 1.65e-4, 3e-5, 3e-5]
    assert rates == pytest.approx(expected, rel=1e-3)
    assert (settings.beta1, settings.beta2, settings.eps, settings.weight_decay, settings.clip) == (
        0.9,
        0.95,
        1e-5,
        0.1,
        1,
    )


def test_training_learns() -> None:
    trainer = trainer_of(steps=40)
    losses = [metrics.loss for metrics in trainer.steps()]
    assert losses[0] == pytest.approx(math.log(256), abs=0.2)
    assert losses[-1] < 0.6 * losses[0]
    assert trainer.tokens == 40 * 4 * 32


def test_a_step_is_adamw_of_the_mean_over_all_tokens() -> None:
    """transformers#34191: the sum of the micro-batches' means is another gradient where these have unlike tokens."""
    trainer = trainer_of(micro_rows=1, clip=math.inf)
    reference = Llama(CONFIGS["llama-tiny"])
    reference.load_state_dict(trainer.model.state_dict())
    batch = trainer.data.batch(range(4))
    attend = batch.attend()
    logits = reference(batch.tokens_BT, attend.positions().view(4, 32), attend)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets_BT.flatten())
    loss.backward()
    decays = [p for p in reference.parameters() if p.dim() > 1]
    others = [p for p in reference.parameters() if p.dim() == 1]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=1.5e-3, betas=(0.9, 0.95), eps=1e-5).step()
    found, norm, targets = trainer.train_step()
    assert targets == 128
    assert found == pytest.approx(loss.item(), abs=1e-5)
    gradients = torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None])
    assert norm == pytest.approx(float(gradients.norm()), rel=1e-4)
    torch.testing.assert_close(weights(trainer.model), weights(reference), rtol=0, atol=2e-5)


def test_accumulation_weighs_tokens_and_not_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = PackedRows.batch

    def with_gaps(self: PackedRows, numbers: Any) -> Batch:
        batch = whole(self, numbers)
        for row, number in enumerate(numbers):
            batch.targets_BT[row, : 7 * (number % 4)] = IGNORED
        return batch

    monkeypatch.setattr(PackedRows, "batch", with_gaps)
    one, many = trainer_of(micro_rows=4), trainer_of(micro_rows=1)
    found = [trainer.train_step() for trainer in (one, many)]
    assert found[0][2] == found[1][2] == 128 - 7 * 6
    assert found[0][:2] == pytest.approx(found[1][:2], rel=1e-5)
    torch.testing.assert_close(weights(one.model), weights(many.model), rtol=0, atol=1e-5)


def test_gradients_are_clipped_all_together() -> None:
    trainer = trainer_of(clip=0.01)
    _, norm, _ = trainer.train_step()
    clipped = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]).norm()
    assert norm > 0.1
    assert float(clipped) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path, dtype: str) -> None:
    data = tmp_path / "data"
    write_store(data, [store_of().document(i).tolist() for i in range(24)], 256)
    settings = settings_of(dtype=dtype, steps=6)
    through = Run(tmp_path / "through", settings, data).train()
    stopped = Run(tmp_path / "stopped", settings, data, checkpoint_every=2)
    seen: list[int] = []

    class Crash(Exception):
        pass

    def crash(metrics: Metrics) -> None:
        seen.append(metrics.step)
        if metrics.step == 4:
            raise Crash

    with pytest.raises(Crash):
        stopped.train(on_step=crash)
    resumed = stopped.train(resume=True, on_step=lambda metrics: seen.append(metrics.step))
    assert resumed["resumed_from"] == 2
    assert seen == [1, 2, 3, 4, 3, 4, 5, 6]
    assert resumed["loss"] == through["loss"]
    models = [load_model(tmp_path / name)[0] for name in ("through", "stopped")]
    assert torch.equal(weights(models[0]), weights(models[1]))
    lines = [read_metrics(tmp_path / name) for name in ("through", "stopped")]
    assert [(line["step"], line["loss"]) for line in lines[0]] == [(line["step"], line["loss"]) for line in lines[1]]
    assert [line["step"] for line in lines[1]] == [1, 2, 3, 4, 5, 6]


def test_a_finished_run_leaves_a_model_that_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_store(tmp_path / "data", [list(TEXT[:300])], 256)
    document = Run(tmp_path / "run", settings_of(steps=2), tmp_path / "data").train()
    assert document["finished"] and document["model"] == str(tmp_path / "run" / "model")
    ours, _ = load_model(tmp_path / "run")
    theirs = AutoModelForCausalLM.from_pretrained(document["model"])
    tokens = torch.randint(0, 256, (2, 10))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)
    again = Run(tmp_path / "run", settings_of(steps=2), tmp_path / "data").train(resume=True)
    assert again["steps"] == 2 and again["resumed_from"] == 2


def test_a_folder_is_of_one_run(tmp_path: Path) -> None:
    write_store(tmp_path / "data", [list(TEXT[:300])], 256)
    run = Run(tmp_path / "run", settings_of(steps=1), tmp_path / "data")
    run.train()
    with pytest.raises(FormatError, match="there is a run in this folder"):
        run.train()
    with pytest.raises(FormatError, match="this run has seed 3, not 0"):
        Run(tmp_path / "run", settings_of(steps=1, seed=3), tmp_path / "data").train(resume=True)
    assert read_settings(tmp_path / "run") == settings_of(steps=1)
    (tmp_path / "run" / "settings.json").write_text('{"model": 3}')
    with pytest.raises(FormatError, match="no settings"):
        read_settings(tmp_path / "run")


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(tmp_path: Path) -> None:
    write_store(tmp_path / "data", [list(TEXT[:800])], 256)
    run = Run(tmp_path / "run", settings_of(steps=4), tmp_path / "data", checkpoint_every=2)
    run.train()
    (damaged,) = (tmp_path / "run" / "checkpoints" / "step-00000004").glob("*.distcp")
    damaged.write_bytes(damaged.read_bytes()[:-100])
    document = run.train(resume=True)
    assert document["resumed_from"] == 2
    (problem,) = document["refused"].values()
    assert damaged.name in problem


class TwoReplicas:
    """Another replica that always computes the same rows, and fails once."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[int]]] = []

    def rows(self, step: int, rows: range) -> Sequence[int]:
        self.asked.append((step, list(rows)))
        return rows[: len(rows) // 2]

    def reduce(self, step: int, model: nn.Module, totals: Tensor) -> Tensor | None:
        if len(self.asked) == 2:  # the second step has to be done again
            return None
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(2)
        return totals * 2


def test_replicas_share_the_rows_and_a_step_can_be_done_again() -> None:
    settings, replicas = settings_of(steps=3), TwoReplicas()
    trainer = Trainer(settings, PackedRows(store_of(), 32), replicas=replicas)
    steps = list(trainer.steps())
    assert [step for step, _ in replicas.asked] == [0, 1, 1, 2]
    assert replicas.asked[1][1] == [4, 5, 6, 7]
    assert [metrics.tokens for metrics in steps] == [128, 256, 384]
    alone = trainer_of(steps=3, rows=2, micro_rows=2)
    found, norm, _ = alone.train_step()
    assert steps[0].loss == pytest.approx(found, rel=1e-6)  # the mean over both
    assert steps[0].gradient_norm == pytest.approx(norm, rel=1e-5)


def test_metrics_of_repeated_steps_and_cut_lines_are_dropped(tmp_path: Path) -> None:
    def line(step: int) -> Metrics:
        return Metrics(step, 1.0, step, 1.0, None, 1.0, 1.0, 1.0)

    with MetricsLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.write(line(step))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    with MetricsLog(tmp_path, 2) as log:
        log.write(line(3))
    assert [entry["step"] for entry in read_metrics(tmp_path)] == [1, 2, 3]
    (tmp_path / "metrics.jsonl").write_text("nonsense\n")
    with pytest.raises(FormatError, match="line 1 is no step's metrics"):
        read_metrics(tmp_path)


def test_flops_are_those_of_the_description() -> None:
    config = CONFIGS["llama-1m"]
    full = training_flops(config, [512])
    assert full == pytest.approx(3 * 512 * config.sizes.forward_flops_per_token(), rel=0.01)
    assert training_flops(config, [256, 256]) < full
    peak = peak_flops_per_s(torch.device("cpu"), "fp32")
    assert peak is not None and peak > 1e9
    assert peak_flops_per_s(torch.device("meta"), "fp32") is None


def test_perplexity_counts_every_token_once() -> None:
    model, store = Llama(CONFIGS["llama-tiny"]).eval(), store_of(5)
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(model(document[None, :-1])[0], document[1:], reduction="sum")
            for document in (torch.from_numpy(store.document(i).astype(np.int64)) for i in range(5))
        ]
    total = len(store.tokens) - 5
    for at_once in (1, 100, 10_000):
        found = evaluate(model, store, tokens_at_once=at_once)
        assert found.tokens == total
        assert found.loss == pytest.approx(float(sum(losses)) / total, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert evaluate(model, store, length=10).tokens == total


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"peak_lr": 0.0}, "peak_lr is 0.0"),
        ({"beta2": 1.5}, "beta2 is 1.5"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"dtype": "fp8"}, "'fp8' is none of"),
        ({"clip": math.nan}, "clip is nan"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        settings_of(**change)


def test_data_that_does_not_fit_the_model_is_refused() -> None:
    store = store_of()
    wide = TokenStore(store.tokens, store.starts, 300)
    with pytest.raises(ValueError, match="the data's vocabulary has 300 tokens, the model's 256"):
        Trainer(settings_of(), PackedRows(wide, 32))
    with pytest.raises(ValueError, match="rows of 16 tokens, the settings say 32"):
        Trainer(settings_of(), PackedRows(store, 16))


def test_settings_are_json() -> None:
    settings = settings_of(clip=2.0)
    assert Settings(**json.loads(json.dumps(settings.to_json()))) == settings
    assert settings.differences(settings_of()) == ["clip 2.0, not 1.0"]
