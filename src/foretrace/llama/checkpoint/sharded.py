"""Checkpoints of a training run: each rank writes what it has, and any layout of ranks can go on from them.

The files are those of ``torch.distributed.checkpoint``. They are written under a hidden name, then listed in a manifest
with size and digest, and only then the folder gets its name: a run that is killed, or a disk that is full, leaves the
checkpoints before as they were.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.checkpoint.stateful import Stateful

from foretrace.llama.checkpoint.files import sync_file, sync_folder, to_json, write_file
from foretrace.llama.checkpoint.manifest import MANIFEST, digests, first_problem
from foretrace.llama.checkpoint.plain_objects import PlainPlanner, PlainReader, check_plain
from foretrace.trace.reading import FormatError

_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")  # a number behind the step: written again, after going back
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # by parameter name, whatever groups there are

# Settings of an optimizer that depend on where a run computes, not on what.
_HOW_COMPUTED = {"fused", "foreach", "capturable", "differentiable"}

# PyTorch says so at each save and load of a single process. Not around each: filters are those of all threads.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


@dataclass(frozen=True)
class Latest:
    """The last good checkpoint of a folder.

    Attributes:
        folder: where it lies; None if there is none.
        step: of the run.
        refused: later checkpoints that are damaged: folder, and what is wrong with which file.
    """

    folder: Path | None
    step: int | None
    refused: dict[str, str]


def latest(folder: Path, group: dist.ProcessGroup | None = None) -> Latest:
    """Find the last checkpoint of which all files are as they were written.

    Args:
        folder: of the run.
        group: ranks that share the work of reading and all call this; this process alone if None.
    """
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    candidates = [_names(folder)]
    if group is not None:
        dist.broadcast_object_list(candidates, group=group, group_src=0)
    refused: dict[str, str] = {}
    for name in reversed(candidates[0]):
        problems = [first_problem(folder / name, rank, size)]
        if group is not None:
            problems = [None] * size
            dist.all_gather_object(problems, first_problem(folder / name, rank, size), group=group)
        problem = next(filter(None, problems), None)
        if problem is None:
            return Latest(folder / name, _order(name)[0], refused)
        refused[str(folder / name)] = problem
    return Latest(None, None, refused)


def load(folder: Path, state: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Fill a state from a checkpoint, whatever layout of ranks it was written by. Call it on all ranks.

    Args:
        folder: of the checkpoint, as `latest` gives it.
        state: as it was saved: its tensors, and objects with ``load_state_dict``, are filled in place.
        group: ranks that take part; all if None.

    Raises:
        FormatError: if something is missing or has another shape.
    """
    filled, reader = dict(state), PlainReader(folder)
    try:
        load_state(filled, storage_reader=reader, planner=PlainPlanner(), process_group=group)
    except CheckpointException as error:
        cause = _cause(error)
        if isinstance(cause, FormatError):
            raise cause from None
        raise FormatError(str(folder), _line(cause), "load it into the model that it was saved of") from None
    if isinstance(state, dict):
        state.update(filled)


class TrainingState(Stateful):
    """A model and its optimizer as they are saved: by parameter name, so that another layout can load them.

    Args:
        model: plain, compiled, or spread over ranks by ``fully_shard`` or tensor parallelism.
        optimizer: of its parameters.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """What is saved."""
        model, optimizer = get_state_dict(self._model, self._optimizer, options=_FLAT)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        groups = self._optimizer.param_groups
        own = [{name: group[name] for name in _HOW_COMPUTED & group.keys()} for group in groups]
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
            options=_FLAT,
        )
        for group, mine in zip(self._optimizer.param_groups, own, strict=True):
            group.update(mine)


class Checkpointer:
    """Saves the checkpoints of a run. All ranks make one, and call each method in the same order.

    Args:
        folder: of the run, and of no other one at the same time; on a file system that all ranks share.
        keep: how many checkpoints stay; all if None.
        group: gloo ranks that save; a new group of all ranks if None and ``torch.distributed`` is in use.

    Raises:
        FormatError: if the folder cannot be made.
    """

    def __init__(self, folder: Path | str, keep: int | None = 3, group: dist.ProcessGroup | None = None) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep is {keep}: at least 1 checkpoint stays")
        self.folder, self._keep = Path(folder), keep
        if group is None and dist.is_available() and dist.is_initialized():
            # Of its own: a save in the background must not come between the collectives of training.
            group = dist.new_group(backend="gloo")
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._stager: DefaultStager | None = None
        self._pending: Future[Path] | None = None
        self._on_first(self._clean)

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write a checkpoint and wait for it.

        Args:
            step: of the run.
            state: tensors, plain values and containers of these by name, and objects with ``state_dict`` (a
                `TrainingState`). Plain values are those of the first rank: name what a rank has for itself after it.

        Returns:
            The folder of the checkpoint.

        Raises:
            ValueError: if the state holds what could not be read again.
            FormatError: if it cannot be written; the checkpoints before are as they were.
        """
        self.wait()
        return self._write(step, _plain_state(state))

    def save_async(self, step: int, state: Mapping[str, Any]) -> None:
        """Copy the state to main memory, then write it while training goes on; otherwise like `save`.

        What goes wrong is raised by the next call.
        """
        self.wait()
        if self._stager is None:
            is_pinned = torch.accelerator.is_available()
            self._stager = DefaultStager(StagingOptions(is_pinned, False, False, False))
        staged: Any = self._stager.stage(_plain_state(state))
        self._pending = self._thread.submit(self._write, step, staged)

    def wait(self) -> Path | None:
        """Wait for the save in the background, if there is one; the folder of its checkpoint."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def load_latest(self, state: Mapping[str, Any]) -> Latest:
        """Fill a state from the last good checkpoint; leave it alone if there is none.

        Raises:
            FormatError: if the checkpoint does not fit the state.
        """
        self.wait()
        found = latest(self.folder, self._group)
        if found.folder is not None:
            load(found.folder, state, self._group)
        return found

    def close(self) -> None:
        """Wait for what is being saved, and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._stager is not None:
                self._stager.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _write(self, step: int, state: dict[str, Any]) -> Path:
        name: str = self._on_first(lambda: self._begin(step))
        unfinished = self.folder / f".{name}.part"
        try:
            save_state(state, storage_writer=FileSystemWriter(unfinished), process_group=self._group)
        except CheckpointException as error:
            self._on_first(lambda: shutil.rmtree(unfinished, ignore_errors=True))
            raise self._not_saved(_line(_cause(error))) from None
        mine = self._digests(unfinished)
        self._on_first(lambda: self._finish(name, step, mine))
        return self.folder / name

    def _begin(self, step: int) -> str:
        again = [_order(name)[1] for name in _names(self.folder) if _order(name)[0] == step]
        name = f"step-{step:08d}" + (f".{max(again) + 1}" if again else "")
        unfinished = self.folder / f".{name}.part"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        return name

    def _digests(self, unfinished: Path) -> dict[str, dict[str, Any]]:
        """Of all files, on the first rank; each rank reads those that it wrote, and the first one the index."""
        pattern = f"__{self._rank}_*"
        try:
            mine: Any = digests([*unfinished.glob(pattern), *([unfinished / ".metadata"] if not self._rank else [])])
        except OSError as error:
            mine = error.strerror or str(error)
        parts = [mine]
        if self._group is not None:
            parts = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(parts, mine, group=self._group)
        problem = next((part for part in parts if isinstance(part, str)), None)
        if problem is not None:
            raise self._not_saved(problem)
        return {name: entry for part in parts for name, entry in part.items()}

    def _finish(self, name: str, step: int, files: dict[str, dict[str, Any]]) -> None:
        unfinished = self.folder / f".{name}.part"
        write_file(unfinished / MANIFEST, to_json({"version": 1, "step": step, "files": files}))
        for path in unfinished.iterdir():
            sync_file(path)
        unfinished.replace(self.folder / name)
        sync_folder(self.folder)
        self._tidy(name, step)

    def _tidy(self, name: str, step: int) -> None:
        """Remove what is not to be kept; what a run left that was farther is set aside, so as not to be taken up."""
        names = _names(self.folder)
        for other in names:
            if _order(other)[0] > step:
                _rename_away(self.folder / other, self.folder / f"set-aside.{other}")
        before = [other for other in names if _order(other)[0] <= step and other != name]
        stay = len(before) if self._keep is None else self._keep - 1
        same_step = {other for other in before if _order(other)[0] == step}
        gone = same_step | set(before[: max(len(before) - len(same_step) - stay, 0)])
        for other in gone:
            (self.folder / other).replace(self.folder / f".{other}.old")
            shutil.rmtree(self.folder / f".{other}.old", ignore_errors=True)

    def _clean(self) -> None:
        """Make the folder, and remove what a killed run left behind."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for pattern in (".step-*.part", ".step-*.old"):
            for left in self.folder.glob(pattern):
                shutil.rmtree(left, ignore_errors=True)

    def _on_first(self, action: Callable[[], Any]) -> Any:
        """Run something on the first rank; all ranks have its result, or raise what it raised."""
        outcome: list[Any] = [None, None]
        if self._rank == 0:
            try:
                outcome[0] = action()
            except FormatError as error:
                outcome[1] = error.problem
            except OSError as error:
                outcome[1] = error.strerror or str(error)
        if self._group is not None:
            dist.broadcast_object_list(outcome, group=self._group, group_src=0)
        if outcome[1] is not None:
            raise self._not_saved(outcome[1])
        return outcome[0]

    def _not_saved(self, problem: str) -> FormatError:
        remedy = "free space or choose another place; the checkpoints before are as they were"
        return FormatError(str(self.folder), f"no checkpoint was saved ({problem})", remedy)


def _plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()}
    check_plain(plain)
    return plain


def _names(folder: Path) -> list[str]:
    """Of the checkpoints in a folder, whatever their state, in the order in which they were written."""
    if not folder.is_dir():
        return []
    return sorted((path.name for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=_order)


def _order(name: str) -> tuple[int, int]:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _rename_away(path: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    path.replace(target)


def _cause(error: CheckpointException) -> BaseException:
    """The first rank's mistake; PyTorch gives those of all ranks with their traces."""
    return next((wrapped[0] for wrapped in error.failures.values()), error)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
