"""What simulate, critical-path and validate print."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from foretrace.cli.show import new_table, out, short
from foretrace.report.summary import PART_LABELS, milliseconds
from foretrace.report.validation import step_errors


def simulation(document: dict[str, Any], findings: list[str]) -> None:
    """Findings, steps, and what the graph consists of."""
    _say(findings)
    table = new_table("Steps", "rank", "step", "measured", "simulated", "error", "copied share")
    for rank in document["ranks"]:
        share = "" if rank["copied_share"] is None else f"{rank['copied_share']:.1%}"
        for at, step in enumerate(rank["steps"]):
            label = "" if at else str(rank["rank"])
            measured = "" if step["measured_ns"] is None else milliseconds(step["measured_ns"])
            error = "" if step["error_pct"] is None else f"{step['error_pct']:+.2f} %"
            row = (measured, milliseconds(step["simulated_ns"]), error)
            table.add_row(label, str(step["step"]), *row, "" if at else share)
    out.print(table)
    edges = new_table("Edges", "kind", "recorded", "inferred")
    recorded, inferred = document["edges"]["recorded"], document["edges"]["inferred"]
    for kind in dict.fromkeys((*recorded, *inferred)):
        edges.add_row(kind.replace("_", " "), f"{recorded.get(kind, 0):,}", f"{inferred.get(kind, 0):,}")
    out.print(edges)
    for note, count in document["notes"].items():
        out.print(f"  {escape(note)}: {count:,}", highlight=False)


def critical_path(document: dict[str, Any], findings: list[str]) -> None:
    """Findings, composition, and what would shorten the path."""
    _say(findings)
    for by, rows in document["composition"].items():
        if len(rows) > 1 or by == "kind":
            _composition(f"On the critical path, by {by}", rows)
    for title, rows in (("What would shorten it", document["improvements"]), ("Stragglers", document["stragglers"])):
        if rows:
            table = new_table(title, "what", "tasks", "time", "change")
            for row in rows:
                time, change = milliseconds(row["after_ns"]), f"{row['change_pct']:+.2f} %"
                table.add_row(escape(short(row["what"])), f"{row['tasks']:,}", time, change)
            out.print(table)


def _composition(title: str, rows: list[dict[str, Any]]) -> None:
    table = new_table(title, "name", "time", "share", "segments")
    for row in rows:
        name = escape(short(row["name"]))
        table.add_row(name, milliseconds(row["time_ns"]), f"{row['share_pct']:.1f} %", f"{row['count']:,}")
    out.print(table)


def validation(document: dict[str, Any]) -> None:
    """Every part of a validation, and why a part is missing."""
    found = document["reproduction"]
    table = new_table("Mean absolute error of a step", "how", "error")
    for row in step_errors(document):
        table.add_row(row["how"], _pct(row["error_pct"]))
    out.print(table)
    parts = new_table("Breakdown, simulated less measured", "part", "of the step")
    for name, row in found["parts"].items():
        parts.add_row(PART_LABELS[f"{name}_ns"], f"{row['error_pct_of_step']:+.2f} %")
    out.print(parts)
    shares = [rank["copied_share"] for rank in found["ranks"] if rank["copied_share"] is not None]
    if shares:
        out.print(f"Copied share of the critical path: {min(shares):.1%} to {max(shares):.1%}", highlight=False)
    waits = document["event_waits"]
    line = f"Event waits: {waits['recorded']} recorded, {waits['inferred']} inferred"
    if waits["contradicted_pct"] is not None:
        line += f", {waits['contradicted_pct']:.1f} % contradicted by held-out steps"
    out.print(line, highlight=False)
    for edge in waits["recorded_edges"]:
        how = "found" if edge["found"] else "missed"
        out.print(f"  {how} without the record: {escape(edge['source'])} -> {escape(edge['target'])}", highlight=False)
    for name in ("cross_step", "leave_one_rank_out", "event_waits"):
        if reason := document[name].get("reason"):
            out.print(f"{name.replace('_', ' ')}: not applicable, {reason}", highlight=False)


def _pct(error: float | None) -> str:
    return "not applicable" if error is None else f"{error:.2f} %"


def _say(findings: list[str]) -> None:
    for sentence in findings:
        out.print(f"• {escape(sentence)}", highlight=False)
