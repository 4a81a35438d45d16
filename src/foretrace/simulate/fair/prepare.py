"""The engine's state at time 0: the rows of a `FairPlan` as records in a canonical order."""

from __future__ import annotations

import numpy as np

from foretrace.simulate.fair import engine
from foretrace.simulate.fair.plan import F64, I32, I64, FairPlan, csr

__all__ = ["engine", "initial_state"]


def _gather(first: I64, item: I32, order: I64) -> tuple[I64, I32]:
    """A CSR with its rows in another order."""
    length = np.diff(first)[order]
    new_first = np.zeros(len(order) + 1, np.int64)
    np.cumsum(length, out=new_first[1:])
    at = np.repeat(first[order] - new_first[:-1], length) + np.arange(new_first[-1])
    return new_first, item[at]


def _canonical_links(hop: I32, count: int) -> I64:
    """Links in the order in which routes use them, then the unused ones."""
    used, first_use = np.unique(hop, return_index=True)
    unused = np.ones(count, np.bool_)
    unused[used] = False
    return np.concatenate([used[np.argsort(first_use)].astype(np.int64), np.flatnonzero(unused)])


def _records(dtype: np.dtype[np.void], count: int, **columns: object) -> engine.Records:
    """``count`` records; what is not given is 0."""
    records = np.zeros(count, dtype)
    for name, column in columns.items():
        records[name] = column
    return records.view(np.recarray)


def _activities(
    plan: FairPlan, order: I64, missing: I32, latency: F64, first_child: I64, first_hop: I64
) -> engine.Records:
    """Records of the activities at time 0, in the engine's order, with one row more."""
    records = _records(
        engine.ACTIVITY,
        len(order) + 1,
        first_child=first_child,
        first_hop=first_hop,
        heap_rank=1,
        **dict.fromkeys(("event_at", "before", "after", "heap_left", "heap_right", "ready", "start", "end"), -1),
    )
    for name in ("kind", "rank", "peer", "work", "takes", "gives"):
        records[name][:-1] = getattr(plan, name)[order]
    records["left"] = records["work"]
    records["missing"][:-1] = missing
    records["latency"][:-1] = latency
    return records


def initial_state(plan: FairPlan, order: I64) -> tuple[engine.State, I64]:
    """The engine's state at time 0, and the plan's number of each of the engine's links."""
    count = plan.num_activities
    place = np.empty(count, np.int32)
    place[order] = np.arange(count, dtype=np.int32)
    first_child, child = _gather(plan.first_child, plan.child, order)
    first_hop, hop = _gather(plan.first_hop, plan.hop, order)
    child = place[child]
    links = _canonical_links(hop, plan.num_links)
    new_link = np.empty(plan.num_links, np.int32)
    new_link[links] = np.arange(plan.num_links, dtype=np.int32)
    flow = np.repeat(np.arange(count, dtype=np.int32), np.diff(first_hop))
    latency = np.bincount(flow, plan.link_latency[hop], count).astype(np.float64)
    missing = np.bincount(child, minlength=count).astype(np.int32)
    owner = plan.link_owner[links]
    has_owner = np.flatnonzero(owner >= 0)
    first_owned, owned = csr(plan.num_ranks, owner[has_owner], has_owner)
    counter = np.zeros(engine.COUNTERS, np.int64)
    counter[0] = count
    state = engine.State(
        act=_activities(plan, order, missing, latency, first_child, first_hop),
        child=child,
        hop=_records(engine.HOP, len(hop), link=new_link[hop], flow=flow, before=-1, after=-1),
        link=_records(
            engine.LINK,
            plan.num_links,
            capacity=plan.link_capacity[links],
            factor=1,
            on_since=-1,
            owner=owner,
            first=-1,
        ),
        ranks=_ranks(plan, first_owned),
        owned=owned,
        head=np.full((3, plan.num_ranks), -1, np.int32),
        queue=_records(engine.QUEUE, len(plan.queue_slots), root=-1, free=plan.queue_slots),
        fault=_faults(plan, new_link),
        event=_records(engine.EVENT, count),
        fill=_records(engine.SHARE, plan.num_links),
        ready_stack=np.empty(count, np.int32),
        granted=np.empty(count, np.int32),
        path=np.empty(128, np.int32),  # a leftist heap of 2^31 entries has right spines of at most 31
        flows=np.empty(count, np.int32),
        links=np.empty(plan.num_links, np.int32),
        dirty_links=np.empty(plan.num_links, np.int32),
        dirty_ranks=np.empty(plan.num_ranks, np.int32),
        dirty_queues=np.empty(len(plan.queue_slots), np.int32),
        counter=counter,
    )
    return state, links


def _ranks(plan: FairPlan, first_owned: I64) -> engine.Records:
    """Records of the ranks at time 0, with one row more."""
    ranks = _records(engine.RANK, plan.num_ranks + 1, factor=1, first_owned=first_owned)
    ranks["speed"][:-1] = plan.rank_speed
    ranks["slowdown"][:-1] = plan.rank_slowdown
    ranks["link_slowdown"][:-1] = plan.rank_link_slowdown
    return ranks


def _faults(plan: FairPlan, new_link: I32) -> engine.Records:
    """Faults by time; of several that strike one target at one moment the lowest factor holds."""
    time = np.array([engine.snap(at) for at in plan.fault_time.tolist()], np.float64)
    target = np.asarray(plan.fault_target, np.int32).copy()
    links = plan.fault_kind == 0
    target[links] = new_link[target[links]]
    order = np.lexsort((plan.fault_factor, target, plan.fault_kind, time))
    time, kind, target = time[order], plan.fault_kind[order].astype(np.int8), target[order]
    first = np.ones(len(order), np.bool_)
    first[1:] = (np.diff(time) != 0) | (np.diff(kind) != 0) | (np.diff(target) != 0)
    factor = plan.fault_factor[order]
    return _records(
        engine.FAULT, int(first.sum()), time=time[first], kind=kind[first], target=target[first], factor=factor[first]
    )
