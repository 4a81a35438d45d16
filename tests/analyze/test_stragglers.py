"""Who the others wait for, and what that rank was doing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foretrace
from foretrace import analyze
from foretrace.analyze.stragglers import _median_of_others
from foretrace.trace import Job
from tests.analyze.test_collectives import ALL_REDUCE, EPOCH_US, job_of, metadata, plain
from tests.formats.builder import Event, call, kernel, op


def by_rank(job: Job, **options: Any) -> dict[int, dict[str, Any]]:
    return {row["rank"]: row for row in analyze.stragglers(job, **options).to_pylist()}


def late_job(folder: Path, doing: list[Event], late: float = 80.0) -> Job:
    """Three ranks that start at 100 us; rank 2 is late and does ``doing`` meanwhile."""
    group = metadata([0, 1, 2])
    events = {rank: [*launch(90), *plain([(100, 220)], **group)] for rank in range(2)}
    return job_of(folder, {**events, 2: [*launch(10), *doing, *plain([(100 + late, 220)], **group)]})


def launch(ts: float) -> list[Event]:
    """A kernel that shows which thread launches."""
    return [call("cudaLaunchKernel", ts, 1, 1), kernel("first", ts + 2, 1, 1)]


def test_share_of_the_waiting(tmp_path: Path) -> None:
    spans = {0: [(100, 200), (390, 400)], 1: [(110, 200), (320, 400)], 2: [(190, 200), (380, 400)]}
    job = job_of(tmp_path, {rank: plain(of_rank) for rank, of_rank in spans.items()})
    found = by_rank(job)
    # First: 90 + 80 us wait for rank 2; then 70 + 10 us for rank 0.
    assert {rank: row["waiting_caused_ns"] for rank, row in found.items()} == {0: 80_000, 1: 0, 2: 170_000}
    assert {rank: row["last_arrivals"] for rank, row in found.items()} == {0: 1, 1: 0, 2: 1}
    assert found[2]["share_pct"] == pytest.approx(68)
    assert found[2]["late_ns"] == 85_000  # behind the median of 100 and 110
    assert [rank for rank, row in found.items() if row["is_straggler"]] == [2]  # 2/3 is the bound
    assert found[1]["doing"] is found[1]["doing_ns"] is None


def test_with_two_ranks_three_quarters_are_the_bound(tmp_path: Path) -> None:
    job = job_of(tmp_path, {0: plain([(100, 200), (300, 400)]), 1: plain([(180, 200), (380, 400)])})
    assert [row["is_straggler"] for row in by_rank(job).values()] == [True, False]
    assert by_rank(job)[1]["late_ns"] == 160_000


def test_no_straggler_without_waiting(tmp_path: Path) -> None:
    job = job_of(tmp_path, {rank: plain([(100, 200)]) for rank in range(4)})
    assert not any(row["is_straggler"] for row in by_rank(job).values())
    assert all(row["share_pct"] == 0 for row in by_rank(job).values())


@pytest.mark.parametrize("ranks", [1, 2])
def test_empty_where_nothing_is_matched(tmp_path: Path, ranks: int) -> None:
    job = job_of(tmp_path, {rank: plain([(100, 200)]) for rank in range(ranks)}, world_size=8)
    table = analyze.stragglers(job)
    assert table.num_rows == 0 and "doing" in table.column_names


@pytest.mark.parametrize(
    ("doing", "words", "event", "time_us"),
    [
        ([kernel("gemm", 110, 60)], "computing on the device", "gemm", 60),
        ([kernel("a", 100, 20), kernel("b", 125, 30), kernel("a", 160, 15)], "computing on the device", "a", 65),
        ([op("outer", 100, 80), op("inner", 105, 60)], "device idle while the host runs operators", "inner", 80),
        ([op("outer", 100, 80), op("inner", 105, 10)], "device idle while the host runs operators", "outer", 80),
        ([], "device idle and no host event", None, 80),
        ([op("elsewhere", 100, 80, tid=99)], "device idle and no host event", None, 80),
        ([kernel("Memcpy DtoH", 110, 60) | {"cat": "gpu_memcpy"}], "communicating or copying", "Memcpy DtoH", 60),
        ([kernel(ALL_REDUCE, 100, 60, stream=7)], "communicating or copying", ALL_REDUCE, 60),
    ],
    ids=["kernel", "kernels", "inner operator", "outer operator", "nothing", "other thread", "copy", "other group"],
)
def test_what_the_late_rank_was_doing(
    tmp_path: Path, doing: list[Event], words: str, event: str | None, time_us: int
) -> None:
    row = by_rank(late_job(tmp_path, doing))[2]
    assert (row["doing"], row["doing_event"], row["doing_ns"]) == (words, event, time_us * 1000)
    assert row["late_ns"] == 80_000 and row["doing_pct"] == pytest.approx(100 * time_us / 80)


def test_host_time_under_a_busy_device_does_not_name_the_event(tmp_path: Path) -> None:
    doing = [op("busy", 100, 30), kernel("gemm", 100, 30), op("idle", 130, 50)]
    row = by_rank(late_job(tmp_path, doing))[2]
    assert (row["doing"], row["doing_event"]) == ("device idle while the host runs operators", "idle")


def test_without_a_device(tmp_path: Path) -> None:
    events = {rank: [op("gloo:all_reduce", 100, 100, tid=7)] for rank in range(2)}
    late = [op("aten::mm", 100, 60), op("gloo:all_reduce", 180, 20, tid=7)]
    row = by_rank(job_of(tmp_path, {**events, 2: late}))[2]
    assert (row["doing"], row["doing_event"], row["doing_ns"]) == ("running operators", "aten::mm", 60_000)


def test_corrected_clocks_name_another_rank(tmp_path: Path) -> None:
    """Rank 2's clock is 500 us ahead: it seems to be last, but its kernel was early."""
    late = [*launch(10), kernel("gemm", 100, 80), *plain([(180, 220)])]
    events = {0: [*launch(10), *plain([(100, 220)])], 1: late, 2: [*launch(510), *plain([(600, 720)])]}
    job = job_of(tmp_path, events)
    assert by_rank(job)[2]["is_straggler"]
    found = by_rank(job, clock_offsets_ns={2: 500_000})
    assert [rank for rank, row in found.items() if row["is_straggler"]] == [1]
    assert found[1]["doing_event"] == "gemm"


def test_times_of_today_are_exact(tmp_path: Path) -> None:
    at = EPOCH_US
    job = job_of(tmp_path, {rank: plain([(at + 7 * rank, at + 50)]) for rank in range(3)})
    assert by_rank(job)[2]["late_ns"] == 10_500


@given(
    starts=st.lists(st.lists(st.integers(0, 10**6), min_size=2, max_size=2), min_size=2, max_size=7),
    origin=st.sampled_from([0, 1_700_000_000_000_000_000]),
)
def test_median_of_others(starts: list[list[int]], origin: int) -> None:
    start = np.array(starts, np.int64) + origin
    found = _median_of_others(start) - origin
    for at in range(2):
        others = np.sort(start[:, at] - origin)[:-1]
        assert found[at] == np.floor(np.median(others))


@settings(max_examples=30)
@given(late=st.lists(st.lists(st.integers(0, 400), min_size=3, max_size=3), min_size=1, max_size=5))
def test_shares_add_up(tmp_path_factory: pytest.TempPathFactory, late: list[list[int]]) -> None:
    spans = {r: [(1000.0 * n + of[r], 1000.0 * n + 500) for n, of in enumerate(late)] for r in range(3)}
    job = job_of(tmp_path_factory.mktemp("job"), {rank: plain(of_rank) for rank, of_rank in spans.items()})
    found = by_rank(job).values()
    assert sum(row["waiting_caused_ns"] for row in found) == analyze.collective_summary(job)["wait_ns"]
    assert sum(row["last_arrivals"] for row in found) == len(late)
    assert sum(row["is_straggler"] for row in found) <= 1
    assert all(row["doing_ns"] is None or 0 < row["doing_ns"] <= row["late_ns"] for row in found)


def test_megatron_names_ranks_0_and_6(shared: Path) -> None:
    found = by_rank(foretrace.read(shared / "traces" / "megatron-tp8-a100" / "kineto"))
    assert {rank for rank, row in found.items() if row["is_straggler"]} == {0, 6}
    assert found[0]["share_pct"] == pytest.approx(52.17, abs=0.01)
    assert found[6]["share_pct"] == pytest.approx(41.50, abs=0.01)
    assert sum(row["last_arrivals"] for row in found.values()) == 84
    assert all(found[rank]["doing"] == "device idle while the host runs operators" for rank in (0, 6))
