"""A whole job: which ranks to run, their traces, and ``job.json``, which says what the other ranks are."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from foretrace.capture.fake import symmetry
from foretrace.capture.fake.errors import CaptureError
from foretrace.capture.fake.program import Options
from foretrace.capture.fake.workers import Outcome, Workers

FORMAT = "foretrace-fake-job-1"


@dataclass(frozen=True, slots=True)
class _Found:
    """What is known of the ranks of a job."""

    outcomes: list[Outcome]
    equal_to: dict[int, int]
    traced: list[int]
    surprises: list[int]


def capture(options: Options, ranks: Sequence[int] | None, output: Path, limit: int = 0) -> dict[str, Any]:
    """Run a script at its world size without hardware, and write one trace for each kind of rank.

    Args:
        options: the program and how to run it.
        ranks: ranks to trace; None for one of each kind.
        output: folder for ``rank<N>.et.json.gz``, ``rank<N>.log`` (what the script printed) and ``job.json``.
        limit: ranks to run at a time, 0 for as many as there are cores.

    Returns:
        The contents of ``job.json``.

    Raises:
        CaptureError: if the script fails.
    """
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="foretrace-", dir=output) as folder:
        workers = Workers(options, Path(folder), limit or os.cpu_count() or 1)
        try:
            found = _explicit(workers, ranks) if ranks is not None else _by_symmetry(workers)
        except CaptureError:
            _keep_logs(Path(folder), output)
            raise
        finally:
            workers.stop()
        for outcome in found.outcomes:
            shutil.move(outcome.path, output / outcome.path.name)
            shutil.move(outcome.path.with_name(f"rank{outcome.rank}.log"), output / f"rank{outcome.rank}.log")
    described = _describe(workers.options, options, found)
    (output / "job.json").write_text(json.dumps(described, indent=1) + "\n")
    return described


def _keep_logs(folder: Path, output: Path) -> None:
    for log in folder.glob("rank*.log"):
        shutil.copy(log, output / log.name)


def _explicit(workers: Workers, ranks: Sequence[int]) -> _Found:
    """The given ranks; those of them that are alike are noted."""
    outcomes = workers.run(sorted(set(ranks)))
    first: dict[str, int] = {}
    equal_to = {outcome.rank: first.setdefault(outcome.digest, outcome.rank) for outcome in outcomes}
    return _Found(outcomes, equal_to, [outcome.rank for outcome in outcomes], [])


def _by_symmetry(workers: Workers) -> _Found:
    world_size = workers.options.world_size
    first = workers.run([0])[0]
    grid = symmetry.axes(first.groups, world_size)
    classes = symmetry.classify(grid, world_size, lambda ranks: [found.digest for found in workers.run(ranks)])
    kinds = sorted(set(classes.equal_to))
    return _Found(workers.run(kinds), dict(enumerate(classes.equal_to)), classes.traced, classes.surprises)


def _describe(options: Options, asked: Options, found: _Found) -> dict[str, Any]:
    followers: dict[int, list[int]] = {}
    for rank, other in found.equal_to.items():
        if rank != other:
            followers.setdefault(other, []).append(rank)
    traced = set(found.traced)
    first = found.outcomes[0]
    described: dict[str, Any] = {
        "format": FORMAT,
        "world_size": options.world_size,
        "ranks_per_node": options.ranks_per_node,
        "script": str(options.script),
        "args": list(options.args),
        "torch": torch.__version__,
        "device": options.device,
        "steps": list(first.steps),
        "warm_up": options.warm_up,
        "traces": {str(outcome.rank): outcome.path.name for outcome in found.outcomes},
        "nodes": {str(outcome.rank): outcome.num_nodes for outcome in found.outcomes},
        "equal_to": {text: other for other, ranks in followers.items() for text in symmetry.ranges(ranks)},
        "verified_by_tracing": symmetry.ranges(traced),
        "inferred_from_symmetry": symmetry.ranges(rank for rank in found.equal_to if rank not in traced),
        "unknown": symmetry.ranges(rank for rank in range(options.world_size) if rank not in found.equal_to),
        "groups": [asdict(group) for group in first.groups],
        "report": {str(outcome.rank): outcome.report for outcome in found.outcomes},
        "exit_codes": {str(outcome.rank): outcome.exit_code for outcome in found.outcomes if outcome.exit_code},
    }
    if found.surprises:
        described["unlike_what_symmetry_said"] = symmetry.ranges(found.surprises)
    if (options.steps, options.warm_up) != (asked.steps, asked.warm_up):
        described["fewer_steps_than_asked"] = {"steps": asked.steps, "warm_up": asked.warm_up}
    return described
