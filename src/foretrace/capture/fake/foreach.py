"""Shortcuts for operators on long lists of tensors: what an optimizer does to all parameters at once.

DTensor works out the sharding of every tensor of such a list, for 300 parameters in seconds, where the answer is
plain: the operators below work element by element, so on operands that are sharded alike they work on the shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

_BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "clamp_max", "pow", "lerp", "addcmul")
_UNARY = ("abs", "neg", "sqrt", "rsqrt", "exp", "log", "reciprocal", "sign", "zero", "copy", "addcdiv", "floor")
_NAMES = frozenset(f"aten::_foreach_{name}{suffix}" for name in (*_BINARY, *_UNARY) for suffix in ("", "_"))
_FUSED = frozenset(f"aten::_fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad"))


def on_shards(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on lists of DTensors on their local tensors.

    Returns:
        What DTensor would return; NotImplemented where this is no such case.
    """
    name = func._schema.name
    if name not in _NAMES and name not in _FUSED:
        return NotImplemented
    lists = [argument for argument in (*args, *kwargs.values()) if _is_list(argument)]
    others = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, DTensor)]
    if (
        others
        or not lists
        or not isinstance(lists[0][0], DTensor)
        or not all(map(_is_alike, zip(*lists, strict=False)))
    ):
        return NotImplemented
    local_args = [_local(argument) for argument in args]
    result = func(*local_args, **{key: _local(value) for key, value in kwargs.items()})
    if result is None:
        return None
    return [DTensor(part, like._spec, requires_grad=False) for part, like in zip(result, lists[0], strict=True)]  # type: ignore[no-untyped-call]


def changes_nothing(name: str, args: Sequence[Any]) -> bool:
    """Whether an operator leaves fake tensors as they are: it writes in place, and no operand has a known value."""
    if not name.endswith("_") or (name not in _NAMES and name not in _FUSED):
        return False
    return all(isinstance(tensor, FakeTensor) and tensor.constant is None for tensor in _tensors(args))


def _tensors(args: Sequence[Any]) -> Iterator[Any]:
    for argument in args:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif _is_list(argument):
            yield from argument


def _is_list(argument: Any) -> bool:
    return isinstance(argument, list | tuple) and bool(argument) and isinstance(argument[0], torch.Tensor)


def _is_alike(operands: tuple[Any, ...]) -> bool:
    """Whether the operands of one element of the list are sharded alike; a plain scalar goes with everything."""
    specs = [operand._spec for operand in operands if isinstance(operand, DTensor)]
    if any(not isinstance(operand, DTensor) and operand.dim() for operand in operands):
        return False
    first = specs[0]
    return all(
        spec is first or (spec.placements == first.placements and spec.mesh == first.mesh and spec.shape == first.shape)
        for spec in specs
    ) and not any(placement.is_partial() for placement in first.placements)


def _local(argument: Any) -> Any:
    if _is_list(argument):
        return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in argument]
    return argument
