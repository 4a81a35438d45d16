"""Commands that predict, as a user meets them."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import run
from tests.formats.builder import Event, call, kernel, op, small_trace, step, write

COMMANDS = ("simulate", "critical-path", "validate")
RANK_KEYS = {
    "rank",
    "finish_ns",
    "measured_ns",
    "simulated_ns",
    "error_pct",
    "copied_share",
    "unexplained_ns",
    "steps",
}
STEP_KEYS = {"step", "measured_ns", "simulated_ns", "error_pct"}
BASELINES = {
    "sum_of_kernels",
    "longest_stream",
    "no_inter_stream_edges",
    "without_unexplained_delays",
    "copy_everything",
    "single_rank",
}


def document(*words: str | Path) -> Any:
    done = run(*words, "--json")
    assert done.returncode == 0, done.stderr

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(done.stdout, parse_constant=refuse)  # one document, and nothing else


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2, and one line on stderr that says why."""
    assert (done.returncode, done.stdout) == (2, ""), done
    (line,) = done.stderr.splitlines()
    assert line.startswith("foretrace: ")
    for word in words:
        assert word in line


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_ranks")
    for rank in range(2):
        write(folder / f"rank{rank}.json.gz", small_trace(rank, 2, late=100.0 * rank))
    return folder


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("one_rank") / "rank0.json", small_trace())


def bare(tmp_path: Path, what: str) -> Path:
    """A trace that lacks something."""
    events: dict[str, list[Event]] = {
        "nothing": [],
        "no device": [step(0, 0, 100), op("aten::mm", 10, 50), op("aten::add", 70, 20)],
        "no host": [kernel("gemm", 0, 10), kernel("gemm", 20, 10)],
        "no launch": [op("aten::mm", 0, 10), kernel("gemm", 20, 10, 7)],
        "no time": [op("aten::mm", 5, 0), call("cudaLaunchKernel", 5, 0, 1), kernel("gemm", 5, 0, 1)],
        "annotation only": [step(0, 0, 100)],
    }
    return write(tmp_path / "bare.json", {"schemaVersion": 1, "traceEvents": events[what]})


def assert_keeps_the_contract(found: Any, ranks: list[int]) -> None:
    assert {"summary", "fidelity", "ranks", "mean_abs_error_pct", "tasks", "edges"} <= set(found)
    assert found["fidelity"] == "recorded"
    assert [rank["rank"] for rank in found["ranks"]] == ranks
    for rank in found["ranks"]:
        assert set(rank) >= RANK_KEYS
        assert all(set(one) == STEP_KEYS for one in rank["steps"])
        assert all(abs(one["error_pct"]) <= 5 for one in rank["steps"])
        for name in ("measured_ns", "simulated_ns"):
            assert rank[name] == sum(one[name] for one in rank["steps"])
        assert 0 <= rank["copied_share"] <= 1 and rank["unexplained_ns"] >= 0
    errors = [abs(one["error_pct"]) for rank in found["ranks"] for one in rank["steps"]]
    assert found["mean_abs_error_pct"] == pytest.approx(sum(errors) / len(errors))
    assert set(found["edges"]) == {"recorded", "inferred"}
    assert found["tasks"] > 0 and found["edges"]["recorded"]["order"] > 0


def test_simulate_json(two_ranks: Path) -> None:
    found = document("simulate", two_ranks)
    assert_keeps_the_contract(found, [0, 1])
    assert found["summary"]["coupled_collectives"] == 2
    assert found["edges"]["recorded"]["collective"] == 8
    assert found["mean_abs_error_pct"] < 1
    assert [one["step"] for one in found["ranks"][0]["steps"]] == [0, 1]
    alone = document("simulate", two_ranks, "--alone")
    assert alone["summary"]["coupled_collectives"] == 0
    assert "collective" not in alone["edges"]["recorded"]


def test_simulate_a_recorded_run(data: Path) -> None:
    found = document("simulate", data / "gloo-ddp")
    assert_keeps_the_contract(found, [0, 1])
    assert found["mean_abs_error_pct"] <= 5


def test_what_if(two_ranks: Path) -> None:
    found = document("simulate", two_ranks, "--scale", "collective:=2", "--scale", "kernel:gemm=4")["what_if"]
    assert found["tasks"] == 8
    assert found["gain_ns"] == found["before_ns"] - found["after_ns"] == 100_000  # the last of the all-reduces
    assert found["change_pct"] == pytest.approx(-100 * found["gain_ns"] / found["before_ns"])
    done = run("simulate", two_ranks, "--scale", "collective:=2")
    assert done.returncode == 0 and done.stderr == "" and "collective: 2 x faster" in done.stdout


@pytest.mark.parametrize(
    ("scale", "reason"),
    [
        ("gemm", "PATTERN=FACTOR"),
        ("=2", "PATTERN=FACTOR"),
        ("gemm=", "PATTERN=FACTOR"),
        ("kernel:", "PATTERN=FACTOR"),
        ("gemm=fast", "PATTERN=FACTOR"),
        ("gemm=0", "no speed-up"),
        ("gemm=-1", "no speed-up"),
        ("gemm=nan", "no speed-up"),
        ("kernel:nothing=2", "fits no task"),
        ("kernel:(=2", "no regular expression"),
    ],
)
def test_scales_that_make_no_sense(one_rank: Path, scale: str, reason: str) -> None:
    assert_refused(run("simulate", one_rank, "--scale", scale), reason)


def assert_composed(found: Any) -> None:
    kinds = found["composition"]["kind"]
    for rows in found["composition"].values():
        assert sum(row["time_ns"] for row in rows) <= found["length_ns"]
    assert sum(row["time_ns"] for row in kinds) == found["length_ns"]
    assert sum(row["share_pct"] for row in kinds) == pytest.approx(100)
    assert all(row["before_ns"] >= row["after_ns"] for row in found["improvements"])
    gains = [row["gain_ns"] for row in found["improvements"]]
    assert gains == sorted(gains, reverse=True)
    assert found["anomalies"] == 0


def test_critical_path_json(two_ranks: Path) -> None:
    found = document("critical-path", two_ranks)
    assert_composed(found)
    assert found["steps"] == [0, 1] and found["step"] is None
    assert len(found["stragglers"]) == 2
    assert {"rank", "segments", "copied_share", "unexplained_ns", "improvements", "stragglers"} <= set(found)
    simulated = document("simulate", two_ranks)["ranks"][0]["steps"]
    for number in (0, 1):
        one = document("critical-path", two_ranks, "--step", str(number), "--rank", "0")
        assert_composed(one)
        assert (one["step"], one["rank"]) == (number, 0)
        assert one["length_ns"] == simulated[number]["simulated_ns"]
        # The first rank waits for the second one, whose host is late: the path leads there.
        assert len(one["composition"]["rank"]) == 2


def test_critical_path_of_a_recorded_run(data: Path) -> None:
    assert_composed(document("critical-path", data / "gloo-ddp"))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--step", "7"), "no step 7"),
        (("--step", "-1"), "no step -1"),
        (("--rank", "5"), "no rank 5"),
        (("--rank", "0", "--step", "99"), "no step 99"),
    ],
)
def test_steps_and_ranks_that_are_not_there(two_ranks: Path, options: tuple[str, ...], reason: str) -> None:
    assert_refused(run("critical-path", two_ranks, *options), reason)


def assert_validated(found: Any) -> None:
    assert {"reproduction", "baselines", "cross_step", "leave_one_rank_out", "event_waits"} <= set(found)
    assert {"ranks", "mean_abs_error_pct", "parts"} <= set(found["reproduction"])
    assert set(found["baselines"]) >= BASELINES
    assert {"edges_only_pct", "full_pct", "mean_of_others_pct"} <= set(found["cross_step"])
    assert "mean_abs_error_pct" in found["leave_one_rank_out"]
    assert "contradicted_pct" in found["event_waits"]
    for part, value in (
        ("cross_step", "edges_only_pct"),
        ("leave_one_rank_out", "mean_abs_error_pct"),
        ("event_waits", "contradicted_pct"),
    ):  # what does not apply says why
        assert (found[part][value] is None) == bool(found[part].get("reason"))


def test_validate_json(two_ranks: Path, one_rank: Path) -> None:
    found = document("validate", two_ranks)
    assert_validated(found)
    assert found["baselines"]["copy_everything"] < 0.1
    assert found["leave_one_rank_out"]["mean_abs_error_pct"] is not None
    assert [row["rank"] for row in found["leave_one_rank_out"]["ranks"]] == [0, 1]
    alone = document("validate", one_rank)
    assert_validated(alone)
    assert "two ranks" in alone["leave_one_rank_out"]["reason"]
    assert alone["baselines"]["single_rank"] is None and alone["baselines"]["single_rank_reason"]


def test_validate_a_recorded_run(data: Path) -> None:
    found = document("validate", data / "gloo-ddp")
    assert_validated(found)
    assert found["cross_step"]["full_pct"] is not None
    assert found["leave_one_rank_out"]["reason"]
    assert found["event_waits"]["contradicted_pct"] is None
    assert "no model" in run("validate", data / "gloo-ddp").stdout
    assert found["reproduction"]["mean_abs_error_pct"] <= 5


@pytest.mark.parametrize("command", COMMANDS)
def test_as_a_process(one_rank: Path, command: str) -> None:
    words = [sys.executable, "-m", "foretrace", command, str(one_rank), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == document(command, one_rank)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("source", ["built", "recorded"])
def test_tables_pages_and_timelines(two_ranks: Path, data: Path, tmp_path: Path, command: str, source: str) -> None:
    page, tracks = tmp_path / "page.html", tmp_path / "tracks.json.gz"
    folder = two_ranks if source == "built" else data / "gloo-ddp"
    done = run(command, folder, "--html", page, "--perfetto", tracks)
    assert done.returncode == 0, done.stderr
    assert done.stdout and "Traceback" not in done.stderr
    text = page.read_text()
    assert "Plotly.newPlot" in text
    assert text.lstrip().lower().startswith("<!doctype html") and text.rstrip().endswith("</html>")
    events = json.loads(gzip.decompress(tracks.read_bytes()))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) > 20
    names = {event["args"]["name"] for event in events if event.get("name") == "process_name"}
    if source == "built":
        assert {"rank 0 device", "rank 0 device (simulated)", "rank 1 device (simulated)"} <= names
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "tracks.json.gz"]


@pytest.mark.parametrize("command", COMMANDS)
def test_files_that_cannot_be_written(one_rank: Path, tmp_path: Path, command: str) -> None:
    for option in ("--html", "--perfetto"):
        assert_refused(run(command, one_rank, option, tmp_path / "none" / "file.json"), "folder does not exist")


@pytest.mark.parametrize("command", COMMANDS)
def test_inputs_that_are_not_there(tmp_path: Path, command: str) -> None:
    assert_refused(run(command, tmp_path / "none.json"))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("what", ["nothing", "no device", "no host", "no launch", "no time", "annotation only"])
def test_traces_that_lack_something(tmp_path: Path, command: str, what: str) -> None:
    """An answer, or a refusal in one line where there is no path; never a traceback."""
    path = bare(tmp_path, what)
    is_answered = what not in ("nothing", "annotation only") or command != "critical-path"
    done = run(command, path, "--json", "--html", tmp_path / "page.html", "--perfetto", tmp_path / "tracks.json")
    if is_answered:
        assert done.returncode == 0, done.stderr
    if done.returncode == 0:
        assert json.loads(done.stdout)
        assert (tmp_path / "page.html").exists() and (tmp_path / "tracks.json").exists()
    else:
        assert_refused(done)
    table = run(command, path)
    assert table.returncode == done.returncode and "Traceback" not in table.stderr


@pytest.mark.parametrize("what", ["nothing", "no device", "no host", "no launch", "no time"])
def test_anything_can_be_simulated(tmp_path: Path, what: str) -> None:
    found = document("simulate", bare(tmp_path, what))
    for rank in found["ranks"]:
        assert all(one["error_pct"] == 0 for one in rank["steps"])
