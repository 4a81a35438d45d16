"""The command line as a user meets it: its output, its exit code, and what it does as a process."""

from __future__ import annotations

import contextlib
import glob
import io
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import run, run_process
from tests.formats.builder import small_trace, write

ROOT = Path(__file__).parents[2]
PARTS = {"exposed_compute_ns", "exposed_communication_ns", "overlapped_ns", "memory_ns", "idle_ns"}


def document(*words: str | Path) -> Any:
    done = run(*words, "--json")
    assert done.returncode == 0, done.stderr

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(done.stdout, parse_constant=refuse)


@pytest.fixture
def two_ranks(tmp_path: Path) -> Path:
    for rank in range(2):
        write(tmp_path / f"rank{rank}.json.gz", small_trace(rank, 2, late=100.0 * rank))
    return tmp_path


def test_analyze_json_keeps_the_contract(two_ranks: Path) -> None:
    found = document("analyze", two_ranks)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        for entry in (rank, *rank["steps"]):
            assert set(entry["breakdown"]) == PARTS
            assert sum(entry["breakdown"].values()) == entry["span_ns"]
            assert sum(entry["idle_causes"].values()) == entry["breakdown"]["idle_ns"]
    collectives = found["collectives"]
    assert (collectives["matched"], collectives["stragglers"]) == (2, [1])
    assert (collectives["transfer_ns"], collectives["wait_ns"]) == (400_000, 200_000)
    assert found["warnings"] == {}


def test_windows(two_ranks: Path) -> None:
    found = document("analyze", two_ranks, "--window", "launched", "--memsets", "compute")
    for rank in found["ranks"]:
        assert sum(rank["idle_causes"].values()) == rank["breakdown"]["idle_ns"]


def test_info_json(two_ranks: Path) -> None:
    found = document("info", two_ranks)
    first = found["files"][0]
    assert (first["kind"], first["rank"], first["events"]["kernel"]) == ("kineto", 0, 4)
    assert {"repaired", "dropped", "guessed"} <= set(first)


def test_diff_json(two_ranks: Path) -> None:
    found = document("diff", two_ranks / "rank0.json.gz", two_ranks / "rank1.json.gz")
    assert {"kind", "name", "before_ns", "after_ns", "change"} <= set(found["changes"][0])


@pytest.mark.parametrize("command", ["info", "analyze"])
def test_tables(two_ranks: Path, command: str) -> None:
    done = run(command, two_ranks)
    assert done.returncode == 0 and done.stderr == ""
    assert "cpu_op" in done.stdout if command == "info" else "straggler" in done.stdout


def test_pages_and_timeline(two_ranks: Path) -> None:
    page, timeline = two_ranks / "report.html", two_ranks / "timeline.json.gz"
    done = run("analyze", two_ranks, "--html", page, "--perfetto", timeline, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)
    assert page.read_text().startswith("<!DOCTYPE html>") and timeline.stat().st_size > 500
    assert not list(two_ranks.glob(".*.part"))
    assert run("diff", two_ranks / "rank0.json.gz", two_ranks / "rank1.json.gz", "--html", page).returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        ("analyze", "nope.json"),
        ("analyze", "*.none"),
        ("info", "."),
        ("analyze", "bad.json"),
        ("diff", "rank0.json", "bad.json"),
        ("analyze", "rank0.json", "--html", "no/folder/x.html"),
        ("analyze", "rank0.json", "--html", "."),
        ("analyze", "rank0.json", "--window", "nonsense"),
        ("analyze", "rank0.json", "--kernel-table", "bad.json"),
        ("analyze", "rank0.json", "--top", "0"),
        ("analyze",),
        ("nonsense",),
        ("analyze", "rank0.json", "--nonsense"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, words: tuple[str, ...]) -> None:
    if words != ("info", "."):
        write(tmp_path / "rank0.json", small_trace())
        (tmp_path / "bad.json").write_text("<html>")
    done = run(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"foretrace: [^\n]{5,}\n", done.stderr), done.stderr


def test_user_table_of_kernels(two_ranks: Path) -> None:
    table = two_ranks / "mine.yaml"
    table.write_text("rules:\n  - kind: attention\n    any: ['^ampere_sgemm']\n")
    kinds = {
        row["kind"] for row in document("analyze", two_ranks / "rank0.json.gz", "--kernel-table", table)["kernel_kinds"]
    }
    assert kinds == {"attention", "communication"}


def test_help_and_version() -> None:
    done = run_process("--help")
    assert done.returncode == 0 and "Look" in done.stdout
    assert run_process("--version").stdout.startswith("foretrace ")


def test_a_process_answers_as_the_function_does(two_ranks: Path) -> None:
    for words in (("analyze", two_ranks, "--json"), ("info", two_ranks), ("analyze", "nope.json"), ("nonsense",)):
        process, here = run_process(*words, cwd=two_ranks), run(*words, cwd=two_ranks)
        assert (process.returncode, process.stdout, process.stderr) == (here.returncode, here.stdout, here.stderr)


def test_closed_pipe(two_ranks: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m foretrace analyze {shlex.quote(str(two_ranks))} --json | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""


def test_a_killed_run_leaves_the_old_page(two_ranks: Path) -> None:
    page = two_ranks / "report.html"
    page.write_text("old")
    command = [sys.executable, "-m", "foretrace", "analyze", str(two_ranks), "--html", str(page)]
    for delay in (0.1, 0.4, 0.8):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert page.read_text() == "old" or page.read_text().rstrip().endswith("</html>")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_full_disk_is_an_error(two_ranks: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m foretrace analyze {shlex.quote(str(two_ranks))} --json > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert re.fullmatch(r"foretrace: [^\n]+\n", done.stderr)


# What the pages call train.py: any program that trains, alone or under torchrun.
TRAIN = """
import os

import torch

if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if "RANK" in os.environ:
    model = torch.nn.parallel.DistributedDataParallel(model)
for _ in range(14):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if "RANK" in os.environ:
    torch.distributed.destroy_process_group()
"""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def run_line(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A line of a page as a shell in the folder would run it; a shell itself does where more than a command is told."""
    words = shlex.split(line)
    if words[1] == "capture" or set(line) & set("|&;<>$`~{}[]?()"):
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        return subprocess.run(line, shell=True, capture_output=True, text=True, cwd=folder, env=environment)
    expanded = [sorted(glob.glob(word, root_dir=folder)) or [word] for word in words[1:]]
    return run(*itertools.chain(*expanded), cwd=folder)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "import foretrace" in page.read_text()], ids=lambda page: page.name
)
def test_documented_commands_and_examples_run(tmp_path: Path, page: Path) -> None:
    """Every ``foretrace`` line and Python block of a page, on traces recorded for the tests."""
    text = page.read_text()
    out = tmp_path / "demo" / "out"
    out.mkdir(parents=True)
    for rank in range(2):
        (out / f"rank{rank}.json.gz").write_bytes(
            (ROOT / "tests" / "data" / "gloo-ddp" / f"rank{rank}.json.gz").read_bytes()
        )
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "corpus.txt").write_text((ROOT / "README.md").read_text() * 2)
    shell = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    commands = re.findall(r"^foretrace .*$", shell, re.MULTILINE)
    for command in commands:
        done = run_line(command, tmp_path)
        assert done.returncode == 0, (command, done.stderr)
    blocks = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "foretrace" in b]
    assert blocks
    for block in blocks:
        if "foretrace.capture" in block:  # it would stay in this process
            done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, cwd=tmp_path)
            assert done.returncode == 0, (block, done.stderr)
        else:
            with contextlib.chdir(tmp_path), contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block, f"<{page.name}>", "exec"), {"__name__": "__main__"})
