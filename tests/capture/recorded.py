"""Running the programs of the recorder's tests, and looking at what they wrote."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).with_name("record_programs.py")
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "99"}


def run(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program of ours."""
    return _run([sys.executable, str(PROGRAMS), *map(str, words)], environment)


def run_ranks(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program of ours as two ranks."""
    return _run([*torchrun(), str(PROGRAMS), *map(str, words)], {})


def capture(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command ``foretrace capture``."""
    return _run([sys.executable, "-m", "foretrace", "capture", *map(str, words)], environment)


def torchrun() -> list[str]:
    """The beginning of a command line for two ranks."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return [*launcher, "--master-addr", "localhost", "--master-port", str(port)]


def _run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=180, env={**_ENVIRONMENT, **environment}, check=False
    )


def read(path: Path) -> Any:
    with gzip.open(path, "rt") as file:
        return json.load(file)


def job(folder: Path) -> Any:
    return json.loads((folder / "job.json").read_text())


def attributes(node: dict[str, Any]) -> dict[str, Any]:
    return {attribute["name"]: attribute["value"] for attribute in node["attrs"]}


def nodes(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Nodes of an execution trace in order of start."""
    return sorted(read(folder / f"rank{rank}.et.json.gz")["nodes"], key=lambda node: int(node["id"]))


def collectives(folder: Path, rank: int) -> list[tuple[Any, ...]]:
    """Name, group, its ranks, elements in and out, data type and reduction of each collective."""
    names = ("collective_name", "pg_desc", "pg_ranks", "in_msg_nelems", "out_msg_nelems", "dtype", "reduce_op")
    found = [attributes(node) for node in nodes(folder, rank)]
    return [tuple(one.get(name, "") for name in names) for one in found if "collective_name" in one]


def check_joined(folder: Path, rank: int = 0) -> None:
    """Every node of the execution trace stands in the Kineto trace under its id and name, and has its parent."""
    events = read(folder / f"rank{rank}.kineto.json.gz")["traceEvents"]
    names = {
        event["args"]["Record function id"]: event["name"]
        for event in events
        if event.get("ph") == "X" and "Record function id" in event.get("args", {})
    }
    found = nodes(folder, rank)
    ids = {node["id"] for node in found}
    assert len(ids) == len(found) > 20
    assert all(node["ctrl_deps"] in ids for node in found)
    recorded = {attributes(node)["rf_id"]: node["name"] for node in found if attributes(node)["rf_id"]}
    assert {record: names.get(record) for record in recorded} == recorded
