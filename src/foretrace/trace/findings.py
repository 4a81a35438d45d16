"""`Finding`: what a check says of a trace, and `Rule`: why it says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foretrace.trace.reading import ReadReport


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that can be wrong with a trace.

    Attributes:
        name: in kebab case, as users see it.
        reason: what is wrong, and what comes of it.
        remedy: what to do about it; for a rule that ``--repair`` knows, what that does.
        is_repairable: whether ``--repair`` can mend it at all.
    """

    name: str
    reason: str
    remedy: str
    is_repairable: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule that a file breaks.

    Attributes:
        count: how often.
        example: the first place: file, node, value.
        repairable: whether a repair mends all of these.
    """

    rule: Rule
    count: int
    example: str
    repairable: bool

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "rule": self.rule.name,
            "count": self.count,
            "example": self.example,
            "repairable": self.repairable,
            "reason": self.rule.reason,
            "remedy": self.rule.remedy,
        }


def by_name(*rules: Rule) -> dict[str, Rule]:
    """Rules by their names."""
    return {rule.name: rule for rule in rules}


DAMAGED = Rule(
    "damaged-file",
    "Parts of the file could not be read as they stand (a cut, broken messages, text that is no UTF-8): what follows "
    "was left out or mended while reading.",
    "Get the file again. A repair writes a Chakra file anew with all that could be read; what is lost stays lost.",
    is_repairable=True,
)


def damage(report: ReadReport, can_be_written: bool = False) -> list[Finding]:
    """What the reader had to mend or leave out, as one finding."""
    counts = report.repaired + report.dropped
    if not counts:
        return []
    reason = next(iter(counts))
    place = f" ({report.examples[reason]})" if reason in report.examples else ""
    more = f", and {len(counts) - 1} further reasons" if len(counts) > 1 else ""
    example = f"{report.path}: {reason}{place}{more}"
    return [Finding(DAMAGED, sum(counts.values()), example, can_be_written)]
