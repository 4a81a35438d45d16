"""Which steps are recorded: windows of steps, and what to do in each step of the program."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

# Step 0 is unlike the others (allocation, lazy initialization), and one step shows how long a step takes unrecorded.
_STEPS_BEFORE = 2
_RANGE = re.compile(r"\s*(\d*)\s*:\s*(\d+)\s*")

Steps = int | str | range | Iterable[range] | None


class Action(Enum):
    """What the profiler does in a step."""

    REST = 0
    WARM_UP = 1
    RECORD = 2
    RECORD_LAST = 3  # and then write the files


@dataclass(frozen=True)
class Windows:
    """The steps to record: disjoint ranges in order; none for the whole block, however many steps it has.

    Attributes:
        ranges: half-open, not empty, apart from each other by at least one step.
        warmup: steps before each range in which the profiler already runs and what it sees is thrown away.
    """

    ranges: tuple[range, ...]
    warmup: int

    def action(self, step: int) -> Action:
        """What to do in this step."""
        if not self.ranges:
            return Action.RECORD
        for one in self.ranges:
            if step in one:
                return Action.RECORD_LAST if step == one[-1] else Action.RECORD
            if one.start - self.warmup <= step < one.start:
                return Action.WARM_UP
        return Action.REST

    def folder(self, step: int) -> str:
        """Name of the folder of the window that ``step`` lies in; empty where there is one window only."""
        if len(self.ranges) <= 1:
            return ""
        return next((f"steps-{one.start}-{one.stop}" for one in self.ranges if step in one), "")

    def __str__(self) -> str:
        return ",".join(f"{one.start}:{one.stop}" for one in self.ranges) or "all"


def parse_windows(steps: Steps, warmup: int = 1) -> Windows:
    """Windows from what a person writes.

    Args:
        steps: ``"3:5"`` for steps 3 and 4 (as Python slices count, from 0), ``"3:5,10:12"`` for two windows, a number
            for that many steps after step 0, one unrecorded step and the warm-up, ranges, or None (``"all"``) for
            everything.
        warmup: steps of warm-up before each window; fewer where the window begins earlier.

    Raises:
        ValueError: for anything else, for empty or overlapping windows, and for windows that touch.
    """
    if warmup < 0:
        raise ValueError(f"warmup is {warmup}; it is a number of steps")
    ranges = sorted(_ranges(steps, warmup), key=lambda one: one.start)
    for one in ranges:
        if not len(one) or one.step != 1 or one.start < 0:
            raise ValueError(f"steps {one.start}:{one.stop}:{one.step} is no window; write for example 3:5")
    for before, after in itertools.pairwise(ranges):
        if after.start <= before.stop:
            raise ValueError(f"steps {before.start}:{before.stop} and {after.start}:{after.stop} overlap or touch")
    return Windows(tuple(ranges), warmup)


def _ranges(steps: Steps, warmup: int) -> list[range]:
    if steps is None or steps == "all":
        return []
    if isinstance(steps, str):
        if not steps.strip().isdigit():
            return [_range(part) for part in steps.split(",")]
        steps = int(steps)
    if isinstance(steps, int):
        if steps < 1:
            raise ValueError(f"steps is {steps}; record at least one")
        return [range(_STEPS_BEFORE + warmup, _STEPS_BEFORE + warmup + steps)]
    if isinstance(steps, range):
        return [steps]
    ranges = list(steps)
    if not ranges or not all(isinstance(one, range) for one in ranges):
        raise ValueError("steps holds no ranges; write for example [range(3, 5), range(10, 12)]")
    return ranges


def _range(text: str) -> range:
    found = _RANGE.fullmatch(text)
    if not found:
        raise ValueError(f"steps {text!r} is no window; write for example 3:5 (steps 3 and 4)")
    return range(int(found[1] or 0), int(found[2]))
