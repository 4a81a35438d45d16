"""Which kernel attention takes on an NVIDIA GPU: PyTorch chooses in C++, which cannot see the fake device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

Replace = Callable[[Any, str, Any], Any]
_HALF = (torch.float16, torch.bfloat16)
_MAX_FLASH_HEAD = 256
_KNOWN = (torch.Tensor, torch.nn.Parameter, DTensor)
_ALIGNMENT = 8  # elements of a head; flash and memory-efficient kernels pad to it


def patch(replace: Replace) -> None:
    """Let `scaled_dot_product_attention` on "cuda" call the operator that a GPU of compute capability 8 or 9 would."""
    old = functional.scaled_dot_product_attention

    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        rest = (attn_mask, dropout_p, is_causal)
        plain = query.device.type == "cuda" and query.dim() == key.dim() == value.dim() == 4
        if not (plain and _are_known(query, key, value)):
            return old(query, key, value, *rest, scale=scale, enable_gqa=enable_gqa)
        if _takes_flash(query, key, value, attn_mask):
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if enable_gqa:
            repeats = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
        if torch.backends.cuda.mem_efficient_sdp_enabled():  # type: ignore[no-untyped-call]
            return _memory_efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
        return old(query, key, value, *rest, scale=scale)

    replace(functional, "scaled_dot_product_attention", scaled_dot_product_attention)


def _are_known(*tensors: torch.Tensor) -> bool:
    """Whether all are plain, or the DTensors for which PyTorch knows how to shard the fused operators."""
    return all(type(tensor) in _KNOWN or isinstance(tensor, FakeTensor) for tensor in tensors)


def _takes_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    is_enabled: bool = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    heads = {query.shape[-1], key.shape[-1], value.shape[-1]}
    fits = len(heads) == 1 and heads.pop() <= _MAX_FLASH_HEAD
    return is_enabled and mask is None and fits and query.dtype in _HALF


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, causal: bool, scale: float | None
) -> torch.Tensor:
    head = query.shape[-1]
    scale = 1.0 / math.sqrt(head) if scale is None else scale
    if head % _ALIGNMENT:
        padding = (0, _ALIGNMENT - head % _ALIGNMENT)
        query, key, value = (functional.pad(tensor, padding) for tensor in (query, key, value))
    result = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scale)[
        0
    ]
    attended: torch.Tensor = result[..., :head] if head % _ALIGNMENT else result
    return attended


def _memory_efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    needs_sums = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    if mask is not None:
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, needs_sums, dropout, causal, scale=scale
    )[0]
    return result
