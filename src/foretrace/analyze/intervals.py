"""Sets of half-open time intervals [start, end) as sorted, disjoint arrays, and how much of a span they cover."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Intervals:
    """Disjoint, ascending, non-empty intervals; ``start_ns`` and ``end_ns`` have one shape ``(n,)``."""

    start_ns: Times
    end_ns: Times

    @classmethod
    def union(cls, start_ns: Times, end_ns: Times) -> Intervals:
        """The union of any intervals, in any order; empty and reversed ones count as nothing."""
        real = end_ns > start_ns
        start_ns, end_ns = start_ns[real], end_ns[real]
        if not len(start_ns):
            return cls(np.empty(0, np.int64), np.empty(0, np.int64))
        order = np.argsort(start_ns, kind="stable")
        start_ns = start_ns[order]
        latest = np.maximum.accumulate(end_ns[order])
        begins = np.append(True, start_ns[1:] > latest[:-1])
        ends = np.append(begins[1:], True)
        return cls(start_ns[begins], latest[ends])

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def length_ns(self) -> int:
        """Total length."""
        return int((self.end_ns - self.start_ns).sum())

    def gaps_within(self, start_ns: int, end_ns: int) -> Intervals:
        """What is not covered between two times that no interval crosses."""
        return Intervals.union(np.append(start_ns, self.end_ns), np.append(self.start_ns, end_ns))

    def covered_before(self, time_ns: Times) -> Times:
        """How much of (-inf, time) is covered, for each time."""
        time_ns = np.asarray(time_ns, np.int64)
        total = np.append(0, np.cumsum(self.end_ns - self.start_ns))
        index = np.searchsorted(self.start_ns, time_ns, side="right")
        if not len(self):
            return np.zeros_like(time_ns)
        last = np.maximum(index - 1, 0)
        # The last interval that has begun may reach beyond the time.
        beyond = np.where(index > 0, np.maximum(self.end_ns[last] - time_ns, 0), 0)
        covered: Times = total[index] - beyond
        return covered

    def covered_within(self, start_ns: Times, end_ns: Times) -> Times:
        """How much of each window [start, end) is covered."""
        return self.covered_before(end_ns) - self.covered_before(start_ns)
