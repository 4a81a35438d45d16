"""The messages of a collective: who sends how much to whom, after what.

A phase runs on lines: ``ranks`` of shape ``(lines, n)``, each line by itself. It begins after the activities ``enter``
and is over with the activities it returns, both of the shape of ``ranks``. Before each message a rank takes the
endpoint delay; after one that it must combine with its own data also the reduction delay R(m) = 3 m / (memory
bandwidth): it reads two operands and writes one. Messages, sizes and delays are those of ASTRA-sim's analytical back
ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretrace.machine.network import Network
from foretrace.machine.system import Algorithm, Pattern, System
from foretrace.simulate.fair.builder import Builder
from foretrace.simulate.fair.plan import F64, I64, Kind
from foretrace.trace.workload import CommType

ALL_REDUCE, ALL_GATHER = CommType.ALL_REDUCE, CommType.ALL_GATHER
ALL_TO_ALL, REDUCE_SCATTER = CommType.ALL_TO_ALL, CommType.REDUCE_SCATTER


@dataclass(frozen=True)
class Lines:
    """One logical dimension of a group.

    Attributes:
        algorithm: what runs on it.
        members: positions in the group's list, shape ``(lines, n)``.
    """

    algorithm: Algorithm
    members: I64


def layout(network: Network, ranks: I64) -> tuple[tuple[int, int], ...]:
    """How the ranks fill a grid: (dimension, extent) where they differ; empty if they fill none."""
    coordinates = network.coordinates(ranks)
    extents = [len(np.unique(coordinates[:, dimension])) for dimension in range(coordinates.shape[1])]
    if np.prod(extents) != len(ranks) or len(np.unique(ranks)) != len(ranks):
        return ()
    return tuple((dimension, extent) for dimension, extent in enumerate(extents) if extent > 1)


def logical_dimensions(algorithms: Sequence[Algorithm], count: int, grid: tuple[tuple[int, int], ...]) -> list[Lines]:
    """How a group of ``count`` members, in order of rank where they fill a grid, is cut into lines.

    Each dimension of the grid has the algorithm of the network's dimension, and the last one where the list is shorter.
    Members that fill no grid are one line: a ring where several algorithms are given, else that one.
    """
    algorithms = algorithms or (Algorithm(Pattern.RING),)
    if not grid or algorithms[0].flat:
        single = algorithms[0] if len(algorithms) == 1 or algorithms[0].flat else Algorithm(Pattern.RING)
        return [Lines(single, np.arange(count)[None, :])]
    members = np.arange(count).reshape([extent for _, extent in reversed(grid)])
    lines = []
    for axis, (dimension, extent) in enumerate(grid):
        along = np.moveaxis(members, len(grid) - 1 - axis, -1).reshape(-1, extent)
        lines.append(Lines(algorithms[min(dimension, len(algorithms) - 1)], along))
    return lines


def phases(kind: CommType, dimensions: int, bandwidth_aware: bool) -> list[tuple[CommType, int]]:
    """Kind and logical dimension of each phase of a collective."""
    inner = list(range(dimensions))
    if kind == ALL_REDUCE and bandwidth_aware and inner:
        outer = [(ALL_GATHER, dimension) for dimension in reversed(inner[:-1])]
        return [*((REDUCE_SCATTER, dimension) for dimension in inner[:-1]), (ALL_REDUCE, inner[-1]), *outer]
    return [(kind, dimension) for dimension in (reversed(inner) if kind == ALL_GATHER else inner)]


class Collectives:
    """Expands collectives into the activities of a builder."""

    def __init__(self, builder: Builder, system: System) -> None:
        self.builder = builder
        self.system = system
        self.delay = float(system.endpoint_delay_ns)

    def reduction(self, size: float) -> float:
        """Time to combine a received message with one's own data, ns."""
        memory = self.system.memory_bytes_per_s
        return 3 * size / memory * 1e9 if memory else 0.0

    def expand(self, kind: CommType, size: float, ranks: I64, lines: list[Lines], enter: I64, leave: I64) -> None:
        """Several collectives of one kind, size and shape at once, each of ``(collectives, members)``.

        The chunks of a collective go through its phases one behind the other, at most ``active_chunks`` of them at once
        through a phase.
        """
        chunks, active = max(self.system.splits, 1), max(self.system.active_chunks, 1)
        order = phases(kind, len(lines), self.system.local_bandwidth_aware)
        over: list[list[I64]] = []
        before = self.builder.count
        for chunk in range(chunks):
            if chunk == 1:
                self.builder.reserve((self.builder.count - before) * (chunks - 1))
            at, left, ends = enter, size / chunks, list[I64]()
            for number, (part, dimension) in enumerate(order):
                if chunk >= active:
                    gate = self.builder.add(Kind.INSTANT, ranks)
                    self.builder.wait(at, gate)
                    self.builder.wait(over[chunk - active][number], gate)
                    at = gate
                members = lines[dimension].members
                ended, left = self.phase(part, lines[dimension].algorithm, ranks, members, at, left, chunk)
                at = np.empty_like(enter)
                at[:, members] = ended
                ends.append(at)
            over.append(ends)
            self.builder.wait(at, leave)

    def phase(
        self, kind: CommType, algorithm: Algorithm, ranks: I64, members: I64, enter: I64, size: float, chunk: int
    ) -> tuple[I64, float]:
        """One phase of some collectives: its last activities, ``(collectives, lines, n)``, and the size after it."""
        shape, n = (len(ranks), *members.shape), members.shape[1]
        on, after = ranks[:, members].reshape(-1, n), enter[:, members].reshape(-1, n)
        if algorithm.pattern == Pattern.DOUBLE_BINARY_TREE:
            return self.tree(on, after, size, chunk % 2).reshape(shape), size
        if algorithm.pattern == Pattern.HALVING_DOUBLING:
            ended = self.halving_doubling(kind, on, after, size)
        elif algorithm.pattern == Pattern.DIRECT:
            ended = self.direct(kind, on, after, size, algorithm.window)
        else:
            ended = self.ring(kind, on, after, size)
        factor = {REDUCE_SCATTER: 1 / n, ALL_GATHER: float(n)}.get(kind, 1.0)
        return ended.reshape(shape), size * factor

    def steps(self, ranks: I64, enter: I64, target: I64, size: F64, reduction: F64, in_order: bool = False) -> I64:
        """Send k + 1 of a rank waits for its receive k.

        Args:
            ranks, enter: shape ``(lines, n)``.
            target: position to which each position sends, shape ``(steps, n)``.
            size: of the messages of each step.
            reduction: after each step, ns.
            in_order: a rank's message waits until the one before has left.
        """
        b, count = self.builder, len(size)
        ready = b.add(Kind.DELAY, ranks, self.delay + np.concatenate([[0.0], reduction])[:, None, None])
        peer = ranks[:, target].transpose(1, 0, 2)
        queue = b.queues(*ranks.shape) if in_order else -1
        flow = b.add(Kind.FLOW, np.broadcast_to(ranks, peer.shape), size[:, None, None], peer, takes=queue, gives=queue)
        b.wait(enter, ready[0])
        b.wait(ready[:-1], ready[1:])
        b.wait(ready[:-1], flow)
        arrives = np.moveaxis(ready[1 + np.arange(count)[:, None], :, target], -1, 1)
        b.wait(flow, arrives)
        last: I64 = ready[-1]
        return last

    def ring(self, kind: CommType, ranks: I64, enter: I64, size: float) -> I64:
        """Everybody sends to the next in line; an all-to-all hands on what is for others."""
        n = ranks.shape[1]
        count = {ALL_REDUCE: 2 * (n - 1), ALL_TO_ALL: n * (n - 1) // 2}.get(kind, n - 1)
        message = size if kind == ALL_GATHER else size / n
        combines = (np.arange(count) < n - 1) & (kind in (ALL_REDUCE, REDUCE_SCATTER))
        target = np.broadcast_to((np.arange(n) + 1) % n, (count, n))
        reduction = np.where(combines, self.reduction(message), 0.0)
        return self.steps(ranks, enter, target, np.full(count, message), reduction, in_order=True)

    def halving_doubling(self, kind: CommType, ranks: I64, enter: I64, size: float) -> I64:
        """Partners at distance 1, 2, 4, ... exchange halves, quarters, ...; an all-gather goes the other way."""
        n = ranks.shape[1]
        if n & (n - 1) or kind == ALL_TO_ALL:
            raise ValueError(f"halving and doubling cannot run {kind.label} on {n} ranks (a power of two is needed)")
        halving = 1 << np.arange(n.bit_length() - 1)
        sizes = size / 2 / halving
        if kind == ALL_GATHER:
            distance, message = halving[::-1], size * halving.astype(np.float64)
        elif kind == ALL_REDUCE:
            distance, message = np.concatenate([halving, halving[::-1]]), np.concatenate([sizes, sizes[::-1]])
        else:
            distance, message = halving, sizes
        # As in ASTRA-sim the delay is that of the next message, and the last halving has none.
        reduction = np.zeros(len(message))
        if kind != ALL_GATHER:
            reduction[: len(halving) - 1] = [self.reduction(float(after)) for after in sizes[1:]]
        return self.steps(ranks, enter, np.arange(n) ^ distance[:, None], message, reduction)

    def direct(self, kind: CommType, ranks: I64, enter: I64, size: float, window: int) -> I64:
        """Everybody sends to everybody else; an all-reduce twice."""
        message = size if kind == ALL_GATHER else size / ranks.shape[1]
        ready = self.builder.add(Kind.DELAY, ranks, self.delay)
        self.builder.wait(enter, ready)
        combines = kind in (ALL_REDUCE, REDUCE_SCATTER)
        ended = self.exchange(ranks, ready, message, self.reduction(message) if combines else 0.0, window)
        return self.exchange(ranks, ended, message, 0.0, window) if kind == ALL_REDUCE else ended

    def exchange(self, ranks: I64, ready: I64, message: float, reduction: float, window: int) -> I64:
        """Each rank sends a message to each other one of its line, at most ``window`` at once (0: all)."""
        b, (lines, n) = self.builder, ranks.shape
        target = (np.arange(n) + 1 + np.arange(n - 1)[:, None]) % n
        peer = ranks[:, target].transpose(1, 0, 2)
        flow = b.add(Kind.FLOW, np.broadcast_to(ranks, peer.shape), message, peer)
        ended = b.add(Kind.DELAY, ranks, self.delay + reduction)
        b.wait(ready, ended)
        b.wait(flow, ended[:, target].transpose(1, 0, 2))
        window = min(window or n - 1, n - 1)
        b.wait(ready, flow[:window])
        if window < n - 1:  # send q waits for receive q - window
            again = b.add(Kind.DELAY, np.broadcast_to(ranks, (n - 1 - window, lines, n)), self.delay + reduction)
            b.wait(again, flow[window:])
            late = target[: n - 1 - window]
            b.wait(flow[: n - 1 - window], np.moveaxis(again[np.arange(len(late))[:, None], :, late], -1, 1))
            b.wait(ready, again)
        return ended

    def tree(self, ranks: I64, enter: I64, size: float, variant: int) -> I64:
        """An all-reduce up and down one of two binary trees, a message of the whole size an edge."""
        b, n = self.builder, ranks.shape[1]
        parent = binary_tree(n, variant)
        root = int(np.flatnonzero(parent < 0)[0])
        child = np.flatnonzero(parent >= 0)
        above = parent[child]
        edge_of = np.full(n, -1)
        edge_of[child] = np.arange(n - 1)
        is_leaf = ~np.isin(np.arange(n), above)
        combining = self.delay + self.reduction(size)
        up = b.add(Kind.FLOW, ranks[:, child], size, ranks[:, above])
        merged = b.add(Kind.DELAY, ranks[:, above], combining)
        ready = b.add(Kind.DELAY, ranks[:, is_leaf], self.delay)
        down = b.add(Kind.FLOW, ranks[:, above], size, ranks[:, child])
        ended = np.empty_like(ranks)
        ended[:, child] = b.add(Kind.DELAY, ranks[:, child], np.where(is_leaf[child], self.delay, combining))
        ended[:, root] = b.add(Kind.INSTANT, ranks[:, root])
        b.wait(enter[:, is_leaf], ready)
        b.wait(ready, up[:, edge_of[is_leaf]])
        b.wait(enter[:, above], merged)
        b.wait(up, merged)
        inner = above != root
        b.wait(merged[:, inner], up[:, edge_of[above[inner]]])
        b.wait(merged[:, ~inner], ended[:, [root]])
        b.wait(ended[:, above], down)
        b.wait(down, ended[:, child])
        return ended


def binary_tree(n: int, variant: int) -> I64:
    """Parent of each position, -1 of the root, of one of the two trees (Sanders, Speck and Träff 2009).

    The root has one child, the top of a balanced tree over the other positions in order. The root is the last position
    for variant 0 and the first one for variant 1, so that leaves of one tree are inner in the other.
    """
    parent = np.full(n, -1, np.int64)
    low, high, top = (0, n - 1, n - 1) if variant == 0 else (1, n, 0)
    pending = [(low, high, top)]
    while pending:
        low, high, above = pending.pop()
        if low >= high:
            continue
        middle = (low + high) // 2
        parent[middle] = above
        pending += [(low, middle, middle), (middle + 1, high, middle)]
    return parent
