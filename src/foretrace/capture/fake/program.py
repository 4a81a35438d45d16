"""Runs a script as one rank of a job that does not exist, and records what it computes and communicates."""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from foretrace.capture.fake import (
    attention,
    cuda,
    ddp,
    devices,
    environment,
    kernels,
    labels,
    placeholders,
    process_groups,
)
from foretrace.capture.fake.labels import CaptureComplete, Steps
from foretrace.capture.fake.nodes import CallTree, Node
from foretrace.capture.fake.patches import Patches
from foretrace.capture.fake.process_groups import Group, Groups, Mail
from foretrace.capture.fake.recorder import Recorder
from foretrace.capture.fake.report import FakeReport
from foretrace.capture.fake.tensors import Life, TensorNumbers


@dataclass(frozen=True, slots=True)
class Options:
    """How to run a script.

    Attributes:
        script, args: the program and its command line.
        world_size: ranks of the job.
        steps: how many steps to record.
        warm_up: how many steps to leave out before; the first makes the optimizer's state.
        device: ``"cuda"`` or ``"cpu"``: whether the script finds CUDA devices.
        ranks_per_node: as ``torchrun --nproc-per-node``.
        may_postpone: leave out one more step where DDP arranges its buckets anew in the first one to be recorded.
    """

    script: Path
    args: tuple[str, ...] = ()
    world_size: int = 1
    steps: int = 1
    warm_up: int = 1
    device: str = "cuda"
    ranks_per_node: int = 8
    may_postpone: bool = True


@dataclass
class Recording:
    """What one rank did in the recorded steps.

    Attributes:
        nodes: in the order of their ends.
        lives: storages that lived then.
        groups: all process groups of the job, as this rank made them.
        steps: numbers of the steps.
        steps_seen: how many steps the program made, recorded or not.
        exit_code: what the script ended with, 0 where the capture ended it.
    """

    rank: int
    nodes: list[Node] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    steps_seen: int = 0
    exit_code: int = 0
    report: FakeReport = field(default_factory=FakeReport)


def run(
    options: Options, rank: int, mail_folder: Path, ask: Callable[[int], None], go_on: Callable[[], None]
) -> Recording:
    """Run the script as ``rank``. Changes this process for good: call it in one of its own.

    Args:
        options: the program and how to run it.
        rank: of the job.
        mail_folder: where ranks leave objects for each other.
        ask: called with a rank whose objects are waited for, and that may have to be started.
        go_on: called when they have come.

    Raises:
        Exception: what the script raises.
    """
    report = FakeReport()
    tree = CallTree()
    numbers = TensorNumbers(tree.next_id, lambda: tree.last_node)
    groups = Groups()
    recorder = Recorder(tree, numbers, report)
    mode = devices.FakeMode()
    record = partial(setattr, recorder, "is_recording")
    steps = Steps(tree, options.warm_up, options.steps, record, options.may_postpone)
    os.environ.update(process_groups.environment(rank, options.world_size, options.ranks_per_node))
    with Patches() as patches:
        replace = patches.replace
        _serve_device(options, replace, report)
        process_groups.patch(replace, groups, report, Mail(mail_folder, rank, ask, go_on))
        placeholders.patch_tensor(report, replace)
        environment.patch(replace, numbers, report)
        labels.patch_modules(replace, tree)
        labels.patch_labels(replace, tree)
        ddp.patch(replace, mode, steps.postpone)
        steps.patch(replace)
        with mode, recorder:
            exit_code = _run_script(options)
            steps.finish()
    first = min((node.id for node in steps.kept), default=0)
    last = max((node.id for node in steps.kept), default=0)
    lives = numbers.lives_of(first, last)
    return Recording(rank, steps.kept, lives, groups.all, steps.kept_steps, steps.seen, exit_code, report)


def _serve_device(options: Options, replace: Any, report: FakeReport) -> None:
    if options.device == "cpu":
        return
    if not devices.is_supported():
        report.note("this PyTorch cannot stand in for CUDA: the script finds none, and tensors are on the CPU")
        return
    devices.register_accelerator(int(os.environ["LOCAL_RANK"]))
    kernels.register()
    cuda.patch(replace)
    attention.patch(replace)


def _run_script(options: Options) -> int:
    """Run it as ``python script.py args`` would; returns its exit code."""
    script = options.script.resolve()
    with ExitStack() as stack:
        patches = stack.enter_context(Patches())
        patches.replace(sys, "argv", [str(options.script), *options.args])
        patches.replace(sys, "path", [str(script.parent), *sys.path])
        stack.enter_context(warnings.catch_warnings())
        # No device takes part, so PyTorch's advice on devices is beside the point.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.")
        with suppress(CaptureComplete):
            try:
                runpy.run_path(str(script), run_name="__main__")
            except SystemExit as end:
                return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
