"""Calls of real PyTorch operators, as operands: PyTorch itself says what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foretrace.machine import Operand, OperatorCost, operator_cost

# Numbers of PyTorch's ScalarType, which is how an argument ``dtype`` is recorded; test_operands checks them.
NUMBERS = {torch.uint8: 0, torch.int64: 4, torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}


def operand(value: Any) -> Operand | list[Operand]:
    """One argument or result as an operand."""
    if isinstance(value, torch.Tensor):
        return Operand(tuple(value.shape), str(value.dtype).removeprefix("torch."), tuple(value.stride()))
    if isinstance(value, list | tuple) and any(isinstance(one, torch.Tensor) for one in value):
        return [operand(one) for one in value]  # type: ignore[misc]
    if isinstance(value, torch.dtype):
        return Operand.of(NUMBERS[value])
    if isinstance(value, torch.device | torch.layout | torch.memory_format):
        return Operand()
    return Operand.of(value)


def operands_of(overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Operand | list[Operand]]:
    """All arguments in the order of the schema, those left out with their default, as profilers record them."""
    found = []
    for at, argument in enumerate(overload._schema.arguments):
        if at < len(args):
            found.append(operand(args[at]))
        elif argument.name in kwargs:
            found.append(operand(kwargs[argument.name]))
        elif not argument.is_out:
            found.append(operand(argument.default_value))
    return found


def cost_of(overload: Any, *args: Any, with_outputs: bool = False, **kwargs: Any) -> tuple[OperatorCost | None, Any]:
    """The cost of a call, and its result."""
    operands = operands_of(overload, args, kwargs)
    result = overload(*args, **kwargs)
    results = result if isinstance(result, list | tuple) else [result]
    outputs = [operand(one) for one in results] if with_outputs else None
    return operator_cost("aten::" + overload._schema.name.split("::")[1], operands, outputs), result


def nbytes(value: Any) -> int:
    """Bytes of all tensors in it."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(nbytes, value)) if isinstance(value, list | tuple) else 0


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")
