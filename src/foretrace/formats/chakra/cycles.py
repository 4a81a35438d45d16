"""Nodes that wait for each other: which, one short cycle of them, and which edges to cut.

Compiled. Imported where it is used: reading a trace does not need Numba.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

# Rounds that cut as little as possible, before everything that goes backward in a cycle is cut at once: each is linear.
_CAREFUL_ROUNDS = 64


def forward_star(source: Ints, target: Ints, count: int) -> tuple[Ints, Ints]:
    """Edges sorted by source: offsets of shape ``(count + 1,)``, and targets."""
    order = np.argsort(source, kind="stable")
    first = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(source, minlength=count), out=first[1:])
    return first, target[order]


def components(source: Ints, target: Ints, count: int) -> Ints:
    """The strongly connected component of each node; nodes of one component, and no others, wait for each other."""
    from foretrace.trace.topology import topological_order

    first, sorted_target = forward_star(source, target, count)
    free = topological_order(first, sorted_target, np.bincount(target, minlength=count))
    found = np.arange(count, dtype=np.int64)
    if len(free) == count:
        return found
    # Tarjan's algorithm for what is left: nodes in cycles, between, and behind them.
    left = np.ones(count, np.bool_)
    left[free] = False
    rows = np.flatnonzero(left)
    place = np.full(count, -1, np.int64)
    place[rows] = np.arange(len(rows))
    inside = left[source] & left[target]
    first, sorted_target = forward_star(place[source[inside]], place[target[inside]], len(rows))
    found[rows] = rows[_components(first, sorted_target)]
    return found


@njit(cache=True, nogil=True)
def _components(first: Ints, target: Ints) -> Ints:
    """Tarjan's algorithm without recursion; the number of a component is one of its nodes."""
    count = len(first) - 1
    number = np.full(count, -1, np.int64)
    low = np.empty(count, np.int64)
    component = np.full(count, -1, np.int64)
    open_nodes = np.empty(count, np.int64)
    path = np.empty(count, np.int64)
    edge = first[:-1].copy()
    num_open, counter = 0, 0
    for root in range(count):
        if number[root] >= 0:
            continue
        depth = 0
        path[0] = root
        number[root] = low[root] = counter
        counter += 1
        open_nodes[num_open] = root
        num_open += 1
        while depth >= 0:
            node = path[depth]
            if edge[node] < first[node + 1]:
                child = target[edge[node]]
                edge[node] += 1
                if number[child] < 0:
                    number[child] = low[child] = counter
                    counter += 1
                    open_nodes[num_open] = child
                    num_open += 1
                    depth += 1
                    path[depth] = child
                elif component[child] < 0:
                    low[node] = min(low[node], number[child])
                continue
            if low[node] == number[node]:
                while True:
                    num_open -= 1
                    member = open_nodes[num_open]
                    component[member] = node
                    if member == node:
                        break
            depth -= 1
            if depth >= 0:
                low[path[depth]] = min(low[path[depth]], low[node])
    return component


def cycle_through(source: Ints, target: Ints, component: Ints, node: int) -> list[int]:
    """A shortest cycle through a node, beginning with it: each waits for the one before, the first for the last.

    Args:
        source, target: edges.
        component: of each node, as `components` gives them; that of ``node`` has more than one node.
    """
    inside = (component[source] == component[node]) & (component[target] == component[node]) & (source != target)
    rows = np.flatnonzero(component == component[node])
    place = np.full(len(component), -1, np.int64)
    place[rows] = np.arange(len(rows))
    first, sorted_target = forward_star(place[source[inside]], place[target[inside]], len(rows))
    found: list[int] = rows[_shortest_cycle(first, sorted_target, int(place[node]))].tolist()
    return found


@njit(cache=True, nogil=True)
def _shortest_cycle(first: Ints, target: Ints, start: int) -> Ints:
    """Breadth first from a node until an edge leads back to it."""
    count = len(first) - 1
    before = np.full(count, -1, np.int64)
    queue = np.empty(count, np.int64)
    queue[0] = start
    size, done = 1, 0
    while done < size:
        node = queue[done]
        done += 1
        for edge in range(first[node], first[node + 1]):
            child = target[edge]
            if child == start:
                length = 1
                step = node
                while step != start:
                    step = before[step]
                    length += 1
                found = np.empty(length, np.int64)
                for at in range(length - 1, -1, -1):
                    found[at] = node
                    node = before[node]
                return found
            if before[child] < 0:
                before[child] = node
                queue[size] = child
                size += 1
    return queue[:0]


def edges_to_cut(source: Ints, target: Ints, position: Ints) -> Mask:
    """Edges without which there is no cycle; each leads from a later to an earlier node of a cycle.

    Args:
        source, target: edges, none from a node to itself.
        position: of each node in the order that is to be kept, all distinct.

    Returns:
        Shape ``(edges,)``. In each round, every group of nodes that wait for each other loses what its first node
        waits for within the group. Where that takes too many rounds, all that leads backward in a group is cut.
    """
    count = len(position)
    cut = np.zeros(len(source), np.bool_)
    active = np.arange(len(source))
    for round_number in range(_CAREFUL_ROUNDS + 1):
        component = components(source[active], target[active], count)
        active = active[component[source[active]] == component[target[active]]]
        if not len(active):
            break
        if round_number == _CAREFUL_ROUNDS:
            cut[active] = position[source[active]] > position[target[active]]
            break
        earliest = np.full(count, count, np.int64)
        np.minimum.at(earliest, component, position)
        now = position[target[active]] == earliest[component[target[active]]]
        cut[active[now]] = True
        active = active[~now]
    return cut


def order_of(source: Ints, target: Ints, priority: Ints) -> Ints:
    """Place of each node in the order in which edges without cycles allow the nodes, the smallest priority first."""
    count = len(priority)
    first, sorted_target = forward_star(source, target, count)
    by_priority = np.argsort(priority, kind="stable")
    return np.asarray(_order(first, sorted_target, np.bincount(target, minlength=count), priority, by_priority))


@njit(cache=True, nogil=True)
def _order(first: Ints, target: Ints, missing: Ints, priority: Ints, by_priority: Ints) -> Ints:
    count = len(missing)
    position = np.empty(count, np.int64)
    ready = [np.int64(0) for _ in range(0)]
    for node in range(count):
        if missing[node] == 0:
            heappush(ready, priority[node])
    done = 0
    while ready:
        node = by_priority[heappop(ready)]
        position[node] = done
        done += 1
        for edge in range(first[node], first[node + 1]):
            child = target[edge]
            missing[child] -= 1
            if missing[child] == 0:
                heappush(ready, priority[child])
    return position


__all__: list[Any] = ["components", "cycle_through", "edges_to_cut", "order_of"]
