"""What changed between two runs: kernels, operators and phases that appeared, vanished, grew or shrank."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from foretrace.analyze.breakdown import PARTS, breakdown, breakdown_by_step
from foretrace.analyze.idle import idle_causes
from foretrace.analyze.kernels import kernels
from foretrace.analyze.operators import operators
from foretrace.analyze.tables import FLOAT, INT, TEXT, table_of
from foretrace.trace import Category, Job
from foretrace.trace.steps import profiler_steps

if TYPE_CHECKING:
    import pyarrow as pa

_Sums = dict[tuple[str, str], tuple[float, float]]
SAME_PCT = 1.0  # a change of less is called the same


def diff(before: Job, after: Job) -> pa.Table:
    """Compare two jobs, largest change first within each kind.

    Counts and times are means over the ranks. Where both jobs have profiler steps they are means per step as well
    (``unit`` says "per step", else "whole trace"), so that runs of different length compare.

    Columns: kind (kernel, operator by self time, phase), name, unit, before_count, after_count, before_ns,
    after_ns, delta_ns, ratio (null for what appeared), change (appeared, vanished, grew, shrank, same; a change of
    less than 1 % of the time is the same).
    """
    per_step = min(_steps_per_rank(before), _steps_per_rank(after)) > 0
    old, new = _sums(before, per_step), _sums(after, per_step)
    unit = "per step" if per_step else "whole trace"
    rows: list[tuple[Any, ...]] = []
    for key in old.keys() | new.keys():
        count_before, before_ns = old.get(key, (0.0, 0.0))
        count_after, after_ns = new.get(key, (0.0, 0.0))
        ratio = after_ns / before_ns if before_ns else None
        change = _change(key in old, key in new, before_ns, after_ns)
        values = (count_before, count_after, round(before_ns), round(after_ns), round(after_ns - before_ns))
        rows.append((*key, unit, *values, ratio, change))
    rows.sort(key=lambda row: (_KINDS.index(row[0]), -abs(row[7]), row[1]))
    schema = {"kind": TEXT, "name": TEXT, "unit": TEXT, "before_count": FLOAT, "after_count": FLOAT}
    schema |= {"before_ns": INT, "after_ns": INT, "delta_ns": INT, "ratio": FLOAT, "change": TEXT}
    return table_of(schema, rows)


_KINDS = ("phase", "kernel", "operator")


def _change(was: bool, now: bool, before_ns: float, after_ns: float) -> str:
    if not was or not now:
        return "appeared" if now else "vanished"
    if abs(after_ns - before_ns) * 100 < SAME_PCT * max(before_ns, after_ns) or before_ns == after_ns:
        return "same"
    return "grew" if after_ns > before_ns else "shrank"


def _steps_per_rank(job: Job) -> float:
    counts = [len(profiler_steps(timeline).number) for timeline in job]
    return sum(counts) / len(counts) if counts and all(counts) else 0.0


def _sums(job: Job, per_step: bool) -> _Sums:
    """(count, ns) of every kernel, operator and phase, per rank and, if asked, per step."""
    totals: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in kernels(job).to_pylist():
        _add(totals, "kernel", row["name"], row["count"], row["total_ns"])
    for row in operators(job).to_pylist():
        _add(totals, "operator", row["name"], row["count"], row["self_ns"])
    for timeline in job:
        rows = timeline.rows(Category.ANNOTATION)
        for name, duration in zip(timeline.names(rows), timeline.duration_ns[rows].tolist(), strict=True):
            if not name.startswith("ProfilerStep"):
                _add(totals, "phase", f"annotation {name}", 1, duration)
    table = breakdown_by_step(job) if per_step else breakdown(job)
    for part in (*PARTS, "span_ns"):
        values = np.array(table[part].to_pylist())
        _add(totals, "phase", part.removesuffix("_ns").replace("_", " "), len(values), float(values.sum()))
    for row in idle_causes(job).to_pylist():
        if (row["step"] >= 0) == per_step and row["idle_ns"]:
            _add(totals, "phase", f"idle: {row['cause'].replace('_', ' ')}", 1, row["idle_ns"])
    share = len(job) * (_steps_per_rank(job) if per_step else 1.0)
    return {key: (count / share, total / share) for key, (count, total) in totals.items()}


def _add(totals: dict[tuple[str, str], list[float]], kind: str, name: str, count: float, total: float) -> None:
    entry = totals[kind, name]
    entry[0] += count
    entry[1] += total
