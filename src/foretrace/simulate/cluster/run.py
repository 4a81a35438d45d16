"""`run_plan`: a plan through the compiled engine, or the plain one where that is missing."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import numpy as np

from foretrace.machine.limits import MOST_CHUNKS_OF_ALL, MOST_NODES
from foretrace.simulate.cluster.fold import Fold, fold
from foretrace.simulate.cluster.plan import Action, Outcome, Plan
from foretrace.trace.graph import GraphError

try:
    _engine: Any = importlib.import_module("foretrace.simulate.cluster._engine")
except ImportError:  # no C compiler where it was installed
    _engine = None

_WAITING = ("rank", "node", "stream", "dimension", "phase", "received", "posted_from")


def empty_outcome(plan: Plan) -> Outcome:
    """An outcome in which nothing has happened."""
    ranks, states = plan.num_ranks, int(plan.first_state[-1])
    wires = np.where(plan.topology == 1, plan.size, 2)
    links = int(ranks * wires.sum()) if plan.congestion else 0
    return Outcome(
        finish=np.full(ranks, -1, np.int64),
        computed=np.zeros(ranks, np.int64),
        start=np.full(states, -1, np.int64),
        end=np.full(states, -1, np.int64),
        waiting={name: np.empty(0, np.int64) for name in _WAITING},
        link_bytes=np.zeros(links, np.int64),
        link_busy=np.zeros(links, np.int64),
    )


def check_size(plan: Plan) -> None:
    """Refuse what takes all memory before there is an answer; ranks that another one stands for take none.

    Raises:
        GraphError: naming what is too much.
    """
    ranks, nodes = int((plan.program_of >= 0).sum()), int(plan.first_state[-1])
    if nodes > MOST_NODES:
        raise GraphError(f"{nodes} nodes on {ranks} ranks: at most {MOST_NODES} are simulated; take fewer")
    if plan.splits * ranks > MOST_CHUNKS_OF_ALL and (plan.node_action == Action.COLLECTIVE).any():
        raise GraphError(
            f"{plan.splits} chunks of a collective on {ranks} ranks: at most {MOST_CHUNKS_OF_ALL} chunks in all are "
            "simulated; take fewer of either"
        )


def run_plan(plan: Plan, can_fold: bool = True) -> Outcome:
    """Simulate; with ``can_fold`` ranks that provably do the same are simulated once, and the outcome is unfolded."""
    if _engine is None:
        from foretrace.simulate.cluster.plain import run

        check_size(plan)
        return run(plan)
    folded = fold(plan) if can_fold else None
    outcome = _run_folded(plan, folded) if folded is not None else None
    if outcome is None:
        outcome = _run(plan, None)
    if plan.phases_at_once and outcome is not None and _is_mixed(plan, outcome):
        outcome = _run(replace(plan, phases_at_once=False), None)
    assert outcome is not None  # only a fold is given up
    return outcome


def _is_mixed(plan: Plan, outcome: Outcome) -> bool:
    """Whether different collectives have met in streams of one number.

    As phases they never end; but messages only know tag and size, and some of those may pass.
    """
    waiting = outcome.waiting
    if not len(waiting["rank"]):
        return False
    node = plan.first_node[plan.program_of[waiting["rank"]]] + waiting["node"]
    what = np.stack([plan.node_kind[node], plan.node_size[node], waiting["phase"]], axis=1).tolist()
    met: dict[int, list[int]] = {}
    return any(met.setdefault(stream, one) != one for stream, one in zip(waiting["stream"].tolist(), what, strict=True))


def _run(plan: Plan, folded: Fold | None) -> Outcome | None:
    """The outcome of a plan; None if ranks that were folded turn out to differ."""
    check_size(plan)
    outcome = empty_outcome(plan)
    try:
        found = _engine.run(plan, folded, outcome)
    except OverflowError as error:
        raise GraphError(str(error)) from None
    if found is None:
        return None
    waiting = np.array(found[0], np.int64).reshape(-1, len(_WAITING))
    outcome.waiting = {name: waiting[:, i] for i, name in enumerate(_WAITING)}
    outcome.messages = found[1]
    return outcome


def _run_folded(plan: Plan, folded: Fold) -> Outcome | None:
    """What is found of those that stand for others, for all ranks; None if they turn out to differ."""
    part = folded.apply(plan)
    outcome = _run(part, folded)
    if outcome is None:
        return None
    represent = folded.represent
    outcome.finish, outcome.computed = outcome.finish[represent], outcome.computed[represent]
    outcome.represent, outcome.first_state = represent, part.first_state
    return outcome
