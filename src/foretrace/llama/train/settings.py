"""`Settings`: what a pretraining run is told once and keeps for its whole life."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

Dtype = Literal["fp32", "bf16"]
DTYPES: tuple[Dtype, ...] = ("fp32", "bf16")


@dataclass(frozen=True)
class Settings:
    """Settings of a run; the defaults are the paper's (arXiv 2307.09288, section 2.2) where it gives them.

    Attributes:
        model: a name of `config.CONFIGS`.
        steps: optimizer steps.
        rows: of a step, over all ranks. row_length: tokens of a row. micro_rows: rows that a rank computes at once.
        peak_lr: learning rate behind the warm-up. warmup_steps: linear from 0. final_share: of the peak, at the end of
            the cosine.
        beta1, beta2, eps, weight_decay: of AdamW; norms do not decay.
        clip: largest norm of all gradients together; inf for none.
        dtype: ``"bf16"`` computes products in bf16; weights, gradients and optimizer are fp32 in any case.
        seed: of the weights and of the order of documents.
    """

    model: str
    steps: int
    rows: int
    row_length: int
    micro_rows: int
    peak_lr: float = 3e-4
    warmup_steps: int = 2000
    final_share: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-5
    weight_decay: float = 0.1
    clip: float = 1.0
    dtype: Dtype = "fp32"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "rows", "row_length", "micro_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: at least 1 is needed")
        for name in ("peak_lr", "eps", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be above 0")
        for name, most in (("beta1", 1), ("beta2", 1), ("final_share", 1), ("weight_decay", math.inf)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be from 0 to {most}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps is {self.warmup_steps}: at least 0 is needed")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(DTYPES)}")

    def learning_rate(self, step: int) -> float:
        """The learning rate of step ``step``, counted from 0: a linear warm-up, then a cosine."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        done = min((step - self.warmup_steps) / max(self.steps - 1 - self.warmup_steps, 1), 1.0)
        return self.peak_lr * (self.final_share + (1 - self.final_share) * (1 + math.cos(math.pi * done)) / 2)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return dataclasses.asdict(self)

    def differences(self, other: Settings) -> list[str]:
        """What another run would do differently, e.g. ``"seed 0, not 1"``."""
        mine, theirs = self.to_json(), other.to_json()
        return [f"{name} {mine[name]}, not {theirs[name]}" for name in mine if mine[name] != theirs[name]]
