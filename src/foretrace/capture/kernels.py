"""Looking at the arguments of chosen operators, whoever calls them: kernels in Python in front of the real ones.

They stand in the dispatcher at the key ``BackendSelect``, just above the devices' own kernels: every call passes
there, from Python and from C++ alike (gradient buckets, the autograd engine), below autograd and below tensor
subclasses, so that they see local tensors. Other operators cost nothing more. The call is handed down without passing
the dispatcher's beginning again, so that profilers see one call, and without the interpreter's lock: a communication
library may hold a lock of its own that a thread which waits for the interpreter has.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

# What a look gets: the operator's name, its positional arguments (trailing defaults may be missing) and the others.
Look = Callable[[str, tuple[Any, ...], dict[str, Any]], Callable[[], None] | None]
_KEY = "BackendSelect"


def overloads(names: set[str]) -> list[str]:
    """All overloads of the given operators (``aten::index`` -> ``aten::index.Tensor``, ...)."""
    known = torch._C._dispatch_get_all_op_names()
    return sorted(name for name in known if name.partition(".")[0] in names)


class Watch:
    """Calls ``look`` before each call of the given operators, from `install` to `remove`.

    ``look`` may return a function to call afterwards. Errors in it are counted in `failures`, never raised.
    """

    def __init__(self, operators: list[str], look: Look) -> None:
        self.failures = 0
        self._operators = operators
        self._look = look
        self._libraries: dict[str, torch.library.Library] = {}

    def install(self) -> None:
        """Stand in front of the operators' kernels."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns of kernels that override others; these hand on to them
            for operator in self._operators:
                if _may_stand_before(operator):
                    self._stand_before(operator)

    def remove(self) -> None:
        """Give the operators their kernels back."""
        for library in self._libraries.values():
            library._destroy()  # type: ignore[no-untyped-call]
        self._libraries.clear()

    def _stand_before(self, operator: str) -> None:
        namespace, _, name = operator.partition("::")
        plain, _, overload = name.partition(".")
        if namespace not in self._libraries:
            self._libraries[namespace] = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
        hand_on = getattr(getattr(getattr(torch.ops, namespace), plain), overload or "default").redispatch
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        look, plain = self._look, f"{namespace}::{plain}"

        def watched(keys: Any, *args: Any, **kwargs: Any) -> Any:
            after = None
            try:
                after = look(plain, args, kwargs)
            except Exception:  # a recorder must not break what it records
                self.failures += 1
            if after is None:
                return hand_on(keys & below, *args, **kwargs)
            try:
                return hand_on(keys & below, *args, **kwargs)
            finally:
                after()

        self._libraries[namespace].impl(name, watched, _KEY, with_keyset=True)  # type: ignore[no-untyped-call]


def _may_stand_before(operator: str) -> bool:
    """Not before composites, whose derivatives are those of their parts, and not where a kernel stands already."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return not (has_kernel(operator, "CompositeImplicitAutograd") or has_kernel(operator, _KEY))
