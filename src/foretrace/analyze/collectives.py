"""Collectives across ranks: the n-th of each process group, split into waiting for the last rank and transfer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foretrace.analyze.tables import FLOAT, INT, TEXT, table_of, table_of_arrays
from foretrace.trace import Job, arrow_arrays
from foretrace.trace.classify import CollectiveKind
from foretrace.trace.matching import Group, groups

if TYPE_CHECKING:
    import pyarrow as pa


def bus_factor(kind: CollectiveKind, size: int) -> float:
    """Bus bandwidth over algorithm bandwidth (NCCL tests, PERFORMANCE.md)."""
    if kind == CollectiveKind.ALL_REDUCE:
        return 2 * (size - 1) / size
    if kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL):
        return (size - 1) / size
    return 1.0


def _repeated(texts: list[str], counts: list[int]) -> pa.Array:
    """A string column in which each text stands ``counts`` times."""
    import pyarrow as pa

    index = arrow_arrays.numbers(np.repeat(np.arange(len(texts), dtype=np.int32), counts))
    values = arrow_arrays.texts(texts)
    if sum(4 * len(text) * count for text, count in zip(texts, counts, strict=True)) >= 1 << 31:
        values = values.cast(pa.large_string())
    return pa.DictionaryArray.from_arrays(index, values).dictionary_decode()


def _joined(columns: list[NDArray[Any]], dtype: type[np.generic] = np.int64) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *columns])


def collectives(job: Job, clock_offsets_ns: Mapping[int, int] | None = None) -> pa.Table:
    """One row a collective, by start.

    Columns: group, size (members of the group), index, kind, bytes, dtype, ranks (members present), matched,
    asymmetric (wait and transfer are bounds), start_ns and last_start_ns (first and last member's start), end_ns,
    transfer_ns, wait_ns (over all members), last_rank, algorithm_gb_per_s, bus_gb_per_s (10^9 bytes; nccl-tests).
    What needs all members is null where some are missing; bytes and rates where the size is unknown.

    Args:
        job: any number of ranks.
        clock_offsets_ns: by rank, as `clock_offsets` estimates them; times are corrected by these where given.
    """
    found = groups(job, clock_offsets_ns)
    counts = [group.event.shape[1] for group in found]
    labels = [kind.label for kind in CollectiveKind]
    unmatched = ~_joined([g.matched for g in found], np.bool_)
    size_bytes, transfer = _joined([g.size_bytes for g in found]), _joined([g.transfer_ns for g in found])
    no_rate = unmatched | (size_bytes <= 0) | (transfer <= 0)
    rate = size_bytes / np.maximum(transfer, 1)
    factor = _joined([_bus_factors(g) for g in found], np.float64)
    start = _joined([g.start_ns.min(axis=0) for g in found])
    numbers = arrow_arrays.numbers
    table = table_of_arrays(
        {
            "group": _repeated([g.name for g in found], counts),
            "size": numbers(np.repeat(np.array([g.size for g in found], np.int64), counts)),
            "index": numbers(_joined([np.arange(count) for count in counts])),
            "kind": arrow_arrays.texts([labels[kind] for g in found for kind in g.kind.tolist()]),
            "bytes": numbers(size_bytes, size_bytes < 0),
            "dtype": arrow_arrays.texts([dtype for g in found for dtype in g.dtype]),
            "ranks": numbers(np.repeat(np.array([len(g.ranks) for g in found], np.int64), counts)),
            "matched": numbers(~unmatched),
            "asymmetric": numbers(~_joined([g.is_symmetric for g in found], np.bool_)),
            "start_ns": numbers(start),
            "last_start_ns": numbers(_joined([g.start_ns.max(axis=0) for g in found])),
            "end_ns": numbers(_joined([g.end_ns.max(axis=0) for g in found])),
            "transfer_ns": numbers(transfer, unmatched),
            "wait_ns": numbers(_joined([g.wait_ns.sum(axis=0) for g in found]), unmatched),
            "last_rank": numbers(_joined([g.ranks[g.last] for g in found]), unmatched),
            "algorithm_gb_per_s": numbers(rate, no_rate),
            "bus_gb_per_s": numbers(rate * factor, no_rate),
        }
    )
    return table.take(numbers(np.argsort(start, kind="stable")))


def _bus_factors(group: Group) -> NDArray[np.float64]:
    return np.array([bus_factor(kind, group.size) for kind in CollectiveKind])[group.kind]


def collective_members(job: Job, clock_offsets_ns: Mapping[int, int] | None = None) -> pa.Table:
    """One row a collective and member: group, index, rank, event, start_ns, end_ns, wait_ns (null if unmatched).

    Args:
        job: any number of ranks.
        clock_offsets_ns: by rank, as `clock_offsets` estimates them; times are corrected by these where given.
    """
    found = groups(job, clock_offsets_ns)
    index = [np.broadcast_to(np.arange(g.event.shape[1]), g.event.shape) for g in found]
    unmatched = _joined([np.broadcast_to(~g.matched, g.event.shape).ravel() for g in found], np.bool_)
    numbers = arrow_arrays.numbers
    return table_of_arrays(
        {
            "group": _repeated([g.name for g in found], [g.event.size for g in found]),
            "index": numbers(_joined([at.ravel() for at in index])),
            "rank": numbers(_joined([np.repeat(g.ranks, g.event.shape[1]) for g in found])),
            "event": numbers(_joined([g.event.ravel() for g in found])),
            "start_ns": numbers(_joined([g.start_ns.ravel() for g in found])),
            "end_ns": numbers(_joined([g.end_ns.ravel() for g in found])),
            "wait_ns": numbers(_joined([g.wait_ns.ravel() for g in found]), unmatched),
        }
    )


def collectives_by_size(job: Job) -> pa.Table:
    """Collectives by group, kind, bytes and dtype; those that take longest first.

    Columns: group, kind, bytes, dtype, count, transfer_mean_ns, transfer_min_ns, transfer_max_ns, wait_ns,
    algorithm_gb_per_s and bus_gb_per_s (of all bytes over all transfer time; null where sizes are unknown), matched,
    duration_mean_ns (over the members that are present, waiting included). Transfer, waiting and rates are null
    where ``matched`` is false.
    """
    rows = [row for group in groups(job) for row in _by_size(group)]
    rows.sort(key=lambda row: -row[-1] * row[4])
    schema = {"group": TEXT, "kind": TEXT, "bytes": INT, "dtype": TEXT, "count": INT, "transfer_mean_ns": FLOAT}
    schema |= {"transfer_min_ns": INT, "transfer_max_ns": INT, "wait_ns": INT}
    schema |= {"algorithm_gb_per_s": FLOAT, "bus_gb_per_s": FLOAT, "matched": "bool", "duration_mean_ns": FLOAT}
    return table_of(schema, rows)


def _by_size(group: Group) -> list[tuple[Any, ...]]:
    dtypes = {dtype: at for at, dtype in enumerate(dict.fromkeys(group.dtype))}
    dtype = np.fromiter(map(dtypes.__getitem__, group.dtype), np.int64, len(group.dtype))
    keys, which = np.unique(np.stack((group.kind, group.size_bytes, dtype, group.matched)), axis=1, return_inverse=True)
    which = which.reshape(-1)
    waits, duration = group.wait_ns.sum(axis=0), (group.end_ns - group.start_ns).mean(axis=0)
    rows = []
    for at, (kind, size_bytes, dtype_id, matched) in enumerate(keys.T.tolist()):
        mine = which == at
        count, times = int(mine.sum()), group.transfer_ns[mine]
        total = int(times.sum())
        timing: tuple[Any, ...] = (None,) * 6
        if matched:
            rate = size_bytes * count / total if size_bytes > 0 and total > 0 else None
            bus = rate * bus_factor(CollectiveKind(kind), group.size) if rate is not None else None
            timing = (total / count, int(times.min()), int(times.max()), int(waits[mine].sum()), rate, bus)
        what = (group.name, CollectiveKind(kind).label, size_bytes if size_bytes >= 0 else None, list(dtypes)[dtype_id])
        rows.append((*what, count, *timing, bool(matched), float(duration[mine].mean())))
    return rows


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
        apart = group.matched & ~group.overlaps
        notes["matched collective whose members do not overlap in time"] += int(apart.sum())
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
