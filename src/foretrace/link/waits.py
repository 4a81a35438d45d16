"""Event waits between streams: taken from the trace where it records them, inferred where it does not.

Two kinds of evidence are combined. Call order: an event is recorded after some work and waited for before other
work, whatever the times. Timing: work that launch and stream order do not explain starts as work on another stream
ends. Whatever any step contradicts is dropped, and what is left holds in every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretrace.link.device import NOISE_NS, ROUNDING_NS, DeviceWork, Flags, Ints, calls_named, runtime_rows

RECENT_NS = 30_000  # work that ended this long before a start may have caused it
BY_CALLS, BY_TIMING, RECORDED = 0.9, 0.7, 1.0
_FAR = np.iinfo(np.int64).max // 4
_MOST_PENDING = 8  # collectives that a program launches before it waits for the first of them


@dataclass
class Waits:
    """Pairs of device work: ``target`` starts after ``source`` has ended. Indices into the device work."""

    source: Ints
    target: Ints
    confidence: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.source)

    def take(self, rows: Flags | Ints) -> Waits:
        """The given rows."""
        return Waits(self.source[rows], self.target[rows], self.confidence[rows])


def joined(parts: list[Waits]) -> Waits:
    """All pairs once, each with its highest confidence."""
    source, target = (
        np.concatenate([np.empty(0, np.int64), *(getattr(p, n) for p in parts)]) for n in ("source", "target")
    )
    confidence = np.concatenate([np.empty(0), *(p.confidence for p in parts)])
    order = np.lexsort((-confidence, target, source))
    source, target, confidence = source[order], target[order], confidence[order]
    first = np.append(True, (source[1:] != source[:-1]) | (target[1:] != target[:-1]))[: len(source)]
    return Waits(source[first], target[first], confidence[first])


class StepMap:
    """Finds the same work in other steps: by stream, place among the step's work on it, and name."""

    def __init__(self, work: DeviceWork) -> None:
        self.work = work
        self.names = work.timeline.events["name"][work.event]
        self._steps = work.steps
        key = work.lane * (work.steps + 1) + work.step + 1
        self._order = np.argsort(key, kind="stable")
        counts = np.bincount(key, minlength=(int(work.lane.max(initial=0)) + 1) * (work.steps + 1))
        self._first = np.append(0, np.cumsum(counts))

    def counterpart(self, rows: Ints, step: Ints) -> Ints:
        """The work that corresponds to ``rows`` in the given steps, -1 where there is none."""
        valid = (step >= 0) & (step < self._steps)
        key = self.work.lane[rows] * (self._steps + 1) + np.where(valid, step, -1) + 1
        at = self._first[key] + self.work.ordinal[rows]
        valid &= at < self._first[key + 1]
        found = self._order[np.where(valid, at, 0)]
        valid &= self.names[found] == self.names[rows]
        return np.where(valid, found, -1)


def recorded_waits(work: DeviceWork) -> Waits:
    """Waits from ``cuda_sync`` events: last work on the stream before the record -> first work after the wait."""
    timeline, table = work.timeline, work.timeline.syncs
    source, target = [], []
    if table.num_rows:
        correlation = timeline.events["correlation"]
        rows = runtime_rows(timeline)
        call_of = {int(c): int(row) for row, c in zip(rows.tolist(), correlation[rows].tolist(), strict=True)}
        streams = {timeline.lanes[lane].stream: part for lane, part in work.lanes()}
        kinds = table.texts("kind")
        for at in range(table.num_rows):
            event = int(table["event"][at])
            if "stream wait" not in kinds[at].lower():
                continue
            record = call_of.get(int(table["wait_on_event_record_correlation"][at]))
            wait = call_of.get(int(correlation[event]))
            on = streams.get(int(table["wait_on_stream"][at]))
            waiting = streams.get(timeline.lanes[timeline.events["lane"][event]].stream)
            if record is None or wait is None or on is None or waiting is None:
                continue
            last = int(work.latest_before(on, timeline.start_ns[[record]])[0])
            later = np.flatnonzero(work.call_start_ns[waiting] > timeline.start_ns[wait])
            if last >= 0 and len(later):
                source.append(last)
                target.append(waiting.start + int(later[0]))
    return Waits(np.array(source, np.int64), np.array(target, np.int64), np.full(len(source), RECORDED))


def waits_by_calls(work: DeviceWork, use_records: bool = True) -> Waits:
    """Waits that the order of record, wait and launch calls on a thread tells.

    The source is the last work launched before the record that precedes the wait, the target the first work launched
    after the wait, on different streams. Where both calls' neighbors are on one stream, a collective after the wait
    is its target (its library records and waits before each launch); else the work on another stream that follows.
    """
    timeline = work.timeline
    waits = calls_named(timeline, "streamwaitevent")
    if use_records and timeline.syncs.num_rows:  # what such a call waited for is known
        known = timeline.events["correlation"][timeline.syncs["event"]]
        waits = waits[~np.isin(timeline.events["correlation"][waits], known)]
    records = calls_named(timeline, "eventrecord")
    parts = []
    for thread in np.unique(timeline.events["lane"][waits]).tolist():
        launched = np.flatnonzero(work.has_call & work.leads & (work.thread == thread))
        launched = launched[np.argsort(work.call_start_ns[launched], kind="stable")]
        wait_ns, record_ns = (
            timeline.start_ns[calls[timeline.events["lane"][calls] == thread]] for calls in (waits, records)
        )
        if len(launched) and len(record_ns):
            parts.append(_of_thread(work, launched, wait_ns, record_ns))
    return joined(parts)


def weakened(work: DeviceWork, same: StepMap, found: Waits, leave_out: int | None = None) -> Waits:
    """Pairs whose source is a collective that some step contradicts, with an earlier one on its stream instead.

    A collective is often waited for after the next one was launched, whose record then seems to be the one: which it
    was, only times can tell.
    """
    found = Waits(found.source.copy(), found.target, found.confidence)
    for _ in range(_MOST_PENDING):
        wrong = np.flatnonzero(_contradicted(work, same, found, leave_out))
        wrong = wrong[work.is_communication[found.source[wrong]]]
        before = work.previous[found.source[wrong]]
        usable = (before >= 0) & work.is_communication[before]
        if not usable.any():
            break
        found.source[wrong[usable]] = before[usable]
    return found


def _of_thread(work: DeviceWork, launched: Ints, wait_ns: Ints, record_ns: Ints) -> Waits:
    called = work.call_start_ns[launched]
    record = np.searchsorted(record_ns, wait_ns, side="left") - 1
    before = np.searchsorted(called, record_ns[np.maximum(record, 0)], side="left") - 1
    after = np.searchsorted(called, wait_ns, side="left")
    ok = (record >= 0) & (before >= 0) & (after < len(launched))
    before, after = before[ok], after[ok]
    lane = work.lane[launched]
    same = lane[before] == lane[after]
    to_collective = same & work.is_communication[launched[after]]
    # The neighbor on another stream: further on for the target, further back for the source.
    next_other, last_other = _next_other(lane), _last_other(lane)
    target = np.where(same & ~to_collective, next_other[before], after)
    source = np.where(to_collective, last_other[after], before)
    ok = (target >= 0) & (source >= 0)
    source, target = launched[source[ok]], launched[target[ok]]
    return Waits(source, target, np.full(len(source), BY_CALLS))


def _next_other(lane: Ints) -> Ints:
    """For each launch the next one on another stream, -1 for none."""
    change = np.append(np.flatnonzero(lane[1:] != lane[:-1]) + 1, -1)
    return change[np.searchsorted(change[:-1], np.arange(len(lane)), side="right")]


def _last_other(lane: Ints) -> Ints:
    """For each launch the last one before it on another stream, -1 for none."""
    change = np.append(0, np.flatnonzero(lane[1:] != lane[:-1]) + 1)
    return change[np.searchsorted(change, np.arange(len(lane)), side="right") - 1] - 1


def waits_by_timing(work: DeviceWork, late: Flags) -> Waits:
    """For late work the work on another stream of its device that ended shortly before it started.

    Of several candidates it is the one whose distance is most like the usual one. Where the trace shows wait calls, one
    must lie between the launch of the work before it on its stream and its own.
    """
    at = np.flatnonzero(late & ~_lacks_wait_call(work))
    source = np.stack([np.full(len(at), -1), *(_last_ended(work, at, *one) for one in work.lanes())])
    lag = np.where(source >= 0, work.start_ns[at] - work.end_ns[source], RECENT_NS + 1)
    lag[lag > RECENT_NS] = _FAR
    shortest = lag.min(axis=0, initial=_FAR)
    alone = (lag < _FAR).sum(axis=0) == 1
    usual = np.median(shortest[alone & (shortest >= 0)]) if (alone & (shortest >= 0)).any() else 0
    best = np.abs(lag - usual).argmin(axis=0)
    found = np.flatnonzero(lag[best, np.arange(len(at))] < _FAR)
    return Waits(source[best[found], found], at[found], np.full(len(found), BY_TIMING))


def _last_ended(work: DeviceWork, at: Ints, lane: int, rows: slice) -> Ints:
    """The last work on a stream that had ended as each of ``at`` began and was launched before it; -1 for none."""
    called = np.where(work.has_call[at], work.call_start_ns[at], np.iinfo(np.int64).max)
    ended = np.maximum.accumulate(work.end_ns[rows])
    last = rows.start + np.searchsorted(ended, work.start_ns[at] + ROUNDING_NS // 2, side="right") - 1
    # What was launched after the target cannot be waited for, however well its times fit.
    source = np.minimum(last, work.latest_before(rows, called))
    usable = (source >= rows.start) & (work.lane[at] != lane) & (work.device[at] == work.device[rows.start])
    return np.where(usable, source, -1)


def _lacks_wait_call(work: DeviceWork) -> Flags:
    """Work whose thread makes wait calls, but none since the launch of the work before it on its stream."""
    timeline = work.timeline
    waits = calls_named(timeline, "streamwaitevent")
    lacks = np.zeros(len(work), np.bool_)
    previous = np.where(work.previous >= 0, work.call_start_ns[work.previous], work.call_start_ns.min(initial=0))
    for thread in np.unique(timeline.events["lane"][waits]).tolist():
        times = timeline.start_ns[waits[timeline.events["lane"][waits] == thread]]
        mine = work.thread == thread
        calls = np.searchsorted(times, work.call_start_ns) - np.searchsorted(times, previous)
        lacks |= mine & (calls <= 0)
    return lacks


def pooled(work: DeviceWork, same: StepMap, found: Waits, leave_out: int | None = None) -> Waits:
    """Carry pairs to all steps, but for those that any step contradicts (the source ends after the target starts).

    Args:
        work: the device work.
        same: finds it in other steps.
        found: pairs of any steps.
        leave_out: a step whose times may not be used: it only receives pairs.
    """
    if leave_out is not None:
        found = found.take((work.step[found.target] != leave_out) | (found.confidence >= RECORDED))
    found = found.take(~_contradicted(work, same, found, leave_out) | (found.confidence >= RECORDED))
    in_steps = _in_steps(work, found)
    alone, found = found.take(~in_steps), found.take(in_steps)
    copies = []
    for step in range(work.steps if len(found) else 0):
        source, target = _counterparts(work, same, found, step)
        known = (source >= 0) & (target >= 0)
        copies.append(Waits(source, target, found.confidence).take(known))
    return joined([alone, *copies])


def _in_steps(work: DeviceWork, pairs: Waits) -> Flags:
    return np.asarray((work.step[pairs.target] >= 0) & (work.step[pairs.source] >= 0) & (work.steps > 1))


def _counterparts(work: DeviceWork, same: StepMap, pairs: Waits, step: int) -> tuple[Ints, Ints]:
    """The pairs whose targets are in another step; the source may be in the one before it."""
    steps = np.full(len(pairs), step)
    back = work.step[pairs.source] - work.step[pairs.target]
    return same.counterpart(pairs.source, steps + back), same.counterpart(pairs.target, steps)


def _contradicted(work: DeviceWork, same: StepMap, pairs: Waits, leave_out: int | None) -> Flags:
    """Which pairs any step contradicts that has a say, and the pair's own times if it is in no step."""

    def against(source: Ints, target: Ints) -> Flags:
        known = (source >= 0) & (target >= 0)
        return np.asarray(known & (work.end_ns[source] > work.start_ns[target] + ROUNDING_NS))

    in_steps = _in_steps(work, pairs)
    wrong = against(pairs.source, pairs.target) & ~in_steps
    for step in range(work.steps if in_steps.any() else 0):
        if step != leave_out:
            wrong |= against(*_counterparts(work, same, pairs, step)) & in_steps
    return wrong


def contradicted_in(work: DeviceWork, waits: Waits, step: int) -> tuple[int, int]:
    """How many pairs with targets in a step its times contradict, and how many there are."""
    mine = waits.take(work.step[waits.target] == step)
    against = work.end_ns[mine.source] > work.start_ns[mine.target] + ROUNDING_NS
    return int(against.sum()), len(mine)


def event_waits(work: DeviceWork, leave_out: int | None = None, *, use_records: bool = True) -> Waits:
    """The event waits of a timeline, recorded and inferred.

    Args:
        work: its device work.
        leave_out: a step from which nothing may be inferred.
        use_records: take waits that the trace records; without them all are inferred.
    """
    told = [recorded_waits(work)] if use_records else []
    same = StepMap(work)
    called = weakened(work, same, waits_by_calls(work, use_records), leave_out)
    known = pooled(work, same, joined([*told, called]), leave_out)
    late = (work.start_ns - ready_with(work, known, 0) > NOISE_NS) & work.leads
    return joined([known, pooled(work, same, waits_by_timing(work, late), leave_out)])


def wait_latency_ns(work: DeviceWork, waits: Waits) -> int:
    """From the end of what is waited for to the start of what waits, one number: the median over binding waits."""
    lag = work.start_ns[waits.target] - work.end_ns[waits.source]
    slack = work.start_ns[waits.target] - work.ready_ns()[waits.target]
    binding = lag[(slack > NOISE_NS) & (lag >= 0) & (lag <= RECENT_NS)]
    return int(np.median(binding)) if len(binding) else 0


def ready_with(work: DeviceWork, waits: Waits, latency_ns: int) -> Ints:
    """When launch, stream order and waits would let each piece of work start."""
    ready = work.ready_ns()
    np.maximum.at(ready, waits.target, work.end_ns[waits.source] + latency_ns)
    return ready
