"""`fold`: which ranks of a plan provably do the same at the same times, so that one can stand for all of them.

Ranks begin with the color of their program. A color is split as long as two of its ranks see different things: another
color or another way to a peer, or rings of other colors in their collectives. What is left is an equitable partition,
and the rules of the simulation, which treat ranks alike, give all ranks of a color the same times. The engine checks
that members of a color end every phase together, and gives up the fold if they do not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from foretrace.machine.system import Pattern
from foretrace.simulate.cluster.plan import I32, I64, Action, Plan

_MOST_PAIRS = 64  # members of a group whose ways are compared pair by pair


@dataclass(frozen=True)
class Fold:
    """Who stands for whom.

    Attributes:
        represent: the rank that stands for each rank, shape ``(ranks,)``.
        ring_of: for each rank and dimension a rank on the ring that stands for its ring, shape ``(ranks, dimensions +
            1)``; the last column is the ring of all ranks.
        group_class: the group that stands for each group.
    """

    represent: I32
    ring_of: I32
    group_class: I32

    @property
    def num_folded(self) -> int:
        """Ranks that another one stands for."""
        return int((self.represent != np.arange(len(self.represent))).sum())

    def apply(self, plan: Plan) -> Plan:
        """The plan of those that stand for others only."""
        is_own = self.represent == np.arange(plan.num_ranks)
        return replace(plan, program_of=np.where(is_own, plan.program_of, -1).astype(np.int32))


def fold(plan: Plan) -> Fold | None:
    """The coarsest fold that can be shown to be exact; None where there is none, or where messages meet on links."""
    if plan.congestion or plan.rendezvous or plan.memory_pool or not plan.phases_at_once or plan.num_ranks < 2:
        return None
    if (plan.node_action == Action.ENCLOSE).any():  # a collective of its own algorithm need not treat ranks alike
        return None
    rings = _Rings(plan)
    color = np.asarray(plan.program_of, np.int64)
    count = -1
    while (found := int(color.max()) + 1) != count:
        count = found
        color = _ids(np.stack([color, *_views_of_peers(plan, color), *rings.views(color)], axis=1))
    if count == plan.num_ranks or _is_ambiguous(plan, color):
        return None
    first = np.unique(color, return_index=True)[1]
    return Fold(first[color].astype(np.int32), *rings.classes(color))


def _ids(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """A number for each distinct row, shape ``(len(rows),)``."""
    ids = np.zeros(len(rows), np.int64)
    for column in rows.T:  # column by column: sorting numbers is much faster than sorting rows
        distinct = np.unique(column, return_inverse=True)[1]
        ids = np.unique(ids * (int(distinct.max(initial=0)) + 1) + distinct, return_inverse=True)[1]
    return ids


def _coordinates(plan: Plan, ranks: NDArray[np.integer]) -> I64:
    strides = np.concatenate(([1], np.cumprod(plan.size)[:-1]))
    return np.asarray(ranks, np.int64)[..., None] // strides % plan.size


def _way(plan: Plan, source: NDArray[np.integer], target: NDArray[np.integer]) -> I64:
    """What a message between two ranks is charged for: the dimension and the hops along it, as one number."""
    one, other = _coordinates(plan, source), _coordinates(plan, target)
    differs = one != other
    dimension = np.argmax(differs, axis=-1)
    here = np.take_along_axis(one, dimension[..., None], -1)[..., 0]
    there = np.take_along_axis(other, dimension[..., None], -1)[..., 0]
    size = plan.size[dimension]
    around = (there - here) % size
    hops = np.where(plan.topology[dimension] == 0, np.minimum(around, size - around), 1)
    return np.where(differs.any(axis=-1), dimension * (int(plan.size.max()) + 1) + hops, -1)


def _slot_rows(first: I64) -> list[tuple[NDArray[np.intp], I64]]:
    """For each slot number the ranks that have it, and where it stands."""
    counts = np.diff(first)
    return [
        (ranks := np.flatnonzero(counts > slot), first[:-1][ranks] + slot) for slot in range(int(counts.max(initial=0)))
    ]


def _views_of_peers(plan: Plan, color: I64) -> list[I64]:
    views = []
    for ranks, at in _slot_rows(plan.first_peer):
        view, way = np.full(plan.num_ranks, -1, np.int64), np.full(plan.num_ranks, -2, np.int64)
        view[ranks] = color[plan.peer[at]]
        way[ranks] = _way(plan, ranks, plan.peer[at])
        views += [view, way]
    return views


def _is_ambiguous(plan: Plan, color: I64) -> bool:
    """Whether a rank has two peers of one color: their messages could be mistaken for each other."""
    owner = np.repeat(np.arange(plan.num_ranks), np.diff(plan.first_peer))
    pair = owner * (int(color.max()) + 1) + color[plan.peer]
    return len(np.unique(pair)) < len(pair)


class _Rings:
    """The rings on which a plan's collectives run, by the number of their members."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        patterns = {int(p) for i in range(4) for p in plan.algorithm[i, : plan.algorithms[i], 0]}
        self._is_tree = Pattern.DOUBLE_BINARY_TREE in patterns
        sizes = np.diff(plan.first_member)
        self._local = [np.flatnonzero(sizes == n) for n in np.unique(sizes) if n not in (0, plan.num_ranks)]
        collectives = plan.node_action == Action.COLLECTIVE
        uses_world = bool((collectives & (plan.node_slot < 0)).any()) or bool((sizes == plan.num_ranks).any())
        uses_world = uses_world or bool((plan.group_of < 0).any())
        self._dimensions = range(len(plan.size)) if uses_world else range(0)
        self._flat = uses_world and bool(plan.flat.any())
        self._slot_of_member = self._place_of_slots()
        only_rings = bool((plan.algorithms != 1).all()) or patterns <= {int(Pattern.RING)}
        self._ways = {id(groups): self._ways_of(groups, only_rings) for groups in self._local}

    def _place_of_slots(self) -> tuple[I64, I64]:
        """Group and position within it, for each row of ``group_of``; -1 for the world."""
        plan = self.plan
        owner = np.repeat(np.arange(plan.num_ranks), np.diff(plan.first_group))
        group = plan.group_of.astype(np.int64)
        position = np.full(len(group), -1, np.int64)
        if len(plan.member) == 0:
            return group, position
        of_member = np.repeat(np.arange(len(plan.first_member) - 1), np.diff(plan.first_member))
        key = of_member * plan.num_ranks + plan.member
        order = np.argsort(key, kind="stable")
        wanted = group * plan.num_ranks + owner
        at = order[np.minimum(np.searchsorted(key[order], wanted), len(key) - 1)]
        position[group >= 0] = (at - plan.first_member[np.maximum(group, 0)])[group >= 0]
        return group, position

    def _members(self, groups: NDArray[np.intp]) -> I64:
        """Ranks of groups of one size, shape ``(groups, members)``."""
        plan = self.plan
        n = int(plan.first_member[groups[0] + 1] - plan.first_member[groups[0]])
        return np.asarray(plan.member[plan.first_member[groups][:, None] + np.arange(n)], np.int64)

    def _ways_of(self, groups: NDArray[np.intp], only_rings: bool) -> I64:
        """A number for what messages within each group are charged, -1 where it depends on the member."""
        members = self._members(groups)
        n = members.shape[1]
        if only_rings or n > _MOST_PAIRS:
            both = [_way(self.plan, members, np.roll(members, -1, axis=1))]
        else:
            both = [_way(self.plan, members, np.roll(members, -shift, axis=1)) for shift in range(1, n)]
        even = np.ones(len(groups), np.bool_)
        for way in both:
            even &= (way == way[:, :1]).all(axis=1) & (way == both[0][:, :1]).all(axis=1)
        if not only_rings and n > _MOST_PAIRS:
            even[:] = False
        return np.where(even, both[0][:, 0], -1)

    def _ring_ids(self, colors: I64, ways: I64) -> tuple[I64, NDArray[np.bool_]]:
        """A number for each distinct ring, and whether all its members see the same."""
        is_even = (colors == colors[:, :1]).all(axis=1) & (ways >= 0) & (not self._is_tree)
        key = np.where(is_even[:, None], colors[:, :1], colors)
        return _row_ids(np.column_stack([is_even, ways, key])), is_even

    def _lines(self, dimension: int) -> I64:
        """Ranks of every line along a dimension, shape ``(lines, members)``."""
        plan = self.plan
        ranks = np.arange(plan.num_ranks).reshape([int(n) for n in plan.size[::-1]])
        return np.moveaxis(ranks, len(plan.size) - 1 - dimension, -1).reshape(-1, int(plan.size[dimension]))

    def views(self, color: I64) -> list[I64]:
        """What each rank sees of the rings that it is in."""
        views = [self._view_of_line(color, self._lines(d)) for d in self._dimensions]
        if self._flat:
            views.append(self._view_of_line(color, np.arange(len(color))[None, :], is_even=False))
        views += self._views_of_groups(color)
        return views

    def _view_of_line(self, color: I64, lines: I64, is_even: bool = True) -> I64:
        ids, even = self._ring_ids(color[lines], np.full(len(lines), 0 if is_even else -1))
        view = np.empty(len(color), np.int64)
        n = lines.shape[1]
        view[lines] = ids[:, None] * (n + 1) + np.where(even[:, None], n, np.arange(n))
        return view

    def _views_of_groups(self, color: I64) -> list[I64]:
        """By slot: which group it is, and the place in it where that matters."""
        plan = self.plan
        group, position = self._slot_of_member
        view_of = np.full(len(group), -1, np.int64)
        base = 0
        for groups in self._local:
            ids, even = self._ring_ids(color[self._members(groups)], self._ways[id(groups)])
            where = np.full(len(plan.first_member), -1, np.int64)
            where[groups] = np.arange(len(groups))
            rows = np.flatnonzero((group >= 0) & (where[group] >= 0))
            at = where[group[rows]]
            view_of[rows] = base + ids[at] * (plan.num_ranks + 1) + np.where(even[at], plan.num_ranks, position[rows])
            base += (int(ids.max(initial=0)) + 1) * (plan.num_ranks + 1)
        views = []
        for ranks, at in _slot_rows(plan.first_group):
            view = np.full(plan.num_ranks, -2, np.int64)
            view[ranks] = np.where(group[at] < 0, -1, view_of[at])
            views.append(view)
        return views

    def classes(self, color: I64) -> tuple[I32, I32]:
        """The rings that stand for rings: ``ring_of`` and ``group_class`` of a fold."""
        plan = self.plan
        ring_of = np.zeros((plan.num_ranks, len(plan.size) + 1), np.int32)
        for dimension in range(len(plan.size)):
            lines = self._lines(dimension)
            ids, _ = self._ring_ids(color[lines], np.zeros(len(lines), np.int64))
            first = np.unique(ids, return_index=True)[1]
            ring_of[lines, dimension] = lines[first[ids]][:, :1]
        group_class = np.arange(max(len(plan.first_member) - 1, 0))
        for groups in self._local:
            ids, _ = self._ring_ids(color[self._members(groups)], self._ways[id(groups)])
            group_class[groups] = groups[np.unique(ids, return_index=True)[1][ids]]
        return ring_of, group_class.astype(np.int32)


def _row_ids(rows: NDArray[np.int64]) -> I64:
    """A number for each distinct row; rows may be long."""
    index: dict[bytes, int] = {}
    return np.array([index.setdefault(row.tobytes(), len(index)) for row in np.ascontiguousarray(rows)], np.int64)
