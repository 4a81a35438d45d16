"""What an operator is called with: tensors by shape and type, and plain values, read from the texts in a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from math import prod
from typing import Any

import msgspec

from foretrace.machine.dtypes import element_bytes, normalize_dtype

NONE, SCALAR, SCALAR_LIST, UNKNOWN_DTYPE = "none", "scalar", "scalar list", "unknown"


class Unknown(Exception):
    """Raised within a formula when the cost cannot be told."""


@dataclass(frozen=True)
class Operand:
    """One argument of an operator.

    Attributes:
        shape: of a tensor; ``()`` for one without dimensions and for plain values.
        dtype: PyTorch's name of the element type, such as ``"bfloat16"``; for what is no tensor ``SCALAR`` (a number,
            Boolean or text), ``SCALAR_LIST`` or ``NONE``; ``UNKNOWN_DTYPE`` for a tensor whose type was not recorded.
        strides: in elements, None where they were not recorded.
        value: of a plain value; None where it was not recorded.
    """

    shape: tuple[int, ...] = ()
    dtype: str = NONE
    strides: tuple[int, ...] | None = None
    value: Any = None

    @staticmethod
    def of(value: Any) -> Operand:
        """A plain value: None, a number, a text, or a list of numbers."""
        if value is None:
            return Operand()
        if isinstance(value, list | tuple):
            return Operand(dtype=SCALAR_LIST, value=tuple(value))
        return Operand(dtype=SCALAR, value=value)

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor, of known type or not."""
        return self.dtype not in (NONE, SCALAR, SCALAR_LIST)

    @cached_property
    def elements(self) -> int:
        """Elements as the operator sees them."""
        return prod(self.shape)

    @cached_property
    def stored_elements(self) -> int:
        """Elements that differ in memory: an expanded dimension (stride 0) is stored once, overlapping windows too."""
        if self.strides is None or len(self.strides) != len(self.shape) or not self.elements:
            return self.elements
        sizes = [(size, stride) for size, stride in zip(self.shape, self.strides, strict=True) if stride]
        reach = 1 + sum((size - 1) * abs(stride) for size, stride in sizes)
        return min(prod(size for size, _ in sizes), reach)

    @cached_property
    def bytes(self) -> int:
        """Bytes to move all of a tensor once; 0 for a plain value.

        Raises:
            Unknown: if its type is not known.
        """
        if not self.is_tensor:
            return 0
        if self.dtype == UNKNOWN_DTYPE:
            raise Unknown
        return self.stored_elements * element_bytes(self.dtype)


# A list of tensors stands for itself; an empty one means that its tensors were not recorded.
Argument = Operand | Sequence[Operand]


def kineto_arguments(
    shapes: str, types: str, strides: str, concrete: str, list_dtype: str | None = None
) -> list[Argument]:
    """Arguments as Kineto records them.

    Args:
        shapes, types, strides, concrete: the members ``Input Dims``, ``Input type``, ``Input Strides`` and
            ``Concrete Inputs`` as JSON text, ``""`` for an absent one.
        list_dtype: element type of tensors in lists, which Kineto does not record.

    Raises:
        Unknown: if the texts do not fit together.
    """
    sizes, kinds = _list_of(shapes), _list_of(types)
    if len(sizes) != len(kinds) or not kinds:
        raise Unknown
    steps = _list_of(strides) if strides else []
    values = _list_of(concrete) if concrete else []
    return [
        _kineto_argument(
            kind,
            sizes[at],
            steps[at] if len(steps) == len(kinds) else None,
            values[at] if len(values) == len(kinds) else "",
            normalize_dtype(list_dtype) if list_dtype else UNKNOWN_DTYPE,
        )
        for at, kind in enumerate(kinds)
    ]


def _list_of(text: str) -> list[Any]:
    try:
        found = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        raise Unknown from None
    if not isinstance(found, list):
        raise Unknown
    return found


# Kineto of 2021 named plain values as execution traces do.
_SCALAR_TYPES = frozenset(("Scalar", "Int", "Double", "Bool", "String", "Complex"))
_LIST_TYPES = frozenset(("ScalarList", "GenericList"))


def _kineto_argument(kind: Any, shape: Any, strides: Any, concrete: Any, list_dtype: str) -> Argument:
    if not isinstance(kind, str):
        raise Unknown
    if kind == "TensorList":
        # Lists of more than 30 tensors are written as an empty list.
        shapes = shape if isinstance(shape, list) else []
        steps = strides if isinstance(strides, list) and len(strides) == len(shapes) else [None] * len(shapes)
        return tuple(_tensor(one, list_dtype, step) for one, step in zip(shapes, steps, strict=True))
    if kind in _SCALAR_TYPES:
        return Operand(dtype=SCALAR, value=_concrete(concrete))
    if kind in _LIST_TYPES:
        return Operand(dtype=SCALAR_LIST, value=_concrete(concrete))
    return _tensor(shape, normalize_dtype(kind) or UNKNOWN_DTYPE, strides) if kind else Operand()


def _tensor(shape: Any, dtype: str, strides: Any) -> Operand:
    if not _are_sizes(shape):
        raise Unknown
    known = _are_sizes(strides) and len(strides) == len(shape)
    return Operand(tuple(shape), dtype, tuple(strides) if known else None)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


@cache
def _concrete(text: Any) -> Any:
    """A value of ``Concrete Inputs``, which are Python-like texts."""
    if not isinstance(text, str) or not text:
        return None
    if text in ("True", "False"):
        return text == "True"
    if text.startswith("["):
        parts = text.strip("[]").split(",") if text.strip("[] ") else []
        return tuple(_concrete(part.strip()) for part in parts)
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


@lru_cache(1 << 16)
def trace_argument(kind: str, shape: str, strides: str, value: str) -> Argument:
    """One argument as PyTorch execution traces record it: type, shape, strides and value as text.

    Raises:
        Unknown: if the texts do not fit together.
    """
    if kind.startswith("Tensor("):
        return _trace_tensor(kind, _json(shape), _json(strides))
    if kind.startswith(("GenericList[", "Tuple[")) and "Tensor(" in kind:
        return tuple(_trace_tensors(kind, _json(shape), _json(strides)))
    if kind.startswith("GenericList["):
        found = _json(value)
        return Operand(dtype=SCALAR_LIST, value=tuple(found) if isinstance(found, list) else None)
    if kind in ("None", ""):
        return Operand()
    return Operand(dtype=SCALAR, value=_json(value))


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text) if text else None
    except (ValueError, RecursionError):
        return text


def _trace_tensor(kind: str, shape: Any, strides: Any) -> Operand:
    dtype = normalize_dtype(kind)
    if "nullptr" in kind:  # an undefined tensor: an argument that was left out
        return Operand()
    return _tensor(shape, dtype or UNKNOWN_DTYPE, strides)


def _trace_tensors(kind: str, shapes: Any, strides: Any) -> list[Operand]:
    """The tensors of a list, and of lists in it, one after the other."""
    kinds = split_types(kind)
    if not isinstance(shapes, list) or len(shapes) != len(kinds):
        raise Unknown
    steps = strides if isinstance(strides, list) and len(strides) == len(kinds) else [None] * len(kinds)
    found: list[Operand] = []
    for one, shape, step in zip(kinds, shapes, steps, strict=True):
        if one.startswith("Tensor("):
            found.append(_trace_tensor(one, shape, step))
        elif "[" in one:
            found.extend(_trace_tensors(one, shape, step))
        else:
            found.append(Operand())
    return found


@cache
def split_types(kind: str) -> tuple[str, ...]:
    """The types within ``GenericList[...]`` or ``Tuple[...]``."""
    begin = kind.index("[") + 1
    parts, depth, start = [], 0, begin
    for at in range(begin, len(kind)):
        c = kind[at]
        if depth == 0 and c in ",]":
            parts.append(kind[start:at])
            start = at + 1
        depth += (c in "[(<") - (c in "])>")
    return tuple(part.strip() for part in parts if part.strip())
