"""Calls that block: what each waited for, and which part of its duration was waiting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretrace.link.device import NEVER_NS, DeviceWork, Flags, Ints, calls_named, is_named
from foretrace.trace import Timeline

_LONG_CALL_NS = 50_000
_PROMPT_NS = 100_000  # a call that waited for an event returns this soon after it
_MIN_QUEUE = 100
# A call without device work that nevertheless waits for the whole device, if it takes long.
_IMPLICIT = ("cudafree", "hipfree", "cudahostalloc", "cudamallochost")


@dataclass
class Blocking:
    """Calls that are split into an issuing and a returning part, by event row of the timeline.

    Attributes:
        issue_end_ns, resume_ns: shape ``(num_events,)``; end of the issuing part and start of the returning part,
            `NEVER_NS` for events that are not split. Between them the call was waiting.
        is_unexplained: calls that took long though no device work explains it, shape ``(num_events,)``.
        wait_call, wait_lane: calls that wait for all that is on a stream when they are issued.
        fixed_call, fixed_work, fixed_recorded: calls that wait for one piece of work (index into the device work).
        queue_call, queue_work: launch calls that need room in the launch queue, and the work that makes it.
        queue_depth: entries of the launch queue, 0 where it was never seen full.
    """

    issue_end_ns: Ints
    resume_ns: Ints
    is_unexplained: Flags
    wait_call: Ints
    wait_lane: Ints
    fixed_call: Ints
    fixed_work: Ints
    fixed_recorded: Flags
    queue_call: Ints
    queue_work: Ints
    queue_depth: int


def blocking_calls(work: DeviceWork) -> Blocking:
    """Split launch calls, copies that wait for themselves, and synchronizing calls."""
    timeline = work.timeline
    nothing, flags = np.empty(0, np.int64), np.empty(0, np.bool_)
    found = Blocking(
        np.full(timeline.num_events, NEVER_NS),
        np.full(timeline.num_events, NEVER_NS),
        np.zeros(timeline.num_events, np.bool_),
        wait_call=nothing,
        wait_lane=nothing,
        fixed_call=nothing,
        fixed_work=nothing,
        fixed_recorded=flags,
        queue_call=nothing,
        queue_work=nothing,
        queue_depth=0,
    )
    _launches(work, found)
    _full_queue(work, found)
    _synchronizing(work, found)
    return found


def _launches(work: DeviceWork, found: Blocking) -> None:
    """Launch calls; a copy that ends inside its own call was waited for (pageable memory)."""
    launched = np.flatnonzero(work.has_call & work.leads)
    calls = work.call[launched]
    issue = np.clip(work.issue_ns[launched], work.call_start_ns[launched], work.call_end_ns[launched])
    np.maximum.at(found.issue_end_ns, calls, issue)
    found.resume_ns[calls] = found.issue_end_ns[calls]
    all_launched = np.flatnonzero(work.has_call)
    last = np.full(work.timeline.num_events, -1, np.int64)
    order = all_launched[np.argsort(work.end_ns[all_launched], kind="stable")]
    last[work.call[order]] = order
    calls = np.unique(work.call[all_launched])
    own = last[calls]
    inside = (work.end_ns[own] <= work.call_end_ns[own]) & (work.end_ns[own] > found.issue_end_ns[calls])
    found.resume_ns[calls[inside]] = work.end_ns[own[inside]]
    _add_fixed(found, calls[inside], own[inside], True)


def _add_fixed(found: Blocking, call: Ints, work: Ints, recorded: bool) -> None:
    found.fixed_call = np.append(found.fixed_call, call)
    found.fixed_work = np.append(found.fixed_work, work)
    found.fixed_recorded = np.append(found.fixed_recorded, np.full(len(call), recorded))


def _add_waits(found: Blocking, call: Ints, lane: Ints) -> None:
    found.wait_call = np.append(found.wait_call, call)
    found.wait_lane = np.append(found.wait_lane, lane)


def _full_queue(work: DeviceWork, found: Blocking) -> None:
    """Estimate the depth of the launch queue from launch calls that took long, and let launches wait for room."""
    for device in np.unique(work.device).tolist():
        rows = np.flatnonzero(work.has_call & (work.device == device))
        # One entry a call, by its start; it is out of the queue when its last work has ended.
        order = rows[np.lexsort((work.end_ns[rows], work.call[rows]))]
        is_last = np.append(work.call[order][1:] != work.call[order][:-1], True)[: len(order)]
        entry = order[is_last]
        entry = entry[np.argsort(work.call_start_ns[entry], kind="stable")]
        depth = _queue_depth(work.call_start_ns[entry], work.call_end_ns[entry], work.end_ns[entry])
        if not depth:
            continue
        found.queue_depth = max(found.queue_depth, depth)
        late, early = entry[depth:], entry[:-depth]
        found.queue_call = np.append(found.queue_call, work.call[late])
        found.queue_work = np.append(found.queue_work, early)
        room = work.end_ns[early]
        waited = (room > work.call_start_ns[late]) & (room <= work.call_end_ns[late])
        calls = work.call[late[waited]]
        found.resume_ns[calls] = np.maximum(found.resume_ns[calls], room[waited])


def _queue_depth(call_start: Ints, call_end: Ints, work_end: Ints) -> int:
    """Entries at which launch calls began to block, 0 if they never did."""
    duration = call_end - call_start
    outstanding = np.arange(len(call_start)) - np.searchsorted(np.sort(work_end), call_start, side="right")
    fullest = int(outstanding.max(initial=0))
    blocked = (duration > max(_LONG_CALL_NS, 10 * int(np.median(duration)) if len(duration) else 0)) & (
        outstanding >= 0.97 * fullest
    )
    if fullest < _MIN_QUEUE or blocked.sum() < 10:
        return 0
    at = np.flatnonzero(blocked)
    best, best_error = 0, np.inf
    for depth in range(max(fullest - 40, _MIN_QUEUE // 2), fullest + 8):
        usable = at[at >= depth]
        if len(usable) < len(at) / 2:
            continue
        error = float(np.median(np.abs(call_end[usable] - work_end[usable - depth])))
        if error < best_error:
            best, best_error = depth, error
    return best if best_error < _LONG_CALL_NS else 0


def _synchronizing(work: DeviceWork, found: Blocking) -> None:
    timeline = work.timeline
    calls = calls_named(timeline, "synchronize")
    recorded = _recorded_streams(timeline)
    device_wide = is_named(timeline, calls, "devicesynchronize", "ctxsynchronize") | _is_exactly(
        timeline, calls, "synchronize"
    )
    of_event = is_named(timeline, calls, "eventsynchronize")
    start, end = timeline.start_ns[calls], timeline.end_ns[calls]
    found.issue_end_ns[calls], found.resume_ns[calls] = start, start
    lanes = work.lanes()
    ends = np.full((len(lanes), len(calls)), NEVER_NS)  # when the last work of each stream ended
    for at, (_, part) in enumerate(lanes):
        last = work.latest_before(part, start)
        ends[at] = np.where(last >= 0, work.end_ns[last], NEVER_NS)
    for at, call in enumerate(calls.tolist()):
        if of_event[at]:
            _event_wait(work, found, call)
            continue
        choose = _device_streams if device_wide[at] else _one_stream
        streams = choose(work, call, lanes, ends[:, at], recorded)
        if len(streams):
            _add_waits(found, np.full(len(streams), call), np.array([lanes[s][0] for s in streams]))
            until = min(max(int(ends[s, at]) for s in streams), int(end[at]))
            found.resume_ns[call] = max(until, int(start[at]))
        elif end[at] - start[at] > _LONG_CALL_NS:
            found.is_unexplained[call] = True
    _implicit(work, found, lanes)


def _is_exactly(timeline: Timeline, rows: Ints, name: str) -> NDArray[np.bool_]:
    return np.asarray(timeline.events["name"][rows] == timeline.strings.find(name))


def _recorded_streams(timeline: Timeline) -> dict[int, int]:
    """The stream that a synchronizing call waited for, by correlation, where the trace has ``cuda_sync`` events."""
    table = timeline.syncs
    if not table.num_rows:
        return {}
    events, kinds = table["event"].tolist(), table.texts("kind")
    correlation, lane = timeline.events["correlation"], timeline.events["lane"]
    return {
        int(correlation[event]): int(lane[event])
        for event, kind in zip(events, kinds, strict=True)
        if "stream sync" in kind.lower()
    }


_Lanes = list[tuple[int, slice]]


def _device_streams(work: DeviceWork, call: int, lanes: _Lanes, ends: Ints, recorded: dict[int, int]) -> list[int]:
    """All streams with work, but for those whose work outlasts the call: these belong to another device."""
    until = int(work.timeline.end_ns[call]) + 2 * work.latency_ns
    return [at for at in range(len(lanes)) if NEVER_NS < ends[at] <= until]


def _one_stream(work: DeviceWork, call: int, lanes: _Lanes, ends: Ints, recorded: dict[int, int]) -> list[int]:
    """The recorded stream; else the one whose last work ended last inside the call; else the one last used."""
    timeline = work.timeline
    stream = recorded.get(int(timeline.events["correlation"][call]))
    if stream is not None:
        return [at for at, (lane, _) in enumerate(lanes) if lane == stream]
    start, end = timeline.start_ns[call], timeline.end_ns[call]
    inside = [at for at in range(len(lanes)) if start < ends[at] <= end]
    if inside:
        return [max(inside, key=lambda at: int(ends[at]))]
    return _last_used(work, call, lanes, ends)


def _last_used(work: DeviceWork, call: int, lanes: _Lanes, ends: Ints) -> list[int]:
    """The stream of the last launch of this thread, if its work had ended."""
    start, thread = work.timeline.start_ns[call], work.timeline.events["lane"][call]
    before = np.flatnonzero((work.thread == thread) & (work.call_start_ns < start))
    if not len(before):
        return []
    lane = work.lane[before[work.call_start_ns[before].argmax()]]
    return [at for at, (one, _) in enumerate(lanes) if one == lane and ends[at] <= start]


def _event_wait(work: DeviceWork, found: Blocking, call: int) -> None:
    """A call that waited for an event: the work that ended last inside it, if the call returned soon after."""
    timeline = work.timeline
    start, end = int(timeline.start_ns[call]), int(timeline.end_ns[call])
    inside = np.flatnonzero((work.end_ns > start) & (work.end_ns <= end) & (work.call_start_ns < start))
    if len(inside):
        cause = inside[work.end_ns[inside].argmax()]
        if end - work.end_ns[cause] <= _PROMPT_NS:
            found.resume_ns[call] = work.end_ns[cause]
            _add_fixed(found, np.array([call]), np.array([cause]), False)
            return
    found.is_unexplained[call] = end - start > _LONG_CALL_NS


def _implicit(work: DeviceWork, found: Blocking, lanes: _Lanes) -> None:
    """Calls that free or pin memory wait for the device: where device work ended just before they did."""
    timeline = work.timeline
    calls = calls_named(timeline, *_IMPLICIT)
    calls = calls[timeline.duration_ns[calls] > _LONG_CALL_NS]
    for call in calls.tolist():
        start, end = int(timeline.start_ns[call]), int(timeline.end_ns[call])
        ended = [
            (int(work.end_ns[last]), last)
            for _, part in lanes
            if (last := int(work.latest_before(part, np.array([start]))[0])) >= 0
        ]
        inside = [(time, last) for time, last in ended if start < time <= end and end - time <= _PROMPT_NS]
        if inside and len(inside) == sum(time > start for time, _ in ended):
            found.issue_end_ns[call], found.resume_ns[call] = start, max(inside)[0]
            _add_fixed(found, np.array([call]), np.array([max(inside)[1]]), False)
