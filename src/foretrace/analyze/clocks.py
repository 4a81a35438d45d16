"""Clock offsets between ranks, from collectives that end on all members together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foretrace.analyze.collectives import groups
from foretrace.analyze.tables import INT, TEXT, table_of
from foretrace.trace import Job

if TYPE_CHECKING:
    import pyarrow as pa


def clock_offsets(job: Job) -> pa.Table:
    """How far each rank's clock is ahead, estimated from the ends of matched symmetric collectives.

    Members of an all-reduce, all-gather, reduce-scatter, all-to-all or barrier leave within microseconds of each
    other; what their recorded ends differ by, in the median, is the clock. Groups are chained through the ranks
    they share; ranks that share none with rank 0's are measured against the lowest rank they are connected to.

    Columns: rank, host (where recorded), offset_ns, spread_ns (median absolute deviation), samples. Offset and
    spread are null for a rank without a matched symmetric collective. Nothing is corrected by this.
    """
    offsets: dict[int, float] = {}
    spreads: dict[int, float] = {}
    samples: dict[int, int] = {}
    waiting = [(g.ranks, g.end_ns[:, g.matched & g.is_symmetric]) for g in groups(job)]
    waiting = [(ranks, ends) for ranks, ends in waiting if ends.shape[1]]
    waiting.sort(key=lambda item: (-len(item[0]), int(item[0][0])))
    while waiting:
        at = next((i for i, (ranks, _) in enumerate(waiting) if any(int(r) in offsets for r in ranks)), 0)
        ranks, ends = waiting.pop(at)
        _place(ranks, ends, offsets, spreads, samples)
    rows = []
    for timeline in job:
        rank = timeline.rank
        found = rank in offsets
        offset, spread = (round(offsets[rank]), round(spreads[rank])) if found else (None, None)
        host = timeline.metadata.get("host_name")
        rows.append((rank, host if isinstance(host, str) else None, offset, spread, samples.get(rank, 0)))
    return table_of({"rank": INT, "host": TEXT, "offset_ns": INT, "spread_ns": INT, "samples": INT}, rows)


def _place(
    ranks: NDArray[np.int64],
    ends: NDArray[np.int64],
    offsets: dict[int, float],
    spreads: dict[int, float],
    samples: dict[int, int],
) -> None:
    """Add the ranks of one group, tied to a rank whose offset is known (the lowest rank begins at 0)."""
    known = [i for i, rank in enumerate(ranks.tolist()) if rank in offsets]
    anchor = known[0] if known else 0
    base = offsets.get(int(ranks[anchor]), 0.0)
    relative = (ends - ends[anchor]).astype(np.float64)
    for i, rank in enumerate(ranks.tolist()):
        if rank not in offsets:
            median = float(np.median(relative[i]))
            offsets[rank] = base + median
            spreads[rank] = float(np.median(np.abs(relative[i] - median)))
            samples[rank] = ends.shape[1]
