"""Thread hand-off: a gap of one thread that is explained by another thread's work."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from foretrace.link.device import NEVER_NS, Ints
from foretrace.link.host import GAP, START, HostSlices
from foretrace.trace import Timeline

LONG_GAP_NS = 50_000
_MOST_OF_A_BURST = 0.8


@dataclass
class Handoffs:
    """Gaps that end when another thread has finished something; shape ``(n,)`` each.

    Attributes:
        gap: index of the gap's slice.
        source: index of the slice whose end it waits for.
        confidence: 0 to 1.
    """

    gap: Ints
    source: Ints
    confidence: np.ndarray


@dataclass
class _Thread:
    """The slices of one thread that are not gaps, and the bursts that they form."""

    index: Ints
    start: Ints
    end: Ints
    burst_start: Ints  # of the burst that each slice is in
    burst_end: Ints


def handoffs(
    timeline: Timeline, slices: HostSlices, launching: set[int], step: Ints, leave_out: int | None = None
) -> Handoffs:
    """Find the gaps of launching threads that another launching thread explains.

    The source is the latest end of another thread within the gap, if that thread then stays idle until the gap ends,
    or did most of a burst of work within the gap. Steps vote: a gap before the same event of each step is a hand-off
    in all steps or in none.

    Args:
        timeline: where the slices come from.
        slices: of all host threads.
        launching: lanes of threads that may be source or sink.
        step: of each slice, -1 outside of steps.
        leave_out: a step that has no vote.
    """
    threads = {lane: _thread(slices, rows) for lane, rows in slices.lanes() if lane in launching}
    gap_length = slices.end_ns - slices.start_ns
    is_start = slices.part == START
    gaps = np.flatnonzero(((slices.part == GAP) & (gap_length > LONG_GAP_NS)) | is_start)
    gaps = gaps[is_start[gaps] | np.isin(slices.lane[gaps], list(launching))]
    strict, loose = (_sources(slices, gaps, threads, is_strict) for is_strict in (True, False))
    found = np.where(strict >= 0, strict, np.where(is_start[gaps], loose, -1))
    if step.max(initial=-1) > 0:
        found = _vote(timeline, slices, gaps, found, loose, step, leave_out)
    use = found >= 0
    confidence = np.where(strict[use] >= 0, 0.9, 0.6)
    return Handoffs(gaps[use], found[use], confidence)


def _thread(slices: HostSlices, rows: slice) -> _Thread:
    index = np.arange(rows.start, rows.stop)
    index = index[(slices.part[rows] != GAP) & (slices.part[rows] != START)]
    start, end = slices.start_ns[index], slices.end_ns[index]
    begins = np.append(True, start[1:] - end[:-1] > LONG_GAP_NS)[: len(index)]
    burst = np.cumsum(begins) - 1
    ends = np.append(begins[1:], True)[: len(index)]
    return _Thread(index, start, end, start[begins][burst], end[ends][burst])


def _sources(slices: HostSlices, gaps: Ints, threads: dict[int, _Thread], is_strict: bool) -> Ints:
    """For each gap the slice of another thread whose end explains it, -1 for none."""
    best, best_end = np.full(len(gaps), -1, np.int64), np.full(len(gaps), NEVER_NS)
    begin, until = slices.start_ns[gaps], slices.end_ns[gaps]
    is_start = slices.part[gaps] == START
    for lane, thread in threads.items():
        if not len(thread.index):
            continue
        at = np.searchsorted(thread.end, until, side="right") - 1
        ok = (at >= 0) & (slices.lane[gaps] != lane)
        at = np.maximum(at, 0)
        end = thread.end[at]
        ok &= is_start | (end > begin)
        if is_strict:
            following = np.minimum(at + 1, len(thread.index) - 1)
            is_idle = (following == at) | (thread.start[following] >= until)
            inside = np.minimum(thread.burst_end[at], until) - np.maximum(thread.burst_start[at], begin)
            length = thread.burst_end[at] - thread.burst_start[at]
            ok &= is_idle | (inside >= _MOST_OF_A_BURST * length)
        better = ok & (end > best_end)
        best[better], best_end[better] = thread.index[at[better]], end[better]
    return best


def _vote(
    timeline: Timeline, slices: HostSlices, gaps: Ints, found: Ints, loose: Ints, step: Ints, leave_out: int | None
) -> Ints:
    """Let the majority of steps decide for each call site: the event after a gap, and which one of its name it is."""
    sites: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    seen: dict[tuple[int, int, int], int] = defaultdict(int)
    after = np.minimum(gaps + 1, len(slices) - 1)
    names = timeline.events["name"][slices.event[after]]
    for at, (gap, name) in enumerate(zip(gaps.tolist(), names.tolist(), strict=True)):
        if step[gap] < 0:
            continue
        count = (int(slices.lane[gap]), int(step[gap]), name)
        sites[count[0], name, seen[count]].append(at)
        seen[count] += 1
    result = found.copy()
    for members in sites.values():
        voters = [at for at in members if step[gaps[at]] != leave_out]
        if not voters:
            result[members] = -1
            continue
        in_favor = sum(found[at] >= 0 for at in voters) > len(voters) / 2
        for at in members:
            result[at] = (found[at] if found[at] >= 0 else loose[at]) if in_favor else -1
    return result


def launching_lanes(slices: HostSlices, threads: Ints) -> set[int]:
    """Threads that launch device work; without any, all threads with slices."""
    found = set((np.flatnonzero(np.bincount(threads + 1, minlength=1)[1:])).tolist())
    return found or {lane for lane, _ in slices.lanes()}
