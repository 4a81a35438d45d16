"""Hugging Face's names and layout of weights, and Meta's.

Rotary embedding turns pairs of elements: Meta's weights have a pair side by side, Hugging Face's have its second half
``head_size / 2`` further on. Rows of the query and key projections are reordered accordingly, head by head: the keys by
their own number of heads.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from foretrace.llama.config import LlamaConfig

_TOP = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
}


def hf_name(name: str) -> str:
    """Hugging Face's name of a weight that Meta calls ``name``."""
    if name in _TOP:
        return _TOP[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{_IN_LAYER[rest]}"


def to_hf(name: str, weight: Tensor, config: LlamaConfig) -> Tensor:
    """A weight in Hugging Face's layout.

    Args:
        name: Meta's.
        weight: in Meta's layout; shape ``(out, in)``, or ``(channels,)`` of norms. The result has the same shape.
    """
    return _reordered(name, weight, config, lambda rows: rows.unflatten(1, (-1, 2)).transpose(1, 2))


def from_hf(name: str, weight: Tensor, config: LlamaConfig) -> Tensor:
    """A weight in Meta's layout; the inverse of `to_hf`."""
    return _reordered(name, weight, config, lambda rows: rows.unflatten(1, (2, -1)).transpose(1, 2))


def _reordered(name: str, weight: Tensor, config: LlamaConfig, order: Callable[[Tensor], Tensor]) -> Tensor:
    heads = {"wq": config.sizes.heads, "wk": config.sizes.kv_heads}.get(name.removesuffix(".weight").rpartition(".")[2])
    if heads is None:
        return weight
    return order(weight.unflatten(0, (heads, -1))).reshape(weight.shape)
