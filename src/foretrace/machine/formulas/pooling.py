"""Pooling and dropout.

Pooling counts one operation for each element of a window and each result, adaptive averages one for each element that
goes in. Dropout counts two for each element (comparison with a random number, product), and writes a mask of Booleans.
"""

from __future__ import annotations

from math import ceil, prod

from foretrace.machine.call import Call, Formula, OperatorCost, known_dtype, size_bytes, table_of, tensor_of
from foretrace.machine.formulas.copying import NOTHING
from foretrace.machine.operands import Operand, Unknown


def _pooled_shape(call: Call, given: Operand, kernel: tuple[int, ...]) -> tuple[int, ...]:
    count = len(kernel)
    stride = call.integers("stride", count, least=1) if call.value("stride", ()) != () else kernel
    padding = call.integers("padding", count, (0,))
    dilation = call.integers("dilation", count, (1,), least=1) if "dilation" in call.signature else (1,) * count
    is_ceil = bool(call.value("ceil_mode", False))
    sizes = []
    for at, size in enumerate(given.shape[-count:]):
        room = size + 2 * padding[at] - dilation[at] * (kernel[at] - 1) - 1
        length = (ceil(room / stride[at]) if is_ceil else room // stride[at]) + 1
        if is_ceil and (length - 1) * stride[at] >= size + padding[at]:
            length -= 1  # a window must begin within the tensor
        sizes.append(length)
    if min(sizes) < 0:
        raise Unknown
    return (*given.shape[:-count], *sizes)


def _kernel(call: Call) -> tuple[int, ...]:
    count = int(call.name.split("pool")[1][0])
    return call.integers("kernel_size", count, least=1)


def _pool(call: Call) -> OperatorCost:
    given, kernel = call.tensor("self"), _kernel(call)
    if len(given.shape) <= len(kernel):
        raise Unknown
    result = call.result(lambda: tensor_of(_pooled_shape(call, given, kernel), known_dtype(given)))
    indices = tensor_of(result.shape, "int64").bytes if call.name.endswith("_with_indices") else 0
    return OperatorCost(result.elements * prod(kernel), given.bytes, result.bytes + indices, "pooling")


def _pool_backward(call: Call) -> OperatorCost:
    """The gradient of each result goes to one element (maximum) or to all of its window (average)."""
    gradient, given, kernel = call.tensor("grad_output"), call.tensor("self"), _kernel(call)
    is_average = call.name.startswith("avg")
    flops = gradient.elements * (prod(kernel) if is_average else 1)
    read = [gradient] if is_average else [gradient, call.tensor("indices")]
    return OperatorCost(flops, size_bytes(read), tensor_of(given.shape, known_dtype(given)).bytes, "pooling")


def _adaptive(call: Call) -> OperatorCost:
    given = call.tensor(0)
    count = int(call.name.split("pool")[1][0])

    def computed() -> Operand:
        sizes = call.integers(1, count)
        return tensor_of((*given.shape[:-count], *sizes), known_dtype(given))

    return OperatorCost(given.elements, given.bytes, call.result(computed).bytes, "pooling")


def _adaptive_backward(call: Call) -> OperatorCost:
    gradient, given = call.tensor(0), call.tensor(1)
    return OperatorCost(given.elements, gradient.bytes, tensor_of(given.shape, known_dtype(given)).bytes, "pooling")


def _dropout(call: Call) -> OperatorCost:
    """``native_dropout(input, p, train)``; ``dropout`` does nothing outside of training."""
    given = call.tensor(0)
    if call.value(2, True) is False and call.name == "dropout":
        return NOTHING
    if call.value(2, True) is False:
        raise Unknown
    result = tensor_of(given.shape, known_dtype(given))
    return OperatorCost(2 * given.elements, given.bytes, result.bytes + given.elements, "dropout")


def _dropout_backward(call: Call) -> OperatorCost:
    gradient, mask = call.tensor(0), call.tensor(1)
    result = tensor_of(gradient.shape, known_dtype(gradient))
    return OperatorCost(2 * gradient.elements, size_bytes((gradient, mask)), result.bytes, "dropout")


_MAXIMUM = "self kernel_size stride padding dilation ceil_mode"
_AVERAGE = "self kernel_size stride padding ceil_mode"
FORMULAS: dict[str, Formula] = {
    **table_of(
        _MAXIMUM,
        _pool,
        "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices",
    ),
    **table_of(_AVERAGE, _pool, "avg_pool1d avg_pool2d avg_pool3d"),
    **table_of(
        f"grad_output {_MAXIMUM} indices",
        _pool_backward,
        "max_pool2d_with_indices_backward max_pool3d_with_indices_backward",
    ),
    **table_of("grad_output self kernel_size", _pool_backward, "avg_pool2d_backward avg_pool3d_backward"),
    **table_of(
        "",
        _adaptive,
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d",
    ),
    **table_of("", _adaptive_backward, "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward"),
    **table_of("", _dropout, "dropout native_dropout"),
    **table_of("", _dropout_backward, "native_dropout_backward"),
}
