"""Operators on single elements: one operation for each element of the result, whatever the function is.

So a square root counts as an addition does: FLOPs of such operators say how much work there is, not how hard it is, and
AMD's TraceLens counts the same. ``alpha`` and the like are not counted. Operators on three tensors (``addcmul``,
``lerp``) count two for each element, a selection (``where``, ``clamp``) one.

Each operand is read once in its own size (broadcasting reads nothing twice) and the result is written in the type that
PyTorch's promotion gives. A number that was recorded as a tensor without dimensions is read as one element.
"""

from __future__ import annotations

from foretrace.machine.call import (
    Call,
    Formula,
    OperatorCost,
    broadcast,
    known_dtype,
    size_bytes,
    table_of,
    tensor_of,
    words,
)
from foretrace.machine.dtypes import is_floating, promote_groups
from foretrace.machine.operands import NONE, SCALAR, Operand, Unknown

_TO_FLOAT = words(
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh "
    "atanh sigmoid erf erfc erfinv special_erf logit lgamma digamma div true_divide atan2 xlogy log_sigmoid mish "
    "softplus selu elu celu"
)
_TO_BOOL = words(
    "eq ne lt le gt ge equal logical_and logical_or logical_xor logical_not isnan isinf isfinite isposinf isneginf "
    "isclose signbit"
)


def _result_dtype(call: Call, operands: list[Operand]) -> str:
    """What PyTorch's type promotion gives."""
    if call.name in _TO_BOOL:
        return "bool"
    tensors = [one for one in operands if one.is_tensor]
    groups = [
        [known_dtype(one) for one in tensors if one.shape],
        [known_dtype(one) for one in tensors if not one.shape],
        [],
    ]
    known = promote_groups(groups)
    if not is_floating(known):  # a number matters only to what is no floating-point tensor
        groups[2] = [_number_dtype(one) for one in operands if one.dtype == SCALAR]
    dtype = promote_groups(groups)
    if not dtype or (call.name == "abs" and dtype.startswith("complex")):
        raise Unknown
    if call.name == "square" and dtype == "bool":
        return "int64"  # the power of an integer 2
    return "float32" if call.name in _TO_FLOAT and not is_floating(dtype) else dtype


def _number_dtype(number: Operand) -> str:
    kinds = {bool: "bool", int: "int64", float: "float32"}
    if type(number.value) not in kinds:
        raise Unknown
    return kinds[type(number.value)]


def _pointwise(call: Call, count: int, per_element: int, category: str) -> OperatorCost:
    """An operator on the first ``count`` arguments; a tensor behind them is where ``out=`` writes to."""
    operands = [call.operand(at) for at in range(count)]
    tensors = [one for one in operands if one.is_tensor]
    if not tensors:
        raise Unknown
    if call.is_in_place:
        result = tensor_of(call.tensor(0).shape, known_dtype(call.tensor(0)))
    else:
        result = call.result(
            lambda: tensor_of(broadcast(one.shape for one in tensors), _result_dtype(call, operands)), out=count
        )
    return OperatorCost(per_element * result.elements, size_bytes(tensors), result.bytes, category)


def _unary(call: Call) -> OperatorCost:
    call.tensor(0)
    return _pointwise(call, 1, 1, "elementwise_unary")


def _binary(call: Call) -> OperatorCost:
    """A number as second operand makes a binary operator no unary one: `mul` stays what it is."""
    if call.operand(1).dtype == NONE:
        raise Unknown
    if call.name == "div" and call.operand(2).dtype == SCALAR and not is_floating(call.tensor(0).dtype):
        raise Unknown  # rounding decides whether the result is of integers
    return _pointwise(call, 2, 1, "elementwise_binary")


def _pow(call: Call) -> OperatorCost:
    """With a number as exponent it has one operand (as TraceLens classifies it)."""
    is_unary = call.operand(1).dtype == SCALAR or call.operand(0).dtype == SCALAR
    return _pointwise(call, 2, 1, "elementwise_unary" if is_unary else "elementwise_binary")


def _clamp(call: Call) -> OperatorCost:
    tensors = [at for at in range(3) if call.operand(at).is_tensor]
    return _pointwise(call, 3, 1, "elementwise_unary" if len(tensors) == 1 else "elementwise_ternary")


def _gradient(call: Call) -> OperatorCost:
    """Gradient of a function of one tensor: of the gradient of its result, and its result or argument."""
    call.tensor(1)
    return _pointwise(call, 2, 1, "elementwise_binary")


def _ternary(call: Call) -> OperatorCost:
    call.tensor(0)
    return _pointwise(call, 3, 2, "elementwise_ternary")


def _where(call: Call) -> OperatorCost:
    """One selection for each element; the condition does not take part in the type of the result."""
    condition, *others = (call.operand(at) for at in range(3))
    if NONE in (one.dtype for one in others):  # where(condition) finds places
        raise Unknown
    tensors = [one for one in (condition, *others) if one.is_tensor]
    result = call.result(lambda: tensor_of(broadcast(one.shape for one in tensors), _result_dtype(call, others)))
    return OperatorCost(result.elements, size_bytes(tensors), result.bytes, "elementwise_ternary")


def _masked_fill(call: Call) -> OperatorCost:
    given, mask = call.tensor(0), call.tensor(1)
    shape = given.shape if call.is_in_place else broadcast((given.shape, mask.shape))
    result = tensor_of(shape, known_dtype(given))
    value = call.operand(2)
    return OperatorCost(result.elements, size_bytes((given, mask, value)), result.bytes, "elementwise_ternary")


_UNARY = (
    "neg abs exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal square sin cos tan asin acos atan sinh cosh "
    "tanh asinh acosh atanh sigmoid relu relu6 gelu silu mish hardswish hardsigmoid hardtanh leaky_relu elu selu celu "
    "softplus erf erfc erfinv special_erf logit lgamma digamma sign sgn floor ceil round trunc frac bitwise_not "
    "logical_not isnan isinf isfinite isposinf isneginf signbit nan_to_num clamp_min clamp_max threshold log_sigmoid "
    "positive deg2rad rad2deg"
)
_BINARY = (
    "add sub mul div rsub true_divide floor_divide remainder fmod maximum minimum fmax fmin atan2 hypot copysign "
    "xlogy eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor isclose "
    "bitwise_left_shift bitwise_right_shift prelu _prelu_kernel __and__ __or__ __xor__"
)
_GRADIENTS = (
    "threshold_backward gelu_backward silu_backward tanh_backward sigmoid_backward elu_backward hardtanh_backward "
    "hardswish_backward hardsigmoid_backward leaky_relu_backward softplus_backward mish_backward logit_backward "
    "log_sigmoid_backward"
)
FORMULAS: dict[str, Formula] = {
    **table_of("", _unary, _UNARY),
    **table_of("", _binary, _BINARY),
    **table_of("", _gradient, _GRADIENTS),
    **table_of("", _ternary, "addcmul addcdiv lerp"),
    **table_of("", _clamp, "clamp clip"),
    "pow": ("", _pow),
    "where": ("", _where),
    "masked_fill": ("", _masked_fill),
}
