"""The next token out of logits, as Meta's reference code draws it (llama/generation.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: what logits are divided by; 0 takes the most probable token.
        top_p: draw among the most probable tokens whose probabilities together just exceed this (Holtzman et al. 2019,
            arXiv 1904.09751); 1 for all.
        top_k: draw among that many at most; 0 for all.
    """

    temperature: float = 0.6
    top_p: float = 0.9
    top_k: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}: it must be 0 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: it must be above 0 and at most 1")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}: it must be 0 or more")

    def draw(self, logits_BV: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A token a row, shape ``(B,)``."""
        if self.temperature == 0 or self.top_k == 1:
            return logits_BV.argmax(-1)
        probabilities = torch.softmax(logits_BV.float() / self.temperature, -1)
        if self.top_p == 1 and not self.top_k:
            return torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        ordered, token = probabilities.sort(-1, descending=True)
        ordered = torch.where(ordered.cumsum(-1) - ordered > self.top_p, 0.0, ordered)
        if self.top_k:
            ordered[:, self.top_k :] = 0.0
        place = torch.multinomial(ordered, 1, generator=generator)  # which divides by the sum itself
        return token.gather(-1, place)[:, 0]
