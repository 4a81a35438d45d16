"""``job.json``: what was recorded, of all ranks that share a folder. Each rank merges its own part into it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isal import igzip

NAME = "job.json"
SCHEMA = "foretrace-job-1"
_OUR_FILES = re.compile(r"rank\d+\.(kineto|et)\.json\.gz")
_RELEVANT = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT|OMP_\w+|MKL_\w+|KMP_\w+|NCCL_\w+|RCCL_\w+"
    r"|GLOO_\w+|TORCH\w*|PYTORCH_\w+|KINETO_\w+|CUDA_\w+|HIP_\w+|CUBLAS_\w+|SLURM_(JOB_ID|NNODES|NTASKS|PROCID|NODEID))"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|_KEY$")


def relevant_environment() -> dict[str, str]:
    """Environment variables that change how PyTorch runs; none that looks like a secret."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if _RELEVANT.fullmatch(name) and not _SECRET.search(name)
    }


def claim(folder: Path, run: str, rank: int, fixed: bool) -> int:
    """Take part in a recording: what an earlier run left in the folder is deleted by the first rank that comes.

    Args:
        run: what all processes of this run have in common.
        rank: the wanted number.
        fixed: whether that is this process's rank for certain; else the next free number is taken.

    Returns:
        The number under which this process records.
    """
    with _locked(folder):
        document = _read(folder)
        if document.get("run") != run:
            _delete_files(folder, document)
            document = {"schema": SCHEMA, "run": run, "ranks": {}}
        ranks = document["ranks"]
        while not fixed and str(rank) in ranks and ranks[str(rank)].get("pid") != os.getpid():
            rank += 1
        ranks.setdefault(str(rank), {"pid": os.getpid()})
        _write(folder, document)
    return rank


def is_taken_over(folder: Path, run: str) -> bool:
    """Whether a later run has begun to record into the folder: what is in it now is not ours to replace."""
    return bool(_read(folder).get("run", run) != run)


def merge(folder: Path, run: str, rank: int, own: dict[str, Any], job: dict[str, Any]) -> None:
    """Put one rank's part into the file, unless a later run has taken the folder over.

    Args:
        own: the rank's part.
        job: members that all ranks share; lists (of groups) are united.
    """
    with _locked(folder):
        document = _read(folder)
        if document.get("run", run) != run:
            return
        document = document or {"schema": SCHEMA, "run": run, "ranks": {}}
        for name, value in job.items():
            document[name] = _united(document.get(name), value) if isinstance(value, list) else value
        document["ranks"][str(rank)] = own
        document["ranks"] = dict(sorted(document["ranks"].items(), key=lambda item: int(item[0])))
        _write(folder, document)


def _united(known: Any, more: list[Any]) -> list[Any]:
    united = list(known) if isinstance(known, list) else []
    united += [one for one in more if one not in united]
    return united


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time. A file system without locks is used without: then the last rank's view stays."""
    with (folder / f".{NAME}.lock").open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(folder: Path) -> dict[str, Any]:
    try:
        document = json.loads((folder / NAME).read_text())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) and document.get("schema") == SCHEMA else {}


def _write(folder: Path, document: dict[str, Any]) -> None:
    write_whole(folder / NAME, json.dumps(document, indent=1).encode() + b"\n")


def _delete_files(folder: Path, document: dict[str, Any]) -> None:
    for rank in document.get("ranks", {}).values():
        for name in rank.get("files", {}).values():
            if isinstance(name, str) and _OUR_FILES.fullmatch(name):
                (folder / name).unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write to a temporary name, then rename; compressed if the name ends in ``.gz``."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        unfinished.write_bytes(igzip.compress(content, compresslevel=2) if path.suffix == ".gz" else content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
