"""``foretrace generate``, and ``simulate`` of what it wrote."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import run


def foretrace(*words: object, code: int = 0) -> Any:
    """Run the command; its JSON, or what it says on stderr."""
    done = run(*words)
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


LONG = ("--tp", 8, "--pp", 4, "--dp", 16, "--micro-batches", 8)


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.startswith(".")}


def _killed_while_writing(folder: Path) -> None:
    """Begin to write many ETs, and kill the process when some are there."""
    command = [sys.executable, "-m", "foretrace", "generate", "llama-2-7b", *map(str, LONG), "-o", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    hidden = f".{folder.name}.{process.pid}.part"
    places = (folder.parent / hidden, folder / hidden)
    while process.poll() is None and not any(len(list(place.glob("*.et"))) > 3 for place in places if place.is_dir()):
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL


def test_a_killed_run_leaves_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "ets"
    _killed_while_writing(folder)
    assert not folder.exists()
    foretrace("generate", "llama-2-7b", *PLAN, "-o", folder, "--json")
    (folder / "notes.txt").write_text("mine")
    before = _content(folder)
    assert len(before) == 10
    _killed_while_writing(folder)
    assert _content(folder) == before
    assert foretrace(
        "simulate", folder, "--machine", "h100-sxm", "--comm-groups", folder / "comm_groups.json", "--json"
    )


def test_a_job_takes_the_place_of_another(tmp_path: Path) -> None:
    folder = tmp_path / "ets"
    foretrace("generate", "llama-2-7b", *PLAN, "-o", folder, "--json")
    (folder / "notes.txt").write_text("mine")
    foretrace("generate", "llama-2-7b", "--dp", 2, "--granularity", "layer", "-o", folder, "--json")
    assert sorted(path.name for path in folder.iterdir()) == ["comm_groups.json", "notes.txt", "rank.0.et", "rank.1.et"]
    (folder / "job.0.et").write_bytes(b"")
    assert "job.0.et of another job" in foretrace("generate", "llama-2-7b", "-o", folder, code=2)
    assert "is a file" in foretrace("generate", "llama-2-7b", "-o", folder / "notes.txt", code=2)


@pytest.mark.parametrize("exists", [False, True], ids=["new", "existing"])
def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "ets"
    if exists:
        foretrace("generate", "llama-2-7b", "--granularity", "layer", "-o", folder, "--json")
    before = _content(folder) if exists else {}
    limited = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)); "
    limited += f"sys.argv = ['foretrace', 'generate', 'llama-2-7b', '-o', {str(folder)!r}]; "
    limited += "runpy.run_module('foretrace', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"foretrace: [^\n]*: File too large; free space or choose another place\n", done.stderr)
    assert (_content(folder) if exists else {}) == before
    assert [path.name for path in tmp_path.iterdir()] == (["ets"] if exists else [])
    assert not list(folder.glob(".*"))
