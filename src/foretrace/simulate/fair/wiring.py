"""The links of a network, and the routes over them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foretrace.machine.network import Network, Topology
from foretrace.simulate.fair.plan import F64, I32, I64, csr


class Wiring:
    """Directed links of every dimension, numbered. Each line of ranks along a dimension has wires of its own.

    A rank of a ring has a link to the next and one to the previous rank of its line; one of a fully connected dimension
    has one to each rank of its line; one of a switch has a link up to the switch of its line and one down from it.

    Attributes:
        first: number of the first link of each dimension, and behind the last one. widths: links of a rank in each.
        capacity: bytes/ns, shape ``(links,)``. latency: ns. owner: the rank at its end (for rings and full connections
            the sending end).
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        ranks = np.arange(network.num_ranks)
        widths = [d.size if d.topology is Topology.FULLY_CONNECTED else 2 for d in network.dimensions]
        counts = [network.num_ranks * width for width in widths]
        self.first = np.cumsum([0, *counts])
        self.widths = widths

        def each(values: list[float]) -> F64:
            return np.repeat(np.array(values, np.float64), counts)

        self.capacity = each([d.bandwidth_bytes_per_ns for d in network.dimensions])
        self.latency = each([d.latency_ns for d in network.dimensions])
        owners = [np.repeat(ranks, width) for width in widths]
        self.owner: I32 = np.concatenate(owners).astype(np.int32) if owners else np.empty(0, np.int32)

    def ends(self, link: int) -> tuple[int, int | None, int | None]:
        """Dimension, sender and receiver of a link; None is the switch."""
        dimension = int(np.searchsorted(self.first, link, "right")) - 1
        kind, size = self.network.dimensions[dimension].topology, self.network.dimensions[dimension].size
        stride = self.network.strides[dimension]
        rank, which = divmod(int(link - self.first[dimension]), self.widths[dimension])
        if kind is Topology.SWITCH:
            return (dimension, None, rank) if which else (dimension, rank, None)
        at = rank // stride % size
        to = which if kind is Topology.FULLY_CONNECTED else (at + (1, -1)[which]) % size
        return dimension, rank, rank + (to - at) * stride

    def describe(self, link: int) -> str:
        """A link in words: its dimension and both of its ends."""
        dimension, *ends = self.ends(link)
        sender, receiver = ("the switch" if end is None else f"rank {end}" for end in ends)
        return f"dimension {dimension}, {sender} to {receiver}"

    def find(self, dimension: int, rank: int, which: int = 0) -> int:
        """The number of a link of a rank.

        Args:
            dimension: of the network.
            rank: that it belongs to.
            which: of a ring 0 to the next rank, 1 to the previous one; of a switch 0 up, 1 down; of a full connection
                the coordinate of the receiver.
        """
        return int(self.first[dimension]) + rank * self.widths[dimension] + which

    def routes(self, source: NDArray[np.integer], target: NDArray[np.integer]) -> tuple[I64, I32]:
        """Routes by dimension order, as CSR over messages: offsets and links.

        Rings are taken the shorter way, at a tie in ascending direction.
        """
        at = np.asarray(source, np.int64).copy()
        message, link = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        there = self.network.coordinates(target)
        for dimension in range(len(self.network.dimensions)):
            rows, links = self._hops(dimension, at, there[:, dimension])
            message.append(rows)
            link.append(links)
            here = self.network.coordinates(at)[:, dimension]
            at += (there[:, dimension] - here) * self.network.strides[dimension]
        return csr(len(at), np.concatenate(message), np.concatenate(link))

    def _hops(self, dimension: int, at: I64, to: I64) -> tuple[I64, I64]:
        """Message and link of each hop along one dimension, from ranks ``at`` to coordinates ``to``."""
        kind, size = self.network.dimensions[dimension].topology, self.network.dimensions[dimension].size
        stride, first = self.network.strides[dimension], int(self.first[dimension])
        here = at // stride % size
        moves = np.flatnonzero(here != to)
        if kind is Topology.FULLY_CONNECTED:
            return moves, first + at[moves] * size + to[moves]
        if kind is Topology.SWITCH:
            down = at[moves] + (to[moves] - here[moves]) * stride
            links = np.stack([first + 2 * at[moves], first + 2 * down + 1], axis=1)
            return np.repeat(moves, 2), links.ravel()
        up, down = (to - here) % size, (here - to) % size
        length, direction = np.minimum(up, down), np.where(up <= down, 1, -1)
        rows = np.repeat(np.arange(len(at)), length)
        step = np.arange(len(rows)) - np.repeat(np.cumsum(length) - length, length)
        passed = (here[rows] + step * direction[rows]) % size
        rank = at[rows] + (passed - here[rows]) * stride
        return rows, first + 2 * rank + (direction[rows] < 0)
