"""Traces that contradict themselves: edges that would make tasks wait for each other are dropped, and counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from foretrace.link.device import ROUNDING_NS, Flags, Ints
from foretrace.link.sorting import source_order
from foretrace.trace import EdgeKind, ExecutionGraph
from foretrace.trace.graph import offsets
from foretrace.trace.topology import topological_order


def without_cycles(graph: ExecutionGraph) -> ExecutionGraph:
    """The graph without edges that close a cycle; ``notes`` say how many were dropped.

    Recorded ids and times of a sound trace cannot do that, but clocks of host and device differ, ids are used twice,
    events are lost. Of the edges among tasks that can never start, those go first that the measured times contradict,
    then inferred ones, then all but the order of threads and streams, which cannot close a cycle alone.
    """
    for rule in (_contradicted, _inferred, _all):
        stuck = _stuck_tasks(graph)
        if not stuck.any():
            return graph
        source, target = graph.edges["source"], graph.edges["target"]
        drop = stuck[source] & stuck[target] & (graph.edges["kind"] != EdgeKind.ORDER) & rule(graph)
        waits = graph.waits
        drop_waits = stuck[waits["task"]] & stuck[waits["issue"]] & (rule is _all)
        graph.notes["dropped: edges that close a cycle"] += int(drop.sum() + drop_waits.sum())
        graph = replace(graph, edges=graph.edges.take(~drop), waits=waits.take(~drop_waits))
    return graph


def _contradicted(graph: ExecutionGraph) -> Flags:
    end = graph.tasks["measured_end_ns"][graph.edges["source"]]
    return np.asarray(end > graph.tasks["measured_start_ns"][graph.edges["target"]] + ROUNDING_NS)


def _inferred(graph: ExecutionGraph) -> Flags:
    return np.asarray(graph.edges["confidence"] < 1)


def _all(graph: ExecutionGraph) -> Flags:
    return np.ones(graph.num_edges, np.bool_)


def _stuck_tasks(graph: ExecutionGraph) -> Flags:
    """Tasks that can never start; blocking calls wait for what had been launched when they were made."""
    source, target = [graph.edges["source"]], [graph.edges["target"]]
    work, task = _measured_waits(graph)
    source += [work, graph.waits["issue"]]
    target += [task, graph.waits["task"]]
    all_sources, all_targets = np.concatenate(source), np.concatenate(target)
    count = graph.num_tasks
    order = source_order(all_sources, count)
    first_edge = offsets(all_sources, count)
    stuck = np.ones(count, np.bool_)
    stuck[topological_order(first_edge, all_targets[order], np.bincount(all_targets, minlength=count))] = False
    return stuck


def _measured_waits(graph: ExecutionGraph) -> tuple[Ints, Ints]:
    """For each wait the last work that was put on its stream before it in the measured run."""
    launched, waits, start = graph.launched, graph.waits, graph.tasks["measured_start_ns"]
    work = np.full(waits.num_rows, -1, np.int64)
    for lane in np.flatnonzero(np.bincount(waits["lane"])) if waits.num_rows else ():
        on = np.flatnonzero(launched["lane"] == lane)
        on = on[np.argsort(start[launched["issue"][on]], kind="stable")]
        mine = np.flatnonzero(waits["lane"] == lane)
        at = np.searchsorted(start[launched["issue"][on]], start[waits["issue"][mine]], side="right") - 1
        if len(on):
            place = np.maximum.accumulate(launched["position"][on])
            last = on[np.searchsorted(place, place[np.maximum(at, 0)])]
            work[mine] = np.where(at >= 0, launched["work"][last], -1)
    return work[work >= 0], waits["task"][work >= 0].astype(np.int64)
