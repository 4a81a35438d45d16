"""Collectives across ranks: the n-th of each process group side by side."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.trace.classify import CollectiveKind
from foretrace.trace.communication import Communication, communication_of
from foretrace.trace.job import Job
from foretrace.trace.timeline import Timeline

# Members of these do not all leave together: the shortest duration is only a bound for the transfer.
_SYMMETRIC = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
SYMMETRIC = (*_SYMMETRIC, CollectiveKind.ALL_TO_ALL, CollectiveKind.BARRIER)


@dataclass(frozen=True, slots=True)
class Group:
    """The collectives of one process group, by rank (axis 0) and order (axis 1).

    Attributes:
        name: as recorded, or ``stream N`` where the trace names no group.
        size: members; the recorded number, else the job's ranks.
        ranks: the ranks that are present, ascending, shape ``(R,)``.
        is_complete: whether these are all members of the group, and no others.
        event, start_ns, end_ns: shape ``(R, N)``; event is the row in the rank's timeline.
        agrees: whether all members ran the same kind (and size, where known), shape ``(N,)``.
        kind, size_bytes: shape ``(N,)``; dtype likewise.
        extra: collectives that some ranks have beyond the common ones.
    """

    name: str
    size: int
    ranks: NDArray[np.int64]
    is_complete: bool
    event: NDArray[np.int64]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    agrees: NDArray[np.bool_]
    kind: NDArray[np.int64]
    size_bytes: NDArray[np.int64]
    dtype: list[str]
    extra: int

    @property
    def matched(self) -> NDArray[np.bool_]:
        """Which collectives were found on every rank of the group, shape ``(N,)``."""
        return self.agrees & self.is_complete & (self.size > 1)

    @property
    def transfer_ns(self) -> NDArray[np.int64]:
        """The shortest member's duration, shape ``(N,)``."""
        return np.asarray((self.end_ns - self.start_ns).min(axis=0))

    @property
    def wait_ns(self) -> NDArray[np.int64]:
        """What each member spends beyond the shortest, shape ``(R, N)``."""
        duration = self.end_ns - self.start_ns
        return np.asarray(duration - duration.min(axis=0))

    @property
    def last(self) -> NDArray[np.intp]:
        """Index into ``ranks`` of the member that starts last (the lowest rank of equals), shape ``(N,)``."""
        return np.asarray(self.start_ns.argmax(axis=0))

    @property
    def is_symmetric(self) -> NDArray[np.bool_]:
        """Whether all members leave together, so that wait and transfer are more than a bound, shape ``(N,)``."""
        return np.isin(self.kind, SYMMETRIC)

    @property
    def overlaps(self) -> NDArray[np.bool_]:
        """Whether there is a moment at which all members are running, shape ``(N,)``."""
        return _overlap(self.start_ns, self.end_ns)


@dataclass(frozen=True, slots=True)
class _Member:
    """The events of one rank in one group; ``rows`` are entries of the rank's ``Communication``."""

    timeline: Timeline
    rows: NDArray[np.intp]
    of: Communication

    def take(self, column: NDArray[np.int64]) -> NDArray[np.int64]:
        return column[self.rows]


def groups(job: Job, clock_offsets_ns: Mapping[int, int] | None = None) -> list[Group]:
    """The collectives of a job, matched by their order within each process group.

    Where a trace names no group, the communication stream stands for it: a library uses one stream per group.

    Args:
        job: any number of ranks.
        clock_offsets_ns: by rank, how far its clock is ahead; subtracted from starts and ends. Nothing is corrected
            without it.
    """
    found = {timeline.rank: communication_of(timeline) for timeline in job}
    # Streams of the ranks correspond by number, or by order where the numbers differ.
    by_number = len({frozenset(np.unique(comm.stream).tolist()) for comm in found.values()}) <= 1
    members: dict[str, list[_Member]] = {}
    for timeline in job:
        comm = found[timeline.rank]
        names, which = _group_names(comm, by_number)
        for at, name in enumerate(names):
            members.setdefault(name, []).append(_Member(timeline, np.flatnonzero(which == at), comm))
    return [_aligned(job, name, of_group, clock_offsets_ns or {}) for name, of_group in members.items()]


def _group_names(comm: Communication, by_number: bool) -> tuple[list[str], NDArray[np.int64]]:
    """The names of a rank's groups, and the index of each event's group.

    Groups of one name (``[0,1]`` and ``[2,3]``) are told apart by their ranks.
    """
    streams = comm.stream.tolist()
    order = {stream: at for at, stream in enumerate(dict.fromkeys(streams))}
    keys = list(zip(comm.group, comm.ranks, streams, strict=True))
    names: dict[str, int] = {}
    index: dict[tuple[str, str, int], int] = {}
    for key in dict.fromkeys(keys):
        group, ranks, stream = key
        if group:
            name = f"{group} {_short(ranks)}" if ranks else group
        elif stream < 0:
            name = "host"
        else:
            name = f"stream {stream}" if by_number else f"communication stream {order[stream]}"
        index[key] = names.setdefault(name, len(names))
    return list(names), np.fromiter(map(index.__getitem__, keys), np.int64, len(keys))


def _aligned(job: Job, name: str, members: list[_Member], offsets: Mapping[int, int]) -> Group:
    """The n-th collective of every member side by side."""
    count = min(len(member.rows) for member in members)
    extra = sum(len(member.rows) for member in members) - count * len(members)
    candidates = [_side_by_side(name, [_cut(m, slice(0, count)) for m in members], offsets)]
    if extra:
        # Windows of ranks may begin or end at different collectives: take the end at which more of them agree,
        # and if that does not tell, the one at which more of them happen together.
        ends = [_cut(m, slice(len(m.rows) - count, None)) for m in members]
        candidates.append(_side_by_side(name, ends, offsets))
    best = max(candidates, key=lambda c: (int(c["agrees"].sum()), int(_overlap(c["start_ns"], c["end_ns"]).sum())))
    ranks = np.array([member.timeline.rank for member in members], np.int64)
    size, known = _size(job, members[0])
    is_complete = len(ranks) == size and (known is None or set(ranks.tolist()) == known)
    return Group(size=size, ranks=ranks, is_complete=is_complete, extra=extra, **best)


def _cut(member: _Member, part: slice) -> _Member:
    return _Member(member.timeline, member.rows[part], member.of)


def _side_by_side(name: str, members: list[_Member], offsets: Mapping[int, int]) -> dict[str, Any]:
    """The columns of a `Group` that depend on which collectives stand side by side."""
    event = np.stack([m.take(m.of.event) for m in members])
    kinds = np.stack([m.take(m.of.kind) for m in members])
    sizes = np.stack([m.take(m.of.size_bytes) for m in members])
    shift = np.array([[offsets.get(m.timeline.rank, 0)] for m in members], np.int64)
    kind = kinds[0]
    same_kind, known_kind = _agreement(kinds, CollectiveKind.UNKNOWN)
    kind = np.where((kind == CollectiveKind.UNKNOWN) & (known_kind >= 0), known_kind, kind)
    same_size, size_bytes = _agreement(sizes, -1)
    return {
        "name": name,
        "event": event,
        "start_ns": np.stack([m.timeline.start_ns[e] for m, e in zip(members, event, strict=True)]) - shift,
        "end_ns": np.stack([m.timeline.end_ns[e] for m, e in zip(members, event, strict=True)]) - shift,
        "agrees": same_kind & (same_size | ~np.isin(kind, _SYMMETRIC)),
        "kind": kind,
        "size_bytes": size_bytes,
        "dtype": [members[0].of.dtype[row] for row in members[0].rows.tolist()],
    }


def _agreement(values: NDArray[np.int64], unknown: int) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Whether the known values of a column are all equal, and the largest of them (-1 if none is known)."""
    known = values != unknown
    largest = np.where(known, values, -1).max(axis=0)
    smallest = np.where(known, values, np.iinfo(np.int64).max).min(axis=0)
    return np.asarray(smallest >= largest), np.asarray(largest)


def _overlap(start_ns: NDArray[np.int64], end_ns: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.asarray(start_ns.max(axis=0) <= end_ns.min(axis=0))


def _size(job: Job, member: _Member) -> tuple[int, set[int] | None]:
    """Members of a group, and which ranks where recorded: from its metadata, the job's groups, else all ranks."""
    comm, row = member.of, int(member.rows[0])
    recorded = _ranks_of(comm.ranks[row])
    if recorded:
        return len(recorded), recorded
    if comm.group_size[row] > 0:
        return int(comm.group_size[row]), None
    known = job.groups.get(comm.group[row]) if comm.group[row] else None
    if known is not None and known.ranks:
        return len(known.ranks), set(known.ranks)
    if known is not None and known.size > 0:
        return known.size, None
    return max(job.world_size, len(job.timelines)), None


def _ranks_of(text: str) -> set[int] | None:
    """Ranks from their JSON text; None where there are none or the profiler cut the text (``[0, 1, ...]``)."""
    try:
        ranks = json.loads(text) if text else None
    except ValueError:
        return None
    if not isinstance(ranks, list) or not all(isinstance(rank, int) for rank in ranks):
        return None
    return set(ranks) or None


@functools.cache
def _short(ranks: str) -> str:
    """Many evenly spaced ranks as ``[first-last]`` or ``[first-last:step]``; any others as they are written."""
    found = sorted(_ranks_of(ranks) or ())
    if len(found) < 9 or found[-1] - found[0] != (found[1] - found[0]) * (len(found) - 1):
        return ranks
    step = found[1] - found[0]
    if found != list(range(found[0], found[-1] + 1, step)):
        return ranks
    return f"[{found[0]}-{found[-1]}{f':{step}' if step > 1 else ''}]"
