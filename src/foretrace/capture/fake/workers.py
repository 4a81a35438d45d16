"""Runs ranks in processes of their own, forked from one that has PyTorch loaded; starts peers that a rank waits for."""

from __future__ import annotations

import gc
import os
import pickle
import selectors
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from foretrace.capture.fake import et_json, program, symmetry
from foretrace.capture.fake.errors import CaptureError
from foretrace.capture.fake.process_groups import Group, groups_of_node
from foretrace.capture.fake.program import Options

_PATIENCE_S = 5.0  # a rank whose mail has come says so at once: if all wait this long, none will come


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is known of a rank that was run; its trace lies at ``path``."""

    rank: int
    path: Path
    digest: str
    num_nodes: int
    groups: tuple[Group, ...]
    steps: tuple[int, ...]
    exit_code: int
    report: dict[str, Any]


@dataclass
class _Child:
    rank: int
    process: int
    pipe: BinaryIO
    waits_for: int = -1


@dataclass
class Workers:
    """A pool of forked processes, one for each rank.

    Attributes:
        options: the program and how to run it.
        folder: for traces, logs and the mail between ranks.
        limit: how many ranks to run at a time (those that wait for others do not count).
    """

    options: Options
    folder: Path
    limit: int
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    _children: dict[int, _Child] = field(default_factory=dict)

    def run(self, ranks: Sequence[int]) -> list[Outcome]:
        """Run ranks, unless they were, and return what came of them.

        Raises:
            CaptureError: if the script fails, or ranks wait for each other.
        """
        waiting = [rank for rank in ranks if rank not in self.outcomes and rank not in self._children]
        with selectors.DefaultSelector() as selector:
            for child in self._children.values():
                selector.register(child.pipe, selectors.EVENT_READ, child)
            while any(rank not in self.outcomes for rank in ranks):
                while waiting and self._num_running() < self.limit:
                    self._start(waiting.pop(0), selector)
                ready = selector.select(_PATIENCE_S)
                if not ready and not self._num_running():
                    raise CaptureError(self._deadlock())
                for key, _ in ready:
                    self._hear(key.data, selector)
        return [self.outcomes[rank] for rank in ranks]

    def stop(self) -> None:
        """End the processes that only served others."""
        for child in self._children.values():
            with suppress(ProcessLookupError):
                os.kill(child.process, signal.SIGKILL)
            os.waitpid(child.process, 0)
            child.pipe.close()
        self._children.clear()

    def _num_running(self) -> int:
        return sum(child.waits_for < 0 for child in self._children.values())

    def _deadlock(self) -> str:
        told = ", ".join(f"rank {child.rank} for rank {child.waits_for}" for child in self._children.values())
        return f"{self.options.script}: ranks wait for objects that nobody sends ({told})"

    def _start(self, rank: int, selector: selectors.BaseSelector) -> None:
        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if not process:
            os.close(reading)
            _be_rank(self.options, rank, self.folder, os.fdopen(writing, "wb"))
        os.close(writing)
        child = self._children[rank] = _Child(rank, process, os.fdopen(reading, "rb"))
        selector.register(child.pipe, selectors.EVENT_READ, child)

    def _hear(self, child: _Child, selector: selectors.BaseSelector) -> None:
        try:
            kind, content = pickle.load(child.pipe)
        except EOFError:
            kind, content = "error", ("the process ended without a word", "")
        if kind == "needs":
            child.waits_for = content
            if content not in self._children and content not in self.outcomes:
                self._start(content, selector)
        elif kind == "goes on":
            child.waits_for = -1
        else:
            selector.unregister(child.pipe)
            child.pipe.close()
            del self._children[child.rank]
            os.waitpid(child.process, 0)
            if kind == "error":
                problem, details = content
                raise CaptureError(f"{self.options.script}: rank {child.rank} failed: {problem}", details)
            if isinstance(content, Outcome):
                self.outcomes[child.rank] = content
            else:
                self.options = _with_fewer_steps(self.options, content)
                self._start(child.rank, selector)


def _with_fewer_steps(options: Options, seen: int) -> Options:
    """How to record a script that makes ``seen`` steps; one that makes none is recorded as a whole."""
    steps = max(min(options.steps, seen), 1)
    warm_up = max(min(options.warm_up, seen - steps), 0)
    return replace(options, steps=steps, warm_up=warm_up, may_postpone=False)


def _be_rank(options: Options, rank: int, folder: Path, pipe: BinaryIO) -> None:
    """The life of a forked process; does not return."""

    def tell(kind: str, content: Any = None) -> None:
        pickle.dump((kind, content), pipe)
        pipe.flush()

    try:
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        # Most objects live as long as the run; looking through them again and again takes a tenth of the time.
        gc.freeze()
        gc.set_threshold(100_000, 50, 1000)
        tell("done", _record(options, rank, folder, tell))
    except BaseException as error:
        text = str(error).strip().splitlines()
        tell("error", (f"{type(error).__name__}: {text[0] if text else ''}", traceback.format_exc()))
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)


def _record(options: Options, rank: int, folder: Path, tell: Any) -> Outcome | int:
    """What came of it; of a script that ended too early, how many steps it made."""
    mail = folder / "mail"
    mail.mkdir(exist_ok=True)
    recording = program.run(options, rank, mail, lambda sender: tell("needs", sender), lambda: tell("goes on"))
    if not recording.nodes:
        return recording.steps_seen
    path = folder / f"rank{rank}.et.json.gz"
    groups = groups_of_node(recording.groups, rank)
    count = et_json.write(path, recording.nodes, recording.lives, groups, rank)
    return Outcome(
        rank,
        path,
        symmetry.digest(recording.nodes, rank),
        count,
        tuple(recording.groups),
        tuple(recording.steps),
        recording.exit_code,
        recording.report.to_dict(),
    )
