"""`KVCache`: keys and values of the tokens so far, in memory that is taken once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from foretrace.generate.model import Transformer


class KVCache:
    """Keys and values of a batch; handed to a model as its ``attend``, it adds the tokens and looks at all.

    Rows begin at slot 0. A row that is shorter than others has anything behind its end, which is overwritten before
    it is ever looked at.

    Args:
        sizes: of the model.
        rows: sequences.
        slots: tokens of a sequence, at most.
        dtype, device: of keys and values.

    Attributes:
        keys, values: of each layer, shape ``(rows, kv_heads, slots, head_size)``.
        used: slots in use, in the longest row.
    """

    def __init__(
        self, sizes: Transformer, rows: int, slots: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        shape = (rows, sizes.kv_heads, slots, sizes.head_size)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(sizes.layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(sizes.layers)]
        self.used = 0

    def __call__(self, layer: int, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
        """Attention of new tokens, which come behind those in use, to themselves and to what came before."""
        new, end = q_BTHD.shape[1], self.used + q_BTHD.shape[1]
        self.keys[layer][:, :, self.used : end] = k_BTKD.transpose(1, 2)
        self.values[layer][:, :, self.used : end] = v_BTKD.transpose(1, 2)
        mask = None
        if new > 1 and self.used:  # `is_causal` would line up the first query with the first key
            mask = torch.ones(new, end, dtype=torch.bool, device=q_BTHD.device).tril(self.used)
        return scaled_dot_product_attention(
            q_BTHD.transpose(1, 2),
            self.keys[layer][:, :, :end].to(q_BTHD.dtype),
            self.values[layer][:, :, :end].to(q_BTHD.dtype),
            attn_mask=mask,
            is_causal=new > 1 and not self.used,
            enable_gqa=q_BTHD.shape[2] != k_BTKD.shape[2],
        ).transpose(1, 2)
