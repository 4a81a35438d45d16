"""The page of ``foretrace validate --html``."""

from __future__ import annotations

from typing import Any

from foretrace.report.page import Page
from foretrace.report.summary import PART_LABELS


def validation_page(document: dict[str, Any]) -> str:
    """Errors of the simulation and of what one would do without it, on one picture, and the tables behind it.

    Args:
        document: what `foretrace.estimate.validate` found.
    """
    page = Page()
    rows = step_errors(document)
    shown = [row for row in rows if row["error_pct"] is not None]
    bar = {
        "type": "bar",
        "orientation": "h",
        "y": [row["how"] for row in shown],
        "x": [row["error_pct"] for row in shown],
    }
    axis = {"autorange": "reversed", "automargin": True}
    layout = {
        "height": 110 + 30 * len(shown),
        "yaxis": axis,
        "xaxis": {"title": {"text": "mean absolute error of a step, %"}},
    }
    note = "A small reproduction error alone proves nothing: copying everything reproduces any run."
    page.plot("How far off", ([{**bar, "marker": {"color": "#3b78b5"}}], layout), note=note)
    page.table("Errors", rows, ("how", "error_pct", "reason"))
    ranks = document["reproduction"]["ranks"]
    page.table("Ranks", ranks, ("rank", "measured_ns", "simulated_ns", "error_pct", "copied_share", "unexplained_ns"))
    parts = [{"part": PART_LABELS[f"{name}_ns"], **row} for name, row in document["reproduction"]["parts"].items()]
    page.table("Breakdown", parts, ("part", "measured_ns", "simulated_ns", "error_pct_of_step"))
    columns = ("rank", "step", "measured_ns", "full_ns", "edges_only_pct", "full_pct", "mean_of_others_pct")
    page.table("Each step from the others", document["cross_step"].get("steps") or [], columns)
    page.table(
        "Each rank from the others",
        document["leave_one_rank_out"]["ranks"] or [],
        ("rank", "error_pct", "mean_of_others_pct", "tasks_without_counterpart"),
    )
    edges = [{**edge, "found": "yes" if edge["found"] else "no"} for edge in document["event_waits"]["recorded_edges"]]
    page.table("Recorded event waits", edges, ("rank", "source", "target", "slack_ns", "found"))
    return page.render("How far to trust the simulation", f"{len(ranks)} rank(s)")


def step_errors(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Mean absolute errors of a step: ``how``, ``error_pct`` (None where it does not apply) and then the ``reason``."""
    cross, ranks = document["cross_step"], document["leave_one_rank_out"]
    baselines = document["baselines"]
    rows = [("this simulation, reproducing the measurement", document["reproduction"]["mean_abs_error_pct"], "")]
    rows += [
        (name.replace("_", " "), error, baselines.get(f"{name}_reason", ""))
        for name, error in baselines.items()
        if not name.endswith("_reason")
    ]
    rows.append(("edges of the other steps, durations of this one", cross["edges_only_pct"], cross.get("reason", "")))
    rows.append(("edges and durations of the other steps", cross["full_pct"], cross.get("reason", "")))
    rows.append(("mean of the other steps (no model)", cross["mean_of_others_pct"], cross.get("reason", "")))
    rows.append(
        ("a rank from the mean of the other ranks, coupled", ranks["mean_abs_error_pct"], ranks.get("reason", ""))
    )
    return [{"how": how, "error_pct": error, "reason": reason} for how, error, reason in rows]
