"""Collectives across ranks: the n-th of each process group, split into waiting for the last rank and transfer."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foretrace.analyze.communication import Communication, communication_of
from foretrace.analyze.tables import BOOL, FLOAT, INT, TEXT, table_of
from foretrace.trace import Job
from foretrace.trace.classify import CollectiveKind

if TYPE_CHECKING:
    import pyarrow as pa

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
        is_complete: whether all members are present.
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


@dataclass(frozen=True, slots=True)
class _Member:
    rank: int
    rows: NDArray[np.int64]
    of: Communication


def groups(job: Job) -> list[Group]:
    """The collectives of a job, matched by their order within each process group.

    Where a trace names no group, the communication stream stands for it: a library uses one stream per group.
    """
    found = {timeline.rank: communication_of(timeline) for timeline in job}
    members: dict[str, list[_Member]] = {}
    for rank, comm in found.items():
        names = _group_names(comm, found)
        for name in dict.fromkeys(names):
            rows = np.flatnonzero(np.array([n == name for n in names]))
            members.setdefault(name, []).append(_Member(rank, rows, comm))
    return [_aligned(job, name, ranks) for name, ranks in members.items()]


def _group_names(comm: Communication, all_ranks: dict[int, Communication]) -> list[str]:
    """Group of each event. Ranks of different groups of one name (``[0,1]`` and ``[2,3]``) are told apart."""
    ids = {rank: list(dict.fromkeys(other.stream.tolist())) for rank, other in all_ranks.items()}
    same_everywhere = len({frozenset(streams) for streams in ids.values()}) == 1
    order = list(dict.fromkeys(comm.stream.tolist()))
    names = []
    for group, ranks, stream in zip(comm.group, comm.ranks, comm.stream.tolist(), strict=True):
        if group:
            names.append(f"{group} {ranks}" if ranks else group)
        elif stream < 0:
            names.append("host")
        else:
            names.append(f"stream {stream}" if same_everywhere else f"communication stream {order.index(stream)}")
    return names


def _aligned(job: Job, name: str, members: list[_Member]) -> Group:
    members = sorted(members, key=lambda member: member.rank)
    counts = [len(member.rows) for member in members]
    count = min(counts)
    kinds = [member.of.kind[member.rows] for member in members]
    # Windows of ranks may begin or end at different collectives: take the end at which more kinds agree.
    front = np.array([kind[:count] for kind in kinds])
    back = np.array([kind[len(kind) - count :] for kind in kinds])
    use_back = _agreement(back).sum() > _agreement(front).sum()
    picked = [m.rows[len(m.rows) - count :] if use_back else m.rows[:count] for m in members]
    event = np.array([m.of.event[rows] for m, rows in zip(members, picked, strict=True)], np.int64).reshape(-1, count)
    start, end = np.empty_like(event), np.empty_like(event)
    for at, member in enumerate(members):
        timeline = job.rank(member.rank)
        start[at], end[at] = timeline.start_ns[event[at]], timeline.end_ns[event[at]]
    sizes = np.array([m.of.size_bytes[rows] for m, rows in zip(members, picked, strict=True)])
    first, first_rows = members[0].of, picked[0]
    kind = first.kind[first_rows]
    is_symmetric = np.isin(kind, _SYMMETRIC)
    agrees = _agreement(back if use_back else front) & (_agreement(sizes) | ~is_symmetric)
    size = _size(job, first, first_rows, len(job.timelines))
    return Group(
        name=name,
        size=size,
        ranks=np.array([member.rank for member in members]),
        is_complete=len(members) >= size,
        event=event,
        start_ns=start,
        end_ns=end,
        agrees=agrees,
        kind=kind,
        size_bytes=sizes.max(axis=0),
        dtype=[first.dtype[row] for row in first_rows.tolist()],
        extra=sum(counts) - count * len(members),
    )


def _agreement(values: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.asarray((values == values[0]).all(axis=0))


def _size(job: Job, comm: Communication, rows: NDArray[np.int64], present: int) -> int:
    """Members of a group: from its metadata, else from the job's process groups, else all ranks of the job."""
    if not len(rows):
        return max(job.world_size, present)
    row = int(rows[0])
    if comm.ranks[row]:
        try:
            return len(json.loads(comm.ranks[row]))
        except (ValueError, TypeError):
            pass
    if comm.group_size[row] > 0:
        return int(comm.group_size[row])
    known = job.groups.get(comm.group[row])
    if known is not None and known.size > 0:
        return known.size
    return max(job.world_size, present)


def bus_factor(kind: CollectiveKind, size: int) -> float:
    """Bus bandwidth over algorithm bandwidth (NCCL tests, PERFORMANCE.md)."""
    if kind == CollectiveKind.ALL_REDUCE:
        return 2 * (size - 1) / size
    if kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL):
        return (size - 1) / size
    return 1.0


_SCHEMA = {
    "group": TEXT,
    "size": INT,
    "index": INT,
    "kind": TEXT,
    "bytes": INT,
    "dtype": TEXT,
    "ranks": INT,
    "matched": BOOL,
    "asymmetric": BOOL,
    "start_ns": INT,
    "last_start_ns": INT,
    "end_ns": INT,
    "transfer_ns": INT,
    "wait_ns": INT,
    "last_rank": INT,
    "algorithm_gb_per_s": FLOAT,
    "bus_gb_per_s": FLOAT,
}


def collectives(job: Job) -> pa.Table:
    """One row a collective.

    Columns: group, size (members of the group), index, kind, bytes, dtype, ranks (members present), matched,
    asymmetric (wait and transfer are bounds), start_ns and last_start_ns (first and last member's start), end_ns,
    transfer_ns, wait_ns (over all members), last_rank, algorithm_gb_per_s, bus_gb_per_s (10^9 bytes; nccl-tests).
    What needs all members is null where some are missing; bytes and rates where the size is unknown.
    """
    rows: list[tuple[Any, ...]] = []
    for group in groups(job):
        matched, transfer, waits = group.matched, group.transfer_ns, group.wait_ns.sum(axis=0)
        for at in range(group.event.shape[1]):
            kind, size_bytes = CollectiveKind(int(group.kind[at])), int(group.size_bytes[at])
            ok, transfer_ns = bool(matched[at]), int(transfer[at])
            rate = size_bytes / transfer_ns if ok and size_bytes > 0 and transfer_ns > 0 else None
            start = group.start_ns[:, at]
            split = (transfer_ns, int(waits[at]), int(group.ranks[group.last[at]])) if ok else (None, None, None)
            what = (group.name, group.size, at, kind.label, size_bytes if size_bytes >= 0 else None, group.dtype[at])
            who = (len(group.ranks), ok, not bool(group.is_symmetric[at]))
            when = (int(start.min()), int(start.max()), int(group.end_ns[:, at].max()))
            bus = rate * bus_factor(kind, group.size) if rate is not None else None
            rows.append((*what, *who, *when, *split, rate, bus))
    rows.sort(key=lambda row: row[9])
    return table_of(_SCHEMA, rows)


def collective_members(job: Job) -> pa.Table:
    """One row a collective and member: group, index, rank, event, start_ns, end_ns, wait_ns (null if unmatched)."""
    rows: list[tuple[Any, ...]] = []
    for group in groups(job):
        waits, matched = group.wait_ns.tolist(), group.matched.tolist()
        columns = (group.event.tolist(), group.start_ns.tolist(), group.end_ns.tolist(), waits)
        for rank, *of_rank in zip(group.ranks.tolist(), *columns, strict=True):
            for at, (event, start, end, wait) in enumerate(zip(*of_rank, strict=True)):
                rows.append((group.name, at, rank, event, start, end, wait if matched[at] else None))
    schema = {"group": TEXT, "index": INT, "rank": INT, "event": INT, "start_ns": INT, "end_ns": INT, "wait_ns": INT}
    return table_of(schema, rows)


def collectives_by_size(job: Job) -> pa.Table:
    """Matched collectives by group, kind, bytes and dtype.

    Columns: group, kind, bytes, dtype, count, transfer_mean_ns, transfer_min_ns, transfer_max_ns, wait_ns,
    algorithm_gb_per_s and bus_gb_per_s (of all bytes over all transfer time; null where sizes are unknown).
    """
    grouped: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in collectives(job).to_pylist():
        if row["matched"]:
            key = tuple(row[name] for name in ("group", "size", "kind", "bytes", "dtype"))
            grouped.setdefault(key, []).append(row)
    rows = []
    for (group, size, kind, size_bytes, dtype), found in grouped.items():
        times = [row["transfer_ns"] for row in found]
        rate = size_bytes * len(times) / sum(times) if size_bytes and sum(times) else None
        factor = bus_factor(next(k for k in CollectiveKind if k.label == kind), size)
        waits = sum(row["wait_ns"] for row in found)
        timing = (len(times), sum(times) / len(times), min(times), max(times), waits)
        rows.append((group, kind, size_bytes, dtype, *timing, rate, rate * factor if rate is not None else None))
    rows.sort(key=lambda row: -row[5] * row[4])
    schema = {"group": TEXT, "kind": TEXT, "bytes": INT, "dtype": TEXT, "count": INT, "transfer_mean_ns": FLOAT}
    schema |= {"transfer_min_ns": INT, "transfer_max_ns": INT, "wait_ns": INT}
    return table_of({**schema, "algorithm_gb_per_s": FLOAT, "bus_gb_per_s": FLOAT}, rows)


def collective_summary(job: Job) -> dict[str, Any]:
    """Totals: matched, wait_ns, transfer_ns, unmatched, asymmetric, notes.

    ``matched`` counts collectives found on every rank of their group; ``transfer_ns`` sums over them the shortest
    member's duration, ``wait_ns`` all members' time beyond it. Both are None, with a ``reason``, where nothing
    could be matched.
    """
    found = groups(job)
    matched = sum(int(group.matched.sum()) for group in found)
    notes: Counter[str] = Counter()
    for group in found:
        notes["collective of an incomplete group"] += 0 if group.is_complete else group.event.shape[1]
        notes["collective whose kind or size differs between ranks"] += int((~group.agrees).sum())
        notes["collective that some ranks lack"] += group.extra
        overlap = group.start_ns.max(axis=0) <= group.end_ns.min(axis=0)
        notes["matched collective whose members do not overlap in time"] += int((group.matched & ~overlap).sum())
    summary: dict[str, Any] = {
        "matched": matched,
        "wait_ns": sum(int(group.wait_ns[:, group.matched].sum()) for group in found) if matched else None,
        "transfer_ns": sum(int(group.transfer_ns[group.matched].sum()) for group in found) if matched else None,
        "unmatched": sum(group.event.shape[1] for group in found) - matched,
        "asymmetric": sum(int((group.matched & ~group.is_symmetric).sum()) for group in found),
        "notes": {note: count for note, count in notes.items() if count},
    }
    if not matched:
        summary["reason"] = "no collectives" if not found else "no collective was found on every rank of its group"
    return summary
