"""Operators that PyTorch runs as one kernel on CUDA, and that a build without CUDA would take apart."""

from __future__ import annotations

from typing import Any

import torch

# Those of native_functions.yaml with a CUDA kernel and a composite form for devices that have none.
_FUSED = ("_fused_rms_norm", "mish_backward", "silu_backward")
_library: list[Any] = []  # registrations last as long as the library object


def register() -> None:
    """Tell the dispatcher that CUDA has these operators, so that they reach the recorder whole."""
    if _library:
        return
    library: Any = torch.library.Library("aten", "IMPL", "CUDA")  # type: ignore[no-untyped-call]
    _library.append(library)
    for name in _FUSED:
        qualified = f"aten::{name}"
        if torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CompositeImplicitAutograd") and not (
            torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CUDA")
        ):
            library.impl(name, _never)


def _never(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no real tensor is on a CUDA device here")
