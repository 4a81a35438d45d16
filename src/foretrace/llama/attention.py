"""Which tokens see which: the forms of `model.Attend` that training and scoring use."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def causal(layer: int, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
    """Each token sees itself and those before it in its row."""
    is_grouped = q_BTHD.shape[2] != k_BTKD.shape[2]
    return scaled_dot_product_attention(
        q_BTHD.transpose(1, 2), k_BTKD.transpose(1, 2), v_BTKD.transpose(1, 2), is_causal=True, enable_gqa=is_grouped
    ).transpose(1, 2)
