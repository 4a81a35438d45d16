"""Rotary position embedding (RoPE; Su et al. 2021, arXiv 2104.09864), and its scaling for longer contexts.

Angles are computed in fp32 from whole positions, whatever type the model has: in bf16 position 257 is 256.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Scaling = Literal["none", "linear", "ntk", "llama3", "yarn"]
SCALINGS: tuple[Scaling, ...] = ("none", "linear", "ntk", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """How fast each pair of elements turns with the position.

    Attributes:
        theta: base of the wavelengths.
        scaling: ``"linear"``: positions divided by ``factor`` (Chen et al. 2023, arXiv 2306.15595).
            ``"ntk"``: a larger base instead: the slowest pair turns ``factor`` times slower, the fastest as before.
            ``"llama3"``: slow pairs as in linear, fast ones as before, in between a blend (Llama 3.1).
            ``"yarn"``: the same by a ramp over the pairs, and larger scores (Peng et al. 2023, arXiv 2309.00071).
        factor: by how much the context grows.
        original_context: tokens that the model was trained for; for ``"llama3"`` and ``"yarn"``.
        low, high: ``"llama3"``: turns within the original context below which a pair is slow, and above which fast.
            ``"yarn"``: the same, alpha and beta in the paper (1 and 32).
    """

    theta: float = 10000.0
    scaling: Scaling = "none"
    factor: float = 1.0
    original_context: int = 4096
    low: float = 1.0
    high: float = 4.0

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise ValueError(f"RoPE scaling {self.scaling!r} is none of {', '.join(SCALINGS)}")
        if not self.theta > 1 or not math.isfinite(self.theta):
            raise ValueError(f"RoPE theta is {self.theta}: it must be above 1")
        if not self.factor >= 1 or not math.isfinite(self.factor):
            raise ValueError(f"the factor of RoPE scaling is {self.factor}: it must be at least 1")
        if self.original_context < 1 or not 0 < self.low < self.high:
            raise ValueError(
                f"RoPE scaling needs an original context above 0 and 0 < low ({self.low}) < high ({self.high})"
            )

    @property
    def score_scale(self) -> float:
        """What queries and keys are multiplied with (yarn's square root of 1/t; equation 22 of the paper)."""
        return 0.1 * math.log(self.factor) + 1.0 if self.scaling == "yarn" else 1.0

    def frequencies(self, head_size: int, device: torch.device | None = None) -> Tensor:
        """Radians a position of each pair, fp32, shape ``(head_size / 2,)``."""
        exponent = torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size
        if self.scaling == "ntk":
            base = self.theta * self.factor ** (head_size / (head_size - 2))
            return torch.pow(base, -exponent)
        fast = 1.0 / torch.pow(self.theta, exponent)
        if self.scaling == "none":
            return fast
        slow = fast / self.factor
        if self.scaling == "linear":
            return slow
        keeps = self._share_kept(fast, head_size)
        return slow * (1 - keeps) + fast * keeps

    def _share_kept(self, fast: Tensor, head_size: int) -> Tensor:
        """How much of each pair's frequency stays: 1 for fast ones, 0 for slow ones."""
        if self.scaling == "llama3":
            turns = self.original_context * fast / (2 * math.pi)
            return ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        first, last = (self._pair_with(turns, head_size) for turns in (self.high, self.low))
        first, last = max(math.floor(first), 0), min(math.ceil(last), head_size - 1)
        pair = torch.arange(head_size // 2, dtype=torch.float32, device=fast.device)
        return 1 - ((pair - first) / max(last - first, 0.001)).clamp(0, 1)

    def _pair_with(self, turns: float, head_size: int) -> float:
        """The pair that makes that many turns within the original context."""
        return head_size * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

    def rotation(self, positions: Tensor, head_size: int) -> Tensor:
        """What `rotate` takes for these positions: complex64 of shape ``positions.shape + (1, head_size / 2)``."""
        angles = positions[..., None].float() * self.frequencies(head_size, positions.device)
        return torch.polar(torch.full_like(angles, self.score_scale), angles)[..., None, :]


def rotate(x_BTHD: Tensor, rotation: Tensor) -> Tensor:
    """Turn neighboring pairs of elements, in fp32; the result has the type of ``x_BTHD``."""
    pairs = x_BTHD.float().reshape(*x_BTHD.shape[:-1], -1, 2)
    if torch.compiler.is_compiling():  # inductor has no complex numbers
        turn = torch.view_as_real(rotation)
        (a, b), (cos, sin) = pairs.unbind(-1), turn.unbind(-1)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).type_as(x_BTHD)
    return torch.view_as_real(torch.view_as_complex(pairs) * rotation).flatten(-2).type_as(x_BTHD)
