"""Annotations that give the trace its structure: modules, labels, the optimizer's step; and where a step ends."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import profiler

from foretrace.capture.fake.nodes import CallTree, Node

Replace = Callable[[Any, str, Any], Any]


class ModuleNames:
    """The path of every module within the outermost module that was called."""

    def __init__(self) -> None:
        self._paths: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()

    def label(self, module: torch.nn.Module) -> str:
        """``nn.Module: layers.0.attention#Attention``; the outermost module has no path."""
        path = self._paths.get(module)
        if path is None:
            # The first call of a module that is not within one that was called before: it is a root.
            for name, inner in module.named_modules():
                self._paths.setdefault(inner, name)
            path = self._paths[module]
        return f"nn.Module: {path}#{type(module).__name__}"


def patch_modules(replace: Replace, tree: CallTree) -> None:
    """Make every call of a module a node."""
    names = ModuleNames()
    old = torch.nn.Module.__call__

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        node = tree.begin(names.label(self))
        try:
            return old(self, *args, **kwargs)
        finally:
            tree.end(node)

    replace(torch.nn.Module, "__call__", call)


def patch_labels(replace: Replace, tree: CallTree) -> None:
    """Make every ``record_function`` block a node: the script's, FSDP's, the optimizer's."""
    opened: dict[int, list[Node]] = {}

    def enter(self: Any) -> Any:
        opened.setdefault(id(self), []).append(tree.begin(self.name))
        return self

    def leave(self: Any, *_: object) -> None:
        nodes = opened.get(id(self))
        if nodes:
            tree.end(nodes.pop())
            if not nodes:
                del opened[id(self)]

    replace(profiler.record_function, "__enter__", enter)
    replace(profiler.record_function, "__exit__", leave)


class Steps:
    """Counts steps, keeps the nodes of those that are wanted, and stops the program after the last of them.

    A step ends when the optimizer that stepped first steps: with several optimizers, each step holds all of them.

    Attributes:
        kept: nodes of the wanted steps, in the order of their ends.
        seen: how many steps have ended.
        kept_steps: numbers of the steps that ``kept`` holds.
        is_complete: whether all wanted steps were seen.

    Args:
        tree: where nodes are.
        warm_up: steps to leave out before.
        wanted: steps to keep.
        record: called with whether to record from here on.
        may_postpone: whether `postpone` may leave out one more step.
    """

    def __init__(
        self, tree: CallTree, warm_up: int, wanted: int, record: Callable[[bool], None], may_postpone: bool = True
    ) -> None:
        self.kept: list[Node] = []
        self.kept_steps: list[int] = []
        self.is_complete = False
        self._tree = tree
        self._warm_up = warm_up
        self._wanted = wanted
        self.seen = 0
        self._record = record
        self._may_postpone = may_postpone
        self._first_optimizer: weakref.ref[Any] | None = None
        tree.begin("ProfilerStep#0")
        record(not warm_up)

    def patch(self, replace: Replace) -> None:
        """Learn of the optimizer's steps."""
        old = torch.optim.Optimizer.profile_hook_step

        def profile_hook_step(function: Any) -> Any:
            inner = old(function)

            @functools.wraps(function)
            def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                result = inner(optimizer, *args, **kwargs)
                self.stepped(optimizer)
                return result

            return step

        replace(torch.optim.Optimizer, "profile_hook_step", staticmethod(profile_hook_step))

    def stepped(self, optimizer: Any) -> None:
        """Take note that an optimizer has stepped.

        Raises:
            CaptureComplete: after the last wanted step.
        """
        if self._first_optimizer is None or self._first_optimizer() is None:
            self._first_optimizer = weakref.ref(optimizer)
        if self._first_optimizer() is not optimizer or self.is_complete:
            return
        nodes = self._tree.cut(f"ProfilerStep#{self.seen + 1}")
        if self.seen >= self._warm_up:
            self.kept += nodes
            self.kept_steps.append(self.seen)
        self.seen += 1
        self.is_complete = len(self.kept_steps) == self._wanted
        self._record(self.seen >= self._warm_up and not self.is_complete)
        if self.is_complete:
            raise CaptureComplete

    def postpone(self) -> None:
        """Leave out the step that runs now, if it was to be the first one recorded: it is unlike those to come."""
        if self._may_postpone and not self.kept_steps and self.seen >= self._warm_up:
            self._warm_up = self.seen + 1
            self._record(False)

    def finish(self) -> None:
        """End of the program. One that never steps is one step, if there was no warm-up."""
        self._record(False)
        if self.seen == 0 and not self._warm_up:
            self.kept = self._tree.cut("")
            self.kept_steps = [0]


class CaptureComplete(BaseException):
    """Ends the program: everything that was asked for is recorded. No script catches it by accident."""
