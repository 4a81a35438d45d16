"""How good inferred event waits are: held-out steps, and recorded waits where a trace has them."""

from __future__ import annotations

from typing import Any

import numpy as np

from foretrace.link.device import DeviceWork, device_work
from foretrace.link.waits import contradicted_in, event_waits, joined, recorded_waits
from foretrace.trace import Timeline


def held_out(timeline: Timeline) -> tuple[int, int]:
    """Waits inferred without a step that its times contradict, over all steps: (contradicted, checked)."""
    work = device_work(timeline)
    if work.steps < 2 or not len(work):
        return 0, 0
    found = [contradicted_in(work, event_waits(work, step), step) for step in range(work.steps)]
    return sum(one for one, _ in found), sum(other for _, other in found)


def recorded_edges(timeline: Timeline) -> list[dict[str, Any]]:
    """The waits that a trace records, one by one, and whether inference without the records finds each."""
    work = device_work(timeline)
    truth = joined([recorded_waits(work)])
    if not len(truth):
        return []
    inferred = event_waits(work, use_records=False)
    found = set(zip(inferred.source.tolist(), inferred.target.tolist(), strict=True))
    return [
        {
            "rank": timeline.rank,
            "source": _label(work, source),
            "target": _label(work, target),
            "slack_ns": int(work.start_ns[target] - work.end_ns[source]),
            "found": (source, target) in found,
        }
        for source, target in zip(truth.source.tolist(), truth.target.tolist(), strict=True)
    ]


def _label(work: DeviceWork, row: int) -> str:
    name = work.timeline.names(np.array([work.event[row]]))[0]
    return f"{work.timeline.lanes[int(work.lane[row])].label}: {name[:80]}"
