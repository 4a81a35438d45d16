"""From a `FairPlan` to a `FairOutcome`: the engine runs it in a canonical order; results go back into the plan's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrace.simulate.fair.plan import F64, I64, FairPlan


@dataclass(frozen=True)
class FairOutcome:
    """When everything happened. Times are ns.

    Attributes:
        ready_ns, start_ns, end_ns: of each activity: when all that it waits for was over, when it started, when it
            ended; -1: never. Shape ``(activities,)``.
        never_finished: the activities without an end, ascending.
        finish_ns: the last end; 0 if nothing ends.
        link_bytes: what went over each link, shape ``(links,)``.
        link_busy_ns: how long something flowed over it.
        link_utilization: ``link_bytes`` over what the link could have carried, without faults, until ``finish_ns``.
    """

    ready_ns: I64
    start_ns: I64
    end_ns: I64
    never_finished: I64
    finish_ns: int
    link_bytes: F64
    link_busy_ns: F64
    link_utilization: F64


def simulate(plan: FairPlan) -> FairOutcome:
    """Run a plan. The order of its rows makes no difference.

    Raises:
        ValueError: the plan's arrays do not fit together.
    """
    from foretrace.simulate.fair.prepare import engine, initial_state  # imports Numba

    plan.check()
    order = np.lexsort((plan.key, plan.priority))
    state, links = initial_state(plan, order)
    engine.run(state)
    act = state.act[:-1]
    moved = np.where(act["start"] >= 0, act["work"] - act["left"], 0.0)
    carried = np.zeros(plan.num_links)
    if len(state.hop):
        carried[links] = np.bincount(state.hop["link"], moved[state.hop["flow"]], plan.num_links)
    busy = np.zeros(plan.num_links)
    busy[links] = state.link["busy"]
    end = _rounded(act["end"], order)
    finish = max(int(end.max(initial=0)), 0)
    able = plan.link_capacity * finish
    return FairOutcome(
        ready_ns=_rounded(act["ready"], order),
        start_ns=_rounded(act["start"], order),
        end_ns=end,
        never_finished=np.flatnonzero(end < 0),
        finish_ns=finish,
        link_bytes=carried,
        link_busy_ns=busy,
        link_utilization=np.divide(carried, able, out=np.zeros(plan.num_links), where=able > 0),
    )


def node_spans(plan: FairPlan, outcome: FairOutcome) -> tuple[I64, I64]:
    """Start and end (-1: never) of the nodes of a lowered workload, shape ``(nodes of all ranks,)``, rank by rank."""
    return outcome.start_ns[plan.node_begin], outcome.end_ns[plan.node_end]


def rank_finishes(plan: FairPlan, outcome: FairOutcome) -> I64:
    """When the last node of each rank ended, 0 for a rank without nodes, -1 if one of its nodes never did."""
    finish = np.zeros(len(plan.first_node) - 1, np.int64)
    owner = np.repeat(np.arange(len(finish)), np.diff(plan.first_node))
    end = outcome.end_ns[plan.node_end]
    np.maximum.at(finish, owner, end)
    finish[owner[end < 0]] = -1
    return finish


def _rounded(time: F64, order: I64) -> I64:
    """Whole ns in the plan's order; -1 stays, and what is beyond 64 bits ends just below them."""
    whole = np.empty(len(time), np.int64)
    whole[order] = np.where(time < 0, -1, np.floor(np.minimum(time, 2.0**62.5) + 0.5)).astype(np.int64)
    return whole
