"""Reading with a progress bar, and writing files that are whole or not there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from foretrace import FormatError, Job, read
from foretrace.cli.show import reading_bar


def read_job(paths: Sequence[Path], *, keep_python: bool, cache: bool) -> Job:
    """Read traces with a progress bar on stderr, when that is a terminal."""
    with reading_bar() as progress:
        return read([str(path) for path in paths], keep_python=keep_python, cache=cache, progress=progress)


def check_writable(path: Path | None) -> None:
    """Refuse an output file before any work is done for it.

    Raises:
        FormatError: if it is a folder, or its folder is missing or cannot be written.
    """
    if path is None:
        return
    if path.is_dir():
        raise FormatError(str(path), "is a folder", "name a file to write")
    if not path.parent.is_dir():
        raise FormatError(str(path), "its folder does not exist", "make the folder first")
    if not os.access(path.parent, os.W_OK):
        raise FormatError(str(path), "its folder cannot be written", "choose another place")


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a temporary name beside the target, then rename.

    Raises:
        FormatError: if the disk is full or the folder cannot be written; an existing file is left as it was.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise FormatError(str(path), error.strerror or str(error), "free space or choose another place") from None
