"""Reading with a progress bar, and writing files that are whole or not there."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    if path.exists() and not path.is_file():  # a rename would put a file in the place of the device
        raise FormatError(str(path), "is no regular file", "name a file to write")
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


@contextmanager
def written_together(folder: Path, own: re.Pattern[str]) -> Iterator[Path]:
    """A folder to write into, whose files become those of ``folder`` when all of them are there.

    A new folder gets its name then. In one that exists, files of a name like ``own`` are put aside first and removed
    last; everything else in it stays. A process that is killed leaves what was there before; only during the renames at
    the end, which take a moment, files of before may be in a hidden folder beside the new ones. The first file by name
    in natural order (rank 0) goes first and comes last, so that half a set is not taken for a whole one.

    Raises:
        FormatError: if the disk is full or the folder cannot be written; what was there is left as it was.
    """
    hidden = f".{folder.resolve().name}.{os.getpid()}"
    target = folder.resolve()
    is_new = not target.exists()
    staging = (target.parent if is_new else target) / f"{hidden}.part"
    try:
        staging.mkdir(parents=True)
        yield staging
        if is_new:
            staging.replace(target)
        else:
            _take_places(staging, target, target / f"{hidden}.old", own)
    except OSError as error:
        path = error.filename or folder
        raise FormatError(str(path), error.strerror or str(error), "free space or choose another place") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _take_places(staging: Path, folder: Path, aside: Path, own: re.Pattern[str]) -> None:
    """Put files of before aside and new ones in their place."""
    old = [path for path in folder.iterdir() if own.fullmatch(path.name)]
    aside.mkdir()
    try:
        for path in sorted(old, key=_natural):
            path.replace(aside / path.name)
        for path in sorted(staging.iterdir(), key=_natural, reverse=True):
            path.replace(folder / path.name)
    except BaseException:
        for path in aside.iterdir():
            path.replace(folder / path.name)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _natural(path: Path) -> tuple[bool, int, str]:
    """Files with a number by that number, then the others."""
    found = re.search(r"[0-9]+", path.name)
    return found is None, int(found[0]) if found else 0, path.name
