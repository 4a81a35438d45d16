"""FLOPs and bytes of operators, as `foretrace.machine.operator_cost` counts them from their shapes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from foretrace.machine import Operand, operator_cost


@dataclass(frozen=True)
class Cost:
    """FLOPs, and bytes read and written."""

    flops: int = 0
    bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


def tensor(*shape: int, dtype: str) -> Operand:
    """A tensor as an argument."""
    return Operand(shape, dtype)


@cache
def cost(name: str, *operands: Operand) -> Cost:
    """The cost of a PyTorch operator.

    Args:
        name: in the namespace ``aten``.
        operands: its arguments in the order of its schema.

    Raises:
        ValueError: if the cost of such a call is not known, or it is beyond 2^62 FLOPs or bytes.
    """
    found = operator_cost(f"aten::{name}", operands)
    if found is None:
        shapes = " and ".join(str(operand.shape) for operand in operands if operand.is_tensor)
        raise ValueError(f"aten::{name} of {shapes} has no cost that is known, or one beyond 2^62 FLOPs or bytes")
    return Cost(found.flops, found.moved_bytes)


def product(rows: int, inner: int, columns: int, dtype: str) -> Cost:
    """A matrix of ``rows`` x ``inner`` times one of ``inner`` x ``columns``: 2 rows inner columns operations."""
    return cost("mm", tensor(rows, inner, dtype=dtype), tensor(inner, columns, dtype=dtype))


def products(batch: int, rows: int, inner: int, columns: int, dtype: str) -> Cost:
    """``batch`` of such products."""
    return cost("bmm", tensor(batch, rows, inner, dtype=dtype), tensor(batch, inner, columns, dtype=dtype))


def elementwise(name: str, count: int, elements: int, dtype: str) -> Cost:
    """An operator on ``count`` tensors of equally many elements."""
    return cost(name, *[tensor(elements, dtype=dtype)] * count)
