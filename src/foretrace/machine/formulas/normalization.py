"""Normalizations.

With mean and variance: 5 operations for each element (sum; square and sum; scale and shift, into which weight and bias
are folded) and 6 for each channel (both divisions, epsilon, reciprocal root, scale, shift). In bytes: the tensor in and
out, and vectors with one element a channel.

This is how AMD's TraceLens counts, and its rows decide. Batch normalization in training has 6 such vectors: weight,
bias, and running mean and variance read and written. TraceLens charges the same 6 for `layer_norm`, where only weight
and bias are vectors over channels (512, say) and the statistics are one number a row: 4 vectors too many, against 8
bytes a row that are really written. So does this file, to be comparable; for a tensor of R rows this is 2 parts in R
too much, 1 % at 200 rows. Group normalization and RMS norm have no such reference and are charged what they move.

RMS norm: 4 operations for each element (square and sum, scale, weight; 3 without a weight) and 3 a row.

Backward, for each element: 9 in batch normalization (normalized value 2, sum of the gradient 1 and of its product 2,
gradient 4); 13 in layer and group normalization (two sums more over each row, of the gradient times the weight), 9
there without a weight; 9 in RMS norm, 6 without a weight. Statistics saved for the backward (one number a row or
channel) are counted nowhere.
"""

from __future__ import annotations

from math import prod

from foretrace.machine.call import Call, Formula, OperatorCost, known_dtype, size_bytes, table_of, tensor_of
from foretrace.machine.operands import Operand, Unknown


def _cost(flops: int, read: list[Operand | None], written: list[Operand | None]) -> OperatorCost:
    dense = [tensor_of(one.shape, one.dtype) for one in written if one is not None]
    return OperatorCost(flops, size_bytes(read), size_bytes(dense), "normalization")


def _channels_of_rows(call: Call, given: Operand, weight: Operand | None) -> int:
    """Elements of a row that is normalized: of the weight, else of ``normalized_shape``."""
    if weight is not None:
        return weight.elements
    shape = call.sizes("normalized_shape")
    if shape != given.shape[len(given.shape) - len(shape) :]:
        raise Unknown
    return prod(shape)


def _layer_norm(call: Call) -> OperatorCost:
    given, weight, bias = call.tensor("input"), call.optional("weight"), call.optional("bias")
    channels = _channels_of_rows(call, given, weight)
    statistics = [tensor_of((channels,), known_dtype(given))] * 2
    flops = 5 * given.elements + 6 * channels
    return _cost(flops, [given, weight, bias, *statistics], [given, *statistics])


def _batch_norm(call: Call) -> OperatorCost:
    given, weight, bias = call.tensor("input"), call.optional("weight"), call.optional("bias")
    running = [call.optional("running_mean"), call.optional("running_var")]
    if len(given.shape) < 2:
        raise Unknown
    # Without ``training`` among the arguments, the name tells: statistics are made and updated.
    is_training = bool(call.value("training")) if "training" in call.signature else True
    per_element, per_channel = (5, 6) if is_training else (2, 4)
    flops = per_element * given.elements + per_channel * given.shape[1]
    return _cost(flops, [given, weight, bias, *running], [given, *(running if is_training else [])])


def _group_norm(call: Call) -> OperatorCost:
    given, weight, bias = call.tensor("input"), call.optional("weight"), call.optional("bias")
    if len(given.shape) < 2:
        raise Unknown
    return _cost(5 * given.elements + 6 * given.shape[1], [given, weight, bias], [given])


def _rms_cost(
    given: Operand, weight: Operand | None, channels: int, extra: int = 0
) -> tuple[int, list[Operand | None]]:
    rows = given.elements // channels if channels else 0
    return (3 + extra + (weight is not None)) * given.elements + 3 * rows, [given, weight]


def _rms_norm(call: Call) -> OperatorCost:
    given, weight = call.tensor("input"), call.optional("weight")
    flops, read = _rms_cost(given, weight, _channels_of_rows(call, given, weight))
    return _cost(flops, read, [given])


def _rms_norm_into(call: Call) -> OperatorCost:
    """vLLM's kernel that is given its result as first argument."""
    given, weight = call.tensor("input"), call.tensor("weight")
    flops, read = _rms_cost(given, weight, weight.elements)
    return _cost(flops, read, [call.tensor("result")])


def _added_rms_norm(call: Call) -> OperatorCost:
    """vLLM's kernel that adds ``input`` to ``residual`` first, and writes the sum and its norm over both."""
    given, residual, weight = call.tensor("input"), call.tensor("residual"), call.tensor("weight")
    flops, read = _rms_cost(given, weight, weight.elements, extra=1)
    return _cost(flops, [*read, residual], [given, residual])


def _mask(call: Call, count: int) -> list[bool]:
    """Which gradients are asked for."""
    if "output_mask" not in call.signature:
        return [True] * count
    found = call.value("output_mask")
    if not isinstance(found, list | tuple) or len(found) != count:
        raise Unknown
    return [bool(one) for one in found]


def _backward(call: Call, with_weight: int, without: int) -> OperatorCost:
    gradient, given, weight = call.tensor("grad_out"), call.tensor("input"), call.optional("weight")
    if "output_mask" in call.signature:
        wanted = _mask(call, 2 if "rms" in call.name else 3)
    else:
        wanted = [True, weight is not None, weight is not None]
    written = [tensor for tensor, is_wanted in zip((given, weight, weight), wanted, strict=False) if is_wanted]
    flops = (with_weight if weight is not None else without) * given.elements
    return _cost(flops, [gradient, given, weight], written)


def _backward_of_rows(call: Call) -> OperatorCost:
    return _backward(call, 13, 9)


def _backward_of_channels(call: Call) -> OperatorCost:
    return _backward(call, 9, 9)


def _backward_of_rms(call: Call) -> OperatorCost:
    return _backward(call, 9, 6)


_BATCH = "input weight bias running_mean running_var training"
_BATCH_BACKWARD = "grad_out input weight running_mean running_var save_mean save_invstd train eps output_mask"
FORMULAS: dict[str, Formula] = {
    **table_of("input normalized_shape weight bias", _layer_norm, "layer_norm native_layer_norm"),
    **table_of(
        _BATCH,
        _batch_norm,
        "batch_norm native_batch_norm _native_batch_norm_legit cudnn_batch_norm miopen_batch_norm "
        "_batch_norm_impl_index",
    ),
    "_batch_norm_with_update": ("input weight bias running_mean running_var", _batch_norm),
    "group_norm": ("input num_groups weight bias", _group_norm),
    "native_group_norm": ("input weight bias", _group_norm),
    **table_of("input normalized_shape weight", _rms_norm, "rms_norm _fused_rms_norm"),
    "_C::rms_norm": ("result input weight", _rms_norm_into),
    "_C::fused_add_rms_norm": ("input residual weight", _added_rms_norm),
    "native_layer_norm_backward": (
        "grad_out input normalized_shape mean rstd weight bias output_mask",
        _backward_of_rows,
    ),
    "native_group_norm_backward": (
        "grad_out input mean rstd weight N C HxW group output_mask",
        _backward_of_rows,
    ),
    "_fused_rms_norm_backward": ("grad_out input normalized_shape rstd weight output_mask", _backward_of_rms),
    "native_batch_norm_backward": (_BATCH_BACKWARD, _backward_of_channels),
    **table_of("input grad_out weight", _backward_of_channels, "cudnn_batch_norm_backward miopen_batch_norm_backward"),
}
