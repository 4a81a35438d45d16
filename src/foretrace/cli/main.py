"""Commands and their options."""

from __future__ import annotations

import enum
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from foretrace import FormatError, __version__
from foretrace.cli import capture, convert, generate, lint, llama, predict, show
from foretrace.cli.files import check_writable, read_job, write_atomically
from foretrace.cli.options import AsJson, Cache, NoPython, Paths, print_json

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Read the traces of a training job and say where the time goes.",
)
_LOOK = "Look"

# What typer raises for wrong options and arguments, whichever click it stands on.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class Window(enum.StrEnum):
    """Names of the windows of `foretrace.analyze.breakdown`."""

    all = "all"
    launched = "launched"
    hta = "hta"


class Memsets(enum.StrEnum):
    """What device memory sets count as."""

    memory = "memory"
    compute = "compute"


def _version(wanted: bool) -> None:
    if wanted:
        print(f"foretrace {__version__}")  # noqa: T201
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Read the traces of a training job and say where the time goes."""


@app.command(rich_help_panel=_LOOK)
def info(paths: Paths, as_json: AsJson = False, no_python: NoPython = False, cache: Cache = False) -> None:
    """What is in the files: kind, rank, events, and what was repaired, dropped or guessed."""
    from foretrace.trace.checks import consistency

    job = read_job(paths, keep_python=not no_python, cache=cache)
    for timeline in job:
        for oddity, count in consistency(timeline).items():
            timeline.report.note(oddity, count=count)
    if as_json:
        print_json(show.info_document(job))
    else:
        show.info(job)


@app.command(rich_help_panel=_LOOK)
def analyze(
    paths: Paths,
    as_json: AsJson = False,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained page.")] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write a timeline for ui.perfetto.dev (.json or .json.gz).")
    ] = None,
    window: Annotated[Window, typer.Option(help="Device work in the totals (launched: as TraceLens).")] = Window.all,
    memsets: Annotated[Memsets, typer.Option(help="What memory sets count as (TraceLens: compute).")] = Memsets.memory,
    kernel_table: Annotated[Path | None, typer.Option(help="YAML with your own rules for naming kernels.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Kernels and operators to show.")] = 15,
    no_python: NoPython = False,
    cache: Cache = False,
) -> None:
    """Where the time goes: per rank and step, by kernel and operator, and who waits for whom."""
    from foretrace.report.summary import analysis

    for target in (html, perfetto):
        check_writable(target)
    job = read_job(paths, keep_python=not no_python, cache=cache)
    if kernel_table is not None:
        _use_rules(job, kernel_table)
    with show.working("analyzing"):
        document = analysis(job, window.value, memsets.value, top=max(top, 50))
    if html is not None:
        from foretrace.report.page import analysis_page

        write_atomically(html, analysis_page(job, document).encode())
        show.note(f"wrote {html}")
    if perfetto is not None:
        from foretrace.report.tracks import write_timeline

        write_timeline(job, document, perfetto)
        show.note(f"wrote {perfetto}; open it in ui.perfetto.dev")
    if as_json:
        print_json(document)
    else:
        show.analysis(document, top)


@app.command(rich_help_panel=_LOOK)
def diff(
    before: Annotated[
        Path, typer.Argument(help="The earlier run: a file, folder, glob or archive.", show_default=False)
    ],
    after: Annotated[Path, typer.Argument(help="The later run.", show_default=False)],
    as_json: AsJson = False,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained page.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Rows of each kind to show.")] = 15,
    no_python: NoPython = False,
    cache: Cache = False,
) -> None:
    """What changed between two runs: which kernels, operators and phases appeared, vanished, grew or shrank."""
    from foretrace.analyze import diff as compare
    from foretrace.report.summary import without_nan

    check_writable(html)
    old, new = (read_job([path], keep_python=not no_python, cache=cache) for path in (before, after))
    with show.working("comparing"):
        rows: list[dict[str, Any]] = without_nan(compare(old, new).to_pylist())
    document: dict[str, Any] = {"before": str(before), "after": str(after), "changes": rows}
    document["warnings"] = {"before": old.all_warnings, "after": new.all_warnings}
    if html is not None:
        from foretrace.report.page import diff_page

        write_atomically(html, diff_page(document).encode())
        show.note(f"wrote {html}")
    if as_json:
        print_json(document)
    else:
        show.diff(rows, top)


app.command(rich_help_panel=predict.PANEL)(predict.simulate)
app.command("critical-path", rich_help_panel=predict.PANEL)(predict.critical_path)
app.command(rich_help_panel=predict.PANEL)(predict.validate)
app.command(rich_help_panel=generate.PANEL)(generate.generate)
app.command(rich_help_panel=convert.PANEL)(convert.convert)
app.command(rich_help_panel=convert.PANEL)(lint.lint)
# What follows the program belongs to it.
app.command(rich_help_panel=convert.PANEL, context_settings={"allow_interspersed_args": False})(capture.capture)
app.add_typer(llama.app, name="llama", rich_help_panel=llama.PANEL)


def _use_rules(job: Any, path: Path) -> None:
    from foretrace.trace.classify import Classifier

    try:
        rules = Classifier.from_yaml(path)
    except (OSError, ValueError) as error:
        raise FormatError(str(path), str(error).removeprefix(f"{path}: "), "mend the table of kernel rules") from None
    for timeline in job:
        timeline.classifier = rules


def main() -> None:
    """Run the command line; exit code 2 and one line on stderr for bad input, 130 for Ctrl-C."""
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except FormatError as error:
        _fail(str(error))
    except _UsageError as error:
        _fail(f"{error.format_message() or 'no command'}; see foretrace --help")  # type: ignore[attr-defined]
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except MemoryError:
        _fail("there is not enough memory; take fewer or smaller files, or a larger machine")
    except OSError as error:
        # What is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(0)  # the reader has gone: ``| head``
        _fail(f"output: {error.strerror or error}; free space or choose another place")
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> None:
    sys.stderr.write(f"foretrace: {' '.join(message.split())}\n")
    sys.exit(2)
