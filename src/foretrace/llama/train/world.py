"""`World`: the ranks of a run as the loop sees them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foretrace.llama.config import LlamaConfig
from foretrace.llama.model import Llama
from foretrace.llama.train.settings import Settings


class World:
    """A single rank.

    Attributes:
        device: that it computes on.
        size: ranks. data_parallel: of these, how many see other rows.
        is_first: it writes logs.
    """

    device = torch.device("cpu")
    size = 1
    data_parallel = 1
    is_first = True

    def prepare(self, model: Llama, settings: Settings) -> nn.Module:
        """Draw the weights."""
        model.init_weights(torch.Generator().manual_seed(settings.seed))
        return model

    def share(self, rows: list[int]) -> list[int]:
        """The rows of a step that this rank computes."""
        return rows

    def sum(self, totals: Tensor) -> Tensor:
        """Over the ranks that see other rows."""
        return totals

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return flag

    def whole(self, model: nn.Module, config: LlamaConfig) -> Llama | None:
        """The model with all weights, on the first rank."""
        assert isinstance(model, Llama)
        return model

    def normalize_and_clip(self, model: nn.Module, targets: float, clip: float) -> float:
        """Divide gradients by the targets, then clip them all together; their norm before that."""
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        torch._foreach_div_(gradients, targets)
        return float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
