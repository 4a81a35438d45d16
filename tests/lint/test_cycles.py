"""Cycles: compiled kernels against plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foretrace.formats.chakra.cycles import components, cycle_through, edges_to_cut, order_of


@st.composite
def graphs(draw: st.DrawFn, forward: bool = False) -> tuple[int, Any, Any, Any]:
    """Number of nodes, sources, targets, and a priority of each node; no edge from a node to itself."""
    count = draw(st.integers(1, 12))
    node = st.integers(0, count - 1)
    pairs = draw(st.lists(st.tuples(node, node).filter(lambda pair: pair[0] != pair[1]), max_size=40))
    priority = np.array(draw(st.permutations(range(count))), np.int64)
    if forward:
        pairs = [(min(pair), max(pair)) for pair in pairs]
    source, target = np.array(pairs, np.int64).reshape(-1, 2).T
    return count, source, target, priority


def reach(count: int, source: Any, target: Any) -> Any:
    """What can be reached from each node in one step or more."""
    found = np.zeros((count, count), np.bool_)
    found[source, target] = True
    for middle in range(count):
        found |= np.outer(found[:, middle], found[middle])
    return found


@given(graphs())
def test_components(graph: Any) -> None:
    count, source, target, _ = graph
    component = components(source, target, count)
    reached = reach(count, source, target)
    same = component[:, None] == component[None, :]
    assert (same == ((reached & reached.T) | np.eye(count, dtype=np.bool_))).all()


@given(graphs())
def test_a_cycle_is_shown_that_is_one(graph: Any) -> None:
    count, source, target, _ = graph
    component = components(source, target, count)
    edges = set(zip(source.tolist(), target.tolist(), strict=True))
    for node in np.flatnonzero(np.bincount(component, minlength=count)[component] > 1).tolist():
        cycle = cycle_through(source, target, component, node)
        assert cycle[0] == node and len(set(cycle)) == len(cycle)
        assert all(pair in edges for pair in zip(cycle, [*cycle[1:], cycle[0]], strict=True))
        assert len(cycle) == shortest(edges, node)


def shortest(edges: set[tuple[int, int]], node: int) -> int:
    front, length = {node}, 0
    while True:
        front, length = {b for a, b in edges if a in front}, length + 1
        if node in front:
            return length


@given(graphs())
def test_cuts(graph: Any) -> None:
    count, source, target, priority = graph
    cut = edges_to_cut(source, target, priority)
    assert not reach(count, source[~cut], target[~cut]).diagonal().any()
    component = components(source, target, count)
    assert (component[source[cut]] == component[target[cut]]).all()
    assert (priority[source[cut]] > priority[target[cut]]).all()


@given(graphs(forward=True))
def test_order(graph: Any) -> None:
    count, source, target, priority = graph
    assert not edges_to_cut(source, target, priority).any()
    position = order_of(source, target, priority)
    done: list[int] = []
    while len(done) < count:
        ready = [
            node
            for node in range(count)
            if node not in done and all(int(s) in done for s, t in zip(source, target, strict=True) if t == node)
        ]
        done.append(min(ready, key=lambda node: int(priority[node])))
    assert position[done].tolist() == list(range(count))
