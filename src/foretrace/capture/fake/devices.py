"""Tensors on "cuda" without CUDA: fake tensors that Python sees on cuda:N and C++ on an accelerator without hardware.

PyTorch's autograd engine, its device guards and its streams ask C++ for the device of a tensor, and a build without
CUDA has no answer for "cuda". It has one for the slot that is kept for out-of-tree devices (``privateuse1``), which
Python may fill. So a fake tensor says "cuda:0" to Python, and to C++ that device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

_BACKEND = "foretrace_fake"
ASK_DEVICE = torch.ops.prim.device.default
# Most of a transformer's operators. Their shape functions need nothing of what `FakeTensorMode` does before and after
# (device rules, constants, a cache that hashes all arguments), which costs three times as much as they do.
_aten = torch.ops.aten
_DIRECT = frozenset(
    {
        *(_aten.view.default, _aten._unsafe_view.default, _aten.t.default, _aten.transpose.int, _aten.detach.default),
        *(_aten.as_strided.default, _aten.slice.Tensor, _aten.expand.default, _aten.permute.default),
        *(_aten.unsqueeze.default, _aten.squeeze.dim, _aten.select.int, _aten.alias.default),
        *(_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.silu.default, _aten.neg.default),
        *(_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor, _aten.clone.default),
        *(_aten.gelu.default, _aten.relu.default, _aten.threshold_backward.default, _aten.gelu_backward.default),
    }
)
_registered: list[Any] = []  # C++ keeps no reference to these
_local_rank = 0


def own_device() -> torch.device:
    """The device that "cuda" without an index stands for."""
    return torch.device("cuda", _local_rank)


def is_supported() -> bool:
    """Whether this PyTorch lets Python provide an accelerator (2.9 and later)."""
    return hasattr(torch._C, "_acc") and hasattr(torch._C._acc, "register_python_privateuseone_device_guard")


def register_accelerator(local_rank: int) -> None:
    """Provide the accelerator that stands for CUDA. It lasts as long as the process.

    Args:
        local_rank: index of the device that is "the current one".
    """
    global _local_rank
    _local_rank = local_rank
    if _registered:
        return
    _registered.extend((_hooks(), _guard()))
    backend_registration.rename_privateuse1_backend(_BACKEND)
    torch._register_device_module(_BACKEND, torch.cuda)  # type: ignore[no-untyped-call]
    torch._C._acc.register_python_privateuseone_hook(_registered[0])
    torch._C._acc.register_python_privateuseone_device_guard(_registered[1])
    # The engine would start one thread for each device, and ours has none.
    torch.autograd.set_multithreading_enabled(False)
    _tell_cpp_another_device()


def _hooks() -> Any:
    class Hooks(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return True

        def has_primary_context(self, device: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    return Hooks()


def _guard() -> Any:
    class Guard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.PrivateUse1

    return Guard()


def told_to_cpp(tensor: FakeTensor) -> torch.device:
    """What C++ takes for the device of a fake tensor."""
    device = tensor.fake_device
    return torch.device(_BACKEND, 0) if device.type == "cuda" else device


def _tell_cpp_another_device() -> None:
    dispatch = FakeTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]

    def torch_dispatch(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASK_DEVICE and not args[0].fake_mode.in_kernel_invocation:
            return told_to_cpp(args[0])
        return dispatch(cls, func, types, args, kwargs or {})

    FakeTensor.__torch_dispatch__ = classmethod(torch_dispatch)  # type: ignore[assignment,method-assign]


def python_device(device: torch.device) -> torch.device:
    """The device as Python should see it, whoever made it."""
    return own_device() if device.type == _BACKEND else device


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """`FakeTensorMode` that serves "cuda" on any build, and takes real tensors where a script mixes them in."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._has_real_integers = False

    @contextmanager
    def real_integers(self) -> Iterator[None]:
        """Within, new tensors of 32-bit integers have data: C++ code is about to read them."""
        self._has_real_integers = True
        try:
            yield
        finally:
            self._has_real_integers = False

    @property
    def avoid_device_init(self) -> bool:
        """True: no device is ever touched."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing is compiled here, and the guard against it costs as much as an operator."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        return self.dispatch(func, types, args, kwargs)

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Run one operator on fake tensors; devices that C++ filled in are translated back."""
        if func is ASK_DEVICE and isinstance(args[0], FakeTensor) and not args[0].fake_mode.in_kernel_invocation:
            return told_to_cpp(args[0])
        kwargs = translated(kwargs or {})
        if self._has_real_integers:
            tensors = [argument for argument in pytree.tree_leaves(args) if isinstance(argument, torch.Tensor)]
            if not tensors and kwargs.get("dtype") is torch.int32:
                return func(*args, **{**kwargs, "device": None})
            if tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
                return func(*args, **kwargs)
        if func in _DIRECT:
            device = self._common_device(args)
            if device is not None:
                with in_kernel_invocation_manager(self):
                    result = func(*args, **kwargs)
                return FakeTensor(self, result, device)
        return super().dispatch(func, types, args, kwargs)

    def _common_device(self, args: Sequence[object]) -> torch.device | None:
        """The device of all tensors; None if they differ, or if the value of one is known and must be kept up."""
        common = None
        for argument in args:
            if type(argument) is FakeTensor:
                device = argument.fake_device
                if argument.fake_mode is not self or argument.constant is not None or common not in (None, device):
                    return None
                common = device
            elif isinstance(argument, torch.Tensor):
                return None
        return common


def translated(kwargs: Mapping[str, object]) -> Mapping[str, object]:
    """Keyword arguments of an operator with the device as Python sees it."""
    device = kwargs.get("device")
    if isinstance(device, torch.device) and (
        device.type == _BACKEND or (device.type == "cuda" and device.index is None)
    ):
        return {**kwargs, "device": own_device()}
    return kwargs
