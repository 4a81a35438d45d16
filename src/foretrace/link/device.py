"""Device work of one rank, stream by stream: what launched it, what precedes it, and when it could have started."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from foretrace.trace import Category, Timeline
from foretrace.trace.steps import profiler_steps

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

NEVER_NS = int(np.iinfo(np.int64).min)  # a time that there is not: measured ones may well be negative
NOISE_NS = 10_000  # a start that is later than its causes by no more than this is noise
ROUNDING_NS = 2_000  # how far clocks and rounding may let an event end after what follows it
DEFAULT_LATENCY_NS = 5_000
LONGEST_LATENCY_NS = 1_000_000
WORST_SKEW_NS = 1_000_000  # work seems to start before its call where clocks of host and device differ
LONG_AGO = np.iinfo(np.int64).min // 4


@dataclass
class DeviceWork:
    """Device events sorted by stream and start; all arrays have shape ``(n,)`` unless said.

    Attributes:
        event, lane, start_ns, end_ns: of each event.
        position: place on its stream.
        call: row of the launch call, -1 where the launch is not in the trace; ``call_start_ns`` and ``call_end_ns``
            are then `LONG_AGO`.
        thread: lane of the launch call, -1.
        in_graph: launched with others by one call.
        leads: the first work of its call on its stream.
        issue_ns: when the call handed the work over: its start, or later where the call itself was slow.
        previous: index of the work before it on the stream, -1.
        previous_end_ns: the latest end on the stream so far.
        gap_ns: back-to-back gap of its stream.
        latency_ns: launch latency of the trace, one number.
        step, ordinal: index of the step in which it was launched (-1 outside), and its place among the work of that
            step on the stream. The same work in another step has the same lane and ordinal.
        is_communication: whether it belongs to a collective.
        steps: number of steps.
    """

    timeline: Timeline
    event: Ints
    lane: Ints
    start_ns: Ints
    end_ns: Ints
    position: Ints
    call: Ints
    call_start_ns: Ints
    call_end_ns: Ints
    thread: Ints
    in_graph: Flags
    leads: Flags
    issue_ns: Ints
    previous: Ints
    previous_end_ns: Ints
    gap_ns: Ints
    latency_ns: int
    step: Ints
    ordinal: Ints
    is_communication: Flags
    steps: int

    def __len__(self) -> int:
        return len(self.event)

    @property
    def has_call(self) -> Flags:
        """Whether the launch is in the trace."""
        return np.asarray(self.call >= 0)

    @property
    def overlaps(self) -> Flags:
        """Whether earlier work on the stream is still running when this starts."""
        return np.asarray((self.previous >= 0) & (self.previous_end_ns > self.start_ns + ROUNDING_NS))

    @cached_property
    def device(self) -> Ints:
        """The device of each event."""
        return np.array([lane.device for lane in self.timeline.lanes], np.int64)[self.lane]

    def lanes(self) -> list[tuple[int, slice]]:
        """Every stream with the rows of its work."""
        return runs(self.lane)

    def ready_ns(self) -> Ints:
        """When launch and stream order would let each event start."""
        return np.asarray(np.maximum(self.issue_ns + self.latency_ns, self.previous_end_ns + self.gap_ns))

    def latest_before(self, rows: slice, time_ns: Ints) -> Ints:
        """For each time the index of the last work on a stream (``rows``) launched before it, -1 for none."""
        order = np.argsort(self.call_start_ns[rows], kind="stable")
        launched = self.call_start_ns[rows][order]
        last = np.maximum.accumulate(order) if len(order) else order
        at = np.searchsorted(launched, time_ns, side="left") - 1
        return np.where(at >= 0, rows.start + last[np.maximum(at, 0)], -1)


def device_work(timeline: Timeline) -> DeviceWork:
    """The device work of a timeline."""
    rows = timeline.device_rows.astype(np.int64)
    lane = timeline.events["lane"][rows].astype(np.int64)
    rows = rows[np.argsort(lane, kind="stable")]  # device_rows are sorted by start
    lane = timeline.events["lane"][rows].astype(np.int64)
    start, end = timeline.start_ns[rows], timeline.end_ns[rows]
    call = timeline.launch_row[rows]
    call = np.where(timeline.start_ns[call] <= start + WORST_SKEW_NS, call, -1)  # an id that was used twice
    has_call = call >= 0
    call_start = np.where(has_call, timeline.start_ns[call], LONG_AGO)
    call_end = np.where(has_call, timeline.end_ns[call], LONG_AGO)
    thread = np.where(has_call, timeline.events["lane"][call], -1).astype(np.int64)
    position, previous, previous_end = _order(lane, end)
    in_graph, leads = _launched_together(timeline, call, lane)
    is_idle = has_call & ~in_graph & (call_start >= previous_end)
    latency = _launch_latency((start - call_start)[is_idle])
    queued = (call_start + 3 * latency <= previous_end) & (previous >= 0)
    step, steps = steps_at(timeline, call_start)  # `LONG_AGO` is before the first
    work = DeviceWork(
        timeline,
        rows,
        lane,
        start,
        end,
        position,
        call,
        call_start,
        call_end,
        thread,
        in_graph,
        leads,
        call_start.copy(),
        previous,
        previous_end,
        _gaps(lane, start - previous_end, queued),
        latency,
        step,
        _ordinals(lane, step),
        timeline.is_communication[rows],
        steps,
    )
    _find_slow_calls(work)
    return work


def _launch_latency(delay: Ints) -> int:
    """Lower quartile of the delays of launches to an idle stream; longer ones than any latency mean something else."""
    usable = delay[(delay >= 0) & (delay <= LONGEST_LATENCY_NS)]
    return int(np.percentile(usable, 25)) if len(usable) else DEFAULT_LATENCY_NS


def _order(lane: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """Place on the stream, index of the one before, and the latest end before."""
    count = len(lane)
    begins = np.append(True, lane[1:] != lane[:-1]) if count else np.empty(0, np.bool_)
    first = np.maximum.accumulate(np.where(begins, np.arange(count), 0))
    previous = np.where(begins, -1, np.arange(count) - 1)
    latest = np.full(count, LONG_AGO)
    borders = [*np.flatnonzero(begins).tolist(), count]
    for begin, stop in itertools.pairwise(borders):
        latest[begin + 1 : stop] = np.maximum.accumulate(end[begin : stop - 1])
    return np.arange(count) - first, previous, latest


def _launched_together(timeline: Timeline, call: Ints, lane: Ints) -> tuple[Flags, Flags]:
    """Which work a call launched together with other work, and which comes first of its call on its stream."""
    count = len(call)
    has_call = call >= 0
    per_call = np.bincount(call[has_call], minlength=timeline.num_events)
    in_graph = has_call & ((per_call[call] > 1) | is_named(timeline, call, "graphlaunch"))
    leads = np.ones(count, np.bool_)
    mine = np.flatnonzero(in_graph)
    _, first = np.unique(call[mine] * (lane.max(initial=0) + 1) + lane[mine], return_index=True)
    leads[mine] = False
    leads[mine[first]] = True
    return in_graph, leads


def _gaps(lane: Ints, gap: Ints, queued: Flags) -> Ints:
    """The mean gap of queued work on each stream (of all streams, where one has no such work).

    The mean of what counts as noise keeps the sum of the gaps that a simulation replaces by it; a median would not.
    """
    usual = queued & (gap >= -ROUNDING_NS) & (gap <= NOISE_NS)
    by_lane = np.full(int(lane.max(initial=-1)) + 1, _mean(gap[usual]))
    for one in np.unique(lane[usual]).tolist():
        by_lane[one] = _mean(gap[usual & (lane == one)])
    return by_lane[lane].astype(np.int64)


def _mean(gap: Ints) -> int:
    return max(round(float(gap.mean())), 0) if len(gap) else 0


def steps_at(timeline: Timeline, time_ns: Ints) -> tuple[Ints, int]:
    """The host step in which each time lies, -1 outside, and the number of steps; all 0 of 1 where there are none."""
    host = profiler_steps(timeline)
    count = len(host.number)
    if not count:
        return np.zeros(len(time_ns), np.int64), 1
    step = np.searchsorted(host.start_ns, time_ns, side="right") - 1
    step[time_ns >= host.end_ns[-1]] = -1
    return step, count


def _ordinals(lane: Ints, step: Ints) -> Ints:
    """The place of each event among those of its stream and step."""
    order = np.lexsort((np.arange(len(lane)), step, lane))
    key_lane, key_step = lane[order], step[order]
    begins = np.append(True, (key_lane[1:] != key_lane[:-1]) | (key_step[1:] != key_step[:-1]))[: len(lane)]
    first = np.maximum.accumulate(np.where(begins, np.arange(len(lane)), 0)) if len(lane) else order
    ordinal = np.empty(len(lane), np.int64)
    ordinal[order] = np.arange(len(lane)) - first
    return ordinal


def _find_slow_calls(work: DeviceWork) -> None:
    """A launch call that is itself slow hands its work over late: the work starts inside it, or right behind."""
    latency = work.latency_ns
    late = work.start_ns - work.ready_ns() > NOISE_NS
    inside = work.start_ns <= work.call_end_ns + 2 * latency
    slow = work.has_call & work.leads & late & inside
    work.issue_ns[slow] = np.minimum(work.start_ns - latency, work.call_end_ns)[slow]


def runs(values: Ints) -> list[tuple[int, slice]]:
    """Each stretch of equal values: the value and its rows."""
    if not len(values):
        return []
    first = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist()]
    stretches = itertools.pairwise([*first, len(values)])
    return [(value, slice(*stretch)) for value, stretch in zip(values[first].tolist(), stretches, strict=True)]


def is_named(timeline: Timeline, rows: Ints, *words: str) -> Flags:
    """Which of the given events have one of the words in their name, whatever its case."""
    return timeline.are_named(rows, lambda name: any(word in name.lower() for word in words))


def runtime_rows(timeline: Timeline) -> Ints:
    """Runtime calls on host threads, by start."""
    rows = timeline.rows(Category.RUNTIME).astype(np.int64)
    return rows[np.argsort(timeline.start_ns[rows], kind="stable")]


def calls_named(timeline: Timeline, *words: str) -> Ints:
    """Runtime calls with one of the words in their name, by start."""
    rows = timeline.rows(Category.RUNTIME).astype(np.int64)
    rows = rows[is_named(timeline, rows, *words)]
    return rows[np.argsort(timeline.start_ns[rows], kind="stable")]
