"""Dependencies of a Chakra trace as pairs of rows, and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from foretrace.formats.chakra.trace import ChakraTrace, Dependencies

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
_DENSE = 4  # ids that are spread over less than so many times their number are looked up in a table


@dataclass(frozen=True)
class Mentions:
    """One kind of dependencies, an entry for each id that a node names.

    Attributes:
        label: ``"ctrl_deps"`` or ``"data_deps"``.
        lists: as the trace holds them.
        source: row of the node that is named, the first of several with that id; -1 if there is none.
        target: row of the node that names it.
        is_self: whether a node names its own id.
    """

    label: str
    lists: Dependencies
    source: Ints
    target: Ints
    is_self: Mask

    @property
    def is_dangling(self) -> Mask:
        """Whether no node has the id."""
        return np.asarray(self.source < 0)


class Edges:
    """Both kinds of dependencies of one trace."""

    def __init__(self, trace: ChakraTrace) -> None:
        self.trace = trace
        self.count = trace.num_nodes
        ids = trace.nodes["id"]
        find = _Finder(ids)
        self.kinds: list[Mentions] = []
        for label, lists in (("data_deps", trace.data), ("ctrl_deps", trace.control)):
            target = lists.nodes.astype(np.int64)
            is_self = lists.ids == ids[target] if len(target) else np.zeros(0, np.bool_)
            self.kinds.append(Mentions(label, lists, find(lists.ids), target, is_self))

    @cached_property
    def is_data(self) -> Mask:
        """Which of `source` and `target` are data dependencies."""
        return np.concatenate([np.full(len(part), at == 0) for at, part in enumerate(self._sound)])

    @cached_property
    def source(self) -> Ints:
        """Rows that are waited for: of both kinds, data first, without dangling and self-dependencies."""
        return np.concatenate([kind.source[part] for kind, part in zip(self.kinds, self._sound, strict=True)])

    @cached_property
    def target(self) -> Ints:
        """Rows that wait, beside `source`."""
        return np.concatenate([kind.target[part] for kind, part in zip(self.kinds, self._sound, strict=True)])

    @cached_property
    def _sound(self) -> list[NDArray[np.intp]]:
        """Entries of each kind that lead from one node to another."""
        return [np.flatnonzero((kind.source >= 0) & (kind.source != kind.target)) for kind in self.kinds]

    def drop_masks(self, cut: Mask) -> list[Mask]:
        """Marks on `source` as marks on the entries of each kind."""
        masks, at = [], 0
        for kind, part in zip(self.kinds, self._sound, strict=True):
            mask = np.zeros(len(kind.source), np.bool_)
            mask[part[cut[at : at + len(part)]]] = True
            at += len(part)
            masks.append(mask)
        return masks

    @cached_property
    def priority(self) -> Ints:
        """Place of each node by start, then id, then place in the file."""
        nodes = self.trace.nodes
        place = np.empty(self.count, np.int64)
        place[np.lexsort((nodes["id"], nodes["start_micros"]))] = np.arange(self.count)
        return place

    @cached_property
    def component(self) -> Ints:
        """Nodes with one number wait for each other."""
        from foretrace.formats.chakra.cycles import components

        return components(self.source, self.target, self.count)


class _Finder:
    """Rows by id; of several nodes with one id the first in the file."""

    def __init__(self, ids: NDArray[np.uint64]) -> None:
        self._count = len(ids)
        self._low = ids.min() if self._count else np.uint64(0)
        spread = int(ids.max()) - int(self._low) + 1 if self._count else 0
        self._table: NDArray[np.int64] | None = None
        if spread <= _DENSE * self._count:
            self._table = np.full(spread, -1, np.int64)
            self._table[(ids - self._low)[::-1].astype(np.int64)] = np.arange(self._count)[::-1]
            return
        self._order = np.argsort(ids, kind="stable")
        self._ids = ids[self._order]

    def __call__(self, wanted: NDArray[np.unsignedinteger]) -> Ints:
        """The row of each id, -1 where there is none."""
        found = np.full(len(wanted), -1, np.int64)
        if not self._count or not len(wanted):
            return found
        ids = wanted.astype(np.uint64)
        if self._table is not None:
            place = ids - self._low  # below the lowest id it wraps around, and is far too large
            inside = place < np.uint64(len(self._table))
            found[inside] = self._table[place[inside].astype(np.int64)]
            return found
        at = np.minimum(np.searchsorted(self._ids, ids), self._count - 1)
        exists = self._ids[at] == ids
        found[exists] = self._order[at[exists]]
        return found


def without(lists: Dependencies, drop: Mask) -> Dependencies:
    """The lists less the marked entries."""
    if not drop.any():
        return lists
    dropped = np.concatenate(([0], np.cumsum(drop)))
    first = lists.first.astype(np.int64)
    return Dependencies((first - dropped[first]).astype(lists.first.dtype), lists.ids[~drop])
