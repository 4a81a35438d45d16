"""`foretrace convert`, and `foretrace simulate` of Chakra ETs, as a user runs them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import run


def document(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_recorded_pair_becomes_an_et_that_takes_as_long(shared: Path, tmp_path: Path) -> None:
    folder = shared / "traces" / "megatron-tp8-a100"
    made = document(
        run(
            "convert",
            "--operators",
            folder / "et",
            "--timeline",
            folder / "kineto",
            "-o",
            "job.et",
            "--json",
            cwd=tmp_path,
        )
    )
    assert made["outputs"] == [f"job.{rank}.et" for rank in range(8)] and made["format"] == "chakra"
    assert {one["device_work_joined"] for one in made["joined"].values()} == {777}
    truth = document(run("simulate", folder / "kineto", "--json", cwd=tmp_path))
    got = document(run("simulate", *made["outputs"], "--json", cwd=tmp_path))
    assert set(truth) <= set(got) and got["mean_abs_error_pct"] is None
    assert abs(got["summary"]["finish_ns"] / truth["summary"]["finish_ns"] - 1) < 0.01
    for one, other in zip(got["ranks"], truth["ranks"], strict=True):
        assert set(one) == set(other) and one["measured_ns"] is None
        assert abs(one["simulated_ns"] / other["simulated_ns"] - 1) < 0.01


def test_every_format_from_the_recorded_example(data: Path, tmp_path: Path) -> None:
    traces = sorted((data / "gloo-ddp").glob("rank*.json.gz"))
    assert document(run("convert", *traces, "-o", "job.et", "--json", cwd=tmp_path))["ranks"] == [0, 1]
    for name in ("job.0.arrow", "job.0.json", "job.0.dot", "job.0.graphml", "again.0.et", "again.0.et.gz"):
        done = document(run("convert", "job.0.et", "-o", name, "--json", cwd=tmp_path))
        assert done["outputs"] == [name] and (tmp_path / name).stat().st_size > 1000
    assert (tmp_path / "again.0.et").read_bytes() == (tmp_path / "job.0.et").read_bytes()
    ends = {
        document(run("simulate", name, "--json", cwd=tmp_path))["summary"]["finish_ns"]
        for name in ("job.0.et", "job.0.arrow", "job.0.json", "again.0.et.gz")
    }
    assert len(ends) == 1
    run("convert", "job.0.et", "job.1.et", "--to", "perfetto", "-o", "timeline.json", cwd=tmp_path)
    assert len(json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]) > 100


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["convert", "-o", "x.et"], "nothing to convert"),
        (["convert", "absent.et", "-o", "x.et"], "no such file"),
        (["convert", "noise.et", "-o", "x.et"], "no trace of a known kind"),
        (["convert", "--operators", "noise.et", "-o", "no/such/x.et"], "no trace of a known kind"),
        (["simulate", "noise.et"], "no trace of a known kind"),
    ],
)
def test_bad_input_is_one_line_and_2(tmp_path: Path, arguments: list[str], problem: str) -> None:
    (tmp_path / "noise.et").write_bytes(b"\xff\xfe\xfd" * 100)
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.count("\n") == 1 and problem in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["noise.et"]


def test_an_output_that_says_nothing(data: Path, tmp_path: Path) -> None:
    done = run("convert", data / "gloo-ddp" / "rank0.json.gz", "-o", "x.unknown", cwd=tmp_path)
    assert done.returncode == 2 and "--to" in done.stderr
