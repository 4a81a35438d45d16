"""Timelines joined with operator traces: real pairs, shifted and missing ids, loops, and strangers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foretrace
from foretrace.formats.pytorch_et import read_operators
from foretrace.link import alignment
from foretrace.link.alignment import align
from foretrace.link.operators import JoinError, join
from foretrace.trace import Table, Timeline
from foretrace.trace.operators import OperatorTrace
from tests.formats.builder import Event, call, kernel, op, write
from tests.formats.execution_traces import node
from tests.formats.execution_traces import trace as execution_trace


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
    blank = np.full_like(timeline.operators["record_function_id"], -1)
    timeline.operators = Table({**timeline.operators, "record_function_id": blank}, timeline.operators.strings)
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


@pytest.mark.parametrize(
    ("timeline", "operators"),
    [
        ("megatron-tp8-a100/kineto/rank0", "linear-rtx2080ti/et"),
        ("megatron-tp8-a100/kineto/rank0", "simple-add-et-kineto/et"),
        ("simple-add-et-kineto/kineto", "megatron-tp8-a100/et/rank0"),
        ("simple-add-et-kineto/kineto", "pytorch-et/small-1.0.2"),
        ("h100-mi300-pairs/h100-gaunernst_bert-small-uncased", "linear-rtx2080ti/et"),
        ("train-a100-8gpu-6steps/rank3", "pytorch-et/small-1.0.2"),
        ("train-a100-8gpu-6steps/rank3", "linear-rtx2080ti/et"),
    ],
)
def test_another_run_is_refused_though_it_has_the_same_operators(shared: Path, timeline: str, operators: str) -> None:
    paths = [shared / "traces" / f"{name}.json.gz" for name in (timeline, operators)]
    with pytest.raises(JoinError, match=r"(none|only \d+) of \d+ operators .* pass the two files of one run"):
        join(foretrace.read(paths[0]).timelines[0], read_operators(paths[1]))


# -- made-up pairs ---------------------------------------------------------------------------------------------------

NAMES = ("aten::mm", "aten::add", "aten::relu", "aten::view", "aten::sum", "aten::mul")


def program(seed: int, length: int = 60, first_id: int = 100) -> list[tuple[int, str]]:
    """Ids and names of the operators of one iteration; each launches a kernel."""
    random = np.random.default_rng(seed)
    return [(first_id + at, NAMES[random.integers(len(NAMES))]) for at in range(length)]


def recorded(
    folder: Path, seen: list[tuple[int, str]], traced: list[tuple[int, str]], ids: str = "", shift: int = 0
) -> tuple[Timeline, OperatorTrace]:
    """A timeline of the operators ``seen`` and an operator trace of those ``traced``.

    Args:
        ids: the key under which the timeline has the ids, if any.
        shift: what is added to them there.
    """
    events: list[Event] = []
    for at, (number, name) in enumerate(seen):
        told: dict[str, Any] = {ids: number + shift} if ids else {}
        events += [op(name, 100.0 * at, 50, **told), call("cudaLaunchKernel", 100.0 * at + 5, 10, at + 1)]
        events[-1]["args"].pop("External id")
        events += [kernel("gemm", 100.0 * at + 20, 40, at + 1)]
    nodes = [node(number + 7, name, 1, rf_id=number) for number, name in traced]
    timeline = foretrace.read(write(folder / "rank0.json", {"traceEvents": events})).timelines[0]
    return timeline, read_operators(write(folder / "et.json", execution_trace(*nodes)))


def pairs_of(timeline: Timeline, trace: OperatorTrace) -> tuple[list[tuple[int, int]], Any]:
    """For each joined node its record-function id and the place of its operator in the timeline."""
    found = join(timeline, trace)
    place = np.full(timeline.num_events, -1)
    operators = timeline.rows(foretrace.trace.Category.OPERATOR)
    place[operators[np.argsort(timeline.start_ns[operators])]] = np.arange(len(operators))
    nodes = np.flatnonzero(found.event >= 0)
    return list(
        zip(trace.nodes["record_function_id"][nodes].tolist(), place[found.event[nodes]].tolist(), strict=True)
    ), found


@pytest.mark.parametrize(("ids", "how"), [("Record function id", "record-function id"), ("External id", "external id")])
@pytest.mark.parametrize("shift", [0, 5, -40])
def test_ids_of_either_kind_at_any_distance(tmp_path: Path, ids: str, how: str, shift: int) -> None:
    one = program(1)
    found, joined = pairs_of(*recorded(tmp_path, one, one, ids, shift))
    assert found == [(number, at) for at, (number, _) in enumerate(one)]
    assert joined.joined == {how + (f" less {shift}" if shift else ""): 60}
    assert (joined.work_node >= 0).all() and joined.missing == {"root of a process or thread": 1}


def test_of_several_iterations_ids_choose(tmp_path: Path) -> None:
    rounds = [program(2, first_id=100 * (1 + at)) for at in range(4)]
    seen = [one for each in rounds for one in each]
    found, joined = pairs_of(*recorded(tmp_path, seen, rounds[2], "Record function id"))
    assert found == [(number, 120 + at) for at, (number, _) in enumerate(rounds[2])]
    assert (joined.work_node >= 0).sum() == 60
    assert joined.missing_work == {"launched by operators that are not in the execution trace": 180}


def test_of_several_iterations_without_ids_one_is_taken_and_told(tmp_path: Path) -> None:
    rounds = [program(2, first_id=100 * (1 + at)) for at in range(4)]
    seen = [one for each in rounds for one in each]
    found, joined = pairs_of(*recorded(tmp_path, seen, rounds[2]))
    places = [place for _, place in found]
    assert places == list(range(places[0], places[0] + 60)) and places[0] % 60 == 0
    assert joined.guessed == {"thread that fits at several places of the timeline: took one of them": 1}


@pytest.mark.parametrize("ids", ["Record function id", "External id", ""])
def test_operators_that_only_one_side_has(tmp_path: Path, ids: str) -> None:
    one = program(3)
    for seen, traced in (
        (one, one[:20] + one[24:]),
        (one[:20] + one[24:], one),
        (one[:12] + one[14:], one[:40] + one[42:]),
    ):
        timeline, trace = recorded(tmp_path, seen, traced, ids)
        found, joined = pairs_of(timeline, trace)
        where = {number: at for at, (number, _) in enumerate(seen)}
        right = sum(where.get(number) == at for number, at in found)
        common = len(set(seen) & set(traced))
        if ids:
            assert right == len(found) == common
        else:  # of equal names beside a gap, names alone cannot tell which one is missing
            assert right >= 0.85 * common and len(found) >= 0.9 * common
        assert sum(joined.joined.values()) + sum(joined.missing.values()) == trace.num_nodes


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


# -- sequences of names ----------------------------------------------------------------------------------------------


def longest_common(short: list[int], long: list[int]) -> int:
    """Length of the longest common subsequence."""
    lengths = [0] * (len(long) + 1)
    for one in short:
        previous = lengths.copy()
        for at, other in enumerate(long):
            lengths[at + 1] = previous[at] + 1 if one == other else max(previous[at + 1], lengths[at])
    return lengths[-1]


NUMBERS = st.lists(st.integers(0, 3), max_size=30)


@settings(max_examples=300)
@given(NUMBERS, NUMBERS, st.lists(st.integers(-1, 29), max_size=30))
def test_an_alignment_is_a_common_subsequence(short: list[int], long: list[int], prefer: list[int]) -> None:
    wish = np.array((prefer + [-1] * len(short))[: len(short)], np.int64)
    for hint in (None, wish):
        places, ties = align(np.array(short, np.int64), np.array(long, np.int64), hint)
        found = np.flatnonzero(places >= 0)
        assert len(places) == len(short) and (places < len(long)).all() and ties >= 0
        assert all(short[at] == long[places[at]] for at in found.tolist())
        assert (np.diff(places[found]) > 0).all()
        most = longest_common(short, long)
        assert len(found) <= most and (len(found) > 0) == (most > 0)


@settings(max_examples=300)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=20), NUMBERS, NUMBERS, st.integers(1, 3))
def test_a_whole_copy_is_found_where_a_search_finds_it(
    short: list[int], before: list[int], after: list[int], copies: int
) -> None:
    long = before + short * copies + after
    fits = [at for at in range(len(long) - len(short) + 1) if long[at : at + len(short)] == short]
    places, ties = align(np.array(short, np.int64), np.array(long, np.int64))
    assert places.tolist() == list(range(fits[0], fits[0] + len(short)))
    assert ties == len(fits)
    for at in fits:  # one of several is taken if a hint speaks for it
        hint = np.arange(len(short)) + at
        assert align(np.array(short, np.int64), np.array(long, np.int64), hint)[0].tolist() == hint.tolist()


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(3, 20), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6), st.data())
def test_runs_of_names_that_differ_are_all_found(runs: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """Common runs of at least three names, with names between them that only one side has."""
    short, long, common, at = [], [], [], 0
    for length, only_short, only_long in runs:
        for side, count in ((short, only_short), (long, only_long)):
            side += range(at, at + count)
            at += count
        common += range(at, at + length)
        short += range(at, at + length)
        long += range(at, at + length)
        at += length
    name = data.draw(st.permutations(range(at)))  # names are numbers without an order
    places, _ = align(np.array([name[one] for one in short]), np.array([name[one] for one in long]))
    assert [short[one] for one in np.flatnonzero(places >= 0).tolist()] == common
    assert [long[place] for place in places[places >= 0].tolist()] == common


def test_of_equal_distances_the_one_that_finds_most() -> None:
    """Two rounds, and between them something that only one side has."""
    places, _ = align(np.array([1, 2, 1, 2]), np.array([8, 1, 2, 9, 1, 2]))
    assert places.tolist() == [1, 2, 4, 5]


def test_a_name_that_is_everywhere_proposes_nothing() -> None:
    short = np.zeros(100, np.int64)
    places, ties = align(short, np.zeros(300, np.int64))
    assert ties == 1 and places.tolist() == list(range(100))


def test_a_gap_longer_than_the_lookahead_ends_the_search() -> None:
    base = np.arange(1000)
    places, _ = align(base, np.concatenate((base[:400], base[400 + alignment._LOOKAHEAD + 1 :])))
    assert (places[:400] < 0).all() or (places[-300:] < 0).all()
    places, _ = align(base, np.concatenate((base[:400], base[400 + alignment._LOOKAHEAD :])))
    assert (places >= 0).sum() == 1000 - alignment._LOOKAHEAD


def test_nothing_on_one_side() -> None:
    none, some = np.empty(0, np.int64), np.arange(5)
    assert align(none, some)[0].tolist() == [] and align(some, none)[0].tolist() == [-1] * 5
