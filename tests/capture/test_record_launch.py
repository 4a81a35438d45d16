"""``foretrace capture -- PROGRAM``: nothing is changed in the program."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.capture import recorded

PROGRAM = [sys.executable, str(recorded.PROGRAMS)]


def test_ranks_of_torchrun(tmp_path: Path) -> None:
    command = [*recorded.torchrun(), str(recorded.PROGRAMS), "unchanged", "0"]
    done = recorded.capture("-o", tmp_path, "--steps", "2:4", "--", *command)
    assert done.returncode == 0, done.stderr
    assert "recorded ranks 0, 1 in" in done.stderr
    document = recorded.job(tmp_path)
    assert sorted(document["ranks"]) == ["0", "1"]  # and not the launcher
    for rank in (0, 1):
        recorded.check_joined(tmp_path, rank)
        expected = ("allreduce", "default_pg", "[0, 1]", 72, 72, "Float", "SUM")
        assert recorded.collectives(tmp_path, rank) == [expected, expected]
        names = [node["name"] for node in recorded.nodes(tmp_path, rank)]
        # Steps end within the program's own scope; what that scope lacks at the end was put in.
        assert (names.count("forward"), names.count("optimizer")) == (2, 2)
        assert document["ranks"][str(rank)]["problems"] == []


@pytest.mark.slow
def test_ranks_of_spawn(tmp_path: Path) -> None:
    done = recorded.capture("-o", tmp_path, "--", *PROGRAM, "spawn", tmp_path / "store")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        recorded.check_joined(tmp_path, rank)
        assert [one[0] for one in recorded.collectives(tmp_path, rank)] == ["allreduce", "allreduce"]


@pytest.mark.slow
@pytest.mark.parametrize(("wait", "active"), [(0, 8), (2, 2), (3, 2), (5, 3)])
def test_a_program_that_profiles_itself_comes_first(tmp_path: Path, wait: int, active: int) -> None:
    """Before our steps, with them, within them, and after them: its own profile is what it is without us."""
    program = [*PROGRAM, "own_profiler", str(wait), str(active)]
    alone = recorded.run("own_profiler", str(wait), str(active))
    done = recorded.capture("-o", tmp_path, "--steps", "3:5", "--", *program)
    assert (done.returncode, done.stdout) == (0, alone.stdout)
    assert "events" in done.stdout
    if wait == 5:
        assert recorded.job(tmp_path)["ranks"]["0"]["problems"] == []
        recorded.check_joined(tmp_path)
    else:
        assert "another profiler is running" in done.stderr or "a profiler of its own" in done.stderr


def test_exit_code_is_passed_through(tmp_path: Path) -> None:
    done = recorded.capture("-o", tmp_path, "--", *PROGRAM, "unchanged", "3")
    assert done.returncode == 3
    assert recorded.job(tmp_path)["ranks"]["0"]["steps"] == [3, 5]


def test_a_program_without_an_optimizer(tmp_path: Path) -> None:
    done = recorded.capture("-o", tmp_path / "none", "--", *PROGRAM, "no_steps", "0")
    assert "nothing was recorded" in done.stderr
    done = recorded.capture("-o", tmp_path / "all", "--steps", "all", "--", *PROGRAM, "no_steps", "0")
    assert "recorded rank 0 in" in done.stderr
    names = [node["name"] for node in recorded.nodes(tmp_path / "all")]
    assert names.count("aten::linear") == 3


def test_a_program_without_torch(tmp_path: Path) -> None:
    done = recorded.capture("-o", tmp_path, "--", sys.executable, "-c", "print('hello'); raise SystemExit(4)")
    assert (done.returncode, done.stdout) == (4, "hello\n")
    assert "nothing was recorded" in done.stderr


def test_the_programs_own_sitecustomize_runs(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("OF_THE_PROGRAM = 'mine'\n")
    told = tmp_path / "told"
    done = recorded.capture("-o", tmp_path / "out", "--", *PROGRAM, "own_sitecustomize", told, PYTHONPATH=str(own))
    assert done.returncode == 0, done.stderr
    assert told.read_text() == f"mine {own / 'sitecustomize.py'}"


@pytest.mark.parametrize("steps", ["5:3", "x", "3:5,4:6", "3:5,5:6", "0"])
def test_wrong_steps(tmp_path: Path, steps: str) -> None:
    done = recorded.capture("-o", tmp_path, "--steps", steps, "--", *PROGRAM, "unchanged", "0")
    assert done.returncode == 2
    assert done.stderr.startswith("foretrace: --steps")
    assert not (tmp_path / "job.json").exists()
