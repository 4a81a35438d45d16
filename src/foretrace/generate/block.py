"""`Block`: the nodes of one pass of one micro-batch, to be put into programs as often as the schedule says."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from foretrace.generate.costs import Cost
from foretrace.trace.strings import StringTable
from foretrace.trace.workload import CommType, WorkKind

# Sources of dependencies that lie in an earlier block: where its stream ended; its last collective on gradients or
# weights.
STREAM, DATA = -1, -2
COLUMNS = ("name", "kind", "flops", "bytes", "collective", "tag", "slot")


@dataclass(frozen=True)
class Slots:
    """Columns of `Workload.groups_of`; -1 where there is no such group."""

    tp: int = -1
    dp: int = -1
    embedding: int = -1


class Block:
    """Nodes in the order in which a rank issues them, and what each waits for.

    A rank works on a stream: one node after the other, computation and the collectives whose results it needs at once.
    What need not be waited for branches off: sends, and collectives over data-parallel ranks, which follow each other.
    Every collective waits for nodes of the stream, and at most for the collective of its own kind before it. So those
    that are issued earlier become free earlier, and ranks with one slot for communication take them in one order.

    Attributes:
        stream: the nodes that the next one of the stream waits for.
        last_data: the last collective over data-parallel ranks.
    """

    def __init__(self, strings: StringTable, prefix: str, merge: bool) -> None:
        self._strings, self._prefix, self._merge = strings, prefix, merge
        self._rows: list[tuple[int, int, int, int, int, int, int]] = []
        self._names: list[str] = []
        self._target: list[int] = []
        self._source: list[int] = []
        self.stream: list[int] = [STREAM]
        self.last_data = DATA

    def compute(self, name: str, cost: Cost) -> None:
        """Computation on the stream; when merging, it is added to the computation directly before it."""
        last = len(self._rows) - 1
        if self._merge and last >= 0 and self.stream == [last] and self._rows[last][1] == WorkKind.COMPUTE:
            _, kind, flops, moved, *rest = self._rows[last]
            first = self._names[last].split(" .. ")[0]
            self._names[last] = f"{first} .. {name}"
            self._rows[last] = (-1, kind, flops + cost.flops, moved + cost.bytes, rest[0], rest[1], rest[2])
            return
        # A look-up has no operations, for which rooflines have no time: with one it takes that of its bytes.
        self.stream = [self._add(name, WorkKind.COMPUTE, self.stream, flops=max(cost.flops, 1), size=cost.bytes)]

    def collective(self, name: str, kind: CommType, size: int, slot: int) -> int:
        """A collective after what is on the stream; the stream goes on beside it until `join`.

        Args:
            name: for the node.
            kind: which collective.
            size: bytes, as Chakra counts them.
            slot: of the group.
        """
        return self._add(name, WorkKind.COLLECTIVE, self.stream, size=size, collective=kind, slot=slot)

    def exchange(self, name: str, kind: CommType, size: int, slot: int) -> None:
        """A collective on the stream."""
        self.stream = [self.collective(name, kind, size, slot)]

    def data(self, name: str, kind: CommType, size: int, slot: int) -> int:
        """A collective over data-parallel ranks, after the one before it."""
        after = [*self.stream, self.last_data]
        self.last_data = self._add(name, WorkKind.COLLECTIVE, after, size=size, collective=kind, slot=slot)
        return self.last_data

    def join(self, row: int) -> None:
        """Let the stream wait for a node beside it."""
        if row not in self.stream:
            self.stream = [*self.stream, row]

    def receive(self, name: str, size: int, slot: int, tag: int) -> None:
        """A receive that the stream waits for; it waits for nothing itself."""
        self.join(self._add(name, WorkKind.RECEIVE, [], size=size, slot=slot, tag=tag))

    def send(self, name: str, size: int, slot: int, tag: int) -> None:
        """A send of what the stream has made; nothing waits for it."""
        self._add(name, WorkKind.SEND, self.stream, size=size, slot=slot, tag=tag)

    def _add(self, name: str, kind: WorkKind, after: list[int], *, flops: int = -1, size: int = -1,
             collective: int = CommType.NONE, tag: int = -1, slot: int = -1) -> int:  # fmt: skip
        row = len(self._rows)
        self._rows.append((-1, kind, flops, size, collective, tag, slot))
        self._names.append(name)
        self._target += [row] * len(after)
        self._source += after
        return row

    @cached_property
    def columns(self) -> NDArray[np.int64]:
        """The nodes: one column each of `COLUMNS`, shape ``(nodes, 7)``. No node may be added afterwards."""
        columns = np.array(self._rows, np.int64).reshape(-1, len(COLUMNS))
        columns[:, 0] = self._strings.intern_all([self._prefix + name for name in self._names])
        return columns

    @cached_property
    def inner(self) -> NDArray[np.int64]:
        """Dependencies within the block: target and source, shape ``(pairs, 2)``."""
        return self._pairs[self._pairs[:, 1] >= 0]

    @cached_property
    def outer(self) -> list[tuple[int, int]]:
        """Dependencies on an earlier block: target, and `STREAM` or `DATA`."""
        return [(target, source) for target, source in self._pairs[self._pairs[:, 1] < 0].tolist()]

    @cached_property
    def _pairs(self) -> NDArray[np.int64]:
        return np.stack((np.array(self._target, np.int64), np.array(self._source, np.int64)), axis=1)
