"""The log of a training run: JSON lines, and the same figures for TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from foretrace.trace.reading import FormatError


class Metrics(NamedTuple):
    """One step.

    Attributes:
        step: counted from 1: steps that are done.
        loss: mean over all targets of the step.
        tokens: that the run has been trained on so far.
        tokens_per_s: of all ranks together, since the line before.
        mfu: share of the devices' peak; None where the peak is unknown.
        learning_rate: of this step. gradient_norm: before clipping. seconds: since the run or its resumption began.
    """

    step: int
    loss: float
    tokens: int
    tokens_per_s: float
    mfu: float | None
    learning_rate: float
    gradient_norm: float
    seconds: float


class MetricsLog:
    """Writes metrics to ``metrics.jsonl`` in a folder, and to TensorBoard's event files where it is installed.

    A resumed run goes on in the same file: lines of steps that it is going to repeat are dropped.

    Args:
        folder: of the run.
        done: steps that the resumed state has done; 0 for a new run.
    """

    def __init__(self, folder: Path, done: int = 0) -> None:
        self._path = folder / "metrics.jsonl"
        kept = [line for line in _lines(self._path) if json.loads(line)["step"] <= done]
        draft = self._path.with_suffix(".tmp")
        draft.write_text("".join(line + "\n" for line in kept))
        draft.rename(self._path)
        self._file = self._path.open("a", buffering=1)
        self._board = _tensorboard(folder, done)

    def write(self, metrics: Metrics) -> None:
        """Add a step."""
        self._file.write(json.dumps(metrics._asdict()) + "\n")
        if self._board is not None:
            for name, value in metrics._asdict().items():
                if name != "step" and value is not None:
                    self._board.add_scalar(name, value, metrics.step)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log."""
    return [json.loads(line) for line in _lines(folder / "metrics.jsonl")]


def _lines(path: Path) -> list[str]:
    """Whole lines; a process that was killed may have left the last one cut off."""
    if not path.exists():
        return []
    text = path.read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()
    for number, line in enumerate(lines, 1):
        try:
            json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            raise FormatError(str(path), f"line {number} is no step's metrics", "remove the line") from None
    return lines


def _tensorboard(folder: Path, done: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1 if done else None)
