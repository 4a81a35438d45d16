"""`Feeder`: the nodes of a trace in the order in which their dependencies allow them."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from foretrace.formats.chakra.trace import ChakraTrace, Dependencies
from foretrace.trace import FormatError

_WAITING, _READY, _TAKEN, _DONE = range(4)


class Feeder:
    """Hands out nodes whose dependencies are complete, the one with the smallest id first.

    A Chakra trace has two legal meanings, and the caller says which: mlcommons' own feeder waits for ``data_deps``
    only, ASTRA-sim's for ``data_deps`` and ``ctrl_deps``. A dependency that a node names twice counts once.

    Args:
        trace: the nodes.
        dependencies: ``"data"`` or ``"data+ctrl"``: what a node waits for.
        dangling: what to do about ids that no node has: ``"error"``, or ``"ignore"`` to wait for the others only.

    Attributes:
        dependencies: as given.
        ignored: dangling dependencies that were left out.

    Raises:
        FormatError: if two nodes have one id, or a node depends on an id that no node has.
        ValueError: if an argument is none of its words.
    """

    def __init__(
        self,
        trace: ChakraTrace,
        dependencies: Literal["data", "data+ctrl"] = "data+ctrl",
        *,
        dangling: Literal["error", "ignore"] = "error",
    ) -> None:
        if dependencies not in ("data", "data+ctrl") or dangling not in ("error", "ignore"):
            raise ValueError(f"no such way to feed: dependencies={dependencies!r}, dangling={dangling!r}")
        self.dependencies = dependencies
        self.ignored = 0
        # From here on a node is its place in the order of ids: a heap of these is a heap of ids.
        ids = trace.nodes["id"]
        order = np.argsort(ids, kind="stable")
        self._ids = ids[order]
        self._row: list[int] = order.tolist()
        self._place = np.empty(len(order), np.int64)
        self._place[order] = np.arange(len(order))
        self._refuse_twins(trace)
        kinds = [trace.data] if dependencies == "data" else [trace.data, trace.control]
        pairs = [self._pairs(trace, kind, dangling) for kind in kinds]
        self._link(np.concatenate([pair[0] for pair in pairs]), np.concatenate([pair[1] for pair in pairs]))

    def _refuse_twins(self, trace: ChakraTrace) -> None:
        twins = np.flatnonzero(self._ids[1:] == self._ids[:-1])
        if len(twins):
            raise FormatError(trace.report.path, f"two nodes have the id {self._ids[twins[0]]}", "number the nodes")

    def _pairs(self, trace: ChakraTrace, kind: Dependencies, dangling: str) -> tuple[NDArray[np.int64], ...]:
        """Places of the nodes that must complete, and of those that wait for them."""
        before = np.searchsorted(self._ids, kind.ids.astype(np.uint64))
        exists = before < len(self._ids)
        exists[exists] = self._ids[before[exists]] == kind.ids[exists]
        after = self._place[kind.nodes]
        missing = np.flatnonzero(~exists)
        if len(missing) and dangling == "error":
            node, lost = self._ids[after[missing[0]]], kind.ids[missing[0]]
            problem = f"node {node} depends on {lost}, which no node is ({len(missing)} such dependencies)"
            raise FormatError(trace.report.path, problem, 'take Feeder(trace, dangling="ignore"), or repair the trace')
        self.ignored += len(missing)
        return before[exists].astype(np.int64), after[exists]

    def _link(self, before: NDArray[np.int64], after: NDArray[np.int64]) -> None:
        count = len(self._ids)
        pairs = before * max(count, 1) + after
        pairs.sort(kind="stable")  # fast where nodes stand near what they wait for, as they mostly do
        pairs = pairs[np.diff(pairs, prepend=-1) > 0]  # each pair once
        before, after = np.divmod(pairs, max(count, 1))
        self._first: list[int] = np.concatenate(([0], np.cumsum(np.bincount(before, minlength=count)))).tolist()
        self._child: list[int] = after.tolist()
        missing = np.bincount(after, minlength=count)
        self._missing: list[int] = missing.tolist()
        self._state = bytearray(np.where(missing == 0, _READY, _WAITING).astype(np.uint8).tobytes())
        self._heap: list[int] = np.flatnonzero(missing == 0).tolist()
        heapify(self._heap)
        self.remaining: int = count
        """Nodes that are not complete. If it stays above 0 while nothing is ready or taken, nodes wait in a circle."""

    def ready(self) -> list[int]:
        """The ids of all nodes that `next` would give now, ascending."""
        found: list[int] = self._ids[sorted(self._heap)].tolist()
        return found

    def next(self) -> int | None:
        """Take the ready node with the smallest id and return its row; None if no node is ready."""
        if not self._heap:
            return None
        place = heappop(self._heap)
        self._state[place] = _TAKEN
        return self._row[place]

    def complete(self, row: int) -> None:
        """A node that `next` gave has ended: nodes that waited for it alone become ready.

        Raises:
            ValueError: if the node was not taken, or is complete already.
        """
        place = int(self._place[row])
        if self._state[place] != _TAKEN:
            raise ValueError(f"node {self._ids[place]} was not taken, or is complete already")
        self._state[place] = _DONE
        self.remaining -= 1
        missing = self._missing
        for child in self._child[self._first[place] : self._first[place + 1]]:
            missing[child] -= 1
            if missing[child] == 0:
                self._state[child] = _READY
                heappush(self._heap, child)

    def put_back(self, row: int) -> None:
        """A node that `next` gave cannot start yet: it becomes ready again.

        Raises:
            ValueError: if the node was not taken.
        """
        place = int(self._place[row])
        if self._state[place] != _TAKEN:
            raise ValueError(f"node {self._ids[place]} was not taken")
        self._state[place] = _READY
        heappush(self._heap, place)
