"""Collectives over ranks: matching, the split into waiting and transfer, bandwidth, and what must stay null."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foretrace
from foretrace import analyze
from foretrace.analyze.collectives import bus_factor
from foretrace.trace import Job
from foretrace.trace.classify import CollectiveKind
from tests.formats.builder import Event, call, kernel, op, write

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
EPOCH_US = 1_700_000_000_000_000.0


def metadata(
    ranks: list[int], elements: int = 1000, dtype: str = "Float", kind: str = "allreduce", **more: Any
) -> dict[str, Any]:
    return {
        "Collective name": kind,
        "In msg nelems": elements,
        "Out msg nelems": elements,
        "Group size": len(ranks),
        "dtype": dtype,
        "Process Group Name": "0",
        "Process Group Ranks": json.dumps(ranks),
        **more,
    }


def job_of(folder: Path, events: dict[int, list[Event]], world_size: int = -1) -> Job:
    folder.mkdir(parents=True, exist_ok=True)
    world_size = len(events) if world_size < 0 else world_size
    paths = []
    for rank, of_rank in events.items():
        info = {"backend": "nccl", "rank": rank, "world_size": world_size}
        paths.append(write(folder / f"rank{rank}.json", {"distributedInfo": info, "traceEvents": of_rank}))
    return foretrace.read(paths)


def plain(spans: list[tuple[float, float]], stream: int = 20, name: str = ALL_REDUCE, **args: Any) -> list[Event]:
    """Kernels by start and end in us."""
    return [kernel(name, start, end - start, stream=stream, **args) for start, end in spans]


def rows(job: Job) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = analyze.collectives(job).to_pylist()
    return found


def test_wait_and_transfer_of_two_ranks(tmp_path: Path) -> None:
    job = job_of(tmp_path, {0: plain([(100, 200), (300, 340)]), 1: plain([(150, 200), (290, 340)])})
    first, second = rows(job)
    assert (first["transfer_ns"], first["wait_ns"], first["last_rank"]) == (50_000, 50_000, 1)
    assert (second["transfer_ns"], second["wait_ns"], second["last_rank"]) == (40_000, 10_000, 0)
    assert (first["start_ns"], first["last_start_ns"], first["end_ns"]) == (100_000, 150_000, 200_000)
    assert (first["kind"], first["size"], first["ranks"], first["matched"]) == ("all_reduce", 2, 2, True)
    summary = analyze.collective_summary(job)
    assert (summary["matched"], summary["wait_ns"], summary["transfer_ns"]) == (2, 60_000, 90_000)
    assert summary["notes"] == {} and "reason" not in summary


def test_ties_name_the_lowest_rank(tmp_path: Path) -> None:
    job = job_of(tmp_path, {rank: plain([(100, 200)]) for rank in range(3)})
    assert [(row["last_rank"], row["wait_ns"]) for row in rows(job)] == [(0, 0)]


def test_members_wait_beyond_the_shortest(tmp_path: Path) -> None:
    job = job_of(tmp_path, {0: plain([(100, 200)]), 1: plain([(120, 200)]), 2: plain([(180, 200)])})
    members = analyze.collective_members(job).to_pylist()
    assert [(row["rank"], row["wait_ns"]) for row in members] == [(0, 80_000), (1, 60_000), (2, 0)]
    assert all(job.rank(row["rank"]).start_ns[row["event"]] == row["start_ns"] for row in members)


@pytest.mark.parametrize(
    ("events", "world_size"),
    [
        ({0: plain([(100, 200)])}, 1),
        ({0: plain([(100, 200)])}, 8),
        ({0: plain([(100, 200)]), 1: plain([(100, 200)])}, 8),
        ({0: plain([(1, 2)], **metadata([0, 1, 2])), 1: plain([(1, 2)], **metadata([0, 1, 2]))}, 3),
    ],
    ids=["one rank", "one of eight", "two of eight", "two of a group of three"],
)
def test_incomplete_groups_are_null(tmp_path: Path, events: dict[int, list[Event]], world_size: int) -> None:
    job = job_of(tmp_path, events, world_size)
    summary = analyze.collective_summary(job)
    assert (summary["matched"], summary["wait_ns"], summary["transfer_ns"]) == (0, None, None)
    assert summary["reason"]
    (row,) = rows(job)
    assert not row["matched"]
    nulls = ("transfer_ns", "wait_ns", "last_rank", "algorithm_gb_per_s", "bus_gb_per_s")
    assert [row[name] for name in nulls] == [None] * 5
    assert all(member["wait_ns"] is None for member in analyze.collective_members(job).to_pylist())
    (size,) = analyze.collectives_by_size(job).to_pylist()
    assert (size["count"], size["matched"], size["transfer_mean_ns"]) == (1, False, None)
    assert size["duration_mean_ns"] > 0


def test_nothing_to_match(tmp_path: Path) -> None:
    job = job_of(tmp_path, {0: [op("aten::mm", 0, 10)], 1: [op("aten::mm", 0, 10)]})
    summary = analyze.collective_summary(job)
    assert (summary["matched"], summary["wait_ns"], summary["reason"]) == (0, None, "no collectives")
    for ask in (analyze.collectives, analyze.collective_members, analyze.collectives_by_size):
        assert ask(job).num_rows == 0


def test_groups_are_told_apart_by_their_ranks(tmp_path: Path) -> None:
    events = {rank: plain([(100 + rank, 200)], **metadata([0, 1] if rank < 2 else [2, 3])) for rank in (0, 1, 2, 3)}
    found = rows(job_of(tmp_path, events))
    assert [(row["group"], row["size"], row["last_rank"]) for row in found] == [("0 [0,1]", 2, 1), ("0 [2,3]", 2, 3)]


def test_group_with_other_ranks_than_recorded_is_null(tmp_path: Path) -> None:
    job = job_of(tmp_path, {rank: plain([(100, 200)], **metadata([0, 1])) for rank in (0, 5)})
    assert not rows(job)[0]["matched"]


def test_more_members_than_the_group_has_is_null(tmp_path: Path) -> None:
    details = {**metadata([0, 1]), "Process Group Ranks": ""}  # two groups of one name: which is which is unknown
    job = job_of(tmp_path, {rank: plain([(100, 200)], **details) for rank in range(4)})
    assert [(row["size"], row["ranks"], row["matched"]) for row in rows(job)] == [(2, 4, False)]


@pytest.mark.parametrize("text", ["[]", "", "[0, 1, ...]", "garbage", "3"])
def test_unreadable_ranks_fall_back_on_the_group_size(tmp_path: Path, text: str) -> None:
    details = {**metadata([0, 1]), "Process Group Ranks": text}
    job = job_of(tmp_path, {rank: plain([(100, 200)], **details) for rank in range(2)})
    assert [(row["size"], row["matched"]) for row in rows(job)] == [(2, True)]


def test_group_names_stay_short(tmp_path: Path) -> None:
    ranks = list(range(0, 64, 4))
    job = job_of(tmp_path, {0: plain([(1, 2)], **metadata(ranks)), 4: plain([(1, 2)], **metadata(list(range(4, 99))))})
    assert {row["group"] for row in rows(job)} == {"0 [0-60:4]", "0 [4-98]"}


def test_streams_correspond_by_order_where_their_numbers_differ(tmp_path: Path) -> None:
    one = plain([(100, 200)], stream=20) + plain([(300, 400)], stream=28)
    other = plain([(120, 200)], stream=21) + plain([(330, 400)], stream=29)
    found = rows(job_of(tmp_path, {0: one, 1: other}))
    assert [row["group"] for row in found] == ["communication stream 0", "communication stream 1"]
    assert [row["wait_ns"] for row in found] == [20_000, 30_000]


def test_metadata_of_the_operator_that_launched(tmp_path: Path) -> None:
    def events(late: float) -> list[Event]:
        return [
            op("record_param_comms", 80, 30, **metadata([0, 1], elements=250)),
            {**call("cudaLaunchKernelExC", 90, 10, 5), "args": {"correlation": 5}},
            kernel(ALL_REDUCE, 100 + late, 100 - late, 5, stream=20),
        ]

    (row,) = rows(job_of(tmp_path, {0: events(0), 1: events(20)}))
    assert (row["group"], row["bytes"], row["dtype"], row["matched"]) == ("0 [0,1]", 1000, "Float", True)


@pytest.mark.parametrize("asymmetric", ["broadcast", "reduce", "gather", "scatter", "send", "recv"])
def test_asymmetric_collectives_are_marked(tmp_path: Path, asymmetric: str) -> None:
    job = job_of(tmp_path, {rank: plain([(1, 2)], **metadata([0, 1], kind=asymmetric)) for rank in range(2)})
    assert [row["asymmetric"] for row in rows(job)] == [True]
    assert analyze.collective_summary(job)["asymmetric"] == 1


@pytest.mark.parametrize("symmetric", ["allreduce", "_allgather_base", "_reduce_scatter_base", "all_to_all", "barrier"])
def test_symmetric_collectives_are_not(tmp_path: Path, symmetric: str) -> None:
    job = job_of(tmp_path, {rank: plain([(1, 2)], **metadata([0, 1], kind=symmetric)) for rank in range(2)})
    assert [row["asymmetric"] for row in rows(job)] == [False]


def test_disagreeing_sequences_are_unmatched_where_they_differ(tmp_path: Path) -> None:
    def events(second: str, third_elements: int) -> list[Event]:
        ranks = [0, 1]
        return [
            *plain([(100, 200)], **metadata(ranks)),
            *plain([(300, 400)], **metadata(ranks, kind=second)),
            *plain([(500, 600)], **metadata(ranks, elements=third_elements)),
            *plain([(700, 800)], **metadata(ranks)),
        ]

    job = job_of(tmp_path, {0: events("allreduce", 7), 1: events("broadcast", 8)})
    assert [row["matched"] for row in rows(job)] == [True, False, False, True]
    assert analyze.collective_summary(job)["notes"] == {"collective whose kind or size differs between ranks": 2}


def test_a_size_that_one_rank_does_not_know_is_no_disagreement(tmp_path: Path) -> None:
    known, unknown = metadata([0, 1]), metadata([0, 1], dtype="Mystery")
    job = job_of(tmp_path, {0: plain([(1, 9)], **unknown), 1: plain([(2, 9)], **known)})
    assert [(row["matched"], row["bytes"]) for row in rows(job)] == [(True, 4000)]


@pytest.mark.parametrize("missing", ["first", "last"])
def test_windows_that_begin_or_end_apart(tmp_path: Path, missing: str) -> None:
    """All collectives are alike, so only the times tell which one a rank lacks."""
    spans = [(100.0 * n, 100.0 * n + 50) for n in range(5)]
    fewer = spans[1:] if missing == "first" else spans[:-1]
    job = job_of(tmp_path, {0: plain(spans), 1: plain([(start + 10, end) for start, end in fewer])})
    assert [(row["wait_ns"], row["matched"]) for row in rows(job)] == [(10_000, True)] * 4
    assert analyze.collective_summary(job)["notes"] == {"collective that some ranks lack": 1}


def test_kinds_tell_the_alignment_before_times_do(tmp_path: Path) -> None:
    kinds = ["broadcast", "allreduce", "allreduce", "_allgather_base"]

    def events(of_rank: list[str], at: float) -> list[Event]:
        spans = [(at + 100 * n, at + 100 * n + 50) for n in range(len(of_rank))]
        return [e for s, k in zip(spans, of_rank, strict=True) for e in plain([s], **metadata([0, 1], kind=k))]

    job = job_of(tmp_path, {0: events(kinds, 0), 1: events(kinds[1:], 0)})  # rank 1's clock is 100 us behind
    assert [row["kind"] for row in rows(job)] == ["all_reduce", "all_reduce", "all_gather"]
    assert all(row["matched"] for row in rows(job))
    assert analyze.collective_summary(job)["notes"]["matched collective whose members do not overlap in time"] == 3


@pytest.mark.parametrize(
    ("kind", "label", "in_elements", "out_elements", "size_bytes", "factor"),
    [
        ("allreduce", "all_reduce", 1000, 1000, 4000, 2 * 3 / 4),
        ("_allgather_base", "all_gather", 1000, 4000, 16000, 3 / 4),
        ("_reduce_scatter_base", "reduce_scatter", 4000, 1000, 16000, 3 / 4),
        ("all_to_all", "all_to_all", 1000, 1000, 4000, 3 / 4),
        ("broadcast", "broadcast", 1000, 1000, 4000, 1.0),
        ("reduce", "reduce", 1000, 1000, 4000, 1.0),
    ],
)
def test_bandwidth_as_in_nccl_tests(
    tmp_path: Path, kind: str, label: str, in_elements: int, out_elements: int, size_bytes: int, factor: float
) -> None:
    details = metadata([0, 1, 2, 3], kind=kind)
    details |= {"In msg nelems": in_elements, "Out msg nelems": out_elements}
    job = job_of(tmp_path, {rank: plain([(rank, 10)], **details) for rank in range(4)})
    (row,) = rows(job)
    assert (row["kind"], row["bytes"], row["transfer_ns"]) == (label, size_bytes, 7_000)
    assert row["algorithm_gb_per_s"] == pytest.approx(size_bytes / 7_000)
    assert row["bus_gb_per_s"] == pytest.approx(size_bytes / 7_000 * factor)
    (size,) = analyze.collectives_by_size(job).to_pylist()
    assert size["bus_gb_per_s"] == pytest.approx(row["bus_gb_per_s"])
    assert (size["count"], size["transfer_mean_ns"], size["wait_ns"]) == (1, 7_000, 6_000)


@pytest.mark.parametrize(
    ("dtype", "width"),
    [("BFloat16", 2), ("Float", 4), ("Half", 2), ("Byte", 1), ("Long", 8), ("c10::BFloat16", 2), ("float32", 4)],
)
def test_widths_of_data_types(tmp_path: Path, dtype: str, width: int) -> None:
    job = job_of(tmp_path, {rank: plain([(1, 2)], **metadata([0, 1], 10, dtype)) for rank in range(2)})
    assert rows(job)[0]["bytes"] == 10 * width


def test_unknown_sizes_give_no_bandwidth(tmp_path: Path) -> None:
    job = job_of(tmp_path, {rank: plain([(1, 2)], **metadata([0, 1], dtype="Mystery")) for rank in range(2)})
    (row,) = rows(job)
    assert row["matched"] and row["wait_ns"] == 0
    assert (row["bytes"], row["algorithm_gb_per_s"], row["bus_gb_per_s"]) == (None, None, None)


def test_bus_factors_of_a_single_rank() -> None:
    assert bus_factor(CollectiveKind.ALL_REDUCE, 1) == bus_factor(CollectiveKind.ALL_GATHER, 1) == 0


def test_sizes_are_grouped(tmp_path: Path) -> None:
    events = {
        rank: plain([(1, 2), (3, 6)], **metadata([0, 1])) + plain([(7, 9)], **metadata([0, 1], elements=5))
        for rank in range(2)
    }
    found = analyze.collectives_by_size(job_of(tmp_path, events)).to_pylist()
    assert [(row["bytes"], row["count"]) for row in found] == [(4000, 2), (20, 1)]
    assert (found[0]["transfer_min_ns"], found[0]["transfer_max_ns"]) == (1000, 3000)
    assert found[0]["algorithm_gb_per_s"] == pytest.approx(8000 / 4000)


def test_gloo_without_a_device(tmp_path: Path) -> None:
    events = {rank: [op("gloo:all_reduce", 100 + 10 * rank, 100 - 10 * rank, tid=7)] for rank in range(3)}
    (row,) = rows(job_of(tmp_path, events))
    assert (row["matched"], row["kind"], row["wait_ns"], row["last_rank"]) == (True, "all_reduce", 30_000, 2)


def test_corrected_clocks_change_who_is_last_but_not_the_waiting(tmp_path: Path) -> None:
    job = job_of(tmp_path, {0: plain([(100, 200)]), 1: plain([(90, 140)])})  # rank 1's clock is 60 us behind
    assert rows(job)[0]["last_rank"] == 0
    (row,) = analyze.collectives(job, clock_offsets_ns={1: -60_000}).to_pylist()
    assert (row["last_rank"], row["wait_ns"], row["end_ns"]) == (1, 50_000, 200_000)
    members = analyze.collective_members(job, clock_offsets_ns={1: -60_000}).to_pylist()
    assert [member["end_ns"] for member in members] == [200_000, 200_000]


@settings(max_examples=30)
@given(data=st.data(), count=st.integers(1, 5), size=st.integers(2, 4))
def test_waiting_and_transfer_add_up(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, count: int, size: int
) -> None:
    spans: dict[int, list[tuple[float, float]]] = {}
    for rank in range(size):
        late = data.draw(st.lists(st.integers(0, 400), min_size=count, max_size=count))
        long = data.draw(st.lists(st.integers(0, 500), min_size=count, max_size=count))
        spans[rank] = [
            (1000.0 * n + a, 1000.0 * n + a + b) for n, (a, b) in enumerate(zip(late, long, strict=True), start=1)
        ]
    job = job_of(tmp_path_factory.mktemp("job"), {rank: plain(of_rank) for rank, of_rank in spans.items()})
    total = sum(round((end - start) * 1000) for of_rank in spans.values() for start, end in of_rank)
    summary = analyze.collective_summary(job)
    assert summary["matched"] == count
    assert summary["wait_ns"] + size * summary["transfer_ns"] == total
    found = rows(job)
    assert sum(row["wait_ns"] for row in found) == summary["wait_ns"]
    assert all(row["wait_ns"] >= 0 and row["transfer_ns"] >= 0 for row in found)
    waits = [row["wait_ns"] for row in analyze.collective_members(job).to_pylist()]
    assert sum(waits) == summary["wait_ns"] and min(waits) == 0


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_order_of_files_and_events_does_not_matter(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    draw = random.Random(seed)
    folder = tmp_path_factory.mktemp("job")
    spans = {
        rank: [(EPOCH_US + 1000 * n + draw.randrange(400), EPOCH_US + 1000 * n + 500) for n in range(4)]
        for rank in range(3)
    }
    job = job_of(folder, {rank: plain(of_rank, **metadata([0, 1, 2])) for rank, of_rank in spans.items()})
    answers = [analyze.collectives(job), analyze.collectives_by_size(job), analyze.stragglers(job)]
    for rank, of_rank in spans.items():
        events = plain(of_rank, **metadata([0, 1, 2]))
        draw.shuffle(events)
        info = {"rank": rank, "world_size": 3}
        write(folder / f"rank{rank}.json", {"distributedInfo": info, "traceEvents": events})
    paths = [folder / f"rank{rank}.json" for rank in range(3)]
    draw.shuffle(paths)
    other = foretrace.read(paths)
    assert [analyze.collectives(other), analyze.collectives_by_size(other), analyze.stragglers(other)] == answers


def test_megatron_matches_as_counted_by_hand(shared: Path) -> None:
    job = foretrace.read(shared / "traces" / "megatron-tp8-a100" / "kineto")
    summary = analyze.collective_summary(job)
    assert (summary["matched"], summary["unmatched"], summary["notes"]) == (84, 0, {})
    assert summary["transfer_ns"] == pytest.approx(50.1e6, rel=0.001)
    assert summary["wait_ns"] == pytest.approx(2.94e9, rel=0.001)
    of_rank = dict.fromkeys(range(8), 0)
    for row in analyze.collective_members(job).to_pylist():
        of_rank[row["rank"]] += row["end_ns"] - row["start_ns"]
    assert round(min(of_rank.values()) / 1e6) == 241 and round(max(of_rank.values()) / 1e6) == 495
    assert sum(of_rank.values()) == summary["wait_ns"] + 8 * summary["transfer_ns"]


def test_sampled_ranks_of_a_large_job_match_nothing(shared: Path) -> None:
    summary = analyze.collective_summary(foretrace.read(shared / "traces" / "sampled-128gpu"))
    assert (summary["matched"], summary["wait_ns"], summary["transfer_ns"]) == (0, None, None)
