"""The feeder against a plain twin, and its two meanings of a trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.formats.chakra import ChakraTrace
from foretrace.formats.chakra.builder import Builder
from foretrace.formats.chakra.feeder import Feeder
from foretrace.trace import FormatError

Node = tuple[int, list[int], list[int]]  # id, data and control dependencies


def trace_of(nodes: list[Node]) -> ChakraTrace:
    builder = Builder()
    for node_id, data, control in nodes:
        builder.add(node_id, f"n{node_id}", 4, data=data, control=control)
    return builder.trace()


class Twin:
    """The rules as sets: every question looks at all nodes."""

    def __init__(self, nodes: list[Node], with_control: bool) -> None:
        known = {node[0] for node in nodes}
        self.waits = {n: (set(data) | (set(control) if with_control else set())) & known for n, data, control in nodes}
        self.taken: set[int] = set()
        self.done: set[int] = set()

    def ready(self) -> list[int]:
        return sorted(n for n, waits in self.waits.items() if n not in self.taken and waits <= self.done)


@st.composite
def graphs(draw: st.DrawFn) -> list[Node]:
    """Any ids in any order; dependencies forwards, backwards, on itself, twice, and on ids that no node has."""
    ids = draw(st.lists(st.one_of(st.integers(0, 20), st.integers(0, 2**64 - 1)), unique=True, max_size=12))
    target = st.one_of(st.sampled_from(ids), st.integers(0, 25)) if ids else st.nothing()
    few = st.lists(target, max_size=3)
    acyclic = draw(st.booleans())
    nodes = [(node, draw(few), draw(few)) for node in ids]
    if acyclic:
        place = {node: at for at, node in enumerate(ids)}
        keep = lambda at, deps: [d for d in deps if place.get(d, -1) < at]  # noqa: E731
        nodes = [(node, keep(at, data), keep(at, control)) for at, (node, data, control) in enumerate(nodes)]
    return draw(st.permutations(nodes))


@given(nodes=graphs(), with_control=st.booleans(), data=st.data())
def test_agrees_with_the_twin(nodes: list[Node], with_control: bool, data: st.DataObject) -> None:
    kind: Any = "data+ctrl" if with_control else "data"
    feeder, twin = Feeder(trace_of(nodes), kind, dangling="ignore"), Twin(nodes, with_control)
    running: list[int] = []
    for _ in range(4 * len(nodes) + 2):
        assert feeder.ready() == twin.ready()
        assert feeder.remaining == len(nodes) - len(twin.done)
        action = data.draw(st.sampled_from(["next", "complete", "put back"] if running else ["next"]))
        if action == "next":
            row, wanted = feeder.next(), twin.ready()
            assert (row is None) == (not wanted)
            if row is not None:
                assert nodes[row][0] == wanted[0]
                twin.taken.add(wanted[0])
                running.append(row)
            continue
        row = running.pop(data.draw(st.integers(0, len(running) - 1)))
        if action == "complete":
            feeder.complete(row)
            twin.done.add(nodes[row][0])
        else:
            feeder.put_back(row)
            twin.taken.remove(nodes[row][0])
    known = {node[0] for node in nodes}
    named = [d for _, d_ids, c_ids in nodes for d in (d_ids + c_ids if with_control else d_ids)]
    assert feeder.ignored == sum(d not in known for d in named)


def test_the_two_meanings() -> None:
    trace = trace_of([(1, [], []), (2, [], [1]), (3, [1], [2])])
    assert Feeder(trace, "data").ready() == [1, 2]
    assert Feeder(trace, "data+ctrl").ready() == Feeder(trace).ready() == [1]
    feeder = Feeder(trace, "data")
    first = feeder.next()
    assert first == 0
    feeder.complete(first)
    assert feeder.ready() == [2, 3]


def test_dangling_ids() -> None:
    trace = trace_of([(1, [], [7]), (2, [1], [])])
    assert Feeder(trace, "data").ready() == [1]
    with pytest.raises(FormatError, match="node 1 depends on 7, which no node is") as error:
        Feeder(trace, "data+ctrl")
    assert "\n" not in str(error.value)
    feeder = Feeder(trace, "data+ctrl", dangling="ignore")
    assert (feeder.ready(), feeder.ignored) == ([1], 1)


def test_what_cannot_be_fed() -> None:
    with pytest.raises(FormatError, match="two nodes have the id 5"):
        Feeder(trace_of([(5, [], []), (5, [], [])]))
    with pytest.raises(ValueError, match="no such way"):
        Feeder(trace_of([]), "control")  # type: ignore[arg-type]
    feeder = Feeder(trace_of([(1, [], []), (2, [1], [])]))
    for row in (0, 1):
        with pytest.raises(ValueError, match="not taken"):
            feeder.complete(row)
    assert feeder.next() == 0
    feeder.complete(0)
    with pytest.raises(ValueError, match="not taken"):
        feeder.complete(0)
    with pytest.raises(ValueError, match="not taken"):
        feeder.put_back(0)


def test_nodes_that_wait_for_each_other_stay() -> None:
    feeder = Feeder(trace_of([(1, [2], []), (2, [1], []), (3, [3], []), (4, [], [])]))
    assert feeder.next() == 3
    feeder.complete(3)
    assert (feeder.next(), feeder.ready(), feeder.remaining) == (None, [], 3)


def test_a_long_chain() -> None:
    count = 50_000
    trace = trace_of([(count - at, [count - at + 1] if at else [], []) for at in range(count)])
    feeder = Feeder(trace)
    order = []
    while (row := feeder.next()) is not None:
        order.append(row)
        feeder.complete(row)
    assert order == list(range(count)) and feeder.remaining == 0


def test_a_recorded_trace(shared: Any) -> None:
    from foretrace.formats.chakra.read import read_chakra

    trace = read_chakra(shared / "traces" / "chakra-et" / "dangling-deps.0.et")
    counts = {}
    for kind in ("data", "data+ctrl"):
        feeder = Feeder(trace, kind, dangling="ignore")  # type: ignore[arg-type]
        while (row := feeder.next()) is not None:
            feeder.complete(row)
        counts[kind] = (feeder.ignored, feeder.remaining)
    # Its control dependencies lack 1,277 nodes, and 383 nodes name themselves: with these, most of it can never run.
    assert counts == {"data": (0, 0), "data+ctrl": (1277, 2283)}
    own = np.flatnonzero(trace.nodes["id"][trace.control.nodes] == trace.control.ids)
    assert len(own) == 383
