"""Clock offsets from the ends of collectives."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foretrace
from foretrace import analyze
from foretrace.trace import Job
from tests.analyze.test_collectives import EPOCH_US, job_of, metadata, plain
from tests.formats.builder import Event


def by_rank(job: Job) -> dict[int, dict[str, Any]]:
    return {row["rank"]: row for row in analyze.clock_offsets(job).to_pylist()}


def job_with_clocks(
    folder: Path, groups: list[list[int]], ahead_us: dict[int, float], jitter_us: int = 0, count: int = 9
) -> Job:
    """Collectives of each group end together but for some jitter; each rank records them by its own clock."""
    draw = random.Random(7)
    events: dict[int, list[Event]] = {rank: [] for group in groups for rank in group}
    for at, group in enumerate(groups):
        for n in range(count):
            base = EPOCH_US + 10_000 * n + 1000 * at + 5
            for rank in group:
                end = base + 500 + draw.randrange(-jitter_us, jitter_us + 1)
                start = base + draw.randrange(300)
                span = (start + ahead_us[rank], end + ahead_us[rank])
                events[rank] += plain([span], **metadata(group, **{"Process Group Name": str(at)}))
    return job_of(folder, events)


def test_two_hosts(tmp_path: Path) -> None:
    job = job_with_clocks(tmp_path, [[0, 1, 2, 3]], {0: 0, 1: 0, 2: 1500, 3: 1500})
    found = by_rank(job)
    assert {rank: row["offset_ns"] for rank, row in found.items()} == {0: 0, 1: 0, 2: 1_500_000, 3: 1_500_000}
    assert all(row["spread_ns"] == 0 and row["samples"] == 9 for row in found.values())
    assert all(row["reference_rank"] == 0 for row in found.values())


def test_groups_are_chained_by_shared_ranks(tmp_path: Path) -> None:
    """The largest group is measured first, and still rank 0 is the reference."""
    ahead: dict[int, float] = {0: 100, 1: 0, 2: 700, 3: 30, 4: -400, 5: 0}
    job = job_with_clocks(tmp_path, [[0, 1], [1, 4], [2, 3, 4, 5]], ahead)
    found = by_rank(job)
    assert {rank: row["offset_ns"] for rank, row in found.items()} == {
        rank: round((clock - 100) * 1000) for rank, clock in ahead.items()
    }


def test_sets_without_a_shared_rank_have_their_own_reference(tmp_path: Path) -> None:
    job = job_with_clocks(tmp_path, [[0, 1], [2, 3]], {0: 0, 1: 10, 2: 999, 3: 1004})
    found = by_rank(job)
    assert [(row["offset_ns"], row["reference_rank"]) for row in found.values()] == [
        (0, 0),
        (10_000, 0),
        (0, 2),
        (5_000, 2),
    ]


def test_null_without_symmetric_collectives(tmp_path: Path) -> None:
    details = metadata([0, 1], kind="broadcast")
    job = job_of(tmp_path, {rank: plain([(1, 9)], **details) for rank in range(2)})
    for row in by_rank(job).values():
        assert (row["offset_ns"], row["spread_ns"], row["samples"], row["reference_rank"]) == (None, None, 0, None)


def test_null_for_incomplete_groups(tmp_path: Path) -> None:
    job = job_of(tmp_path, {rank: plain([(1, 9)]) for rank in range(2)}, world_size=4)
    assert all(row["offset_ns"] is None for row in by_rank(job).values())


def test_one_late_end_does_not_spoil_the_estimate(tmp_path: Path) -> None:
    spans = [(100.0 * n, 100.0 * n + 50) for n in range(7)]
    odd = [*spans[:3], (300.0, 390.0), *spans[4:]]
    job = job_of(tmp_path, {0: plain(spans), 1: plain(odd), 2: plain(spans)})
    assert [(row["offset_ns"], row["spread_ns"]) for row in by_rank(job).values()] == [(0, 0)] * 3


@settings(max_examples=30)
@given(
    clocks=st.lists(st.integers(-(10**5), 10**5), min_size=5, max_size=5),
    jitter_us=st.integers(0, 10),
)
def test_offsets_are_found_within_the_jitter(
    tmp_path_factory: pytest.TempPathFactory, clocks: list[int], jitter_us: int
) -> None:
    ahead = {rank: float(clock) for rank, clock in enumerate(clocks)}
    job = job_with_clocks(tmp_path_factory.mktemp("job"), [[0, 1, 2], [2, 3, 4]], ahead, jitter_us, count=5)
    for rank, row in by_rank(job).items():
        error_ns = row["offset_ns"] - (clocks[rank] - clocks[0]) * 1000
        assert abs(error_ns) <= 8 * jitter_us * 1000
        assert row["spread_ns"] <= 4 * jitter_us * 1000


def test_correction_by_the_estimate_aligns_the_ends(tmp_path: Path) -> None:
    job = job_with_clocks(tmp_path, [[0, 1, 2]], {0: 0, 1: 4000, 2: -2500})
    offsets = {rank: row["offset_ns"] for rank, row in by_rank(job).items()}
    members = analyze.collective_members(job, clock_offsets_ns=offsets).to_pylist()
    assert all(len({row["end_ns"] for row in members if row["index"] == at}) == 1 for at in range(9))


def test_ranks_of_one_node_agree(shared: Path) -> None:
    found = by_rank(foretrace.read(shared / "traces" / "megatron-tp8-a100" / "kineto"))
    assert all(abs(row["offset_ns"]) <= 20_000 and row["spread_ns"] <= 20_000 for row in found.values())
    assert all(row["samples"] == 84 for row in found.values())
