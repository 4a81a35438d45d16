"""What else a training script touches: data loaders, checkpoints, profilers, and rules that go by a tensor's type."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils.data import DataLoader

from foretrace.capture.fake.report import FakeReport
from foretrace.capture.fake.tensors import TensorNumbers

Replace = Callable[[Any, str, Any], Any]
_EAGER = "torch.compile: operators are those of the eager program"


def patch(replace: Replace, numbers: TensorNumbers, report: FakeReport) -> None:
    """Make scripts run that load data, write checkpoints or profile themselves.

    Args:
        replace: ``replace(owner, name, value)`` sets an attribute and returns what was there.
        numbers: told of storages that are resized.
        report: counts what was skipped.
    """
    _patch_loaders(replace, report)
    _patch_checkpoints(replace, report)
    _patch_profiler(replace, report)
    _patch_compiler(replace, report)
    _patch_types(replace)
    _patch_storages(replace, numbers)
    _patch_fsdp(replace)


def _patch_loaders(replace: Replace, report: FakeReport) -> None:
    """Load in this process: workers would have to send tensors without data."""
    old = DataLoader.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("num_workers"):
            report.note("workers of a DataLoader: none, data is loaded in the program itself")
            kwargs["num_workers"] = 0
            for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout"):
                kwargs.pop(name, None)
        kwargs.pop("pin_memory", None)
        old(self, *args, **kwargs)

    replace(DataLoader, "__init__", init)


def _patch_checkpoints(replace: Replace, report: FakeReport) -> None:
    """Write none: there is no data, and a file of the user might be overwritten."""

    def skipping(name: str, result: Any = None) -> Any:
        def skip(*_: Any, **__: Any) -> Any:
            report.skip(name)
            return result

        return skip

    replace(torch, "save", skipping("torch.save"))
    with suppress(ImportError):
        import torch.distributed.checkpoint as checkpoint

        for name in ("save", "async_save", "load"):
            replace(checkpoint, name, skipping(f"torch.distributed.checkpoint.{name}"))
    safetensors = sys.modules.get("safetensors.torch")
    if safetensors is not None:
        replace(safetensors, "save_file", skipping("safetensors.torch.save_file"))


class _NoProfile:
    """Stands for ``torch.profiler.profile``: accepts everything and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _NoProfile:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def _patch_profiler(replace: Replace, report: FakeReport) -> None:
    class NoProfile(_NoProfile):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            report.skip("profiler of the script")

    replace(torch.profiler, "profile", NoProfile)


def _patch_compiler(replace: Replace, report: FakeReport) -> None:
    """Run what would be compiled as it is: the compiler does not work on tensors that are fake already."""

    def compile(model: Any = None, **_: Any) -> Any:
        report.skip(_EAGER)
        return (lambda function: function) if model is None else model

    replace(torch, "compile", compile)
    replace(torch.nn.Module, "compile", lambda *_, **__: report.skip(_EAGER))


def _patch_types(replace: Replace) -> None:
    """Fake tensors count as tensors: for the choice of foreach optimizers, and when a module changes its type."""
    kinds = optimizer._foreach_supported_types
    replace(optimizer, "_foreach_supported_types", [*kinds, FakeTensor])
    replace(torch.utils, "swap_tensors", _swap_tensors)


def _swap_tensors(one: Any, other: Any) -> None:
    """As PyTorch's, without its fear of weak references: the fake mode holds some, to tensors that it converted."""
    one_class, one_members = one.__class__, dict(one.__dict__)
    one.__class__, other.__class__ = other.__class__, one_class
    other_members = dict(other.__dict__)
    for target, members in ((one, other_members), (other, one_members)):
        target.__dict__.clear()
        target.__dict__.update(members)
    torch._C._swap_tensor_impl(one, other)


def _patch_storages(replace: Replace, numbers: TensorNumbers) -> None:
    """FSDP frees the gathered parameters by resizing their storage to nothing."""
    old = torch.UntypedStorage.resize_

    def resize(self: Any, size: Any) -> Any:
        result = old(self, size)
        numbers.resized(self)
        return result

    replace(torch.UntypedStorage, "resize_", resize)


class _Chunks:
    """The equal parts of a tensor, each made when it is asked for: FSDP makes all, to keep one."""

    def __init__(self, tensor: torch.Tensor, parts: int, dim: int) -> None:
        self._tensor, self._parts, self._dim = tensor, parts, dim
        self._size = -(-tensor.size(dim) // parts)

    def __len__(self) -> int:
        return self._parts

    def __getitem__(self, place: int) -> torch.Tensor:
        if not -self._parts <= place < self._parts:
            raise IndexError(place)
        length = self._tensor.size(self._dim)
        first = min(place % self._parts * self._size, length)
        if first == length and place:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, first, min(self._size, length - first))


def _patch_fsdp(replace: Replace) -> None:
    with suppress(ImportError, AttributeError):
        from torch.distributed.fsdp._fully_shard import _fsdp_param

        if hasattr(_fsdp_param, "_chunk_with_empty"):
            replace(_fsdp_param, "_chunk_with_empty", _Chunks)
