"""Answers of other tools and of measurements on real traces."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import pytest

import foretrace
from foretrace import analyze
from foretrace.analyze.breakdown import PARTS

PAIRS = (
    "h100-Qwen_Qwen1.5-0.5B-Chat",
    "h100-gaunernst_bert-small-uncased",
    "mi300-Qwen_Qwen1.5-0.5B-Chat",
    "mi300-gaunernst_bert-small-uncased",
)


@pytest.mark.parametrize(
    ("folder", "window", "idle", "compute", "other"),
    [
        ("train-a100-8gpu-6steps", "hta", 62_119, 234_760, 86_525),
        ("train-v100-2gpu-6steps", "hta", 46_910, 429_216, 152_245),
        ("train-a100-8gpu-6steps", "all", 76_007, 281_336, 107_251),
    ],
)
def test_breakdown_equals_hta(shared: Path, folder: str, window: str, idle: int, compute: int, other: int) -> None:
    job = foretrace.read(shared / "traces" / folder)
    row = analyze.breakdown(job, window=window).to_pylist()[0]  # type: ignore[arg-type]
    assert row["idle_ns"] == idle * 1000
    assert row["exposed_compute_ns"] + row["overlapped_ns"] == compute * 1000
    assert row["exposed_communication_ns"] + row["memory_ns"] == other * 1000


@pytest.mark.parametrize("name", PAIRS)
def test_breakdown_equals_tracelens(shared: Path, name: str) -> None:
    job = foretrace.read(shared / "traces" / "h100-mi300-pairs" / f"{name}.json.gz")
    row = analyze.breakdown(job, window="launched", memsets="compute").to_pylist()[0]
    with (shared / "reference" / "tracelens" / name / "gpu_timeline.csv").open() as file:
        theirs = {entry["type"]: float(entry["time ms"]) for entry in csv.DictReader(file)}
    ours = {
        "computation_time": row["exposed_compute_ns"] + row["overlapped_ns"],
        "exposed_comm_time": row["exposed_communication_ns"],
        "exposed_memcpy_time": row["memory_ns"],
        "idle_time": row["idle_ns"],
        "total_time": row["span_ns"],
    }
    for key, value in ours.items():
        assert abs(value / 1e6 - theirs[key]) <= 1e-3 * theirs["total_time"], key


@pytest.mark.parametrize("name", PAIRS)
def test_kernels_equal_tracelens(shared: Path, name: str) -> None:
    job = foretrace.read(shared / "traces" / "h100-mi300-pairs" / f"{name}.json.gz")
    ours = {row["name"]: (row["count"], row["total_ns"] / 1e3) for row in analyze.kernels(job).to_pylist()}
    theirs: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    with (shared / "reference" / "tracelens" / name / "kernel_summary.csv").open() as file:
        for entry in csv.DictReader(file):
            column = next(key for key in entry if key.startswith("Kernel duration") and key.endswith("_sum"))
            theirs[entry["Kernel name"]][0] += int(entry[column.replace("_sum", "_count")])
            theirs[entry["Kernel name"]][1] += float(entry[column])
    for kernel, (count, total_us) in theirs.items():
        assert ours[kernel][0] == count, kernel
        assert ours[kernel][1] == pytest.approx(total_us, abs=0.01), kernel
    assert all(kernel.startswith("Mem") for kernel in ours.keys() - theirs.keys())  # it lists no copies and sets


def test_megatron_collectives(shared: Path) -> None:
    job = foretrace.read(shared / "traces" / "megatron-tp8-a100" / "kineto")
    for timeline in job:
        rows = timeline.device_rows[timeline.is_communication[timeline.device_rows]]
        assert len(rows) == 84
        assert 241 <= round(timeline.duration_ns[rows].sum() / 1e6) <= 495
    summary = analyze.collective_summary(job)
    assert (summary["matched"], summary["unmatched"], summary["asymmetric"]) == (84, 0, 0)
    assert summary["transfer_ns"] == pytest.approx(50.1e6, abs=0.05e6)
    assert summary["wait_ns"] == pytest.approx(2.94e9, abs=0.005e9)
    rows = analyze.stragglers(job).to_pylist()
    assert [row["rank"] for row in rows if row["is_straggler"]] == [0, 6]
    assert [round(row["share_pct"]) for row in rows[:2]] == [52, 41]  # 41.5
    assert max(abs(row["offset_ns"]) for row in analyze.clock_offsets(job).to_pylist()) < 50_000  # one node, one clock


def test_breakdown_adds_up_on_every_trace(shared: Path) -> None:
    for file in sorted((shared / "traces").rglob("*.json.gz")):
        try:
            job = foretrace.read(file)
        except foretrace.FormatError:
            assert file.name == "et.json.gz" or file.parent.name in ("et", "pytorch-et")
            continue
        idle = defaultdict(int)
        for row in analyze.idle_causes(job).to_pylist():
            idle[row["step"]] += row["idle_ns"]
        whole = [{**row, "step": -1} for row in analyze.breakdown(job).to_pylist()]
        for row in whole + analyze.breakdown_by_step(job).to_pylist():
            parts = [row[part] for part in PARTS]
            assert min(parts) >= 0 and sum(parts) == row["span_ns"], file
            assert row["idle_ns"] == idle[row["step"]], file
        for window in ("launched", "hta"):
            row = analyze.breakdown(job, window=window).to_pylist()[0]  # type: ignore[arg-type]
            causes = analyze.idle_causes(job, window=window).to_pylist()  # type: ignore[arg-type]
            assert row["idle_ns"] == sum(cause["idle_ns"] for cause in causes if cause["step"] == -1), (file, window)
            assert row["span_ns"] == sum(row[part] for part in PARTS), (file, window)
