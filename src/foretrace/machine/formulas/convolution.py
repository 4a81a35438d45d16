"""Convolutions: 2 operations for each element of the result and each weight that it meets.

That is 2 |result| |weight| / C_out, and 2 |input| |weight| / C_in for a transposed one (its own C_in), whatever stride,
padding and dilation are: they only say how large the result is. Elements that padding adds count as if they were there,
as in `torch.utils.flop_counter`. A bias counts one operation for each element of the result, as in a GEMM.
Each gradient (of the input, of the weight) is as many operations as the forward; that of the bias is one for each
element. (`torch.utils.flop_counter` counts the gradient of a grouped weight too often: by the number of groups.)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from foretrace.machine.call import Call, Formula, OperatorCost, size_bytes, table_of, tensor_of
from foretrace.machine.operands import Operand, Unknown


def _flops(given: Operand, weight: Operand, result: Sequence[int], is_transposed: bool) -> int:
    if not weight.shape[0]:
        return 0
    positions = given.elements if is_transposed else prod(result)
    return 2 * positions * weight.elements // weight.shape[0]


def _padding(call: Call, kernel: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """Padding of both sides together, for each dimension."""
    found = call.value("padding", 0)
    if found == "valid":
        return [0] * len(kernel)
    if found == "same":
        return [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
    return [2 * size for size in call.integers("padding", len(kernel), (0,))]


def _result_shape(call: Call, given: Operand, weight: Operand, is_transposed: bool) -> tuple[int, ...]:
    kernel = weight.shape[2:]
    count = len(kernel)
    has_batch = len(given.shape) == count + 2
    dilation = call.integers("dilation", count, (1,), least=1)
    stride = call.integers("stride", count, (1,), least=1)
    padding = _padding(call, kernel, dilation)
    groups = call.value("groups", 1)
    extra = call.integers("output_padding", count, (0,)) if is_transposed else (0,) * count
    sizes, spatial = [], given.shape[-count:]
    for at, size in enumerate(spatial):
        reach = dilation[at] * (kernel[at] - 1) + 1
        if is_transposed:
            sizes.append((size - 1) * stride[at] - padding[at] + reach + extra[at])
        else:
            sizes.append((size + padding[at] - reach) // stride[at] + 1)
    channels = weight.shape[1] * groups if is_transposed else weight.shape[0]
    if min(sizes) < 0 or given.shape[-count - 1] != (weight.shape[0] if is_transposed else weight.shape[1] * groups):
        raise Unknown
    return (*given.shape[:1], channels, *sizes) if has_batch else (channels, *sizes)


def _is_transposed(call: Call) -> bool:
    if "transpose" in call.name:
        return True
    return bool(call.value("transposed", False)) if "transposed" in call.signature else False


def _checked(given: Operand, weight: Operand) -> None:
    if len(weight.shape) < 3 or len(given.shape) not in (len(weight.shape), len(weight.shape) - 1):
        raise Unknown


def _forward(call: Call) -> OperatorCost:
    given, weight = call.tensor("input"), call.tensor("weight")
    bias = call.optional("bias") if "bias" in call.signature else None
    _checked(given, weight)
    is_transposed = _is_transposed(call)
    result = call.result(lambda: tensor_of(_result_shape(call, given, weight, is_transposed), given.dtype))
    flops = _flops(given, weight, result.shape, is_transposed) + (result.elements if bias else 0)
    return OperatorCost(flops, size_bytes((given, weight, bias)), result.bytes, "convolution")


def _backward(call: Call) -> OperatorCost:
    gradient, given, weight = call.tensor("grad_output"), call.tensor("input"), call.tensor("weight")
    _checked(given, weight)
    mask = call.value("output_mask")
    if not isinstance(mask, list | tuple) or len(mask) not in (2, 3):
        raise Unknown
    of_input, of_weight, of_bias = (*map(bool, mask), False)[:3]
    one = _flops(given, weight, gradient.shape, _is_transposed(call))
    channels = gradient.shape[-len(weight.shape) + 1]
    flops = one * (of_input + of_weight) + gradient.elements * of_bias
    written = [given] * of_input + [weight] * of_weight + [tensor_of((channels,), weight.dtype)] * of_bias
    read = size_bytes([gradient] + [weight] * of_input + [given] * of_weight)
    dense = (tensor_of(tensor.shape, tensor.dtype) for tensor in written)
    return OperatorCost(flops, read, size_bytes(dense), "convolution")


_COMMON = "input weight bias stride padding dilation"
_OF_LIBRARY = "padding stride dilation groups"
FORMULAS: dict[str, Formula] = {
    **table_of(
        f"{_COMMON} transposed output_padding groups",
        _forward,
        "convolution _convolution convolution_overrideable",
    ),
    **table_of(f"{_COMMON} groups", _forward, "conv1d conv2d conv3d"),
    **table_of(
        "input weight bias stride padding output_padding groups dilation",
        _forward,
        "conv_transpose1d conv_transpose2d conv_transpose3d",
    ),
    "cudnn_convolution": (f"input weight {_OF_LIBRARY}", _forward),
    "cudnn_convolution_transpose": ("input weight padding output_padding stride dilation groups", _forward),
    "cudnn_convolution_relu": (f"{_COMMON} groups", _forward),
    **table_of(f"input weight bias {_OF_LIBRARY}", _forward, "miopen_convolution mkldnn_convolution"),
    "miopen_depthwise_convolution": (f"input weight bias {_OF_LIBRARY}", _forward),
    **table_of(
        "grad_output input weight bias_sizes stride padding dilation transposed output_padding groups output_mask",
        _backward,
        "convolution_backward",
    ),
    "convolution_backward_overrideable": (
        "grad_output input weight stride padding dilation transposed output_padding groups output_mask",
        _backward,
    ),
    "cudnn_convolution_backward": (
        "input grad_output weight padding stride dilation groups benchmark deterministic allow_tf32 output_mask",
        _backward,
    ),
}
