"""Recording one process: choice of steps, statistics, storages, and programs that end before their time."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.capture import recorded


@pytest.fixture(scope="module")
def bags(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bags")
    done = recorded.run("bags", folder, "3:5")
    assert done.returncode == 0, done.stderr
    assert re.search(r"recorded steps took [\d.]+ ms \(median of 2\), others [\d.]+ ms \(median of 4 ", done.stderr)
    return folder


def steps(folder: Path) -> list[str]:
    return [node["name"] for node in recorded.nodes(folder) if node["name"].startswith("ProfilerStep")]


def statistics(folder: Path, name: str) -> list[dict[str, Any]]:
    found = [recorded.attributes(node) for node in recorded.nodes(folder) if node["name"] == name]
    return [json.loads(one["integer_statistics"]) for one in found if "integer_statistics" in one]


def test_only_the_chosen_steps(bags: Path) -> None:
    recorded.check_joined(bags)
    assert steps(bags) == ["ProfilerStep#3", "ProfilerStep#4"]
    own = recorded.job(bags)["ranks"]["0"]
    assert own["steps"] == [3, 5]
    assert sorted(own["recorded_step_ns"]) == ["3", "4"]
    assert sorted(own["unrecorded_step_ns"]) == ["1", "5", "6", "7"]  # neither step 0 nor the warm-up in step 2
    assert own["overhead"] > -1
    assert (own["files"], own["problems"]) == ({"kineto": "rank0.kineto.json.gz", "et": "rank0.et.json.gz"}, [])
    assert {path.name for path in bags.iterdir()} == {".job.json.lock", "job.json", *own["files"].values()}


def test_two_windows_have_a_folder_each(tmp_path: Path) -> None:
    assert recorded.run("bags", tmp_path, "1:2,4:6").returncode == 0
    assert steps(tmp_path / "steps-1-2") == ["ProfilerStep#1"]
    assert steps(tmp_path / "steps-4-6") == ["ProfilerStep#4", "ProfilerStep#5"]
    for folder in ("steps-1-2", "steps-4-6"):
        recorded.check_joined(tmp_path / folder)


def test_all_steps(tmp_path: Path) -> None:
    done = recorded.run("bags", tmp_path, "all")
    assert "overhead unknown" in done.stderr
    assert len(steps(tmp_path)) == 9  # the last one is what follows the last call of `step`
    recorded.check_joined(tmp_path)


def test_a_block_without_steps(tmp_path: Path) -> None:
    assert recorded.run("whole_block", tmp_path).returncode == 0
    assert "aten::dot" in {node["name"] for node in recorded.nodes(tmp_path)}
    assert list(recorded.job(tmp_path)["ranks"]["0"]["recorded_step_ns"]) == ["0"]


def test_statistics_of_indices_and_offsets(bags: Path) -> None:
    found = statistics(bags, "aten::embedding_bag")
    assert len(found) == 2
    indices, offsets = found[0]["1"], found[0]["2"]
    assert (indices["min"], indices["max"], indices["distinct"], indices["elements"]) == (0, 998, 500, 500)
    assert sum(indices["histogram"]) == 500
    assert indices["zipf_exponent"] == pytest.approx(0, abs=1e-3)
    assert (offsets["first"], offsets["monotone"], offsets["pooling_mean"]) == (0, True, 125.0)
    assert offsets["pooling_std"] == pytest.approx(157.876534, abs=1e-5)  # of 10, 0, 390 and 100
    assert statistics(bags, "aten::cross_entropy_loss")[0]["1"]["distinct"] == 3
    assert statistics(bags, "aten::_embedding_bag_dense_backward")[0]["1"]["distinct"] == 500


def test_storages(bags: Path) -> None:
    trace = recorded.read(bags / "rank0.et.json.gz")
    ids = {node["id"] for node in trace["nodes"]}
    names = {node["id"]: node["name"] for node in trace["nodes"]}
    outputs = {node["id"]: node["outputs"]["values"] for node in trace["nodes"]}
    rows = trace["storages"]
    assert all(row["allocated"] in ids | {-1} and row["freed"] in ids | {-1} for row in rows)
    assert all(row["device"] == "cpu" and row["size_bytes"] > 0 for row in rows)
    # The gradient of the table: 1000 rows of 16 floats, allocated in the backward pass, gone with zero_grad.
    gradients = [row for row in rows if row["size_bytes"] == 64000 and row["allocated"] >= 0]
    assert [names[row["allocated"]] for row in gradients] == ["aten::empty", "aten::empty"]
    assert all(outputs[row["allocated"]][0][1] == row["storage_id"] for row in gradients)
    assert all("zero_grad" in names[row["freed"]] for row in gradients)
    # The table itself was there before: its size follows from the tensors in it, its beginning is not known.
    table = [row for row in rows if row["size_bytes"] == 64000 and row["allocated"] < 0]
    assert len(table) == 1
    assert table[0]["size_is_a_lower_bound"]
    assert table[0]["freed"] == -1


@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("terminate", -signal.SIGTERM)])
def test_a_program_that_ends_early_leaves_whole_files(tmp_path: Path, how: str, code: int) -> None:
    done = recorded.run("bags", tmp_path, "2:6", how)
    assert done.returncode == code
    recorded.check_joined(tmp_path)
    assert recorded.read(tmp_path / "rank0.kineto.json.gz")["traceName"] == "rank0.kineto.json.gz"
    assert steps(tmp_path) == ["ProfilerStep#2", "ProfilerStep#3"]
    problem = {"raise": "the program raised ValueError in step 3", "terminate": "the program was terminated (SIGTERM)"}
    assert problem[how] in done.stderr
    assert recorded.job(tmp_path)["ranks"]["0"]["problems"][-1].startswith(problem[how])
    assert not [path for path in tmp_path.iterdir() if ".part" in path.name]
    if how == "terminate":  # the scope was open: its name is Kineto's, its place that of the missing parent
        scope = next(node for node in recorded.nodes(tmp_path) if node["name"].startswith('a "quoted"'))
        children = [node["name"] for node in recorded.nodes(tmp_path) if node["ctrl_deps"] == scope["id"]]
        assert children == ["aten::ones", "aten::add"]


def test_a_new_recording_replaces_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "rank7.et.json.gz").write_bytes(b"old")
    (tmp_path / "notes.json").write_text("the user's own")
    old = {
        "schema": "foretrace-job-1",
        "run": "old",
        "ranks": {"7": {"files": {"et": "rank7.et.json.gz", "x": "notes.json"}}},
    }
    (tmp_path / "job.json").write_text(json.dumps(old))
    assert recorded.run("bags", tmp_path, "1:2").returncode == 0
    assert not (tmp_path / "rank7.et.json.gz").exists()
    assert (tmp_path / "notes.json").exists()
    assert list(recorded.job(tmp_path)["ranks"]) == ["0"]


def test_steps_that_never_come(tmp_path: Path) -> None:
    done = recorded.run("bags", tmp_path, "20:22")
    assert done.returncode == 0
    assert "no step of 20:22 was reached: the program made 8" in done.stderr
