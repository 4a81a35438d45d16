"""Runs at the start of every Python process under ``foretrace capture``: has PyTorch recorded once it is imported.

Python imports one module of this name. A program's own one, further down the path, is run as if this were not there.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

# These are imported while torch is: nothing of the program runs before.
_WATCHED = {
    "torch.autograd.profiler": "watch_profilers",
    "torch.optim.optimizer": "watch_optimizers",
    "torch.distributed.distributed_c10d": "watch_groups",
}


class _WithHook(importlib.abc.Loader):
    """Loads a module as its own loader does, then calls ours."""

    def __init__(self, loader: importlib.abc.Loader, hook: str) -> None:
        self._loader = loader
        self._hook = hook

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        try:
            from foretrace.capture import injected

            getattr(injected, self._hook)(module)
        except Exception as error:  # the program must run all the same
            sys.stderr.write(f"foretrace: process {os.getpid()} is not recorded: {error}\n")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the watched modules as all other finders do, and gives them our loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _WATCHED:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self and hasattr(finder, "find_spec") else None
            if spec is not None and spec.loader is not None:
                spec.loader = _WithHook(spec.loader, _WATCHED[name])
                return spec
        return None


def _run_the_programs_own() -> None:
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  (at the start of Python, little is loaded)
    others = [place for place in sys.path if os.path.abspath(place or os.curdir) != here]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("FORETRACE_CAPTURE"):
    sys.meta_path.insert(0, _Finder())
_run_the_programs_own()
