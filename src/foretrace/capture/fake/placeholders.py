"""Values for a script that looks at the data of tensors which have none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)

from foretrace.capture.fake.report import FakeReport

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)


def scalar(dtype: torch.dtype) -> bool | int | float | complex:
    """What ``item()`` gives: a loss of 0.0 and no NaN, but a count of 1, since counts are divided by."""
    if dtype is torch.bool:
        return False
    if dtype.is_complex:
        return 0j
    return 0.0 if dtype.is_floating_point else 1


def stand_in(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception, report: FakeReport) -> Any:
    """The result of an operator whose value or shape depends on data.

    Shapes are the largest that are possible: every element counts as non-zero, selected, or distinct.

    Raises:
        Exception: ``error``, for an operator that has no stand-in.
    """
    make = _STAND_INS.get(func)
    if make is None:
        raise error
    name = func._schema.name
    if name in ("aten::_local_scalar_dense", "aten::item"):
        report.invent(f"value of a {str(args[0].dtype).removeprefix('torch.')} scalar")
    else:
        report.invent(f"shape of {name}: the largest possible")
    return make(*args, **kwargs)


def _item(tensor: torch.Tensor) -> Any:
    return scalar(tensor.dtype)


def _equal(*_: Any) -> bool:
    return True


def _nonzero(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)


def _masked_select(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)  # type: ignore[no-untyped-call]
    return tensor.new_empty((shape.numel(),))


def _unique(tensor: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    count = tensor.numel()
    return (
        tensor.new_empty((count,)),
        tensor.new_empty(tensor.shape, dtype=torch.int64),
        tensor.new_empty((count,), dtype=torch.int64),
    )


def _repeat_interleave(repeats: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return repeats.new_empty((repeats.numel(),))


def _bincount(tensor: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    dtype = torch.int64 if weights is None else torch.float64
    return tensor.new_empty((max(minlength, 1),), dtype=dtype)


def _index(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Indexing with masks: each is taken as the indices of all its elements."""
    expanded: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            expanded.extend(index.new_empty((index.numel(),), dtype=torch.int64) for _ in range(index.dim()))
        else:
            expanded.append(index)
    result: torch.Tensor = torch.ops.aten.index.Tensor(tensor, expanded)
    return result


_aten = torch.ops.aten
_STAND_INS: dict[Any, Callable[..., Any]] = {
    _aten._local_scalar_dense.default: _item,
    _aten.item.default: _item,
    _aten.equal.default: _equal,
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten._unique2.default: _unique,
    _aten.unique_dim.default: _unique,
    _aten.unique_consecutive.default: _unique,
    _aten.repeat_interleave.Tensor: _repeat_interleave,
    _aten.bincount.default: _bincount,
    _aten.index.Tensor: _index,
}


def patch_tensor(report: FakeReport, replace: Callable[[Any, str, Any], Any]) -> None:
    """Let tensors without data be printed, formatted and turned into NumPy arrays.

    Args:
        report: counts what is made up.
        replace: ``replace(owner, name, value)`` sets an attribute and returns what was there.
    """
    old_format: Any = torch.Tensor.__format__
    old_numpy = torch.Tensor.numpy
    old_array: Any = torch.Tensor.__array__

    def new_format(self: torch.Tensor, spec: str) -> str:
        if isinstance(self, FakeTensor) and self.dim() == 0:
            return format(self.item(), spec)
        return str(old_format(self, spec))

    def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
        return _zeros(self, report) if isinstance(self, FakeTensor) else old_numpy(self, force=force)

    def array(self: torch.Tensor, dtype: Any = None) -> Any:
        if isinstance(self, FakeTensor):
            zeros = _zeros(self, report)
            return zeros if dtype is None else zeros.astype(dtype)
        return old_array(self) if dtype is None else old_array(self, dtype)

    replace(torch.Tensor, "__format__", new_format)
    replace(torch.Tensor, "numpy", numpy)
    replace(torch.Tensor, "__array__", array)


def _zeros(tensor: torch.Tensor, report: FakeReport) -> Any:
    report.invent("NumPy array of a tensor: zeros")
    name = str(tensor.dtype).removeprefix("torch.")
    return np.zeros(tuple(tensor.shape), name if hasattr(np, name) else np.float32)
