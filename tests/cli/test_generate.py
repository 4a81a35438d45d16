"""``foretrace generate``, and ``simulate`` of what it wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def foretrace(*words: object, code: int = 0) -> Any:
    """Run the command; its JSON, or what it says on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "foretrace", *map(str, words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if code == 0 else done.stderr


PLAN = ("--tp", 2, "--pp", 2, "--dp", 2, "--micro-batches", 4, "--granularity", "layer")


def test_traces_and_description_simulate_alike(tmp_path: Path) -> None:
    folder, description = tmp_path / "ets", tmp_path / "job.yaml"
    written = foretrace("generate", "llama-2-7b", *PLAN, "-o", folder, "--json")
    assert written["ranks"] == 8
    assert len(list(folder.glob("*.et"))) == 8
    assert foretrace("generate", "llama-2-7b", *PLAN, "-o", description, "--json")["ranks"] == 8
    groups = ("--comm-groups", folder / "comm_groups.json")
    of_traces = foretrace("simulate", folder, "--machine", "h100-sxm", *groups, "--json")
    of_description = foretrace("simulate", description, "--machine", "h100-sxm", "--json")
    assert of_traces["ranks"] == of_description["ranks"]
    assert of_traces["summary"]["finished"] == 8
    assert of_traces["summary"]["finish_ns"]["min"] > 0


def test_a_cluster_of_131072_ranks(tmp_path: Path) -> None:
    description = tmp_path / "job.yaml"
    layout = ("--tp", 8, "--pp", 16, "--dp", 1024, "--micro-batches", 16)
    foretrace("generate", "llama-2-70b", *layout, "-o", description, "--json")
    found = foretrace("simulate", description, "--machine", "h100-sxm-cluster", "--json")
    assert found["summary"]["finished"] == 131072
    assert found["ranks"] == []
    assert found["figures"]["simulated_ranks"] == 16


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    assert "llama-2-8b" in foretrace("generate", "llama-2-8b", "-o", tmp_path / "x", code=2)
    assert "3" in foretrace("generate", "llama-2-7b", "--tp", 3, "-o", tmp_path / "x", code=2)
    foretrace("generate", "llama-2-7b", "--tp", 4, "-o", tmp_path / "job.yaml", "--json")
    refused = foretrace("simulate", tmp_path / "job.yaml", "--machine", "h100-sxm", code=2)
    assert "4 ranks do not fill nodes of 8 devices" in refused
    refused = foretrace("simulate", tmp_path / "job.yaml", "--machine", "no-such-machine", code=2)
    assert "no-such-machine" in refused
