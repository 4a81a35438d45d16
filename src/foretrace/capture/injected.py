"""Recording without a change in the program: steps are counted at its optimizer.

The recording begins with the first forward pass of a module, the first process group or the first optimizer step,
whichever comes first: that is the beginning of step 0. A step ends when the optimizer that stepped first has stepped.
Launchers do none of these things, so they are not recorded.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from foretrace.capture.options import Options

if TYPE_CHECKING:
    from foretrace.capture.recorder import Recorder


class _Session:
    """The recording of this process, once something is done that is worth it."""

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._is_tried = False
        self._optimizer: Any = None
        self._handle: Any = None

    def begin(self) -> None:
        """Start recording; only the first call does anything."""
        if self._is_tried:
            return
        self._is_tried = True
        if self._handle is not None:
            self._handle.remove()
        try:
            self._recorder = _recorder().__enter__()
        except Exception as error:  # the program must run all the same
            sys.stderr.write(f"foretrace: process {os.getpid()} is not recorded: {error}\n")
            return
        atexit.register(self._recorder.finish)
        # Children of multiprocessing (torch.multiprocessing.spawn) leave without running what atexit knows.
        multiprocessing.util.Finalize(None, self._recorder.finish, exitpriority=0)

    def begin_with_forward(self) -> None:
        """Start recording at the first forward pass of any module."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        self._handle = register_module_forward_pre_hook(lambda module, args: self.begin())

    def give_way(self, profiler: Any) -> None:
        """The program starts a profiler of its own; there can be one only, and the program's comes first."""
        recorder = self._recorder
        if recorder is not None and not recorder.is_busy:
            recorder.others.add(id(profiler))
            if recorder.is_recording:
                recorder.finish("the program started a profiler of its own")

    def profiler_ended(self, profiler: Any) -> None:
        """A profiler, perhaps of the program, has stopped."""
        if self._recorder is not None:
            self._recorder.others.discard(id(profiler))

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        self.begin()
        if self._optimizer is None:
            self._optimizer = optimizer
        if self._recorder is not None and optimizer is self._optimizer:
            self._recorder.step()


def _recorder() -> Recorder:
    from pathlib import Path

    from foretrace.capture.recorder import Recorder
    from foretrace.capture.windows import parse_windows

    options = Options.from_environment()
    return Recorder(
        Path(options.output),
        parse_windows(options.steps, options.warmup),
        options.statistics,
        options.memory,
        options.stacks,
    )


_session = _Session()


def watch_profilers(module: ModuleType) -> None:
    """Stop recording when the program profiles itself.

    Args:
        module: ``torch.autograd.profiler``, just imported.
    """
    prepare, leave = module.profile._prepare_trace, module.profile.__exit__

    @functools.wraps(prepare)
    def prepare_trace(self: Any) -> Any:
        _session.give_way(self)
        return prepare(self)

    @functools.wraps(leave)
    def exit_trace(self: Any, *args: Any) -> Any:
        try:
            return leave(self, *args)
        finally:
            _session.profiler_ended(self)

    module.profile._prepare_trace, module.profile.__exit__ = prepare_trace, exit_trace


def watch_optimizers(module: ModuleType) -> None:
    """Count steps: of every optimizer class, after ``step`` has returned and its own scope is closed.

    Args:
        module: ``torch.optim.optimizer``, just imported.
    """
    original: Callable[[Any], Any] = module.Optimizer.profile_hook_step

    def profile_hook_step(function: Any) -> Any:
        hooked = original(function)

        @functools.wraps(hooked)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = hooked(self, *args, **kwargs)
            if not _is_compiling():
                _session.stepped(self)
            return result

        return step

    module.Optimizer.profile_hook_step = staticmethod(profile_hook_step)
    _session.begin_with_forward()


def watch_groups(module: ModuleType) -> None:
    """Start recording when the first process group is there.

    Args:
        module: ``torch.distributed.distributed_c10d``, just imported.
    """
    original = module.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        _session.begin()
        return result

    vars(module)["init_process_group"] = init_process_group


def _is_compiling() -> bool:
    import torch

    return torch.compiler.is_compiling()
