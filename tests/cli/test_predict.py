"""simulate, critical-path and validate as a user meets them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.cli.test_cli import document, run
from tests.formats.builder import small_trace, write


@pytest.fixture
def two_ranks(tmp_path: Path) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in range(2):
        write(folder / f"rank{rank}.json.gz", small_trace(rank, 2, late=100.0 * rank))
    return folder


def test_simulate_keeps_the_contract(two_ranks: Path) -> None:
    found = document("simulate", two_ranks)
    assert found["fidelity"] == "recorded"
    assert {"summary", "ranks", "mean_abs_error_pct", "tasks", "edges"} <= set(found)
    assert set(found["edges"]) == {"recorded", "inferred"}
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    errors = []
    for rank in found["ranks"]:
        keys = {"finish_ns", "measured_ns", "simulated_ns", "error_pct", "copied_share", "unexplained_ns", "steps"}
        assert keys <= set(rank)
        assert rank["measured_ns"] == sum(step["measured_ns"] for step in rank["steps"])
        for step in rank["steps"]:
            assert set(step) == {"step", "measured_ns", "simulated_ns", "error_pct"}
            assert abs(step["simulated_ns"] / step["measured_ns"] - 1) < 0.05
            errors.append(abs(step["error_pct"]))
    assert found["mean_abs_error_pct"] == pytest.approx(sum(errors) / len(errors))
    assert found["edges"]["recorded"]["collective"] == 8


def test_simulate_answers_what_if(two_ranks: Path) -> None:
    found = document("simulate", two_ranks, "--scale", "collective:=2")
    assert found["what_if"]["gain_ns"] > 0
    done = run("simulate", two_ranks, "--scale", "collective:=2")
    assert "collective: 2 x faster" in done.stdout


@pytest.mark.parametrize("scale", ["nonsense", "kernel:", "=2", "kernel:nothing=2", "(=2", "kernel:=0", "kernel:=x"])
def test_a_scale_that_makes_no_sense_is_one_line(two_ranks: Path, scale: str) -> None:
    done = run("simulate", two_ranks, "--scale", scale, "--json")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_critical_path_covers_its_steps(two_ranks: Path) -> None:
    whole = document("critical-path", two_ranks)
    for rows in whole["composition"].values():
        assert sum(row["time_ns"] for row in rows) <= whole["length_ns"]
    assert sum(row["time_ns"] for row in whole["composition"]["kind"]) == whole["length_ns"]
    parts = [document("critical-path", two_ranks, "--rank", 0, "--step", step) for step in (0, 1)]
    assert [part["step"] for part in parts] == [0, 1]
    simulated = document("simulate", two_ranks)["ranks"][0]["steps"]
    assert [part["length_ns"] for part in parts] == [step["simulated_ns"] for step in simulated]
    assert len(whole["stragglers"]) == 2
    assert whole["improvements"][0]["gain_ns"] >= whole["improvements"][-1]["gain_ns"]


@pytest.mark.parametrize("wrong", [("--rank", 5), ("--step", 9)])
def test_what_is_not_there_is_one_line(two_ranks: Path, wrong: tuple[str, int]) -> None:
    done = run("critical-path", two_ranks, *wrong)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_validate_keeps_the_contract(data: Path) -> None:
    found = document("validate", data / "gloo-ddp")
    assert set(found) == {"reproduction", "baselines", "cross_step", "leave_one_rank_out", "event_waits"}
    assert {"edges_only_pct", "full_pct", "mean_of_others_pct"} <= set(found["cross_step"])
    assert found["cross_step"]["full_pct"] is not None
    assert found["leave_one_rank_out"]["reason"]
    assert found["event_waits"]["contradicted_pct"] is None
    shown = run("validate", data / "gloo-ddp")
    assert "no model" in shown.stdout


@pytest.mark.parametrize("command", ["simulate", "critical-path", "validate"])
def test_pages_and_timelines(two_ranks: Path, tmp_path: Path, command: str) -> None:
    page, timeline = tmp_path / "page.html", tmp_path / "timeline.json.gz"
    done = run(command, two_ranks, "--html", page, "--perfetto", timeline)
    assert done.returncode == 0, done.stderr
    assert "Plotly.newPlot" in page.read_text()
    with gzip.open(timeline, "rt") as file:
        events = json.load(file)["traceEvents"]
    names = {event["args"]["name"] for event in events if event.get("name") == "process_name"}
    assert {"rank 0 device", "rank 0 device (simulated)", "rank 1 device (simulated)"} <= names


@pytest.mark.parametrize("command", ["simulate", "critical-path", "validate"])
def test_a_trace_without_events(tmp_path: Path, command: str) -> None:
    path = write(tmp_path / "empty.json", {"traceEvents": []})
    done = run(command, path, "--json")
    if command == "critical-path":
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    else:
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)
