"""``foretrace capture -- COMMAND``: run a program as it is, and have every worker process of it recorded."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from foretrace.capture.job_file import NAME
from foretrace.capture.options import RUN_VARIABLE, VARIABLE, Options

_INJECTED = Path(__file__).parent / "inject"


@dataclass(frozen=True)
class Launched:
    """What came of a program: its exit code (128 and the signal if one ended it), and the ranks that were recorded."""

    exit_code: int
    ranks: list[int]


def launch(command: Sequence[str], options: Options) -> Launched:
    """Run a program to its end. SIGTERM and SIGINT are passed on to it.

    Raises:
        OSError: if there is no such program.
    """
    run = uuid.uuid4().hex
    process = subprocess.Popen(command, env=_environment(options, run))
    with _passing_on(process):
        code = process.wait()
    return Launched(128 - code if code < 0 else code, _recorded(Path(options.output), run))


def _environment(options: Options, run: str) -> dict[str, str]:
    paths = [str(_INJECTED), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        VARIABLE: options.to_text(),
        RUN_VARIABLE: run,
    }


@contextlib.contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """A terminal sends SIGINT to both; whoever sends SIGTERM means the program."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT and process.poll() is None:
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _recorded(folder: Path, run: str) -> list[int]:
    """Ranks that wrote files, of the processes that were launched here."""
    ranks = set()
    for path in (folder / NAME, *folder.glob(f"steps-*/{NAME}")):
        with contextlib.suppress(OSError, ValueError):
            document = json.loads(path.read_text())
            ours = {rank: own for rank, own in document["ranks"].items() if own.get("launch") == run}
            ranks |= {int(rank) for rank, own in ours.items() if own.get("files")}
    return sorted(ranks)
