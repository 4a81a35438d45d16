"""`Run`: pretraining in a folder that keeps all that is needed to go on.

``settings.json`` says what is trained, ``metrics.jsonl`` and ``tensorboard/`` how it went, ``checkpoints/`` has states
to resume from, and ``model/`` the finished model in Hugging Face's format.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from foretrace.llama.checkpoint.files import read_json, to_json, write_file
from foretrace.llama.checkpoint.huggingface import write_hf
from foretrace.llama.checkpoint.sharded import Checkpointer, TrainingState
from foretrace.llama.checkpoint.weights import of_model
from foretrace.llama.data.packing import PackedRows
from foretrace.llama.data.store import digest_of, read_store
from foretrace.llama.model import Llama
from foretrace.llama.train.loop import Trainer
from foretrace.llama.train.metrics import Metrics, MetricsLog
from foretrace.llama.train.replicas import Replicas
from foretrace.llama.train.settings import Settings
from foretrace.llama.train.world import World
from foretrace.trace.reading import FormatError

SETTINGS, CHECKPOINTS, MODEL = "settings.json", "checkpoints", "model"
_REMEDY = "name the folder of a run of foretrace llama pretrain"


@dataclass(frozen=True)
class Run:
    """A pretraining run.

    Attributes:
        folder: of the run.
        settings: see `Settings`.
        data: folder of a token store.
        tokenizer: its ``tokenizer.model``; None if there is none to go with the model.
        checkpoint_every: steps between checkpoints. keep: of them.
        capture: folder for traces of some steps; None for none. capture_steps: which, e.g. ``"3:5"``.
    """

    folder: Path
    settings: Settings
    data: Path
    tokenizer: Path | None = None
    checkpoint_every: int = 1000
    keep: int = 3
    capture: Path | None = None
    capture_steps: str = "3:5"

    def train(
        self,
        resume: bool = False,
        on_step: Callable[[Metrics], None] | None = None,
        world: World | None = None,
        replicas: Replicas | None = None,
    ) -> dict[str, Any]:
        """Train to the end, or until SIGTERM or SIGINT asks to stop: then the state is saved, and `resume` goes on.

        Returns:
            ``steps``, ``finished``, ``loss``, ``tokens``, ``tokens_per_s``, ``mfu`` of the last step, ``resumed_from``,
            ``refused`` (damaged checkpoints and why), ``checkpoint`` and ``model`` (folders, or None).

        Raises:
            FormatError: if the folder holds another run, the data cannot be read, or the disk is full.
        """
        world = world or World()
        self._claim(resume)
        trainer = self._trainer(world, replicas)
        state: dict[str, Any] = {
            "training": TrainingState(trainer.model, trainer.optimizer),
            "progress": trainer.progress(),
        }
        with Checkpointer(self.folder / CHECKPOINTS, self.keep) as checkpointer, _stop_signals() as is_stopped:
            found = checkpointer.load_latest(state)
            if found.folder is not None:
                trainer.restore(state["progress"])
            start, last = trainer.step, None
            with MetricsLog(self.folder, start) as log, self._recorder() as recorder:
                for last in trainer.steps():
                    if world.is_first:
                        log.write(last)
                    if on_step:
                        on_step(last)
                    if recorder is not None:
                        recorder.step()
                    if world.any(is_stopped()):
                        break
                    if last.step % self.checkpoint_every == 0 and last.step < self.settings.steps:
                        checkpointer.save_async(last.step, {**state, "progress": trainer.progress()})
            checkpointer.wait()
            saved = found.folder
            if trainer.step > start:
                saved = checkpointer.save(trainer.step, {**state, "progress": trainer.progress()})
        is_finished = trainer.step >= self.settings.steps
        return {
            "steps": trainer.step,
            "finished": is_finished,
            **{name: getattr(last, name, None) for name in ("loss", "tokens_per_s", "mfu")},
            "tokens": trainer.tokens,
            "resumed_from": found.step,
            "refused": found.refused,
            "checkpoint": str(saved) if saved else None,
            "model": self._write_model(trainer) if is_finished and world.is_first else None,
        }

    def _claim(self, resume: bool) -> None:
        """Begin the folder, or see that it is of the same run."""
        path = self.folder / SETTINGS
        if path.exists():
            if not resume:
                raise FormatError(str(path), "there is a run in this folder", "resume it, or name another folder")
            others = self.settings.differences(read_settings(self.folder))
            if others:
                raise FormatError(str(path), f"this run has {', '.join(others)}", "resume with the run's settings")
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FormatError(str(self.folder), error.strerror or str(error), "name another folder") from None
        about = {
            "data": str(self.data.resolve()),
            "tokenizer": str(self.tokenizer.resolve()) if self.tokenizer else None,
        }
        write_file(path, to_json({**self.settings.to_json(), "run": about}))

    def _trainer(self, world: World, replicas: Replicas | None) -> Trainer:
        store = read_store(self.data)
        if self.tokenizer and store.tokenizer and digest_of(self.tokenizer) != store.tokenizer:
            raise FormatError(str(self.tokenizer), f"the tokens of {self.data} are another tokenizer's",
                              "name the tokenizer that made them")  # fmt: skip
        rows = PackedRows(store, self.settings.row_length, self.settings.seed)
        try:
            return Trainer(self.settings, rows, world, replicas)
        except ValueError as error:
            raise FormatError(str(self.folder / SETTINGS), str(error), "change the settings") from None

    def _recorder(self) -> AbstractContextManager[Any]:
        if self.capture is None:
            return nullcontext()
        from foretrace.capture import record

        return record(self.capture, steps=self.capture_steps, quiet=True)

    def _write_model(self, trainer: Trainer) -> str | None:
        model = trainer.whole_model()
        folder = self.folder / MODEL
        if model is None or folder.exists():
            return str(folder) if folder.exists() else None
        write_hf(of_model(model, folder, self.tokenizer), folder)
        return str(folder)


def read_settings(folder: Path) -> Settings:
    """The settings of a run.

    Raises:
        FormatError: if there are none, or they are damaged.
    """
    values = read_json(folder / SETTINGS, _REMEDY)
    values.pop("run", None)
    try:
        return Settings(**values)
    except (TypeError, ValueError) as error:
        raise FormatError(str(folder / SETTINGS), f"it holds no settings: {error}", _REMEDY) from None


def read_run(folder: Path) -> dict[str, Any]:
    """Where a run's data and tokenizer lie.

    Raises:
        FormatError: if there is no run.
    """
    about = read_json(folder / SETTINGS, _REMEDY).get("run")
    return about if isinstance(about, dict) else {}


def load_model(folder: Path) -> tuple[Llama, Path | None]:
    """A model to evaluate or sample from, and its tokenizer: of a run (its last good checkpoint), of Meta's files or of
    Hugging Face's.

    Raises:
        FormatError: if there is none, or it is damaged.
    """
    from foretrace.llama.checkpoint.convert import read_checkpoint
    from foretrace.llama.checkpoint.sharded import latest, load
    from foretrace.llama.config import CONFIGS

    if not (folder / SETTINGS).is_file():
        checkpoint = read_checkpoint(folder)
        return checkpoint.model(), checkpoint.tokenizer
    settings, about = read_settings(folder), read_run(folder)
    found = latest(folder / CHECKPOINTS)
    if found.folder is None:
        problem = "; ".join(found.refused.values()) or "it has no checkpoint yet"
        raise FormatError(str(folder / CHECKPOINTS), problem, "train longer, or name another run")
    model = Llama(CONFIGS[settings.model])
    weights = dict(model.state_dict())
    load(found.folder, {"training": {"model": weights}})
    model.load_state_dict(weights)
    return model, Path(about["tokenizer"]) if about.get("tokenizer") else None


@contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM or SIGINT has come; a second one ends the process as usual."""
    came: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.signal(number, before[number])

    try:
        for which in (signal.SIGTERM, signal.SIGINT):
            before[which] = signal.signal(which, note)
    except ValueError:  # not in the main thread: whoever runs there looks after signals
        pass
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def summary_line(metrics: Metrics, steps: int) -> str:
    """A step in words."""
    mfu = "" if metrics.mfu is None else f", MFU {metrics.mfu:.1%}"
    return (
        f"step {metrics.step:,} of {steps:,}: loss {metrics.loss:.4f}, {metrics.tokens_per_s:,.0f} tokens/s{mfu}, "
        f"learning rate {metrics.learning_rate:.2e}, gradient norm {metrics.gradient_norm:.3f}"
    )


def as_json(metrics: Metrics) -> str:
    """A step as a line of JSON."""
    return json.dumps(metrics._asdict())
