"""Products of matrices and vectors: 2 M N K operations.

A matrix that is added counts one operation for each element of the result. `torch.utils.flop_counter` leaves it out;
AMD's TraceLens counts it, and both agree on the rest. With ``beta`` 0 it is neither read nor
counted; where ``beta`` was not recorded, what is broadcast (a bias) is taken as added, all else is unknown. A product
of complex numbers counts as one of real numbers does.
"""

from __future__ import annotations

from math import prod

from foretrace.machine.call import Call, Formula, OperatorCost, broadcast, known_dtype, size_bytes, table_of, tensor_of
from foretrace.machine.operands import SCALAR, Operand, Unknown


def _cost(flops: int, read: list[Operand | None], result: Operand) -> OperatorCost:
    return OperatorCost(flops, size_bytes(read), result.bytes, "gemm")


def _product(one: Operand, other: Operand) -> tuple[tuple[int, ...], int]:
    """Shape of ``matmul(one, other)`` and its operations."""
    if not one.shape or not other.shape:
        raise Unknown
    left = one.shape if len(one.shape) > 1 else (1, *one.shape)
    right = other.shape if len(other.shape) > 1 else (*other.shape, 1)
    if left[-1] != right[-2]:
        raise Unknown
    shape = (*broadcast((left[:-2], right[:-2])), left[-2], right[-1])
    flops = 2 * prod(shape) * left[-1]
    kept = shape[:-2] + shape[-2:-1] * (len(one.shape) > 1) + shape[-1:] * (len(other.shape) > 1)
    return kept, flops


def _matmul(call: Call) -> OperatorCost:
    one, other = call.tensor(0), call.tensor(1)
    dimensions = {"mm": (2, 2), "bmm": (3, 3), "mv": (2, 1), "dot": (1, 1), "vdot": (1, 1), "_int_mm": (2, 2)}
    if (len(one.shape), len(other.shape)) != dimensions.get(call.name, (len(one.shape), len(other.shape))):
        raise Unknown
    shape, flops = _product(one, other)
    dtype = "int32" if call.name == "_int_mm" else one.dtype
    if call.operand(2).dtype == SCALAR:  # the overload with a type of its own for the result
        dtype = call.dtype(2, dtype)
    return _cost(flops, [one, other], call.result(lambda: tensor_of(shape, dtype), out=2))


def _added_product(call: Call) -> OperatorCost:
    """``beta * self + alpha * (one @ other)``."""
    added, one, other = call.tensor("self"), call.tensor("one"), call.tensor("other")
    shape, flops = _product(one, other)
    dtype, first_factor = one.dtype, 3
    if len(call.arguments) >= 6 and call.operand(5).dtype == SCALAR and call.name != "_addmm_activation":
        dtype, first_factor = call.dtype(3, dtype), 4  # the overload with a type of its own for the result
    if call.name == "addbmm":
        shape = shape[1:]  # products of the batch are summed up
    is_added = _is_added(call.operand(first_factor), added, prod(shape))
    flops += prod(shape) * is_added
    result = call.result(lambda: tensor_of(shape, dtype), out=first_factor)
    return _cost(flops, [added if is_added else None, one, other], result)


def _is_added(factor: Operand, added: Operand, elements: int) -> bool:
    """Whether ``beta`` is not 0; one that was not recorded is 1 if what it stands before is a bias (is broadcast)."""
    if factor.value is not None or factor.dtype != SCALAR:
        return bool(factor.value != 0)
    if added.elements >= elements:
        raise Unknown
    return True


def _linear(call: Call) -> OperatorCost:
    """``input @ weight.T + bias``."""
    given, weight, bias = call.tensor("input"), call.tensor("weight"), call.optional("bias")
    if not given.shape or len(weight.shape) not in (1, 2) or weight.shape[-1] != given.shape[-1]:
        raise Unknown
    shape = given.shape[:-1] + weight.shape[:-1]
    flops = 2 * prod(shape) * given.shape[-1] + (prod(shape) if bias else 0)
    result = call.result(lambda: tensor_of(shape, given.dtype), out=3)
    return _cost(flops, [given, weight, bias], result)


def _outer(call: Call) -> OperatorCost:
    """One multiplication for each element; ``addr`` adds a matrix: two more for its factor and the sum."""
    added = call.tensor(0) if call.name == "addr" else None
    one, other = (call.tensor(at, 1) for at in ((1, 2) if added else (0, 1)))
    shape = (one.elements, other.elements)
    flops = prod(shape) * (2 if added else 1)
    return _cost(flops, [added, one, other], call.result(lambda: tensor_of(shape, one.dtype)))


def _scaled(call: Call) -> OperatorCost:
    """8-bit product with scales; scaling the result is part of the kernel and not counted."""
    one, other = call.tensor("self", 2), call.tensor("mat2", 2)
    scales, bias = [call.tensor("scale_a"), call.tensor("scale_b")], call.optional("bias")
    shape, flops = _product(one, other)
    flops += prod(shape) if bias else 0
    result = call.result(lambda: tensor_of(shape, call.dtype("out_dtype", one.dtype)))
    return _cost(flops, [one, other, *scales, bias], result)


def _grouped(call: Call) -> OperatorCost:
    """Rows of a matrix, in groups, each group by a matrix of its own (experts).

    Every row is multiplied once, wherever the groups begin, so offsets need not be known.
    """
    one, other = call.tensor("self"), call.tensor("mat2", 3)
    if len(one.shape) == 3 and one.shape[0] != other.shape[0]:
        raise Unknown
    if len(one.shape) not in (2, 3) or one.shape[-1] != other.shape[1] or call.optional("bias"):
        raise Unknown
    shape = (*one.shape[:-1], other.shape[2])
    scales = [call.optional(name) for name in ("scale_a", "scale_b") if name in call.signature]
    result = call.result(lambda: tensor_of(shape, call.dtype("out_dtype", known_dtype(one))))
    return _cost(2 * prod(shape) * one.shape[-1], [one, other, *scales, call.optional("offs")], result)


FORMULAS: dict[str, Formula] = {
    **table_of("", _matmul, "mm bmm mv dot vdot matmul _int_mm"),
    **table_of("self one other", _added_product, "addmm baddbmm addbmm addmv _addmm_activation"),
    **table_of("input weight bias", _linear, "linear vllm::rocm_unquantized_gemm"),
    **table_of("", _outer, "outer ger addr"),
    "_scaled_mm": ("self mat2 scale_a scale_b bias scale_result out_dtype", _scaled),
    "_grouped_mm": ("self mat2 offs bias out_dtype", _grouped),
    "_scaled_grouped_mm": ("self mat2 scale_a scale_b offs bias scale_result out_dtype", _grouped),
}
