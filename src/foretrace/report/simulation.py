"""What `foretrace simulate`, `critical-path` and `validate` know, as JSON-ready documents and as pages."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace import analyze
from foretrace.estimate.reproduction import part_errors, periods, reproduction, step_path
from foretrace.estimate.what_if import improvements, straggler_what_ifs, what_if_scaled
from foretrace.formats.chakra import ChakraTrace
from foretrace.formats.chakra.to_graph import to_graph
from foretrace.link import link
from foretrace.report.page import COLORS, Figure, Page
from foretrace.report.summary import PART_LABELS, milliseconds
from foretrace.simulate import Simulation, simulate
from foretrace.trace import ExecutionGraph, Job, LaneKind, TaskKind, Timeline
from foretrace.trace.classify import KernelKind
from foretrace.trace.steps import device_steps

_MOST_SLICES = 3_000
_KIND_COLORS = {"communication": COLORS["exposed_communication_ns"], "memory": COLORS["memory_ns"]}


def simulation_document(
    job: Job, factors: dict[str, float] | None = None, coupled: bool = True
) -> tuple[dict[str, Any], Simulation]:
    """The document of ``foretrace simulate --json``, and the simulation itself.

    Args:
        job: what to simulate.
        factors: see `foretrace.estimate.what_if_scaled`; answered beside the reproduction.
        coupled: see `foretrace.link.link`.
    """
    graph = link(job, coupled=coupled)
    simulation = simulate(graph)
    found = reproduction(job, simulation)
    parts = part_errors(job, simulation.job)
    return _document(graph, simulation, found, parts, job.all_warnings, factors), simulation


def chakra_document(
    traces: list[ChakraTrace],
    factors: dict[str, float] | None = None,
    dependencies: str = "data+ctrl",
    coupled: bool = True,
    warnings: dict[str, int] | None = None,
) -> tuple[dict[str, Any], Simulation]:
    """The same document of Chakra traces, which hold no measurement to compare with: what would be measured is None.

    Args:
        traces: one a rank.
        factors: as in `simulation_document`.
        dependencies: see `foretrace.formats.chakra.to_graph.to_graph`.
        coupled: let collectives wait for all their members.
        warnings: what reading noticed, counted.
    """
    graph = to_graph(traces, dependencies, coupled=coupled)
    simulation = simulate(graph)
    ranks = []
    for timeline in simulation.job:
        mine = graph.rank == timeline.rank
        steps = device_steps(timeline)
        path = step_path(simulation, timeline.rank) if len(steps.number) and mine.any() else None
        lengths = periods(steps).tolist()
        ranks.append(
            {
                "rank": timeline.rank,
                "finish_ns": int(simulation.end_ns[mine].max(initial=0)),
                "measured_ns": None,
                "simulated_ns": sum(lengths),
                "error_pct": None,
                "copied_share": path.copied_share if path else None,
                "unexplained_ns": int(graph.tasks["duration_ns"][mine & _is_unexplained(graph)].sum()),
                "steps": [
                    {"step": number, "measured_ns": None, "simulated_ns": length, "error_pct": None}
                    for number, length in zip(steps.number.tolist(), lengths, strict=True)
                ],
            }
        )
    found = {"ranks": ranks, "mean_abs_error_pct": None}
    parts = {
        name: {**part, **dict.fromkeys(("measured_ns", *(key for key in part if "pct" in key)))}
        for name, part in part_errors(simulation.job, simulation.job).items()
    }
    document = _document(graph, simulation, found, parts, warnings or {}, factors)
    return document | {"dependencies": dependencies}, simulation


def _is_unexplained(graph: ExecutionGraph) -> NDArray[np.bool_]:
    return np.asarray(graph.tasks["kind"] == TaskKind.UNEXPLAINED)


def _document(
    graph: ExecutionGraph,
    simulation: Simulation,
    found: dict[str, Any],
    parts: dict[str, Any],
    warnings: dict[str, int],
    factors: dict[str, float] | None,
) -> dict[str, Any]:
    counts = {kind.label: int((graph.tasks["kind"] == kind).sum()) for kind in TaskKind}
    times = {kind.label: int(graph.tasks["duration_ns"][graph.tasks["kind"] == kind].sum()) for kind in TaskKind}
    errors = [step["error_pct"] for rank in found["ranks"] for step in rank["steps"]]
    document = {
        "summary": {
            "ranks": len(graph.ranks),
            "finish_ns": simulation.finish_ns,
            "mean_abs_error_pct": found["mean_abs_error_pct"],
            "worst_step_error_pct": max((abs(error) for error in errors if error is not None), default=None),
            "coupled_collectives": graph.notes["coupled collectives"],
            "parts": parts,
        },
        "fidelity": "recorded",
        "ranks": found["ranks"],
        "mean_abs_error_pct": found["mean_abs_error_pct"],
        "tasks": graph.num_tasks,
        "edges": graph.count_edges(),
        "task_kinds": {kind: {"count": n, "time_ns": times[kind]} for kind, n in counts.items() if n},
        "notes": dict(graph.notes),
        "figures": graph.figures,
        "warnings": warnings,
    }
    if factors:
        document["what_if"] = what_if_scaled(graph, factors, baseline=simulation).to_dict()
    return document


def critical_path_document(
    job: Job, rank: int | None = None, step: int | None = None, top: int = 15
) -> tuple[dict[str, Any], Simulation]:
    """The document of ``foretrace critical-path --json``, and the simulation that it is about.

    Args:
        job: what to look at.
        rank: whose end the path leads to; by default the rank whose device ends last.
        step: number of the step as the trace has it; by default all steps of the rank.
        top: rows of each composition.

    Raises:
        ValueError: if there is no such rank or step.
    """
    graph = link(job)
    if not graph.num_tasks:
        raise ValueError("there is no work in these traces whose path could be followed")
    simulation = simulate(graph)
    if rank is None:
        ends = {r: int(simulation.end_ns[graph.rank == r].max(initial=0)) for r in graph.ranks}
        rank = max(ends, key=lambda r: (ends[r], -r), default=-1)
    if rank not in graph.ranks:
        raise ValueError(f"there is no rank {rank}; present are {graph.ranks}")
    steps = device_steps(simulation.job.rank(rank))
    numbers = steps.number.tolist()
    if step is not None and step not in numbers:
        raise ValueError(f"rank {rank} has no step {step}; it has {numbers}")
    path = step_path(simulation, rank, None if step is None else numbers.index(step))
    on_path = path.task >= 0
    tried = improvements(graph, path.task[on_path], path.duration_ns[on_path], simulation)
    rows = analyze.stragglers(job).to_pylist() if len(job) > 1 else []
    caused = {row["rank"]: row["waiting_caused_ns"] for row in rows}
    named = sorted(row["rank"] for row in rows if row["is_straggler"])
    slack = analyze.slack(simulation.resolved, simulation.start_ns, simulation.end_ns)
    composition = {by: path.composition(by).to_pylist() for by in ("kind", "kernel", "layer", "rank", "operator")}
    document = {
        "length_ns": path.length_ns,
        "rank": rank,
        "step": step,
        "steps": numbers,
        "segments": len(path.task),
        "copied_share": path.copied_share,
        "unexplained_ns": path.unexplained_ns,
        "composition": {by: rows[:top] if by != "kind" else rows for by, rows in composition.items()},
        "improvements": [one.to_dict() for one in tried],
        "stragglers": [one.to_dict() for one in straggler_what_ifs(graph, caused, named, simulation)],
        "anomalies": sum(one.is_anomaly for one in tried),
        "tasks": graph.num_tasks,
        "tasks_without_slack": int((slack == 0).sum()),
        "warnings": job.all_warnings,
    }
    return document, simulation


def simulation_page(job: Job, document: dict[str, Any], simulation: Simulation) -> str:
    """The page of ``foretrace simulate --html``: measured and simulated side by side."""
    page = Page()
    page.findings(simulation_findings(document))
    is_measured = document["mean_abs_error_pct"] is not None
    timeline = max(job, key=lambda one: len(one.device_rows))
    other = simulation.job.rank(timeline.rank)
    steps, simulated = device_steps(timeline), device_steps(other)
    if len(steps.number) and is_measured:
        at = len(steps.number) // 2
        figure = _side_by_side(timeline, other, (steps, simulated), at)
        note = f"Rank {timeline.rank}, {steps.name[at]}; both begin at 0. The longest {_MOST_SLICES:,} slices at most."
        page.plot("Measured and simulated", figure, note=note)
    steps_rows = [{"rank": rank["rank"], **step} for rank in document["ranks"] for step in rank["steps"]]
    page.table("Steps", steps_rows, ("rank", "step", "measured_ns", "simulated_ns", "error_pct"))
    parts = [{"part": PART_LABELS[f"{name}_ns"], **row} for name, row in document["summary"]["parts"].items()]
    page.plot("Breakdown, all steps and ranks", _part_bars(parts))
    page.table("Breakdown errors", parts, ("part", "measured_ns", "simulated_ns", "error_pct_of_step"))
    kinds = [{"kind": name.replace("_", " "), **row} for name, row in document["task_kinds"].items()]
    page.table(
        "Tasks", kinds, ("kind", "count", "time_ns"), note="Time of all tasks of a kind, on the critical path or not."
    )
    edges = [
        {"edge": kind.replace("_", " "), "known": how, "count": n}
        for how, by in document["edges"].items()
        for kind, n in by.items()
    ]
    page.table("Edges", edges, ("edge", "known", "count"))
    notes = [{"what": what, "count": count} for what, count in {**document["notes"], **document["warnings"]}.items()]
    page.table("Found, inferred, repaired or odd", notes, ("what", "count"))
    page.add("Definitions", f"<p>{_DEFINITIONS}</p>")
    return page.render("Simulated against measured", f"{len(job)} rank(s)")


_DEFINITIONS = """The simulation runs the measured tasks again from their dependencies alone. That it reproduces the
measurement does not prove that it predicts a change: see the copied share, the part of the critical path that was taken
from the measurement (host gaps, hand-offs, blocked time, collectives whose peers are absent, work that the trace lacks,
unexplained delays) rather than derived, and <code>foretrace validate</code>."""


def simulation_findings(document: dict[str, Any]) -> list[str]:
    """What a reader should know first."""
    error, worst = document["mean_abs_error_pct"], document["summary"]["worst_step_error_pct"]
    is_measured = any(rank["measured_ns"] is not None for rank in document["ranks"])
    if error is None and (is_measured or not document["ranks"]):
        return ["There is nothing to simulate in these traces."]
    shares = [rank["copied_share"] for rank in document["ranks"] if rank["copied_share"] is not None]
    if error is None:
        lines = [
            f"The job takes {milliseconds(document['summary']['finish_ns'])} with the durations that the files hold; "
            "they hold no measured run to compare with."
        ]
    else:
        lines = [f"Simulated steps differ from the measured ones by {error:.2f} % on average, {worst:.2f} % at most."]
    if shares:
        span = (
            f"{100 * min(shares):.0f} %"
            if len(shares) == 1
            else f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %"
        )
        lines.append(f"{span} of the critical path was copied from the measurement, not derived.")
        if max(shares) > 0.5:
            lines.append(
                "With so much copied the reproduction is right by construction; a prediction from it is worth little."
            )
    whole = "measured_ns" if is_measured else "simulated_ns"
    unexplained, measured = (sum(rank[name] for rank in document["ranks"]) for name in ("unexplained_ns", whole))
    if unexplained:
        lines.append(
            f"{milliseconds(unexplained)} of device delays have no cause that was found "
            f"({100 * unexplained / max(measured, 1):.2f} % of the time)."
        )
    if "what_if" in document:
        one = document["what_if"]
        lines.append(
            f"With {one['what']}: {milliseconds(one['after_ns'])} instead of {milliseconds(one['before_ns'])} "
            f"({one['change_pct']:+.1f} %)."
        )
        before, after = (sum(step[name] for step in one["steps"]) for name in ("before_ns", "after_ns"))
        if len(one["steps"]) > 1 and before:
            lines.append(f"Its steps take {100 * (after - before) / before:+.1f} % on average.")
        if one["is_anomaly"]:
            lines.append("An anomaly: faster work made the job slower, as lanes that run by priority can do.")
    return lines


def _side_by_side(timeline: Timeline, simulated: Timeline, steps: tuple[Any, Any], at: int) -> Figure:
    """Device work of one step as bars by stream, the measured above the simulated."""
    begin, end = int(steps[0].start_ns[at]), int(steps[0].end_ns[at])
    rows = timeline.device_rows
    rows = rows[(timeline.end_ns[rows] > begin) & (timeline.start_ns[rows] < end)]
    rows = rows[np.argsort(-timeline.duration_ns[rows], kind="stable")[:_MOST_SLICES]]
    lanes = sorted({int(lane) for lane in timeline.events["lane"][rows].tolist()})
    labels = {lane: timeline.lanes[lane].label for lane in lanes if timeline.lanes[lane].kind is LaneKind.DEVICE_STREAM}
    kinds = [KernelKind(kind).label for kind in timeline.kernel_kind[rows].tolist()]
    groups = {"compute": COLORS["exposed_compute_ns"], **_KIND_COLORS}
    data = []
    names = [name[:60] for name in timeline.names(rows)]
    for group, color in groups.items():
        mine = [i for i, kind in enumerate(kinds) if (kind if kind in _KIND_COLORS else "compute") == group]
        y, base, length, text = [], [], [], []
        for which, (one, step) in {"measured": (timeline, steps[0]), "simulated": (simulated, steps[1])}.items():
            zero = int(step.start_ns[at])
            for i in mine:
                row = int(rows[i])
                y.append(f"{labels.get(int(timeline.events['lane'][row]), 'other')}, {which}")
                base.append((int(one.start_ns[row]) - zero) / 1e6)
                length.append(int(one.duration_ns[row]) / 1e6)
                text.append(names[i].replace("<", "&lt;"))
        hover = "%{customdata}<br>%{base:.3f} ms, %{x:.3f} ms long<extra></extra>"
        data.append(
            {"type": "bar", "orientation": "h", "name": group, "y": y, "x": length, "base": base, "customdata": text}
            | {"marker": {"color": color}, "hovertemplate": hover}
        )
    order = [f"{labels[lane]}, {which}" for lane in labels for which in ("measured", "simulated")]
    axis = {"autorange": "reversed", "type": "category", "categoryorder": "array", "categoryarray": order}
    layout = {"barmode": "overlay", "height": 140 + 34 * len(order), "yaxis": {**axis, "automargin": True}}
    return data, {**layout, "xaxis": {"title": {"text": "ms"}}, "bargap": 0.15}


def _part_bars(parts: list[dict[str, Any]]) -> Figure:
    shown = [way for way in ("measured", "simulated") if all(part[f"{way}_ns"] is not None for part in parts)]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": part["part"],
            "y": shown,
            "x": [part[f"{way}_ns"] / 1e6 for way in shown],
            "marker": {"color": COLORS[next(key for key, label in PART_LABELS.items() if label == part["part"])]},
        }
        for part in parts
    ]
    axis = {"autorange": "reversed", "automargin": True}
    return data, {"barmode": "stack", "height": 220, "yaxis": axis, "xaxis": {"title": {"text": "ms"}}}


def critical_path_page(document: dict[str, Any]) -> str:
    """The page of ``foretrace critical-path --html``."""
    page = Page()
    page.findings(critical_path_findings(document))
    kinds = document["composition"]["kind"]
    bar = {
        "type": "bar",
        "orientation": "h",
        "y": [row["name"] for row in kinds],
        "x": [row["time_ns"] / 1e6 for row in kinds],
    }
    axis = {"autorange": "reversed", "automargin": True}
    layout = {"height": 90 + 26 * len(kinds), "yaxis": axis, "xaxis": {"title": {"text": "ms on the critical path"}}}
    page.plot("What the path consists of", ([{**bar, "marker": {"color": "#3b78b5"}}], layout))
    columns = ("what", "tasks", "after_ns", "gain_ns", "change_pct")
    page.table("What would shorten it", document["improvements"], columns, note="By simulation, one change at a time.")
    page.table("Stragglers", document["stragglers"], columns, note="What fixing the hosts of these ranks would gain.")
    for by in ("kernel", "layer", "operator", "rank"):
        page.table(f"By {by}", document["composition"][by], ("name", "time_ns", "share_pct", "count"))
    return page.render("The critical path", f"rank {document['rank']}, {_covered(document)}")


def _covered(document: dict[str, Any]) -> str:
    return "all steps" if document["step"] is None else f"step {document['step']}"


def critical_path_findings(document: dict[str, Any]) -> list[str]:
    """What a reader should know first."""
    top = document["composition"]["kind"][:3]
    parts = ", ".join(f"{row['name']} {row['share_pct']:.0f} %" for row in top)
    lines = [
        f"The critical path of rank {document['rank']}, {_covered(document)}, is "
        f"{milliseconds(document['length_ns'])} long: {parts}."
    ]
    lines.append(f"{100 * document['copied_share']:.0f} % of it was copied from the measurement, not derived.")
    best = document["improvements"][0] if document["improvements"] else None
    if best and best["gain_ns"] > 0:
        lines.append(f"Best single change tried: {best['what'][:80]}, {best['change_pct']:+.1f} %.")
    if document["anomalies"]:
        lines.append(
            f"{document['anomalies']} of the changes made the job slower, as lanes that run by priority can do."
        )
    for one in document["stragglers"]:
        lines.append(f"{one['what'][0].upper()}{one['what'][1:]}: {one['change_pct']:+.1f} %.")
    return lines


__all__ = [
    "critical_path_document",
    "critical_path_findings",
    "critical_path_page",
    "simulation_document",
    "simulation_findings",
    "simulation_page",
]
