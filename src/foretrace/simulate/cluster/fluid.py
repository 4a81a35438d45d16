"""`simulate_fluid`: the same simulation in the third fidelity, in which collectives overlap and flows share links."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from foretrace.machine.limits import MOST_NS
from foretrace.machine.network import Network
from foretrace.machine.system import RemoteMemory, System
from foretrace.simulate import fair
from foretrace.simulate.cluster.lower import Options, lower
from foretrace.simulate.cluster.run import check_size, empty_outcome
from foretrace.simulate.cluster.simulation import ClusterSimulation
from foretrace.trace.graph import GraphError
from foretrace.trace.workload import Workload

_UNITS_NS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
_TIME = r"(\d+(?:\.\d+)?)(ns|us|ms|s)"
_FAULT = re.compile(rf"(?:rank:(\d+)|link:(\d+):(\d+)(?::(\d+))?)@{_TIME}(?:-{_TIME})?(?:=(\d+(?:\.\d+)?))?")


@dataclass(frozen=True)
class Conditions:
    """Under what a cluster runs.

    Attributes:
        rank_speed: of computing by rank; 1 for the others.
        jitter: standard deviation of the logarithm of computation times.
        seed: of the jitter.
        slowdown: part of the speed of computing that is lost while the rank sends or receives.
        link_slowdown: part of the capacity of a rank's links that is lost while it computes.
        communication_slots: sends and collectives of a rank that may be under way; None: any number.
        faults: what fails when, as `fault_of` reads it.
    """

    rank_speed: Mapping[int, float] = field(default_factory=dict)
    jitter: float = 0.0
    seed: int = 0
    slowdown: float = 0.0
    link_slowdown: float = 0.0
    communication_slots: int | None = None
    faults: tuple[str, ...] = ()


def fault_of(text: str, network: Network) -> fair.Fault:
    """A fault as people write it.

    ``rank:3@1ms`` (rank 3 is down from 1 ms on), ``link:0:5@1ms-2ms`` (the first link of rank 5 in dimension 0 is down
    for 1 ms; ``link:0:5:1`` the second one: the way back on a ring, down from the switch, to the member of that number
    where all are connected), each with ``=0.5`` for half of the speed instead of none.

    Raises:
        ValueError: if it is not written like that, or there is no such rank or link.
    """
    found = _FAULT.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is no fault: write rank:3@1ms, or link:0:5@1ms-2ms=0.5")
    rank, dimension, at, which, begin, unit, end, end_unit, factor = found.groups()
    times = float(begin) * _UNITS_NS[unit], None if end is None else float(end) * _UNITS_NS[end_unit]
    if max(times[0], times[1] or 0) > MOST_NS or float(factor or 0) > 1e6:
        raise ValueError(f"{text!r} has a time above {MOST_NS:g} ns or a factor above 1e6")
    if times[1] is not None and times[1] <= times[0]:
        raise ValueError(f"{text!r} ends before it begins")
    if rank is not None:
        if int(rank) >= network.num_ranks:
            raise ValueError(f"{text!r}: there is no rank {rank}")
        return fair.Fault(fair.FaultKind.RANK, int(rank), *times, float(factor or 0))
    if int(dimension) >= len(network.dimensions) or int(at) >= network.num_ranks:
        raise ValueError(f"{text!r}: there is no such dimension or rank")
    wiring = fair.Wiring(network)
    if int(which or 0) >= wiring.widths[int(dimension)]:
        raise ValueError(f"{text!r}: rank {at} has no link {which} in dimension {dimension}")
    link = wiring.find(int(dimension), int(at), int(which or 0))
    return fair.Fault(fair.FaultKind.LINK, link, *times, float(factor or 0))


def simulate_fluid(
    workload: Workload,
    network: Network,
    system: System,
    memory: RemoteMemory | None = None,
    conditions: Conditions | None = None,
) -> ClusterSimulation:
    """Simulate a workload on a machine by the rules of docs/fair.md.

    Raises:
        GraphError: where the workload asks for what the machine does not have, or the conditions make no sense.
    """
    conditions = conditions or Conditions()
    speed = np.ones(network.num_ranks)
    for rank, factor in conditions.rank_speed.items():
        if not 0 <= rank < network.num_ranks:
            raise GraphError(f"there is no rank {rank}")
        speed[rank] = factor
    options = Options(congestion=True, phases_at_once=False, fold=False)
    plan = lower(workload, network, system, memory or RemoteMemory(), options)
    check_size(plan)
    try:
        activities = fair.lower(
            workload,
            network,
            system,
            memory=memory,
            communication_slots=conditions.communication_slots,
            rank_speed=speed,
            slowdown=conditions.slowdown,
            link_slowdown=conditions.link_slowdown,
        )
        if conditions.jitter:
            activities = fair.jitter(activities, conditions.jitter, conditions.seed)
        activities = fair.with_faults(activities, [fault_of(text, network) for text in conditions.faults])
        found = fair.simulate(activities)
    except ValueError as error:
        raise GraphError(str(error)) from None
    if found.finish_ns > MOST_NS or int(found.end_ns.min(initial=-1)) < -1:
        raise GraphError("it takes longer than 64 bits hold in ns")
    outcome = empty_outcome(plan)
    outcome.start, outcome.end = fair.node_spans(activities, found)
    outcome.finish = fair.rank_finishes(activities, found)
    outcome.link_bytes, outcome.link_busy = (
        np.rint(column).astype(np.int64) for column in (found.link_bytes, found.link_busy_ns)
    )
    outcome.messages = int((activities.kind == fair.Kind.FLOW).sum())
    nodes = np.concatenate([np.arange(*plan.first_node[p : p + 2]) for p in plan.program_of])
    spans = np.where((plan.node_counts[nodes] > 0) & (outcome.end >= 0), outcome.end - outcome.start, 0)
    owner = np.repeat(np.arange(plan.num_ranks), np.diff(plan.first_node)[plan.program_of])
    outcome.computed = np.bincount(owner, spans, plan.num_ranks).astype(np.int64)
    merged = replace(workload, notes=workload.notes + activities.notes)
    return ClusterSimulation(merged, network, options, plan, outcome)
