"""``foretrace lint``: what is wrong with trace files, and repaired ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from foretrace import FormatError
from foretrace.cli import show
from foretrace.cli.options import AsJson, print_json

PANEL = "Make and exchange"


def lint(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Chakra ET (binary, JSON or Arrow), PyTorch ET and Kineto files, or folders of them; the ranks of a "
            "job are also compared with each other.",
            show_default=False,
        ),
    ],
    repair: Annotated[
        bool, typer.Option("--repair", help="Write Chakra traces anew without what can be mended, as NAME.repaired.et.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write: a folder, or for one input a file.")
    ] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Replace the files that are repaired.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check traces: dangling dependencies, cycles, unpaired sends, diverging collectives, ...; exit code 1 if any."""
    from foretrace.formats import lint as checks

    if (output is not None or in_place) and not repair:
        raise FormatError("lint", "-o and --in-place are for repaired files", "add --repair")
    if output is not None and in_place:
        raise FormatError("lint", "-o and --in-place exclude each other", "choose one")
    files, errors = _files(paths)
    with show.working("checking"):
        results, notes = checks.lint(files, repair=repair, output=output, in_place=in_place)
    errors += [{"path": str(one.path), "error": one.error} for one in results if one.error]
    good = [one for one in results if not one.error]
    for error in errors:
        sys.stderr.write(f"foretrace: {error['error']}\n")  # as `main` does: one line, however long
    if as_json:
        print_json({"files": [one.to_dict() for one in good], "notes": dict(notes), "errors": errors})
    else:
        _show(good, notes)
    if errors:
        raise typer.Exit(2)
    if any(one.remaining for one in good):
        raise typer.Exit(1)


def _files(paths: list[Path]) -> tuple[list[Path], list[dict[str, str]]]:
    """The files that the paths stand for, each once, and what is wrong with paths."""
    from foretrace.estimate.exchange import files_of

    files: dict[Path, None] = {}
    errors = []
    for path in paths:
        try:
            files.update(dict.fromkeys(files_of([path])))
        except FormatError as error:
            errors.append({"path": str(path), "error": str(error)})
    return list(files), errors


def _show(results: list[Any], notes: Any) -> None:
    """A table a file that has findings, why they are findings, and what was written."""
    reasons: dict[str, Any] = {}
    for one in results:
        if one.findings:
            table = show.new_table(f"{one.path}: {one.kind}", "rule", "count", "repairable", "what")
            for found in one.findings:
                place = found.example.removeprefix(f"{one.path}: ")
                table.add_row(found.rule.name, f"{found.count:,}", "yes" if found.repairable else "no", escape(place))
                reasons[found.rule.name] = found.rule
            show.out.print(table)
        else:
            show.out.print(f"{escape(str(one.path))}: {one.kind}, nothing found", highlight=False)
        for note, count in one.notes.items():
            show.out.print(f"  noted: {escape(note)}: {count:,}", highlight=False)
        if one.output is not None:
            done = ", ".join(f"{rule}: {count:,}" for rule, count in one.repaired.items()) or "nothing to repair"
            left = ", ".join(found.rule.name for found in one.remaining) or "nothing"
            show.out.print(f"  wrote {escape(str(one.output))} ({done}); still found: {left}", highlight=False)
    for note, count in notes.items():
        show.out.print(f"job: {escape(note)}: {count:,}", highlight=False)
    for name, rule in reasons.items():
        show.out.print(f"• {name}: {escape(rule.reason)} {escape(rule.remedy)}", highlight=False)
