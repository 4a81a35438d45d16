"""`Job`: the timelines of all ranks of one run, and the process groups that they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from foretrace.trace.timeline import Timeline


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """A process group: its name, what it is for where recorded, its backend, and its ranks (empty if unknown)."""

    name: str
    description: str = ""
    backend: str = ""
    ranks: tuple[int, ...] = ()
    size: int = -1


@dataclass
class Job:
    """One timeline per rank, in order of rank.

    Attributes:
        timelines: sorted by rank; ranks are distinct.
        groups: process groups by name, merged over ranks.
        world_size: as recorded, else the number of timelines.
        warnings: counts of what concerns the job as a whole (e.g. ``"missing ranks"``).
    """

    timelines: list[Timeline]
    groups: dict[str, ProcessGroup] = field(default_factory=dict)
    world_size: int = 0
    warnings: Counter[str] = field(default_factory=Counter)

    def __iter__(self) -> Iterator[Timeline]:
        return iter(self.timelines)

    def __len__(self) -> int:
        return len(self.timelines)

    @property
    def ranks(self) -> list[int]:
        """The ranks that are present, ascending."""
        return [timeline.rank for timeline in self.timelines]

    def rank(self, rank: int) -> Timeline:
        """The timeline of one rank.

        Raises:
            KeyError: if that rank is not part of the job.
        """
        for timeline in self.timelines:
            if timeline.rank == rank:
                return timeline
        raise KeyError(f"rank {rank} is not in this job; present are {self.ranks}")

    @property
    def all_warnings(self) -> dict[str, int]:
        """Counts of all that was repaired, dropped or guessed, over all files and the job."""
        total = Counter(self.warnings)
        for timeline in self.timelines:
            total.update(timeline.report.warnings)
        return dict(total)
