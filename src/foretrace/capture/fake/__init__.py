"""Capture a training program without its hardware: one process plays any rank of a job of any size.

`main` runs an unchanged script on tensors without data, in process groups without peers, and writes what a rank
computes and communicates as a PyTorch execution trace. PyTorch itself is loaded in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretrace.capture.fake.errors import CaptureError
from foretrace.trace import FormatError

__all__ = ["CaptureError", "main"]


def main(
    script: Path,
    args: Sequence[str],
    *,
    world_size: int,
    ranks: Sequence[int] | None,
    output: Path,
    steps: int = 1,
    warm_up: int = 1,
    device: str = "cuda",
    ranks_per_node: int = 8,
    limit: int = 0,
) -> dict[str, Any]:
    """Run a training script as ranks of a job that does not exist, and write their execution traces.

    Args:
        script: a Python program, as ``torchrun`` would start it.
        args: its command line.
        world_size: ranks of the job.
        ranks: which to trace; None traces one of each kind and says in ``job.json`` which others are like it.
        output: folder for ``rank<N>.et.json.gz``, ``rank<N>.log`` (what the script printed) and ``job.json``.
        steps: optimizer steps to record.
        warm_up: steps to leave out before; the first one makes the optimizer's state.
        device: ``"cuda"`` lets the script find GPUs, ``"cpu"`` lets it find none.
        ranks_per_node: as ``torchrun --nproc-per-node``.
        limit: ranks to run at a time, 0 for as many as there are cores.

    Returns:
        The contents of ``job.json``.

    Raises:
        FormatError: if there is no such script.
        ValueError: if a number is out of range.
        CaptureError: if the script fails.
    """
    _check(script, world_size, ranks, steps, warm_up, device, ranks_per_node)
    reading, writing = os.pipe()
    orders = {
        "options": {
            "script": str(script),
            "args": list(args),
            "world_size": world_size,
            "steps": steps,
            "warm_up": warm_up,
            "device": device,
            "ranks_per_node": ranks_per_node,
        },
        "ranks": None if ranks is None else list(ranks),
        "output": str(output),
        "limit": limit,
        "answer": writing,
    }
    # One thread each: ranks run side by side, and none of them computes anything.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with os.fdopen(reading) as pipe:
        try:
            server = subprocess.Popen(
                [sys.executable, "-m", "foretrace.capture.fake"],
                stdin=subprocess.PIPE,
                pass_fds=[writing],
                env=environment,
                text=True,
            )
        finally:
            os.close(writing)
        with server:
            assert server.stdin is not None
            server.stdin.write(json.dumps(orders))
            server.stdin.close()
            text = pipe.read()
    if not text:
        raise CaptureError(f"{script}: the capture ended without a word (exit code {server.returncode})")
    answer: dict[str, Any] = json.loads(text)
    if "error" in answer:
        raise CaptureError(answer["error"], answer["details"])
    job: dict[str, Any] = answer["job"]
    return job


def _check(
    script: Path,
    world_size: int,
    ranks: Sequence[int] | None,
    steps: int,
    warm_up: int,
    device: str,
    ranks_per_node: int,
) -> None:
    if not script.is_file():
        raise FormatError(str(script), "no such script", "name a Python program that torchrun would start")
    for name, value, least in (
        ("world size", world_size, 1),
        ("number of steps", steps, 1),
        ("number of warm-up steps", warm_up, 0),
        ("number of ranks per node", ranks_per_node, 1),
    ):
        if value < least:
            raise ValueError(f"the {name} must be at least {least}, got {value}")
    wrong = [rank for rank in ranks or () if not 0 <= rank < world_size]
    if wrong:
        raise ValueError(f"rank {wrong[0]} is none of a job of {world_size} (they are 0 to {world_size - 1})")
    if device not in ("cuda", "cpu"):
        raise ValueError(f"the device must be cuda or cpu, got {device}")
