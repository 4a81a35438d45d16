"""Files and folders that are whole or not there, and JSON whose mistakes are told with the file's name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foretrace.trace.reading import FormatError


def write_file(path: Path, content: bytes) -> None:
    """Write under a temporary name beside the target, then rename.

    Raises:
        FormatError: if the disk is full or the folder cannot be written; a file that was there is left as it was.
    """
    unfinished = _unfinished(path)
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise _not_written(path, error) from None


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, under a temporary name beside the target until all of it is there.

    Raises:
        FormatError: if the target exists and is not empty, or cannot be written.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FormatError(str(path), "exists", "name a folder that does not, or remove it first")
    unfinished = _unfinished(path)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        for file in unfinished.iterdir():
            sync_file(file)
        sync_folder(unfinished)
        unfinished.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise _not_written(path, error) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        FormatError: if the file cannot be read or holds something else.
    """
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise FormatError(str(path), error.strerror or str(error), remedy) from None
    except (ValueError, RecursionError) as error:
        raise FormatError(str(path), f"is no JSON, or cut off ({error})", remedy) from None
    if not isinstance(document, dict):
        raise FormatError(str(path), "holds no JSON object", remedy)
    return document


def to_json(document: dict[str, Any]) -> bytes:
    """As it is written to files."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def sync_file(path: Path) -> None:
    """Wait until the content of a file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def _not_written(path: Path, error: OSError) -> FormatError:
    return FormatError(str(path), error.strerror or str(error), "free space or choose another place")
