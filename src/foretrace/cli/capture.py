"""The command that records: capture."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from foretrace import FormatError
from foretrace.cli import show

PANEL = "Make and exchange"


def capture(
    command: Annotated[
        list[str],
        typer.Argument(
            help="The program, after --: torchrun --nproc-per-node 2 train.py; with --fake: train.py.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the files.")] = Path("foretrace-capture"),
    steps: Annotated[
        str | None,
        typer.Option(
            help="3:5 (steps 3 and 4), 3:5,10:12, a number of steps, or all (3:5; with --fake: 1).", show_default=False
        ),
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Steps of the profiler's warm-up before.")] = 1,
    statistics: Annotated[
        bool, typer.Option("--statistics/--no-statistics", help="Note the values of indices and offsets.")
    ] = True,
    memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Note allocations and frees.")] = True,
    stacks: Annotated[bool, typer.Option("--stacks", help="Note Python call stacks; costs much more time.")] = False,
    fake: Annotated[
        bool, typer.Option("--fake", help="Without hardware: run a script as any rank of any job.")
    ] = False,
    world_size: Annotated[int, typer.Option(min=1, help="With --fake: ranks of the job.")] = 1,
    rank: Annotated[
        list[int] | None, typer.Option(min=0, help="With --fake: a rank to record, repeatable (one of each kind).")
    ] = None,
) -> int:
    """Record a PyTorch program as it is: traces of some steps of every rank, and what they cost."""
    _check_steps(steps, warmup)
    if fake:
        return _capture_fake(command, world_size, rank, output, steps)
    from foretrace.capture.launch import launch
    from foretrace.capture.options import Options

    if shutil.which(command[0]) is None:
        raise FormatError(command[0], "no such program", "write the program after --, as on a command line")
    _make(output)
    launched = launch(command, Options(str(output.resolve()), steps or "3:5", warmup, statistics, memory, stacks))
    if launched.ranks:
        show.note(f"foretrace: recorded {_ranks(launched.ranks)} in {output}")
    else:
        show.note(
            "foretrace: nothing was recorded: no process came to these steps with a torch optimizer "
            "(--steps all records from the first forward pass or process group to the end)"
        )
    return launched.exit_code


def _check_steps(steps: str | None, warmup: int) -> None:
    from foretrace.capture.windows import parse_windows

    try:
        parse_windows(steps, warmup)
    except ValueError as error:
        raise FormatError("--steps", str(error), "see foretrace capture --help") from None


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _capture_fake(command: list[str], world_size: int, ranks: list[int] | None, output: Path, steps: str | None) -> int:
    from foretrace.capture.fake import CaptureError, main
    from foretrace.capture.windows import parse_windows

    asked: dict[str, Any] = {}
    if steps is not None:
        windows = parse_windows(steps, 0).ranges
        if len(windows) != 1:
            raise FormatError("--steps", f"{steps!r} is not one window", "with --fake, write for example 1:2")
        asked = {"steps": len(windows[0]), "warm_up": 1 if steps.isdigit() else windows[0].start}
    try:
        main(Path(command[0]), command[1:], world_size=world_size, ranks=ranks, output=output, **asked)
    except (CaptureError, ValueError) as error:
        if getattr(error, "details", ""):
            show.note(error.details)  # type: ignore[union-attr]
        raise FormatError(command[0], str(error), "mend the script or the options") from None
    show.note(f"foretrace: wrote {output}")
    return 0


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FormatError(str(folder), error.strerror or str(error), "name a folder that can be made") from None
