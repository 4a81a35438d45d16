"""Weights as int8 with a scale for each output channel; activations stay floats.

A token's step reads every weight once, so that a quarter of the bytes is most of what there is to gain.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_FEW_ROWS = 4  # up to here the kernel that reads int8 is the faster one; it takes bf16 activations


class Int8Linear(nn.Module):
    """A matrix product with int8 weights.

    Attributes:
        weight: int8, shape ``(out, in)``. scale: fp32, shape ``(out,)``: what 1 of ``weight`` stands for.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self._scale_bf16 = scale.to(torch.bfloat16)

    @classmethod
    def of(cls, weight: Tensor) -> Int8Linear:
        """Round a matrix to the nearest: the largest of each output channel becomes 127."""
        scale = weight.detach().float().abs().amax(1).clamp(min=1e-12) / 127
        return cls((weight.detach().float() / scale[:, None]).round().to(torch.int8), scale)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) <= _FEW_ROWS and x.device.type == "cpu":
            product = torch._weight_int8pack_mm(rows.to(torch.bfloat16), self.weight, self._scale_bf16)
            return product.to(x.dtype).view(*x.shape[:-1], -1)
        return linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype)[:, None])


def quantize(model: nn.Module) -> nn.Module:
    """Replace all matrix products of a model, in place; embeddings and norms stay as they are."""
    for name, module in list(model.named_children()):
        if isinstance(module, nn.Linear):
            setattr(model, name, Int8Linear.of(module.weight))
        else:
            quantize(module)
    return model
