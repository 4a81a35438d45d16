"""The document of a simulated cluster, and what is worth saying of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretrace.report.summary import milliseconds
from foretrace.simulate.cluster import ClusterSimulation
from foretrace.trace import EdgeKind
from foretrace.trace.workload import WorkKind

MOST_RANKS = 1024  # above this the document lists ranks only on request


def cluster_document(
    simulation: ClusterSimulation, fidelity: str, per_rank: bool = False, warnings: dict[str, int] | None = None
) -> dict[str, Any]:
    """The document of ``foretrace simulate --network ... --json``.

    It has the keys that the simulation of traces has; what would be measured is None.

    Args:
        simulation: of what.
        fidelity: its name.
        per_rank: list the ranks of more than 1,024, too.
        warnings: what reading noticed, counted.
    """
    finish = simulation.finish_ns
    done = finish[finish >= 0]
    times = {"min": int(done.min()), "max": int(done.max()), "mean": float(done.mean())} if len(done) else None
    ranks = _ranks(simulation) if per_rank or len(finish) <= MOST_RANKS else []
    return {
        "summary": {
            "ranks": len(finish),
            "finished": len(done),
            "finish_ns": times or dict.fromkeys(("min", "max", "mean")),
            "mean_abs_error_pct": None,
            "worst_step_error_pct": None,
        },
        "fidelity": fidelity,
        "ranks": ranks,
        "deadlock": simulation.deadlock,
        "links": simulation.links(),
        "messages": simulation.outcome.messages,
        "mean_abs_error_pct": None,
        "tasks": simulation.workload.num_nodes,
        "edges": {"recorded": {EdgeKind.DATA.label: _edges(simulation)}, "inferred": {}},
        "task_kinds": _kinds(simulation),
        "notes": dict(simulation.workload.notes),
        "figures": {"programs": len(simulation.workload.programs), "simulated_ranks": _simulated(simulation)},
        "warnings": warnings or {},
    }


def _ranks(simulation: ClusterSimulation) -> list[dict[str, Any]]:
    unknown: dict[str, Any] = dict.fromkeys(("measured_ns", "error_pct", "copied_share"))
    rows = []
    exposed = simulation.exposed_communication_ns.tolist()
    for rank, (finish, rest) in enumerate(zip(simulation.finish_ns.tolist(), exposed, strict=True)):
        is_done = finish >= 0
        times = {"finish_ns": finish if is_done else None, "exposed_communication_ns": rest if is_done else None}
        rows.append({"rank": rank, **times, "simulated_ns": times["finish_ns"], **unknown, "steps": []})
    return rows


def _simulated(simulation: ClusterSimulation) -> int:
    represent = simulation.outcome.represent
    return simulation.workload.num_ranks if represent is None else len(set(represent.tolist()))


def _edges(simulation: ClusterSimulation) -> int:
    workload = simulation.workload
    counts = [len(program.dependency) for program in workload.programs]
    return sum(counts[program] for program in workload.program_of.tolist())


def _kinds(simulation: ClusterSimulation) -> dict[str, dict[str, int]]:
    """Nodes of all ranks by kind, and their time where they have one by themselves."""
    plan, workload = simulation.plan, simulation.workload
    counts: dict[str, dict[str, int]] = {}
    runs = [int((workload.program_of == index).sum()) for index in range(len(workload.programs))]
    for index, program in enumerate(workload.programs):
        time = plan.node_time[plan.first_node[index] : plan.first_node[index + 1]]
        for kind in WorkKind:
            mine = program.nodes["kind"] == kind
            if not mine.any():
                continue
            row = counts.setdefault(kind.label, {"count": 0, "time_ns": 0})
            row["count"] += int(mine.sum()) * runs[index]
            if kind in (WorkKind.COMPUTE, WorkKind.MEMORY):
                row["time_ns"] += int(time[mine].sum()) * runs[index]
    return counts


def jobs_of(simulation: ClusterSimulation, names: Sequence[Path]) -> list[dict[str, Any]]:
    """Where the ranks of each of several jobs are, and when its last one finishes (None: never)."""
    worlds = simulation.workload.groups[1:]
    rows = []
    first = 0
    for name in names:
        # The first group of a job holds its ranks.
        ranks = next(group.ranks for group in worlds if len(group.ranks) and group.ranks[0] == first)
        finish = simulation.finish_ns[ranks]
        last = None if (finish < 0).any() else int(finish.max())
        rows.append({"name": str(name), "first_rank": first, "ranks": len(ranks), "finish_ns": last})
        first += len(ranks)
    return rows


def cluster_findings(document: dict[str, Any]) -> list[str]:
    """What is worth saying, most important first."""
    summary = document["summary"]
    found = []
    if document["deadlock"]:
        found.append(document["deadlock"]["text"])
    if summary["finished"]:
        times = summary["finish_ns"]
        found.append(
            f"{summary['finished']:,} of {summary['ranks']:,} ranks finish, the last after "
            f"{milliseconds(times['max'])}, the first after {milliseconds(times['min'])}"
        )
    busy = max(document["links"], key=lambda row: row["utilization"], default=None)
    if busy:
        found.append(f"the busiest link is {busy['link']} of dimension {busy['dimension']}: {busy['utilization']:.0%}")
    return found
