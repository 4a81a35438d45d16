"""Analyses on traces made for the purpose."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import foretrace
from foretrace import analyze
from foretrace.analyze.intervals import Intervals
from tests.formats.builder import call, kernel, op, small_trace, step, write

spans = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40)), max_size=20)


@given(spans, st.lists(st.integers(-10, 250), min_size=2, max_size=6))
def test_intervals_agree_with_counting_units(pairs: list[tuple[int, int]], borders: list[int]) -> None:
    covered = np.zeros(300, bool)
    for start, length in pairs:
        covered[start : start + length] = True
    start = np.array([pair[0] for pair in pairs], np.int64)
    union = Intervals.union(start, start + np.array([pair[1] for pair in pairs], np.int64))
    assert union.length_ns == covered.sum()
    times = np.sort(np.array(borders))
    wanted = [covered[max(a, 0) : max(b, 0)].sum() for a, b in itertools.pairwise(times)]
    assert union.covered_within(times[:-1], times[1:]).tolist() == wanted
    first, last = (int(np.flatnonzero(covered)[0]), int(np.flatnonzero(covered)[-1]) + 1) if covered.any() else (0, 0)
    assert union.gaps_within(first, last).length_ns == last - first - covered.sum()


def read(tmp_path: Path, *traces: Any) -> foretrace.Job:
    for at, trace in enumerate(traces):
        write(tmp_path / f"rank{at}.json", trace if isinstance(trace, dict) else {"traceEvents": trace})
    return foretrace.read(tmp_path)


def test_breakdown_by_hand(tmp_path: Path) -> None:
    """compute 0-100, communication 50-150, copy 90-180 (100-150 under communication), idle 180-200, compute 200-210"""
    copy = {**kernel("Memcpy DtoD", 90, 90, 3, stream=8), "cat": "gpu_memcpy"}
    job = read(
        tmp_path,
        [kernel("gemm", 0, 100, 1), kernel("ncclDevKernel_AllReduce", 50, 100, 2, 9), copy, kernel("x", 200, 10, 4)],
    )
    wanted = {"rank": 0, "span_ns": 210, "exposed_compute_ns": 60, "exposed_communication_ns": 50}
    wanted |= {"overlapped_ns": 50, "memory_ns": 30, "idle_ns": 20}
    row = analyze.breakdown(job).to_pylist()[0]
    assert {key: value // (1 if key == "rank" else 1000) for key, value in row.items()} == wanted
    assert analyze.overlap(job).to_pylist()[0]["overlap_pct"] == 50.0


@given(
    st.lists(
        st.tuples(st.integers(0, 500), st.integers(0, 60), st.sampled_from(["gemm", "ncclKernel_X", "Memset"])),
        min_size=1,
        max_size=25,
    )
)
def test_breakdown_adds_up(tmp_path_factory: pytest.TempPathFactory, work: list[tuple[int, int, str]]) -> None:
    folder = tmp_path_factory.mktemp("t")
    events = [
        {**kernel(name, ts, dur, at, stream=at % 3), "cat": "gpu_memset" if name == "Memset" else "kernel"}
        for at, (ts, dur, name) in enumerate(work)
    ]
    events += [call("cudaLaunchKernel", ts - 5, 3, at) for at, (ts, _, _) in enumerate(work) if ts % 2]
    events += [step(1, -10, 200), step(2, 190, 400)]
    job = read(folder, events)
    idle = {row["step"]: 0 for row in analyze.idle_causes(job).to_pylist()}
    for row in analyze.idle_causes(job).to_pylist():
        assert row["idle_ns"] >= 0
        idle[row["step"]] += row["idle_ns"]
    rows = [{**row, "step": -1} for row in analyze.breakdown(job).to_pylist()] + analyze.breakdown_by_step(
        job
    ).to_pylist()
    for row in rows:
        parts = [
            value for key, value in row.items() if key.endswith("_ns") and key not in ("span_ns", "start_ns", "end_ns")
        ]
        assert min(parts) >= 0 and sum(parts) == row["span_ns"]
        assert idle[row["step"]] == row["idle_ns"]
    steps = analyze.steps(job).to_pylist()
    assert all(one["end_ns"] == other["start_ns"] for one, other in itertools.pairwise(steps))


def test_idle_causes_by_hand(tmp_path: Path) -> None:
    events = [
        *(call("cudaLaunchKernel", ts, 1, at) for at, ts in enumerate((0, 1, 200, 2))),
        kernel("a", 5, 45, 0),
        kernel("b", 52, 48, 1),  # a 2 us gap between queued kernels
        kernel("c", 205, 15, 2),  # launched 100 us after b ended: the host is late, then 5 us of latency
        kernel("d", 320, 10, 3),  # launched long ago: no recorded cause
    ]
    causes = {
        row["cause"]: row["idle_ns"]
        for row in analyze.idle_causes(read(tmp_path, events)).to_pylist()
        if row["step"] == -1
    }
    assert causes == {
        "queued_gap": 2000,
        "host_late": 100_000,
        "launch_latency": 5000,
        "unexplained": 100_000,
        "launch_queue_full": 0,
    }


def test_a_host_without_a_device(tmp_path: Path, data: Path) -> None:
    job = foretrace.read(data / "gloo-ddp")
    row = analyze.breakdown(job).to_pylist()[0]
    assert row["exposed_communication_ns"] > 0 and row["memory_ns"] == 0
    summary = analyze.collective_summary(job)
    assert summary["matched"] == 9 and summary["wait_ns"] > 5 * summary["transfer_ns"]
    rows = analyze.stragglers(job).to_pylist()
    assert [row["rank"] for row in rows if row["is_straggler"]] == [1]  # recorded with a slow input pipeline


def test_collectives_of_two_ranks(tmp_path: Path) -> None:
    job = read(tmp_path, small_trace(0, 2), small_trace(1, 2, late=120.0))
    rows = analyze.collectives(job).to_pylist()
    assert [(row["kind"], row["bytes"], row["ranks"], row["matched"], row["last_rank"]) for row in rows] == [
        ("all_reduce", 4000, 2, True, 1)
    ] * 2
    assert [(row["transfer_ns"], row["wait_ns"]) for row in rows] == [(180_000, 120_000)] * 2
    assert rows[0]["algorithm_gb_per_s"] == pytest.approx(4000 / 180_000)
    assert rows[0]["bus_gb_per_s"] == pytest.approx(4000 / 180_000)  # 2 (n - 1) / n = 1 for two ranks
    assert analyze.collective_summary(job)["transfer_ns"] == 360_000
    assert [row["rank"] for row in analyze.stragglers(job).to_pylist() if row["is_straggler"]] == [1]
    assert analyze.collectives_by_size(job).to_pylist()[0]["count"] == 2


def test_order_of_files_does_not_matter(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / f"{name}.json", small_trace(rank, 3, late=40.0 * rank)) for rank, name in enumerate("cab")
    ]
    one, other = foretrace.read(paths), foretrace.read(paths[::-1])
    assert analyze.collectives(one) == analyze.collectives(other)
    assert analyze.stragglers(one) == analyze.stragglers(other)


def test_incomplete_groups_give_null(tmp_path: Path) -> None:
    job = read(tmp_path, small_trace(0, 8), small_trace(1, 8))
    summary = analyze.collective_summary(job)
    assert (summary["matched"], summary["wait_ns"], summary["transfer_ns"]) == (0, None, None)
    assert "every rank" in summary["reason"]
    assert {row["transfer_ns"] for row in analyze.collectives(job).to_pylist()} == {None}
    assert analyze.stragglers(job).num_rows == 0


def test_groups_of_one_name_on_different_ranks(tmp_path: Path) -> None:
    """Tensor-parallel groups [0,1] and [2,3] often bear one name."""
    traces = []
    for rank in range(4):
        trace = small_trace(rank, 4, late=30.0 * (rank % 2))
        for event in trace["traceEvents"]:
            if "Group size" in event["args"]:
                event["args"] |= {
                    "Group size": 2,
                    "Process Group Ranks": json.dumps([rank // 2 * 2, rank // 2 * 2 + 1]),
                }
        traces.append(trace)
    rows = analyze.collectives(read(tmp_path, *traces)).to_pylist()
    assert sorted({row["group"] for row in rows}) == ["0 [0,1]", "0 [2,3]"]
    assert all(row["matched"] and row["size"] == 2 for row in rows)


def test_clock_offsets(tmp_path: Path) -> None:
    late = small_trace(1, 2, late=50.0)
    for event in late["traceEvents"]:
        event["ts"] += 7.5
    rows = analyze.clock_offsets(read(tmp_path, small_trace(0, 2), late)).to_pylist()
    assert [(row["rank"], row["offset_ns"], row["samples"]) for row in rows] == [(0, 0, 2), (1, 7500, 2)]


def test_operators_and_kernels(tmp_path: Path) -> None:
    job = read(tmp_path, small_trace())
    rows = {row["name"]: row for row in analyze.operators(job, by_shape=True).to_pylist()}
    assert rows["aten::mm"]["input_shapes"] == "[[4,8],[8,2]]"
    assert (rows["aten::mm"]["count"], rows["aten::mm"]["device_ns"]) == (2, 200_000)
    kinds = {row["kind"]: row["count"] for row in analyze.kernel_kinds(job).to_pylist()}
    assert kinds == {"gemm": 2, "communication": 2}
    assert analyze.kernels(job).to_pylist()[0]["std_ns"] == 0


def test_queue_utilization_memory_and_counters(tmp_path: Path) -> None:
    memory = {"Total Allocated": 100, "Total Reserved": 200, "Bytes": 50, "Device Id": 0, "Device Type": 1}
    instant = {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": 2, "args": memory}
    counter = {"ph": "C", "name": "power", "pid": 1, "ts": 3, "args": {"watts": 250.5}}
    job = read(
        tmp_path, [call("cudaLaunchKernel", 0, 1, 1), kernel("k", 10, 10, 1), kernel("n", 30, 10, 2), instant, counter]
    )
    queue = analyze.queue_length(job).to_pydict()
    assert (queue["time_ns"], queue["length"]) == ([0, 20_000], [1, 0])
    assert analyze.utilization(job, bucket_ns=10_000).to_pydict()["busy_pct"] == [100, 0, 100]
    assert analyze.memory(job).to_pylist()[0]["reserved_bytes"] == 200
    assert analyze.counters(job).to_pylist()[0]["value"] == 250.5
    with pytest.raises(ValueError, match="bucket_ns"):
        analyze.utilization(job, bucket_ns=0)
    with pytest.raises(ValueError, match="window"):
        analyze.breakdown(job, window="nonsense")  # type: ignore[arg-type]


def test_diff(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    changed = small_trace()
    changed["traceEvents"] = [e for e in changed["traceEvents"] if e["name"] != "record_param_comms"] + [
        op("aten::new", 700, 20)
    ]
    for event in changed["traceEvents"]:
        if event["name"].startswith("ampere"):
            event["dur"] *= 1.5
    rows = {
        (row["kind"], row["name"]): row
        for row in analyze.diff(read(before, small_trace()), read(after, changed)).to_pylist()
    }
    assert rows["kernel", "ampere_sgemm_128x64_nn"]["ratio"] == 1.5
    assert rows["kernel", "ampere_sgemm_128x64_nn"]["change"] == "grew"
    assert rows["operator", "record_param_comms"]["change"] == "vanished"
    assert rows["operator", "aten::new"]["change"] == "appeared"
    assert rows["operator", "aten::mm"]["change"] == "same"
    assert rows["operator", "aten::mm"]["unit"] == "per step"
    nothing = analyze.diff(foretrace.read(before), foretrace.read(before)).to_pylist()
    assert {row["change"] for row in nothing} == {"same"}
