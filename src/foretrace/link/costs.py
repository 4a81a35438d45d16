"""What the operators behind a graph's tasks cost: FLOPs and bytes, at the device work that does them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from foretrace.link.operators import Join, join
from foretrace.machine import timeline_costs, trace_costs
from foretrace.trace import Category, ExecutionGraph, Table, TaskKind, Timeline
from foretrace.trace.graph import COST_COLUMNS, HOST_KINDS
from foretrace.trace.nesting import callers
from foretrace.trace.operators import OperatorTrace
from foretrace.trace.steps import operator_rows

Ints = NDArray[np.int64]

# Device work in several pieces is represented by the longest of these.
_WORK = (TaskKind.KERNEL, TaskKind.MEMCPY, TaskKind.MEMSET, TaskKind.COLLECTIVE, TaskKind.COLLECTIVE_ALONE)


def with_operators(
    graph: ExecutionGraph, operators: Mapping[int, OperatorTrace] | None = None
) -> tuple[ExecutionGraph, dict[int, Join]]:
    """The graph with the table ``costs`` filled, and by rank how its timeline was joined with an operator trace.

    Costs come from an operator trace where there is one for the rank, which knows lists of tensors too, else from the
    shapes in the timeline. An operator's cost stands at the longest piece of device work that it launched itself or
    through a callee without a cost of its own; the rest of its work costs 0. Copies and sets move their size.

    Raises:
        JoinError: if a timeline and the operator trace of its rank have nothing in common.
    """
    if graph.source is None:
        return graph, {}
    joins: dict[int, Join] = {}
    parts = []
    for timeline in graph.source:
        trace = (operators or {}).get(timeline.rank)
        if trace is not None:
            joins[timeline.rank] = join(timeline, trace)
        parts.append(_of_rank(graph, timeline, joins.get(timeline.rank)))
    columns = {name: np.concatenate([part[name] for part in parts]) for name in COST_COLUMNS} if parts else {}
    graph.costs = Table(columns) if columns else graph.costs
    return graph, joins


def _of_rank(graph: ExecutionGraph, timeline: Timeline, joined: Join | None) -> dict[str, Ints]:
    """The rows of one rank: a row for each host task of a joined operator, and one for each piece of device work."""
    tasks = np.flatnonzero((graph.rank == timeline.rank) & (graph.tasks["event"] >= 0))
    device = timeline.device_rows
    rows = np.sort(np.asarray(operator_rows(timeline), np.int64))
    parent, launcher = callers(timeline, rows, device)
    above = np.full(timeline.num_events + 1, -1, np.int64)
    above[rows] = parent
    cost = _event_costs(timeline, joined)
    owner = _owners(launcher, above, cost)
    of_work = _work_costs(timeline, device, owner, cost)
    place = np.full(timeline.num_events, -1, np.int64)
    place[device] = np.arange(len(device))
    node_of = joined.node if joined is not None else np.full(timeline.num_events, -1, np.int64)
    work_node = joined.work_node if joined is not None else np.full(len(device), -1, np.int64)
    kind, event = graph.tasks["kind"][tasks], graph.tasks["event"][tasks].astype(np.int64)
    host = _first_of_event(tasks, event, np.isin(kind, HOST_KINDS) & (node_of[event] >= 0))
    work = _longest_of_event(graph, tasks, event, np.isin(kind, _WORK) & (place[event] >= 0))
    at = place[graph.tasks["event"][work]]
    none = np.full(len(host), -1, np.int64)
    host_event = graph.tasks["event"][host].astype(np.int64)
    return {
        "task": np.concatenate((host, work)),
        "operator": np.concatenate((host_event, launcher[at])),
        "node": np.concatenate((node_of[host_event], work_node[at])),
        **{name: np.concatenate((none, column[at])) for name, column in of_work.items()},
    }


def _event_costs(timeline: Timeline, joined: Join | None) -> dict[str, Ints]:
    """FLOPs and bytes by event, -1 where unknown; one more entry answers for "no event"."""
    found = {name: np.full(timeline.num_events + 1, -1, np.int64) for name in ("flops", "read_bytes", "written_bytes")}
    tables = [(timeline_costs(timeline), np.arange(timeline.num_events), "event")]
    if joined is not None:
        tables.append((trace_costs(joined.trace), joined.event, "node"))
    for table, event_of, key in tables:
        event = event_of[table[key]] if table.num_rows else np.empty(0, np.int64)
        known = event >= 0
        for name, column in found.items():
            column[event[known]] = table[name][known]
    return found


def _owners(launcher: Ints, above: Ints, cost: dict[str, Ints]) -> Ints:
    """For each piece of work the innermost operator around its launch that is known to compute or move something."""
    real = (cost["flops"] > 0) | (cost["read_bytes"] + cost["written_bytes"] > 0)
    owner = launcher.copy()
    while len(open_ := np.flatnonzero((owner >= 0) & ~real[owner])):
        owner[open_] = above[owner[open_]]
    return owner


def _work_costs(timeline: Timeline, device: NDArray[np.intp], owner: Ints, cost: dict[str, Ints]) -> dict[str, Ints]:
    """The cost of each piece of device work."""
    category = timeline.category[device]
    found = {name: np.where(owner >= 0, 0, -1) for name in cost}
    kernels = np.flatnonzero((category == Category.KERNEL) & (owner >= 0))
    if not len(kernels):  # operators that only copy
        kernels = np.flatnonzero(owner >= 0)
    order = kernels[np.lexsort((-timeline.duration_ns[device[kernels]], owner[kernels]))]
    first = order[np.append(True, owner[order][1:] != owner[order][:-1])] if len(order) else order
    for name, column in found.items():
        column[first] = cost[name][owner[first]]
    sizes = np.full(timeline.num_events, -1, np.int64)
    if timeline.copies.num_rows:
        sizes[timeline.copies["event"]] = timeline.copies["size_bytes"]
    moved = np.isin(category, (Category.MEMCPY, Category.MEMSET)) & (sizes[device] >= 0)
    found["flops"][moved] = 0
    found["read_bytes"][moved] = np.where(category[moved] == Category.MEMCPY, sizes[device[moved]], 0)
    found["written_bytes"][moved] = sizes[device[moved]]
    return found


def _first_of_event(tasks: NDArray[np.intp], event: Ints, wanted: NDArray[np.bool_]) -> NDArray[np.intp]:
    """The first of the wanted tasks of each event."""
    rows = np.flatnonzero(wanted)
    _, first = np.unique(event[rows], return_index=True)
    return tasks[rows[np.sort(first)]]


def _longest_of_event(
    graph: ExecutionGraph, tasks: NDArray[np.intp], event: Ints, wanted: NDArray[np.bool_]
) -> NDArray[np.intp]:
    """The longest of the wanted tasks of each event."""
    rows = np.flatnonzero(wanted)
    order = rows[np.lexsort((-graph.tasks["duration_ns"][tasks[rows]], event[rows]))]
    first = order[np.append(True, event[order][1:] != event[order][:-1])] if len(order) else order
    return np.asarray(tasks[np.sort(first)])
