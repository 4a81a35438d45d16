"""FLOPs and bytes of an operator from its name and what it is called with: the one owner of that knowledge."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from foretrace.machine.arities import arities
from foretrace.machine.call import Call, Formula, OperatorCost
from foretrace.machine.formulas import (
    attention,
    collective,
    convolution,
    copying,
    elementwise,
    gemm,
    lookup,
    loss,
    normalization,
    optimizer,
    pooling,
    reduction,
    softmax,
)
from foretrace.machine.operands import Argument, Operand, Unknown

_FAMILIES = (
    attention,
    collective,
    convolution,
    copying,
    elementwise,
    gemm,
    lookup,
    loss,
    normalization,
    optimizer,
    pooling,
    reduction,
    softmax,
)
_LARGEST = 2**62  # what no real operator reaches: sizes out of a damaged file


@cache
def formulas() -> dict[str, Formula]:
    """All formulas by the operator's name, as `resolve` gives it."""
    return {name: formula for family in _FAMILIES for name, formula in family.FORMULAS.items()}


@cache
def resolve(name: str) -> tuple[str, bool] | None:
    """The name under which a formula stands, and whether the operator works in place; None for no formula."""
    base = name.removeprefix("aten::")
    if base == name and "::" not in name and ":" not in name and name != "record_param_comms":
        return None  # an annotation or a function of somebody's own, whatever it is called
    base = base.split(".", 1)[0]
    if base in formulas():
        return base, False
    if base.endswith("_") and not base.endswith("__") and base[:-1] in formulas():
        return base[:-1], True
    return None


def operator_cost(
    name: str, operands: Sequence[Argument], outputs: Sequence[Argument] | None = None
) -> OperatorCost | None:
    """What an operator computes and moves.

    The cost is that of the operator *as named*, with all that it calls: of ``aten::linear`` and the ``aten::addmm``
    below it, count one.

    Args:
        name: with namespace, such as ``"aten::addmm"``; an overload (``.out``) may follow.
        operands: arguments in the order of the operator's schema, keyword arguments too; `Operand.of` makes one of
            a number, and a list of tensors is a list of operands.
        outputs: the results, where they were recorded; they take the place of computed ones.

    Returns:
        The cost; None where the operator is not known, or its cost does not follow from what is given. It is never
        guessed.
    """
    found = resolve(name)
    if found is None:
        return None
    base, is_in_place = found
    signature, formula = formulas()[base]
    own = _own_arguments(base, operands)
    if own is None:
        return None
    call = Call(base, own, _tensors(outputs or ()), is_in_place, tuple(signature.split()))
    try:
        cost = formula(call)
    except Unknown:
        return None
    return cost if max(cost.flops, cost.read_bytes, cost.written_bytes) < _LARGEST else None


def _own_arguments(name: str, operands: Sequence[Argument]) -> Sequence[Argument] | None:
    """The last arguments where a whole stack was recorded, None where it cannot be told how many."""
    own, most = arities().get(name, ((), len(operands)))
    if len(operands) <= most:
        return operands
    return operands[-own[0] :] if len(own) == 1 else None


def _tensors(outputs: Sequence[Argument]) -> tuple[Operand, ...]:
    flat = (one for output in outputs for one in ([output] if isinstance(output, Operand) else output))
    return tuple(one for one in flat if one.is_tensor)
