"""Scaled dot-product attention: 2 B H (d_qk + d_v) operations for each pair of a query and a key.

The operations are those of the two products; softmax, scale and dropout are not counted, as in
`torch.utils.flop_counter` and AMD's TraceLens. Backward is five products (scores once more, and the gradients of
values, probabilities, queries and keys): 2 B H (3 d_qk + 2 d_v) for each pair, as in `torch.utils.flop_counter`.

A causal mask halves the work, as in TraceLens: N^2 / 2 pairs for N queries and keys (the flop counter of PyTorch counts
all of them). Where the numbers differ, `scaled_dot_product_attention` and its kind align the mask at the first query
(query i sees keys 0 to i), the flash-attention kernels below it and those of flash_attn at the last one.
`_scaled_dot_product_attention_math` computes all pairs.

Bytes are those of queries, keys, values, mask and result, each once, and of their gradients in the backward; the scores
stay on the chip. Saved statistics (log-sum-exp, seeds) are left out, as in TraceLens: less than 1 % for heads of
64 or more elements of 2 bytes.
"""

from __future__ import annotations

from foretrace.machine.call import Call, Formula, OperatorCost, size_bytes, table_of, tensor_of
from foretrace.machine.operands import Operand, Unknown

_FIRST, _LAST = "first", "last"  # the query at which a causal mask is aligned with the keys


def _sizes(query: Operand, key: Operand, value: Operand, heads_first: bool) -> tuple[int, int, int, int, int]:
    """Batch times heads, queries, keys, and the sizes of a head in keys and in values."""
    shapes = [tensor.shape for tensor in (query, key, value)]
    if any(len(shape) < 3 for shape in shapes) or (not heads_first and any(len(shape) != 4 for shape in shapes)):
        raise Unknown
    if not heads_first:
        shapes = [(batch, heads, length, size) for batch, length, heads, size in shapes]
    queries, keys, values = shapes
    batch = 1
    for size in queries[:-2]:
        batch *= size
    shared = queries[:-3] == keys[:-3] == values[:-3] and keys[-3:-1] == values[-3:-1] and queries[-1] == keys[-1]
    if not shared or not keys[-3] or queries[-3] % keys[-3]:  # heads of queries may share those of keys
        raise Unknown
    return batch, queries[-2], keys[-2], queries[-1], values[-1]


def _twice_pairs(queries: int, keys: int, is_causal: bool, aligned: str) -> int:
    """Twice the pairs of queries and keys that are computed."""
    if not is_causal:
        return 2 * queries * keys
    square = min(queries, keys) ** 2
    # Beyond the square, the mask hides everything (rows before it, columns after it) or nothing.
    all_visible = (queries - keys) * keys if aligned == _FIRST else (keys - queries) * queries
    return square + 2 * max(all_visible, 0)


def _cost(call: Call, is_causal: bool, aligned: str = _FIRST, heads_first: bool = True) -> OperatorCost:
    query, key, value = (call.tensor(name) for name in ("query", "key", "value"))
    batch, queries, keys, size, value_size = _sizes(query, key, value, heads_first)
    is_backward = "grad_out" in call.signature
    factor = 3 * size + 2 * value_size if is_backward else size + value_size
    flops = batch * factor * _twice_pairs(queries, keys, is_causal, aligned)
    read, written = [query, key, value], [tensor_of((*query.shape[:-1], value_size), query.dtype)]
    if "mask" in call.signature and (mask := call.optional("mask")):
        read.append(mask)
    if is_backward:
        read += [call.tensor("grad_out"), call.tensor("out")]
        written = [tensor_of(tensor.shape, tensor.dtype) for tensor in (query, key, value)]
    return OperatorCost(flops, size_bytes(read), size_bytes(written), "attention")


def _is_causal(call: Call) -> bool:
    """The flag; what stands in its place in another overload is refused."""
    if call.signature.index("is_causal") >= len(call.arguments):
        return False
    flag = call.value("is_causal")
    if not isinstance(flag, bool):
        raise Unknown
    return flag


def _scaled_dot_product(call: Call) -> OperatorCost:
    return _cost(call, _is_causal(call) and call.name != "_scaled_dot_product_attention_math")


def _flash(call: Call) -> OperatorCost:
    """Sequences side by side, (batch, length, heads, size); packed ones of unknown lengths are not told."""
    for name in ("cum_seq_q", "cum_seq_k", "seqused_k"):
        if name in call.signature and call.optional(name):
            raise Unknown
    for name in ("window_size_left", "window_size_right"):
        if name in call.signature and call.value(name, -1) not in (-1, None):
            raise Unknown
    return _cost(call, _is_causal(call), _LAST, heads_first=False)


def _efficient(call: Call) -> OperatorCost:
    if call.optional("cu_seqlens_q") or call.optional("cu_seqlens_k"):
        raise Unknown
    kind = call.value("custom_mask_type", 0)  # 0 none, 1 causal from the first query, 2 from the last
    if kind not in (0, 1, 2):
        raise Unknown
    return _cost(call, kind != 0, _LAST if kind == 2 else _FIRST, heads_first=False)


_SDPA, _FLASH = "_scaled_dot_product_", "flash_attn::_flash_attn_"
FORMULAS: dict[str, Formula] = {
    **table_of(
        "query key value mask dropout_p is_causal",
        _scaled_dot_product,
        f"scaled_dot_product_attention {_SDPA}attention_math {_SDPA}fused_attention_overrideable",
    ),
    f"{_SDPA}flash_attention": ("query key value dropout_p is_causal", _scaled_dot_product),
    f"{_SDPA}flash_attention_for_cpu": ("query key value dropout_p is_causal mask", _scaled_dot_product),
    **table_of(
        "query key value mask compute_log_sumexp dropout_p is_causal",
        _scaled_dot_product,
        f"{_SDPA}efficient_attention {_SDPA}cudnn_attention",
    ),
    f"{_SDPA}flash_attention_backward": (
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal",
        _scaled_dot_product,
    ),
    f"{_SDPA}flash_attention_for_cpu_backward": (
        "grad_out query key value out logsumexp dropout_p is_causal mask",
        _scaled_dot_product,
    ),
    f"{_SDPA}efficient_attention_backward": (
        "grad_out query key value mask out logsumexp philox_seed philox_offset dropout_p grad_input_mask is_causal",
        _scaled_dot_product,
    ),
    f"{_SDPA}cudnn_attention_backward": (
        "grad_out query key value out logsumexp philox_seed philox_offset mask cum_seq_q cum_seq_k max_q max_k "
        "dropout_p is_causal",
        _scaled_dot_product,
    ),
    "_flash_attention_forward": (
        "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask scale "
        "window_size_left window_size_right seqused_k",
        _flash,
    ),
    "_flash_attention_backward": (
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal rng_state unused "
        "scale window_size_left window_size_right",
        _flash,
    ),
    "_efficient_attention_forward": (
        "query key value mask cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p custom_mask_type",
        _efficient,
    ),
    "_efficient_attention_backward": (
        "grad_out query key value mask out cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k logsumexp dropout_p "
        "philox_seed philox_offset custom_mask_type",
        _efficient,
    ),
    f"{_FLASH}forward": (
        "query key value dropout_p softmax_scale is_causal window_size_left window_size_right",
        _flash,
    ),
    f"{_FLASH}backward": (
        "grad_out query key value out softmax_lse dq dk dv dropout_p softmax_scale is_causal window_size_left "
        "window_size_right",
        _flash,
    ),
}
