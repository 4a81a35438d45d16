"""Timelines and extra tracks -> Chrome JSON for ui.perfetto.dev, written as a stream."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from foretrace.trace import FormatError, Job, LaneKind, Timeline

_CHUNK = 20_000
_SIMULATED = 1 << 20  # simulated ranks follow the measured ones; process ids stay below 2^31


@dataclass(slots=True)
class Track:
    """Slices of our own: (name, start_ns, end_ns, color name or "") of one rank."""

    rank: int
    name: str
    slices: Iterable[tuple[str, int, int, str]] = ()
    counter: Iterable[tuple[int, float]] = field(default=())


def write(job: Job, path: Path, tracks: Iterable[Track] = (), simulated: Job | None = None) -> None:
    """Write a job and extra tracks; gzip where the name ends with ``.gz``. A simulated job stands below the measured.

    Perfetto drops slices that overlap on one track without nesting, so each lane is split into as many tracks as it
    takes. Times are in microseconds from the job's first event, with nanosecond decimals.

    Raises:
        FormatError: if the file cannot be written; a file of that name is replaced only by a complete one.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with _opened(unfinished, compressed=path.name.endswith(".gz")) as file:
            file.write('{"displayTimeUnit": "ns", "traceEvents": [\n')
            separator = ""
            for event in _events(job, tracks, simulated):
                file.write(separator + json.dumps(event))
                separator = ",\n"
            file.write("\n]}\n")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise FormatError(str(path), error.strerror or str(error), "free space or choose another place") from None


def _opened(path: Path, compressed: bool) -> IO[str]:
    return gzip.open(path, "wt", 5, encoding="utf-8") if compressed else path.open("w", encoding="utf-8")


def _events(job: Job, tracks: Iterable[Track], simulated: Job | None) -> Iterator[dict[str, Any]]:
    origin = min((int(timeline.start_ns.min()) for timeline in job if timeline.num_events), default=0)
    for timeline in job:
        yield from _of_timeline(timeline, origin)
    for timeline in simulated or ():
        yield from _of_timeline(timeline, origin, is_simulated=True)
    next_tid: dict[int, int] = {}
    for track in tracks:
        tid = next_tid.setdefault(track.rank, 0)
        next_tid[track.rank] += 1
        pid = _process(track.rank, 2)
        if tid == 0:
            yield _meta(pid, 0, "process_name", f"rank {track.rank} foretrace")
            yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": 3 * track.rank}}
        yield _meta(pid, tid, "thread_name", track.name)
        for name, start, end, color in track.slices:
            slice_ = {"ph": "X", "cat": "foretrace", "name": name, "pid": pid, "tid": tid}
            yield {
                **slice_,
                "ts": (start - origin) / 1e3,
                "dur": (end - start) / 1e3,
                **({"cname": color} if color else {}),
            }
        for time, value in track.counter:
            yield {"ph": "C", "name": track.name, "pid": pid, "ts": (time - origin) / 1e3, "args": {"value": value}}


def _process(rank: int, part: int) -> int:
    """Host, device and findings of a rank are three processes."""
    return 3 * rank + part + 1


def _meta(pid: int, tid: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}


def _of_timeline(timeline: Timeline, origin: int, is_simulated: bool = False) -> Iterator[dict[str, Any]]:
    rank = timeline.rank + _SIMULATED * is_simulated
    for part, what in enumerate(("host", "device")):
        pid = _process(rank, part)
        yield _meta(pid, 0, "process_name", f"rank {timeline.rank} {what}{' (simulated)' if is_simulated else ''}")
        yield {
            "ph": "M",
            "pid": pid,
            "name": "process_sort_index",
            "args": {"sort_index": 3 * timeline.rank + part + 1},
        }
    lanes = timeline.events["lane"]
    pids = np.zeros(timeline.num_events, np.int64)
    tids = np.zeros(timeline.num_events, np.int64)
    for at, lane in enumerate(timeline.lanes):
        rows = np.flatnonzero(lanes == at)
        if not len(rows):
            continue
        pid = _process(rank, int(lane.kind is LaneKind.DEVICE_STREAM))
        depth = split_lanes(timeline.start_ns[rows], timeline.end_ns[rows])
        pids[rows], tids[rows] = pid, 64 * at + np.minimum(depth, 63)
        for extra in range(int(min(depth.max(), 63)) + 1):
            suffix = f" (overlap {extra})" if extra else ""
            yield _meta(pid, 64 * at + extra, "thread_name", lane.label + suffix)
    yield from _slices(timeline, pids, tids, origin)
    yield from _flows(timeline, rank, pids, tids, origin)


def split_lanes(start_ns: NDArray[np.int64], end_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """The track of each event, so that events of one track nest or follow each other; 0 for most."""
    order = np.lexsort((-end_ns, start_ns))
    track = np.zeros(len(start_ns), np.int64)
    pending = order
    level = 0
    while len(pending):
        start, end = start_ns[pending], end_ns[pending]
        crossing = _crossing(start, end)
        track[pending] = level
        if not crossing.any():
            break
        pending = pending[crossing]
        level += 1
    return track


def _crossing(start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which events (by start, longest first) begin inside an earlier one that stays and end after it."""
    crossing = np.zeros(len(start), np.bool_)
    suspicious = np.flatnonzero(start[1:] < np.maximum.accumulate(end)[:-1])
    if not len(suspicious):
        return crossing
    stack: list[int] = []  # ends of the open events, the innermost last
    for at, (begins, ends) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while stack and stack[-1] <= begins:
            stack.pop()
        if stack and ends > stack[-1]:
            crossing[at] = True
        else:
            stack.append(ends)
    return crossing


def _slices(timeline: Timeline, pids: Any, tids: Any, origin: int) -> Iterator[dict[str, Any]]:
    columns = timeline.events
    for begin in range(0, timeline.num_events, _CHUNK):
        rows = np.arange(begin, min(begin + _CHUNK, timeline.num_events))
        texts = (timeline.names(rows), timeline.strings.lookup(columns["category_name"][rows]))
        numbers = (pids[rows], tids[rows], timeline.start_ns[rows] - origin, timeline.duration_ns[rows])
        correlation = columns["correlation"][rows].tolist()
        lists = (*texts, *(c.tolist() for c in numbers), correlation)
        for name, cat, pid, tid, start, duration, call in zip(*lists, strict=True):
            event = {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": pid,
                "tid": tid,
                "ts": start / 1e3,
                "dur": duration / 1e3,
            }
            yield {**event, "args": {"correlation": call}} if call >= 0 else event


def _flows(timeline: Timeline, rank: int, pids: Any, tids: Any, origin: int) -> Iterator[dict[str, Any]]:
    """Arrows from launch calls to the work they started."""
    device = timeline.device_rows
    launch = timeline.launch_row[device]
    for work, call in zip(device[launch >= 0].tolist(), launch[launch >= 0].tolist(), strict=True):
        number = (rank << 40) + work
        flow = {"cat": "ac2g", "name": "ac2g", "id": number}
        start, end = (int(timeline.start_ns[row]) - origin for row in (call, work))
        yield {**flow, "ph": "s", "pid": int(pids[call]), "tid": int(tids[call]), "ts": start / 1e3}
        yield {**flow, "ph": "f", "bp": "e", "pid": int(pids[work]), "tid": int(tids[work]), "ts": end / 1e3}
