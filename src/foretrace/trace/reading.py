"""What reading a file may say: a format error, or a report of all that was repaired, dropped or guessed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


class FormatError(ValueError):
    """A file that cannot be read. The message is one line: the file, the place, and what to do about it."""

    def __init__(self, path: str, problem: str, remedy: str) -> None:
        message = f"{path}: {problem}; {remedy}"
        # Text out of a damaged file may hold anything; the message stays one printable line.
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in message))
        self.path = path
        self.problem = problem
        self.remedy = remedy


@dataclass(slots=True)
class ReadReport:
    """How one file was read.

    Attributes:
        path: the file, or ``archive!member``.
        kind: ``"kineto"`` or what else the file turned out to be.
        events: events by the category that the file gives them (``"(none)"`` where it gives none).
        phases: events by Chrome-trace phase (``X``, ``s``, ``f``, ``M``, ...).
        repaired, dropped, guessed: counts by reason, e.g. ``{"invalid UTF-8": 3}``.
        noted: counts of oddities that were left as they are, e.g. ``{"device work without a launch": 12}``.
        examples: the place of the first case of each reason.
    """

    path: str
    kind: str = "kineto"
    size_bytes: int = 0
    events: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    guessed: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def repair(self, reason: str, place: str = "", count: int = 1) -> None:
        """Count something that was mended."""
        self._count(self.repaired, reason, place, count)

    def drop(self, reason: str, place: str = "", count: int = 1) -> None:
        """Count something that was left out."""
        self._count(self.dropped, reason, place, count)

    def guess(self, reason: str, place: str = "", count: int = 1) -> None:
        """Count something that the file does not say and that was assumed."""
        self._count(self.guessed, reason, place, count)

    def note(self, reason: str, place: str = "", count: int = 1) -> None:
        """Count an oddity that was left as it is."""
        self._count(self.noted, reason, place, count)

    def _count(self, counter: Counter[str], reason: str, place: str, count: int) -> None:
        if count:
            counter[reason] += count
            if place:
                self.examples.setdefault(reason, place)

    @property
    def warnings(self) -> dict[str, int]:
        """All counts in one mapping, for ``--json`` and for a one-line summary."""
        return dict(self.repaired + self.dropped + self.guessed + self.noted)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; the inverse is `from_dict`."""
        return {
            "path": self.path,
            "kind": self.kind,
            "size_bytes": self.size_bytes,
            "events": dict(self.events),
            "phases": dict(self.phases),
            "repaired": dict(self.repaired),
            "dropped": dict(self.dropped),
            "guessed": dict(self.guessed),
            "noted": dict(self.noted),
            "examples": self.examples,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ReadReport:
        """Rebuild a report that `to_dict` wrote."""
        names = ("events", "phases", "repaired", "dropped", "guessed", "noted")
        counters = {name: Counter(data[name]) for name in names}
        return cls(data["path"], data["kind"], data["size_bytes"], **counters, examples=dict(data["examples"]))
