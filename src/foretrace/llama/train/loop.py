"""`Trainer`: pretraining, step by step, the same after an interruption as without."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from foretrace.llama.config import CONFIGS
from foretrace.llama.data.packing import Batch, PackedRows
from foretrace.llama.model import Llama
from foretrace.llama.train.metrics import Metrics
from foretrace.llama.train.peak import peak_flops_per_s, training_flops
from foretrace.llama.train.replicas import Alone, Replicas
from foretrace.llama.train.settings import Settings
from foretrace.llama.train.world import World


class Trainer:
    """A model, its optimizer and its place in the data.

    Args:
        settings: of the run.
        rows: training data with the settings' row length.
        world: ranks, and how the model is spread over them.
        replicas: other trainers that share the work of each step.

    Attributes:
        step: steps that are done. tokens: that the model was trained on, over all ranks.
    """

    def __init__(
        self, settings: Settings, rows: PackedRows, world: World | None = None, replicas: Replicas | None = None
    ) -> None:
        self.settings, self.data, self.world, self.replicas = settings, rows, world or World(), replicas or Alone()
        self.config = CONFIGS[settings.model]
        _check(settings, rows, self.world, self.config.sizes.vocabulary)
        self.model: nn.Module = self.world.prepare(Llama(self.config), settings)
        self.optimizer = _optimizer(self.model, settings)
        self.step = self.tokens = 0
        self._peak: float | None = None
        self._flops = 0

    def steps(self, until: int | None = None) -> Iterator[Metrics]:
        """Train up to step ``until``, or to the end; what came of each step."""
        peak = peak_flops_per_s(self.world.device, self.settings.dtype)
        self._peak = None if peak is None else peak * self.world.size
        begin = last = time.perf_counter()
        while self.step < (self.settings.steps if until is None else until):
            loss, norm, targets = self.train_step()
            now = time.perf_counter()
            rate = targets / (now - last)
            mfu = None if self._peak is None else self._flops / (now - last) / self._peak
            last = now
            learning_rate = self.settings.learning_rate(self.step - 1)
            yield Metrics(self.step, loss, self.tokens, rate, mfu, learning_rate, norm, now - begin)

    def train_step(self) -> tuple[float, float, int]:
        """One step of the optimizer: the mean loss, the norm of the gradients before clipping, and the targets."""
        settings = self.settings
        rows = range(self.step * settings.rows, (self.step + 1) * settings.rows)
        totals: Tensor | None = None
        while totals is None:  # a step that lost a replica may have to be done again
            self.optimizer.zero_grad(set_to_none=True)
            mine = self.world.share(list(self.replicas.rows(self.step, rows)))
            totals = self.world.sum(self._accumulate(mine))
            totals = self.replicas.reduce(self.step, self.model, totals)
        targets, loss_sum = totals.tolist()
        norm = self.world.normalize_and_clip(self.model, targets, settings.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate(self.step)
        self.optimizer.step()
        self.step += 1
        self.tokens += int(targets)
        return loss_sum / targets, norm, int(targets)

    def _accumulate(self, rows: list[int]) -> Tensor:
        """Gradients of the sum of all losses of these rows, micro-batch by micro-batch; targets and that sum."""
        totals, lengths = torch.zeros(2, dtype=torch.float64), []
        size = self.settings.micro_rows
        for at in range(0, len(rows), size):
            batch = self.data.batch(rows[at : at + size])
            loss = self.loss_sum(batch)
            loss.backward()
            totals += torch.tensor([batch.num_targets(), loss.item()], dtype=torch.float64)
            lengths.append(batch.lengths)
        self._flops = training_flops(self.config, np.concatenate(lengths)) * self.world.data_parallel
        return totals

    def loss_sum(self, batch: Batch) -> Tensor:
        """The sum of the losses of a batch's targets."""
        device = self.world.device
        attend = batch.attend(device)
        with autocast(device, self.settings.dtype):
            positions_BT = attend.positions().view(batch.tokens_BT.shape)
            logits_BTV = self.model(batch.tokens_BT.to(device), positions_BT, attend)
        targets = batch.targets_BT.to(device).flatten()
        return cross_entropy(logits_BTV.float().flatten(0, 1), targets, reduction="sum")

    def whole_model(self) -> Llama | None:
        """The model with all weights, on one rank; None on the others."""
        return self.world.whole(self.model, self.config)

    def progress(self) -> dict[str, Any]:
        """What has to be kept beside the model and the optimizer, to go on exactly."""
        return {"step": self.step, "tokens": self.tokens, "torch_rng": torch.get_rng_state()}

    def restore(self, progress: dict[str, Any]) -> None:
        """Go on from there."""
        self.step, self.tokens = int(progress["step"]), int(progress["tokens"])
        torch.set_rng_state(progress["torch_rng"])


def autocast(device: torch.device, dtype: str) -> AbstractContextManager[Any]:
    """Products in the type of the settings."""
    return nullcontext() if dtype == "fp32" else torch.autocast(device.type, torch.bfloat16)


def _check(settings: Settings, rows: PackedRows, world: World, vocabulary: int) -> None:
    if rows.length != settings.row_length:
        raise ValueError(f"rows of {rows.length} tokens, the settings say {settings.row_length}")
    if rows.store.vocabulary > vocabulary:
        problem = f"the data's vocabulary has {rows.store.vocabulary} tokens, the model's {vocabulary}"
        raise ValueError(f"{problem}: take another model, or a smaller vocabulary")
    if settings.rows % world.data_parallel:
        raise ValueError(f"{settings.rows} rows a step cannot be shared out to {world.data_parallel} ranks evenly")


def _optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(groups, lr=settings.peak_lr, betas=betas, eps=settings.eps, fused=True)
