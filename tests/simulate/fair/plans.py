"""Plans for tests: by hand, and drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from foretrace.simulate.fair import FairPlan, FaultKind, Kind
from foretrace.simulate.fair.plan import csr


def plan_of(
    activities: Sequence[dict[str, Any]],
    links: Sequence[dict[str, Any]] = (),
    ranks: Sequence[dict[str, Any]] = (),
    queues: Sequence[int] = (),
    faults: Sequence[tuple[float, FaultKind, int, float]] = (),
) -> FairPlan:
    """Activities have ``kind``, ``work``, and optionally ``after`` and ``route`` (lists) and the plan's columns."""
    count = len(activities)

    def column(rows: Sequence[dict[str, Any]], name: str, default: Any, dtype: type) -> np.ndarray:
        return np.array([row.get(name, default) for row in rows], dtype)

    edges = [(source, row) for row, activity in enumerate(activities) for source in activity.get("after", ())]
    source, target = np.array(edges, np.int64).reshape(-1, 2).T
    first_child, child = csr(count, source, target)
    routes = [activity.get("route", []) for activity in activities]
    return FairPlan(
        kind=column(activities, "kind", 0, np.int8),
        key=np.array([activity.get("key", row) for row, activity in enumerate(activities)], np.int64),
        priority=column(activities, "priority", 0, np.int32),
        rank=column(activities, "rank", -1, np.int32),
        peer=column(activities, "peer", -1, np.int32),
        work=column(activities, "work", 0, np.float64),
        takes=column(activities, "takes", -1, np.int32),
        gives=column(activities, "gives", -1, np.int32),
        first_child=first_child,
        child=child,
        first_hop=np.cumsum([0, *map(len, routes)]).astype(np.int64),
        hop=np.array([link for route in routes for link in route], np.int32),
        queue_slots=np.array(queues, np.int32),
        link_capacity=column(links, "capacity", 1, np.float64),
        link_latency=column(links, "latency", 0, np.float64),
        link_owner=column(links, "owner", -1, np.int32),
        rank_speed=column(ranks, "speed", 1, np.float64),
        rank_slowdown=column(ranks, "slowdown", 0, np.float64),
        rank_link_slowdown=column(ranks, "link_slowdown", 0, np.float64),
        fault_time=np.array([fault[0] for fault in faults], np.float64),
        fault_kind=np.array([fault[1] for fault in faults], np.int8),
        fault_target=np.array([fault[2] for fault in faults], np.int32),
        fault_factor=np.array([fault[3] for fault in faults], np.float64),
    )


@st.composite
def plans(draw: st.DrawFn, with_faults: bool = True, max_activities: int = 14) -> FairPlan:
    """Small plans in which much happens at once."""
    count = draw(st.integers(1, max_activities))
    ranks = [
        {
            "speed": draw(st.sampled_from([1, 1, 0.5, 2])),
            "slowdown": draw(st.sampled_from([0, 0, 0.5, 0.25, 1])),
            "link_slowdown": draw(st.sampled_from([0, 0, 0.5])),
        }
        for _ in range(draw(st.integers(1, 4)))
    ]
    any_rank = st.integers(-1, len(ranks) - 1)
    links = [
        {
            "capacity": draw(st.sampled_from([1, 2, 3, 0.5, 10])),
            "latency": draw(st.sampled_from([0, 0, 1, 7.5])),
            "owner": draw(any_rank),
        }
        for _ in range(draw(st.integers(1, 6)))
    ]
    queues = draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
    activities = []
    for row in range(count):
        kind = draw(st.sampled_from([Kind.FLOW, Kind.FLOW, Kind.COMPUTE, Kind.DELAY, Kind.INSTANT]))
        activity: dict[str, Any] = {"kind": kind, "rank": draw(any_rank), "priority": draw(st.integers(-1, 1))}
        activity["after"] = draw(st.lists(st.integers(0, row - 1), unique=True, max_size=2)) if row else []
        activity["work"] = draw(st.integers(0, 60)) if kind != Kind.INSTANT else 0
        if kind == Kind.FLOW:
            activity["peer"] = draw(any_rank)
            activity["route"] = draw(st.lists(st.integers(0, len(links) - 1), unique=True, max_size=3))
        if draw(st.booleans()):
            activity["takes"] = draw(st.integers(0, len(queues) - 1))
            activity["gives"] = activity["takes"] if draw(st.integers(0, 4)) else -1
        activities.append(activity)
    faults = []
    for _ in range(draw(st.integers(0, 4)) if with_faults else 0):
        kind = draw(st.sampled_from(FaultKind))
        target = draw(st.integers(0, (len(links) if kind == FaultKind.LINK else len(ranks)) - 1))
        faults.append((draw(st.integers(0, 80)), kind, target, draw(st.sampled_from([0, 0.5, 1, 1]))))
    return plan_of(activities, links, ranks, queues, faults)
