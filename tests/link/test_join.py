"""Timelines joined with operator traces: real pairs, shifted and missing ids, loops, and strangers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import foretrace
from foretrace.formats.pytorch_et import read_operators
from foretrace.link.alignment import align
from foretrace.link.operators import JoinError, join
from foretrace.trace import Table, Timeline
from foretrace.trace.operators import OperatorTrace


def pair(shared: Path, rank: int = 0) -> tuple[Timeline, OperatorTrace]:
    folder = shared / "traces" / "megatron-tp8-a100"
    timeline = foretrace.read(folder / "kineto" / f"rank{rank}.json.gz").timelines[0]
    return timeline, read_operators(folder / "et" / f"rank{rank}.json.gz")


@pytest.mark.parametrize("rank", range(8))
def test_megatron(shared: Path, rank: int) -> None:
    found = join(*pair(shared, rank))
    assert found.joined == {"external id less 2": 5422}
    assert found.missing == {"root of a process or thread": 2}
    assert len(found.work_node) == 777 and (found.work_node >= 0).all() and not found.missing_work
    timeline = found.timeline
    kernels = timeline.category[timeline.device_rows] == foretrace.trace.Category.KERNEL
    assert kernels.sum() == 690
    names = timeline.names(found.event[found.event >= 0])
    assert names == found.trace.names(np.flatnonzero(found.event >= 0))


@pytest.mark.parametrize(("name", "nodes", "work"), [("simple-add-et-kineto", 36, 4), ("linear-rtx2080ti", 928, 261)])
def test_other_pairs(shared: Path, name: str, nodes: int, work: int) -> None:
    folder = shared / "traces" / name
    found = join(foretrace.read(folder / "kineto.json.gz").timelines[0], read_operators(folder / "et.json.gz"))
    assert int((found.event >= 0).sum()) == nodes == sum(found.joined.values())
    assert int((found.work_node >= 0).sum()) == work
    assert work + sum(found.missing_work.values()) == len(found.timeline.device_rows)


def without_ids(timeline: Timeline, shift: int | None = None) -> Timeline:
    external = timeline.events["external_id"]
    changed = np.full_like(external, -1) if shift is None else np.where(external > 0, external + shift, external)
    timeline.events = Table({**timeline.events, "external_id": changed}, timeline.events.strings)
    return timeline


def test_any_constant_distance_between_ids(shared: Path) -> None:
    timeline, trace = pair(shared)
    assert join(without_ids(timeline, 1000), trace).joined == {"external id less 1002": 5422}


def test_without_ids_names_and_order_tell(shared: Path) -> None:
    timeline, trace = pair(shared)
    right = join(timeline, trace).event
    found = join(without_ids(timeline), trace)
    assert set(found.joined) == {"name and order"}
    assert (found.event == right).sum() >= 0.99 * (right >= 0).sum()


def test_a_stranger_is_refused(shared: Path) -> None:
    timeline, trace = pair(shared)
    names = [f"other::{at}" for at in range(len(trace.strings))]
    trace.strings = foretrace.trace.StringTable(names)
    with pytest.raises(JoinError, match=r"none of .* operators"):
        join(timeline, trace)


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(0, 10), st.integers(0, 10))
def test_a_part_is_found_in_the_whole(names: list[int], before: int, after: int) -> None:
    short = np.array(names, np.int64)
    long = np.concatenate((np.full(before, 97), short, np.full(after, 98))).astype(np.int64)
    places, _ = align(short, long)
    found = places >= 0
    assert (short[found] == long[places[found]]).all()
    assert (np.diff(places[found]) > 0).all()
    if len(names) >= 12 and len(set(names)) > 3:
        assert found.mean() > 0.5


def test_gaps_on_either_side() -> None:
    base = np.arange(100)
    places, ties = align(np.delete(base, [30, 31, 60]), np.delete(base, [10, 80, 81]))
    assert ties == 1
    kept = np.delete(base, [30, 31, 60])
    assert (places[~np.isin(kept, [10, 80, 81])] >= 0).all() and (places[np.isin(kept, [10, 80, 81])] < 0).all()


def test_of_equal_rounds_the_first_is_taken_unless_ids_say_otherwise() -> None:
    one = np.arange(20)
    places, ties = align(one, np.tile(one, 3))
    assert ties == 3 and places.tolist() == list(range(20))
    places, _ = align(one, np.tile(one, 3), np.arange(20) + 40)
    assert places.tolist() == list(range(40, 60))
