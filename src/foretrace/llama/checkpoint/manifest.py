"""The manifest of a training checkpoint: every file with its size and digest, written last."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from foretrace.llama.checkpoint.files import read_json
from foretrace.trace.reading import FormatError

MANIFEST = "manifest.json"


def digests(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of files, by name."""
    found = {}
    for path in files:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found[path.name] = {"bytes": path.stat().st_size, "sha256": digest}
    return found


def first_problem(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """What is wrong with the files of a checkpoint, with the file's name; None if nothing is.

    Args:
        folder: of the checkpoint.
        part: read the files of this part only, of ``parts``; sizes are compared of all.
    """
    try:
        expected = read_json(folder / MANIFEST, "take an earlier checkpoint").get("files")
    except FormatError as error:
        return f"{error.path}: {error.problem}"
    if not isinstance(expected, dict) or not expected:
        return f"{folder / MANIFEST}: lists no files"
    for name, entry in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{path}: is missing"
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{path}: has {size} of {entry['bytes']} bytes"
    for name, entry in list(expected.items())[part::parts]:
        if digests([folder / name])[name]["sha256"] != entry["sha256"]:
            return f"{folder / name}: is damaged, its digest is another one"
    return None
