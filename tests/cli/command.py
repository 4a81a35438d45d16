"""The command line without the start of a process, which takes longer than most commands do."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from foretrace.cli import main


def run(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command in this process, and what a process would have given; an exception that leaves it is a failure."""
    command = ["foretrace", *map(str, words)]
    code: Any = 0
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(cwd or Path.cwd()),
        mock.patch.object(sys, "argv", command),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(command, code or 0, out.getvalue(), err.getvalue())


def run_process(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "foretrace", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, check=False)
