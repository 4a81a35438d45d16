"""Which ranks of a job run the same program: found by tracing a few, stated with what was traced and what follows."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from foretrace.capture.fake.nodes import USER_SCOPE, Node
from foretrace.capture.fake.process_groups import Group

_INDEX = re.compile(r":\d+$")
_ASIDE = ("pg_name", "pg_ranks", "global_rank_start", "global_rank_stride", "src_rank", "dst_rank", "pg_size")


def digest(nodes: Iterable[Node], rank: int) -> str:
    """A digest of what a rank computes and communicates, the same for ranks that differ only in their place.

    It covers operators in order, the shapes, types and strides of their tensors, and of collectives the sizes, the
    kind and size of the group, and how far off in the group a peer is. It leaves out numbers among the arguments
    (such as the offset of a rank's part of a vocabulary), which tensor is which, and the names of modules.
    """
    found = hashlib.blake2b(digest_size=16)
    for node in sorted(nodes, key=lambda node: node.id):
        found.update(repr(_essence(node, rank)).encode())
    return found.hexdigest()


def _essence(node: Node, rank: int) -> tuple[Any, ...]:
    if node.scope == USER_SCOPE:
        return ("label",)
    parts: list[Any] = [node.name, node.schema]
    for side in (node.inputs, node.outputs):
        if side is not None:
            parts += (side.shapes, side.types, side.strides, _flags(side.values))
    if node.details:
        parts.append({name: value for name, value in node.details.items() if name not in _ASIDE})
        parts += (node.details["pg_size"], _distances(node.details, rank))
    return tuple(parts)


def _flags(values: Any) -> list[Any]:
    """Booleans, texts and devices among values."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, list):
            found.append(_flags(value))
        elif isinstance(value, bool):
            found.append(value)
        elif isinstance(value, str):
            # The name of a group is one more thing that differs from rank to rank.
            found.append("" if value.isdecimal() else _INDEX.sub("", value))
    return found


def _distances(details: dict[str, Any], rank: int) -> list[int | bool]:
    """How far off the peers of a transfer are; of a collective with a root, whether this rank is it."""
    ranks: list[int] = json.loads(details["pg_ranks"])
    peers = [details[name] for name in ("src_rank", "dst_rank") if details.get(name, -1) in ranks]
    if details["collective_name"] not in ("send", "recv"):
        return [peer == rank for peer in peers]
    own = ranks.index(rank)
    return [(ranks.index(peer) - own) % len(ranks) for peer in peers]


@dataclass(frozen=True)
class Axis:
    """One direction of the job: groups of equal size that share out all ranks."""

    groups: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Ranks along the axis."""
        return len(self.groups[0])

    def positions(self, world_size: int) -> list[int]:
        """Of every rank, its place in its group."""
        found = [0] * world_size
        for ranks in self.groups:
            for place, rank in enumerate(ranks):
                found[rank] = place
        return found


def axes(groups: Sequence[Group], world_size: int) -> list[Axis]:
    """Axes that tell all ranks apart: those of the job's meshes, else the world itself as one."""
    families: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    for group in groups:
        if 1 < len(group.ranks) < world_size:
            families.setdefault((group.description, len(group.ranks)), set()).add(group.ranks)
    found = [
        Axis(tuple(sorted(members)))
        for members in families.values()
        if sorted(rank for ranks in members for rank in ranks) == list(range(world_size))
    ]
    for count in range(2, min(len(found), 5) + 1):
        for chosen in combinations(found, count):
            if _is_grid(chosen, world_size):
                return list(chosen)
    return [Axis((tuple(range(world_size)),))]


def _is_grid(chosen: Sequence[Axis], world_size: int) -> bool:
    cells = 1
    for axis in chosen:
        cells *= axis.size
    if cells != world_size:
        return False
    return len(set(zip(*(axis.positions(world_size) for axis in chosen), strict=True))) == world_size


@dataclass
class Classes:
    """Which ranks are alike.

    Attributes:
        equal_to: for every rank, the rank whose trace is its own.
        traced: ranks that were run.
        surprises: ranks that were run and turned out unlike what symmetry said.
    """

    equal_to: list[int]
    traced: list[int]
    surprises: list[int] = field(default_factory=list)


def classify(grid: Sequence[Axis], world_size: int, digests: Callable[[Sequence[int]], list[str]]) -> Classes:
    """Sort all ranks into classes of equal programs.

    Along each axis (the other coordinates 0) the ends and the middle are compared, and where they differ the places
    between are searched by halving: ranks between two that are equal are taken to be equal as well. The coordinates
    of a rank then say its class; one rank of each class is run, and the last rank of the job as a check.

    Args:
        grid: axes that tell all ranks apart.
        world_size: number of ranks.
        digests: runs ranks, and returns their digests; asked as often as it takes.
    """
    known: dict[int, str] = {}

    def ask(ranks: Iterable[int]) -> list[str]:
        wanted = list(ranks)
        missing = list(dict.fromkeys(rank for rank in wanted if rank not in known))
        known.update(zip(missing, digests(missing), strict=True))
        return [known[rank] for rank in wanted]

    positions = [axis.positions(world_size) for axis in grid]
    rank_at = {coordinates: rank for rank, coordinates in enumerate(zip(*positions, strict=True))}
    lines = [_line(rank_at, axis.size, place, len(grid)) for place, axis in enumerate(grid)]
    ask(line[place] for line in lines for place in {0, (len(line) - 1) // 2, len(line) - 1})
    kinds = [_segments(line, ask) for line in lines]
    representative: dict[tuple[int, ...], int] = {}
    for rank, coordinates in enumerate(zip(*positions, strict=True)):
        cell = tuple(kind[place] for kind, place in zip(kinds, coordinates, strict=True))
        representative.setdefault(cell, rank)
    ask([*representative.values(), world_size - 1])
    first_with: dict[str, int] = {}
    for rank in sorted(representative.values()):
        first_with.setdefault(known[rank], rank)
    equal_to, surprises = [], []
    for rank, coordinates in enumerate(zip(*positions, strict=True)):
        cell = tuple(kind[place] for kind, place in zip(kinds, coordinates, strict=True))
        told = first_with[known[representative[cell]]]
        if known.get(rank, known[told]) != known[told]:
            surprises.append(rank)
            told = first_with.setdefault(known[rank], rank)
        equal_to.append(told)
    return Classes(equal_to, sorted(known), surprises)


def _line(rank_at: dict[tuple[int, ...], int], size: int, place: int, dimensions: int) -> list[int]:
    """The ranks along one axis, the other coordinates being 0."""
    return [rank_at[tuple(at if d == place else 0 for d in range(dimensions))] for at in range(size)]


def _segments(line: Sequence[int], ask: Callable[[Iterable[int]], list[str]]) -> list[int]:
    """For each place of a line the number of its class."""
    told = [""] * len(line)
    last = len(line) - 1

    def search(low: int, high: int) -> None:
        first, second = ask((line[low], line[high]))
        told[low], told[high] = first, second
        if first == second:
            told[low : high + 1] = [first] * (high + 1 - low)
        elif high - low > 1:
            middle = (low + high) // 2
            search(low, middle)
            search(middle, high)

    middle = last // 2
    search(0, middle)
    search(middle, last)
    numbers = {text: at for at, text in enumerate(dict.fromkeys(told))}
    return [numbers[text] for text in told]


def ranges(ranks: Iterable[int]) -> list[str]:
    """Ranks in short: ``"3"``, ``"1-7"``, or ``"0-1022:2"`` for every second one."""
    left = sorted(ranks)
    found: list[str] = []
    while left:
        count, step = _run(left)
        first, last = left[0], left[count - 1]
        found.append(str(first) if count == 1 else f"{first}-{last}" + (f":{step}" if step > 1 else ""))
        del left[:count]
    return found


def _run(ranks: list[int]) -> tuple[int, int]:
    """How many of the leading ranks are evenly spaced, and how far apart; two alone are no run unless neighbors."""
    if len(ranks) == 1:
        return 1, 1
    step = ranks[1] - ranks[0]
    count = 2
    while count < len(ranks) and ranks[count] - ranks[count - 1] == step:
        count += 1
    return (count, step) if count > 2 or step == 1 else (1, 1)
