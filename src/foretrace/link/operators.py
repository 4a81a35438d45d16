"""Join the timeline and the operator trace of one run: which event is which node, and whose the device work is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from foretrace.trace import Category, Timeline
from foretrace.trace.nesting import callers
from foretrace.trace.operators import OperatorTrace
from foretrace.trace.steps import operator_rows

Ints = NDArray[np.int64]

_ENOUGH = 0.9  # of the nodes must agree in name for ids to be believed
_RELATED = 0.6  # of the shorter side must agree in name and order; recorded traces of different programs reach 0.51
_MOST_PAIRS = 64  # a name that occurs more often says nothing of the distance between ids


class JoinError(ValueError):
    """A timeline and an operator trace that have nothing in common."""


@dataclass
class Join:
    """One rank's operators, and where they are in its timeline.

    Attributes:
        timeline, trace: what was joined.
        event: row of the timeline's events for each node, -1 for none, shape ``(num_nodes,)``.
        node: row of the trace's nodes for each event, -1, shape ``(num_events,)``.
        work_operator: for each of ``timeline.device_rows`` the event of the operator that launched it, -1.
        work_node: for each of ``timeline.device_rows`` the node of that operator, or of the innermost joined one
            around it, -1.
        joined: nodes by how they were joined.
        missing: nodes that were not joined, by reason.
        missing_work: device work without a node, by reason.
        guessed: what was assumed.
    """

    timeline: Timeline
    trace: OperatorTrace
    event: Ints
    node: Ints
    work_operator: Ints
    work_node: Ints
    joined: Counter[str] = field(default_factory=Counter)
    missing: Counter[str] = field(default_factory=Counter)
    missing_work: Counter[str] = field(default_factory=Counter)
    guessed: Counter[str] = field(default_factory=Counter)


def join(timeline: Timeline, trace: OperatorTrace) -> Join:
    """Find each node of the trace in the timeline.

    By record-function id where both have it; else by external id, which is the same number or one at a constant
    distance; what is then left by name and order on each thread.

    Raises:
        JoinError: if the two are of different runs: no node is in the timeline, or too few by name and order alone.
    """
    operators = np.asarray(operator_rows(timeline), np.int64)
    host = timeline.host_rows
    annotations = host[timeline.category[host] == Category.ANNOTATION]
    rows = np.concatenate((operators, annotations))
    rows = rows[np.lexsort((-timeline.end_ns[rows], timeline.start_ns[rows]))]
    names = _event_names(timeline, rows, trace)
    found = Join(
        timeline,
        trace,
        np.full(trace.num_nodes, -1, np.int64),
        np.full(timeline.num_events, -1, np.int64),
        np.empty(0, np.int64),
        np.empty(0, np.int64),
    )
    real = trace.nodes["record_function_id"] > 0
    real |= trace.nodes["scope"] != 7
    by_id, how = _by_ids(found, rows, names, real)
    found.event = by_id
    if how:
        found.joined[how] = int((by_id >= 0).sum())
    if (by_id[real] < 0).any():
        _by_order(found, rows, names, real)
    is_known = found.event >= 0
    joined, operators_of_trace = int(is_known.sum()), int(real.sum())
    if not joined or (not how and joined < _RELATED * min(operators_of_trace, len(rows))):
        raise JoinError(
            f"{timeline.report.path} and {trace.report.path}: {f'only {joined}' if joined else 'none'} of "
            f"{operators_of_trace} operators of the execution trace {'are' if joined > 1 else 'is'} among the "
            f"{len(rows)} of the Kineto trace; pass the two files of one run and one rank"
        )
    found.node[found.event[is_known]] = np.flatnonzero(is_known)
    _count_missing(found, rows, names, real)
    _hang_work(found, operators)
    return found


def _event_names(timeline: Timeline, rows: Ints, trace: OperatorTrace) -> Ints:
    """Names of the events as string ids of the trace, -1 for names that it lacks."""
    ids = timeline.events["name"][rows]
    used = np.flatnonzero(np.bincount(ids + 1, minlength=1)[1:])
    here = np.full(len(timeline.strings) + 1, -1, np.int64)
    here[used] = [trace.strings.find(text) for text in timeline.strings.lookup(used)]
    return here[ids]


def _by_ids(found: Join, rows: Ints, names: Ints, real: NDArray[np.bool_]) -> tuple[Ints, str]:
    """The best way in which ids agree: rows of events by node, and what it is; nothing if none is good enough."""
    timeline, trace = found.timeline, found.trace
    wanted, wanted_names = trace.nodes["record_function_id"], trace.nodes["name"]
    recorded = np.full(timeline.num_events, -1, np.int64)
    if timeline.operators.num_rows:
        recorded[timeline.operators["event"]] = timeline.operators["record_function_id"]
    best, best_how, best_count = np.full(trace.num_nodes, -1, np.int64), "", _ENOUGH * real.sum()
    for kind, ids in (("record-function id", recorded[rows]), ("external id", timeline.events["external_id"][rows])):
        for shift in dict.fromkeys((0, _shift(wanted[real], wanted_names[real], ids, names))):
            how = kind if not shift else f"{kind} less {shift}"
            event = _at_ids(wanted + shift, wanted_names, ids, names, rows)
            event[~real] = -1
            count = int((event >= 0).sum())
            if count > best_count:
                best, best_how, best_count = event, how, count
            if count == real.sum():
                return best, best_how
    return best, best_how


def _at_ids(wanted: Ints, wanted_names: Ints, ids: Ints, names: Ints, rows: Ints) -> Ints:
    """Rows of the events that have the wanted id and the same name, -1 where there is none."""
    keep = np.flatnonzero(ids > 0)
    if not len(keep):
        return np.full(len(wanted), -1, np.int64)
    order = keep[np.argsort(ids[keep], kind="stable")]
    at = np.minimum(np.searchsorted(ids[order], wanted), len(order) - 1)
    event = order[at]
    return np.where((ids[event] == wanted) & (names[event] == wanted_names), rows[event], -1)


def _shift(wanted: Ints, wanted_names: Ints, ids: Ints, names: Ints) -> int:
    """The distance between ids that most pairs of equal names have; rare names only."""
    keep = np.flatnonzero((ids > 0) & (names >= 0))
    order = keep[np.argsort(names[keep], kind="stable")]
    first = np.searchsorted(names[order], wanted_names, side="left")
    count = np.searchsorted(names[order], wanted_names, side="right") - first
    count[count > _MOST_PAIRS] = 0
    if not count.sum():
        return 0
    inner = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    other = order[np.repeat(first, count) + inner]
    distances, votes = np.unique(ids[other] - np.repeat(wanted, count), return_counts=True)
    return int(distances[votes.argmax()])


def _by_order(found: Join, rows: Ints, names: Ints, real: NDArray[np.bool_]) -> None:
    """Join what ids left, thread by thread, by the order of names."""
    from foretrace.link.alignment import align

    timeline, trace = found.timeline, found.trace
    lane, thread = timeline.events["lane"][rows], trace.nodes["thread"]
    external = timeline.events["external_id"][rows]
    taken: set[int] = set()
    threads, sizes = np.unique(thread[real], return_counts=True)
    for number in threads[np.argsort(-sizes, kind="stable")].tolist():
        nodes = np.flatnonzero(real & (thread == number))
        if (found.event[nodes] >= 0).mean() > _ENOUGH:
            continue
        best: tuple[int, int, Ints, int] | None = None
        for one in np.unique(lane).tolist():
            if one in taken:
                continue
            events = np.flatnonzero(lane == one)
            place_of = np.full(int(external[events].max(initial=0)) + 2, -1, np.int64) if len(events) else None
            prefer = None
            if place_of is not None and len(place_of) < 1 << 26:
                known = external[events] > 0
                place_of[external[events][known]] = np.flatnonzero(known)
                ids = trace.nodes["record_function_id"][nodes]
                prefer = np.where(ids < len(place_of), place_of[np.minimum(ids, len(place_of) - 1)], -1)
            places, ties = align(trace.nodes["name"][nodes].astype(np.int64), names[events], prefer)
            joined = int((places >= 0).sum())
            if joined and (best is None or joined > best[0]):
                best = (joined, one, np.where(places >= 0, rows[events[places]], -1), ties)
        if best is not None:
            taken.add(best[1])
            is_new = (best[2] >= 0) & (found.event[nodes] < 0)
            found.event[nodes[is_new]] = best[2][is_new]
            found.joined["name and order"] += int(is_new.sum())
            if best[3] > 1:
                found.guessed["thread that fits at several places of the timeline: took one of them"] += 1


def _count_missing(found: Join, rows: Ints, names: Ints, real: NDArray[np.bool_]) -> None:
    trace = found.trace
    left = np.flatnonzero(real & (found.event < 0))
    present = np.zeros(len(trace.strings) + 1, np.bool_)
    present[names] = True
    present[-1] = False
    has_name = present[trace.nodes["name"][left]]
    found.missing["root of a process or thread"] = int((~real).sum())
    found.missing["no event of that name in the timeline"] = int((~has_name).sum())
    found.missing["events of that name do not fit"] = int(has_name.sum())
    found.missing = +found.missing


def _hang_work(found: Join, rows: Ints) -> None:
    """Find the operator that launched each piece of device work."""
    timeline = found.timeline
    device = timeline.device_rows
    parent, launcher = callers(timeline, rows, device)
    above = np.full(timeline.num_events + 1, -1, np.int64)
    above[rows] = parent
    node = np.append(found.node, -1)
    owner = launcher.copy()
    while len(open_ := np.flatnonzero((owner >= 0) & (node[owner] < 0))):  # out to an operator that the trace has
        owner[open_] = above[owner[open_]]
    found.work_operator, found.work_node = launcher, node[owner]
    unjoined = found.work_node < 0
    has_launch = timeline.launch_row[device] >= 0
    found.missing_work["launch is not in the timeline"] = int((unjoined & ~has_launch & (launcher < 0)).sum())
    found.missing_work["launched outside of any operator"] = int((unjoined & has_launch & (launcher < 0)).sum())
    found.missing_work["launched by operators that are not in the execution trace"] = int(
        (unjoined & (launcher >= 0)).sum()
    )
    found.missing_work = +found.missing_work
