"""Clock offsets between ranks, from collectives that end on all members together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foretrace.analyze.tables import INT, TEXT, table_of
from foretrace.trace import Job
from foretrace.trace.matching import groups

if TYPE_CHECKING:
    import pyarrow as pa

_SCHEMA = {"rank": INT, "host": TEXT, "offset_ns": INT, "spread_ns": INT, "samples": INT, "reference_rank": INT}


def clock_offsets(job: Job) -> pa.Table:
    """How far each rank's clock is ahead, estimated from the ends of matched symmetric collectives.

    Members of an all-reduce, all-gather, reduce-scatter, all-to-all or barrier leave within microseconds of each
    other; what a rank's recorded end differs by from the median member's, in the median over collectives, is its
    clock. Groups are chained through the ranks they share.

    Columns: rank, host (where recorded), offset_ns, spread_ns (median absolute deviation of the differences),
    samples (collectives used), reference_rank (the lowest rank that this one is connected to; its offset is 0, and
    offsets to different references cannot be compared). Offset, spread and reference are null for a rank without a
    matched symmetric collective. Nothing is corrected by this: other functions take the offsets as an argument.
    """
    clocks = _Clocks()
    waiting = [(g.ranks, g.end_ns[:, g.matched & g.is_symmetric]) for g in groups(job)]
    waiting = [(ranks, ends) for ranks, ends in waiting if ends.shape[1]]
    waiting.sort(key=lambda item: (-len(item[0]), int(item[0][0])))
    while waiting:
        at = next((i for i, (ranks, _) in enumerate(waiting) if not clocks.offset.keys().isdisjoint(ranks.tolist())), 0)
        clocks.place(*waiting.pop(at))
    rows = []
    for timeline in job:
        rank, host = timeline.rank, timeline.metadata.get("host_name")
        known: tuple[int | None, ...] = (None, None, 0, None)
        if rank in clocks.offset:
            reference = clocks.reference(rank)
            offset = round(clocks.offset[rank] - clocks.offset[reference])
            known = (offset, round(clocks.spread[rank]), clocks.samples[rank], reference)
        rows.append((rank, host if isinstance(host, str) else None, *known))
    return table_of(_SCHEMA, rows)


class _Clocks:
    """What is known of the clocks so far, by rank. ``first`` names the rank with which a connected set began."""

    def __init__(self) -> None:
        self.offset: dict[int, float] = {}
        self.spread: dict[int, float] = {}
        self.samples: dict[int, int] = {}
        self.first: dict[int, int] = {}

    def reference(self, rank: int) -> int:
        """The lowest rank of the connected set."""
        return min(other for other, first in self.first.items() if first == self.first[rank])

    def place(self, ranks: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Add the ranks of one group; those that are known tie it to the rest."""
        relative = (ends - ends[0]).astype(np.float64)  # absolute nanoseconds do not fit a float
        relative -= np.median(relative, axis=0)
        middle = np.median(relative, axis=1)
        spread = np.median(np.abs(relative - middle[:, None]), axis=1)
        names = ranks.tolist()
        known = [i for i, rank in enumerate(names) if rank in self.offset]
        shift = float(np.median([self.offset[names[i]] - middle[i] for i in known])) if known else 0.0
        # No group ties two sets together: a second set begins only when no group touches the first any more.
        first = self.first[names[known[0]]] if known else names[0]
        for i, rank in enumerate(names):
            if rank not in self.offset:
                self.offset[rank] = float(middle[i]) + shift
                self.spread[rank] = float(spread[i])
                self.samples[rank] = ends.shape[1]
                self.first[rank] = first
