"""Findings as extra tracks beside the recorded timeline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from foretrace import analyze
from foretrace.analyze.activity import activity
from foretrace.analyze.idle import find_idle_causes
from foretrace.analyze.intervals import Intervals
from foretrace.formats.perfetto import Track, write
from foretrace.report.summary import CAUSE_LABELS, PART_LABELS
from foretrace.trace import Job, Timeline


def write_timeline(job: Job, document: dict[str, Any], path: Path) -> None:
    """Write the job with our tracks: breakdown, steps, waiting in collectives, queue length."""
    write(job, path, _tracks(job, document))


def _tracks(job: Job, document: dict[str, Any]) -> Iterator[Track]:
    waits: dict[int, list[tuple[str, int, int, str]]] = {rank: [] for rank in job.ranks}
    for row in analyze.collective_members(job).to_pylist():
        if row["wait_ns"] is not None:
            border = row["start_ns"] + row["wait_ns"]
            waits[row["rank"]].append(("waiting for the last rank", row["start_ns"], border, "bad"))
            waits[row["rank"]].append(("transfer", border, row["end_ns"], "good"))
    steps = {rank["rank"]: rank["steps"] for rank in document["ranks"]}
    for timeline in job:
        rank = timeline.rank
        yield Track(rank, "steps", [(step["name"], step["start_ns"], step["end_ns"], "") for step in steps[rank]])
        yield Track(rank, "breakdown", breakdown_slices(timeline))
        if waits[rank]:
            yield Track(rank, "collectives: waiting and transfer", sorted(waits[rank], key=lambda slice_: slice_[1]))
        queue = analyze.queue_length(timeline).to_pydict()
        for stream in sorted(set(queue["stream"])):
            at = [i for i, s in enumerate(queue["stream"]) if s == stream]
            points = [(queue["time_ns"][i], queue["length"][i]) for i in at]
            yield Track(rank, f"launch queue of stream {stream}", counter=points)


def breakdown_slices(timeline: Timeline) -> list[tuple[str, int, int, str]]:
    """What the rank did, as slices that follow each other; idle ones name their cause."""
    active = activity(timeline)
    sets = (active.compute, active.communication, active.busy)
    borders = np.unique(np.concatenate([edge for s in sets for edge in (s.start_ns, s.end_ns)]))
    if not len(borders):
        return []
    starts, ends = borders[:-1], borders[1:]
    computing, communicating, busy = (s.covered_within(starts, ends) > 0 for s in sets)
    names = np.select(
        [computing & communicating, computing, communicating, busy],
        [PART_LABELS[f"{part}_ns"] for part in ("overlapped", "exposed_compute", "exposed_communication", "memory")],
        "",
    )
    working = [(str(n), int(s), int(e), "") for n, s, e in zip(names, starts, ends, strict=True) if n]
    idle = [
        (f"idle: {CAUSE_LABELS[cause]}", int(start), int(end), "grey")
        for cause, found in find_idle_causes(timeline).intervals.items()
        for start, end in _pairs(found)
    ]
    return sorted(working + idle, key=lambda slice_: slice_[1])


def _pairs(found: Intervals) -> Iterator[tuple[int, int]]:
    return zip(found.start_ns.tolist(), found.end_ns.tolist(), strict=True)
