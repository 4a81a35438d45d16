"""What a capture without hardware made up or left out, counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class FakeReport:
    """Counts by reason.

    Attributes:
        invented: values that no tensor held and that the script was given anyway, e.g. ``{"item() of float32": 4}``.
        skipped: calls that did nothing, e.g. ``{"torch.save": 1}``.
        noted: what else the reader of the trace should know.
    """

    invented: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)

    def invent(self, what: str) -> None:
        """Count a value that was made up."""
        self.invented[what] += 1

    def skip(self, what: str) -> None:
        """Count a call that did nothing."""
        self.skipped[what] += 1

    def note(self, what: str) -> None:
        """Count anything else."""
        self.noted[what] += 1

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {"invented": dict(self.invented), "skipped": dict(self.skipped), "noted": dict(self.noted)}
