"""Arguments and options that commands share, and their JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

Paths = Annotated[list[Path], typer.Argument(help="Trace files, folders, globs or archives.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout and nothing else.")]
NoPython = Annotated[bool, typer.Option("--no-python", help="Leave out Python function events.")]
Cache = Annotated[bool, typer.Option("--cache/--no-cache", help="Keep an Arrow file of each trace for the next time.")]


def print_json(document: Any) -> None:
    """One document to stdout; NaN is a mistake of ours and raises."""
    sys.stdout.write(json.dumps(document, allow_nan=False, default=_number) + "\n")


def _number(value: Any) -> Any:
    """NumPy scalars as Python numbers."""
    return value.item()
