"""Put a `FairPlan` together block by block."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foretrace.machine.limits import MOST_ACTIVITIES
from foretrace.simulate.fair.plan import F64, I32, I64, FairPlan, Kind, csr
from foretrace.simulate.fair.wiring import Wiring

_COLUMNS: tuple[tuple[str, type[np.generic]], ...] = (
    ("kind", np.int8),
    ("rank", np.int32),
    ("work", np.float64),
    ("peer", np.int32),
    ("priority", np.int32),
    ("takes", np.int32),
    ("gives", np.int32),
)


class Builder:
    """Activities and their dependencies, added as arrays of any shape; an activity's key is its number."""

    def __init__(self) -> None:
        self.count = 0
        self.num_queues = 0
        self.notes: Counter[str] = Counter()
        self._blocks: dict[str, list[NDArray[Any]]] = {name: [np.empty(0, dtype)] for name, dtype in _COLUMNS}
        self._slots: list[I32] = [np.empty(0, np.int32)]
        self._sources: list[I64] = [np.empty(0, np.int64)]
        self._targets: list[I64] = [np.empty(0, np.int64)]

    def add(
        self,
        kind: Kind,
        rank: ArrayLike,
        work: ArrayLike = 0.0,
        peer: ArrayLike = -1,
        priority: ArrayLike = 0,
        takes: ArrayLike = -1,
        gives: ArrayLike = -1,
    ) -> I64:
        """Activities of one kind; arguments are broadcast, and so is the shape of the numbers that are returned.

        Raises:
            ValueError: if there are more activities than can be simulated.
        """
        values = np.broadcast_arrays(np.int8(kind), rank, work, peer, priority, takes, gives)
        self.reserve(values[0].size)
        for (name, dtype), value in zip(_COLUMNS, values, strict=True):
            self._blocks[name].append(value.ravel().astype(dtype))
        numbers = np.arange(self.count, self.count + values[0].size, dtype=np.int64).reshape(values[0].shape)
        self.count += values[0].size
        return numbers

    def reserve(self, count: int) -> None:
        """Refuse so many activities more if they are too many, before time is spent on them.

        Raises:
            ValueError: saying how many there may be.
        """
        if self.count + count > MOST_ACTIVITIES:
            raise ValueError(
                f"the fluid model has more than {MOST_ACTIVITIES} messages and computations here: take fewer ranks or "
                "chunks, or another fidelity"
            )

    def queues(self, *shape: int, slots: int = 1) -> I64:
        """The numbers of new queues."""
        numbers = self.num_queues + np.arange(np.prod(shape, dtype=np.int64)).reshape(shape)
        self.num_queues += numbers.size
        self._slots.append(np.full(numbers.size, slots, np.int32))
        return numbers

    def wait(self, before: I64, after: I64) -> None:
        """Each of ``after`` waits for the one of ``before`` in its place; both are broadcast."""
        source, target = np.broadcast_arrays(before, after)
        self._sources.append(source.ravel())
        self._targets.append(target.ravel())

    def never(self, activities: I64, why: str) -> None:
        """These activities never start."""
        if activities.size:
            self.wait(activities, activities)
            self.notes[why] += activities.size

    def build(
        self,
        wiring: Wiring,
        rank_speed: F64,
        rank_slowdown: F64,
        rank_link_slowdown: F64,
        **more: Any,
    ) -> FairPlan:
        """The plan, with routes for its flows; ``more``: further attributes of the plan."""
        columns = {name: np.concatenate(blocks) for name, blocks in self._blocks.items()}
        first_child, child = csr(self.count, np.concatenate(self._sources), np.concatenate(self._targets))
        first_hop, hop = self._routes(wiring, columns)
        return FairPlan(
            key=np.arange(self.count, dtype=np.int64),
            **columns,
            first_child=first_child,
            child=child,
            first_hop=first_hop,
            hop=hop,
            queue_slots=np.concatenate(self._slots),
            link_capacity=wiring.capacity,
            link_latency=wiring.latency,
            link_owner=wiring.owner,
            rank_speed=rank_speed,
            rank_slowdown=rank_slowdown,
            rank_link_slowdown=rank_link_slowdown,
            notes=self.notes,
            **more,
        )

    def _routes(self, wiring: Wiring, columns: dict[str, NDArray[Any]]) -> tuple[I64, I32]:
        """Routes of all activities as CSR; each pair of ranks is routed once."""
        flows = np.flatnonzero(columns["kind"] == Kind.FLOW)
        ranks = wiring.network.num_ranks
        pairs = columns["rank"][flows].astype(np.int64) * ranks + columns["peer"][flows]
        pair, which = np.unique(pairs, return_inverse=True)
        first, links = wiring.routes(pair // ranks, pair % ranks)
        length = np.zeros(self.count, np.int64)
        length[flows] = np.diff(first)[which]
        first_hop = np.zeros(self.count + 1, np.int64)
        np.cumsum(length, out=first_hop[1:])
        at = np.repeat(first[which] - first_hop[flows], length[flows]) + np.arange(first_hop[-1])
        return first_hop, links[at]
