"""Reductions: one operation for each element that goes in.

Two for norms (a power and a sum), three for variances (mean, square of the difference, sum). Read all, write what
is left.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from foretrace.machine.call import Call, Formula, OperatorCost, known_dtype, size_bytes, table_of, tensor_of, words
from foretrace.machine.dtypes import is_floating
from foretrace.machine.formulas.elementwise import FORMULAS as ELEMENTWISE
from foretrace.machine.operands import NONE, SCALAR, SCALAR_LIST, Operand, Unknown

# Where one number in the place of the dimensions is no dimension when nothing follows: it is a type, or ``unbiased``.
_NO_DIMENSION_ALONE = words("sum mean nansum nanmean prod var std var_mean std_mean norm linalg_vector_norm")
_OF_INDICES = words("argmax argmin count_nonzero")
_OF_BOOL = words("any all")
_SUMS = words("sum nansum prod")


def _dimensions(call: Call, at: int) -> tuple[int, ...] | None:
    """The dimensions that are reduced, None for all."""
    found = call.operand(at)
    if found.dtype == NONE:
        return None
    if found.dtype == SCALAR_LIST:
        dimensions = tuple(call.value(at))
        return dimensions if dimensions or call.name in _OF_BOOL else None
    if found.dtype != SCALAR:
        raise Unknown
    plain = [one for one in call.arguments if not (isinstance(one, Operand) and one.is_tensor)]
    if call.name in _NO_DIMENSION_ALONE and len(plain) <= at:
        return None
    return (call.value(at),)


def reduced_shape(shape: tuple[int, ...], dimensions: tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape that is left, with reduced dimensions of size 1."""
    if dimensions is None:
        return (1,) * len(shape)
    if not shape:
        return ()
    if not all(type(at) is int and -len(shape) <= at < len(shape) for at in dimensions):
        raise Unknown
    reduced = {at % len(shape) for at in dimensions}
    return tuple(1 if at in reduced else size for at, size in enumerate(shape))


def _result_dtype(call: Call, given: Operand, at: int) -> str:
    if call.name in _OF_INDICES:
        return "int64"
    if call.name in _OF_BOOL:
        return "uint8" if given.dtype == "uint8" else "bool"
    if given.dtype.startswith("complex") and call.name not in ("sum", "mean", "prod"):
        raise Unknown
    # The type, if one is named, stands behind dimensions and ``keepdim`` or in place of them.
    plain = [one for one in call.arguments if not (isinstance(one, Operand) and one.is_tensor)]
    if call.name in _SUMS | {"mean", "linalg_vector_norm", "nanmean"}:
        place = at if len(plain) <= at and call.operand(at).dtype == SCALAR else at + 2
        named = call.dtype(place, "") if not call.operand(place).is_tensor else ""
        if named:
            return named
    if not is_floating(known_dtype(given)) and call.name in _SUMS | {"logsumexp"}:
        return "int64" if call.name in _SUMS else "float32"
    return known_dtype(given)


def _reduction(call: Call, at: int = 1, per_element: int = 1) -> OperatorCost:
    given = call.tensor(0)
    shape = reduced_shape(given.shape, _dimensions(call, at)) if not call.outputs else ()
    result = call.result(lambda: tensor_of(shape, _result_dtype(call, given, at)))
    return OperatorCost(per_element * given.elements, given.bytes, result.bytes, "reduction")


def _two_results(call: Call, per_element: int = 1) -> OperatorCost:
    """Mean and variance, or smallest and largest."""
    given = call.tensor(0)
    shape = reduced_shape(given.shape, _dimensions(call, 1))
    results = call.outputs or (tensor_of(shape, known_dtype(given)),) * 2
    return OperatorCost(per_element * given.elements, given.bytes, size_bytes(results), "reduction")


def _extreme(call: Call) -> OperatorCost:
    """``max`` and ``min``: of all elements, along a dimension (with places), or of two tensors."""
    given, second = call.tensor(0), call.operand(1)
    if second.is_tensor:
        return ELEMENTWISE["maximum"][1](call)
    shape = reduced_shape(given.shape, _dimensions(call, 1))
    results = [tensor_of(shape, known_dtype(given))]
    if second.dtype != NONE:
        results.append(tensor_of(shape, "int64"))
    return OperatorCost(given.elements, given.bytes, size_bytes(call.outputs or results), "reduction")


def _scan(call: Call) -> OperatorCost:
    """``cumsum`` and ``cumprod``: as many results as elements."""
    given = call.tensor(0)

    def computed() -> Operand:
        dtype = call.dtype(2, "") if not call.is_in_place and not call.operand(2).is_tensor else ""
        dtype = dtype or (known_dtype(given) if is_floating(given.dtype) or call.is_in_place else "int64")
        return tensor_of(given.shape, dtype)

    return OperatorCost(given.elements, given.bytes, call.result(computed).bytes, "scan")


def _table(formula: Callable[..., OperatorCost], names: str, **settings: int) -> dict[str, Formula]:
    return table_of("", partial(formula, **settings), names)


FORMULAS: dict[str, Formula] = {
    **_table(_reduction, "sum mean nansum nanmean prod amax amin any all argmax argmin count_nonzero"),
    **_table(_reduction, "logsumexp", per_element=3),
    **_table(_reduction, "var std", per_element=3),
    **_table(_reduction, "norm linalg_vector_norm", at=2, per_element=2),
    **_table(_two_results, "var_mean std_mean", per_element=3),
    **_table(_extreme, "max min"),
    **_table(_scan, "cumsum cumprod"),
}
