"""The fluid engine: against an exact reference, by its bounds and invariances, and in hand-made cases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.simulate.fair import Distribution, FairPlan, Fault, FaultKind, Kind, jitter, simulate, with_faults
from tests.simulate.fair.plans import plan_of, plans
from tests.simulate.fair.reference import Reference

FLOW, COMPUTE, DELAY, INSTANT = Kind.FLOW, Kind.COMPUTE, Kind.DELAY, Kind.INSTANT
many_examples = settings(max_examples=300)


def times(plan: FairPlan) -> list[tuple[int, int]]:
    outcome = simulate(plan)
    return list(zip(outcome.start_ns.tolist(), outcome.end_ns.tolist(), strict=True))


def assert_near(found: np.ndarray, expected: dict[int, object]) -> None:
    assert set(np.flatnonzero(found >= 0).tolist()) == set(expected)
    for row, time in expected.items():
        assert abs(found[row] - float(time)) <= 1 + 1e-6 * float(time)


@many_examples
@given(plans())
def test_equals_the_exact_reference(plan: FairPlan) -> None:
    outcome, reference = simulate(plan), Reference(plan).run()
    assert_near(outcome.ready_ns, reference.ready)
    assert_near(outcome.start_ns, reference.start)
    assert_near(outcome.end_ns, reference.end)
    assert outcome.never_finished.tolist() == sorted(set(reference.rows) - set(reference.end))
    np.testing.assert_allclose(outcome.link_bytes, [float(size) for size in reference.link_bytes], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
        outcome.link_busy_ns, [float(time) for time in reference.link_busy], rtol=1e-6, atol=1e-4
    )


@many_examples
@given(plans(with_faults=False))
def test_bytes_are_conserved_and_bounds_hold(plan: FairPlan) -> None:
    outcome = simulate(plan)
    expected = np.zeros(plan.num_links)
    for row in np.flatnonzero(plan.kind == FLOW):
        route = plan.hop[plan.first_hop[row] : plan.first_hop[row + 1]]
        if outcome.end_ns[row] < 0:
            assert outcome.start_ns[row] < 0  # without faults whatever flows arrives
            continue
        expected[route] += plan.work[row]
        least = plan.link_latency[route].sum()
        if len(route):
            least += plan.work[row] / plan.link_capacity[route].min()
        assert outcome.end_ns[row] - outcome.start_ns[row] >= least - 1
    np.testing.assert_allclose(outcome.link_bytes, expected, rtol=1e-9, atol=1e-9)
    assert (
        outcome.link_bytes <= plan.link_capacity * (outcome.link_busy_ns * (1 + 1e-9) + 1e-4)
    ).all()  # times have a grid
    assert (outcome.link_busy_ns <= outcome.finish_ns + 1).all()
    assert (outcome.link_utilization <= 1 + 1 / max(outcome.finish_ns, 1)).all()


def permuted(plan: FairPlan, row: np.ndarray, link: np.ndarray, rank: np.ndarray, queue: np.ndarray) -> FairPlan:
    """The same plan with its rows, links, ranks and queues in another order: new row i is old row ``row[i]``."""

    def renamed(column: np.ndarray, order: np.ndarray) -> np.ndarray:
        return np.append(np.argsort(order), -1)[column].astype(np.int32)

    def pieces(first: np.ndarray, item: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        parts = [item[first[old] : first[old + 1]] for old in row]
        return np.cumsum([0, *map(len, parts)]).astype(np.int64), np.concatenate(parts).astype(np.int32)

    first_child, child = pieces(plan.first_child, plan.child)
    first_hop, hop = pieces(plan.first_hop, plan.hop)
    is_link = plan.fault_kind == FaultKind.LINK
    target = plan.fault_target.copy()
    target[is_link] = renamed(target[is_link], link)
    target[~is_link] = renamed(target[~is_link], rank)
    backwards = slice(None, None, -1)
    return FairPlan(
        kind=plan.kind[row],
        key=plan.key[row],
        priority=plan.priority[row],
        rank=renamed(plan.rank[row], rank),
        peer=renamed(plan.peer[row], rank),
        work=plan.work[row],
        takes=renamed(plan.takes[row], queue),
        gives=renamed(plan.gives[row], queue),
        first_child=first_child,
        child=renamed(child, row),
        first_hop=first_hop,
        hop=renamed(hop, link),
        queue_slots=plan.queue_slots[queue],
        link_capacity=plan.link_capacity[link],
        link_latency=plan.link_latency[link],
        link_owner=renamed(plan.link_owner[link], rank),
        rank_speed=plan.rank_speed[rank],
        rank_slowdown=plan.rank_slowdown[rank],
        rank_link_slowdown=plan.rank_link_slowdown[rank],
        fault_time=plan.fault_time[backwards],
        fault_kind=plan.fault_kind[backwards],
        fault_target=target[backwards],
        fault_factor=plan.fault_factor[backwards],
    )


@many_examples
@given(plans(), st.randoms(use_true_random=False))
def test_the_order_of_rows_is_nothing(plan: FairPlan, random) -> None:  # type: ignore[no-untyped-def]
    def order(count: int) -> np.ndarray:
        return np.array(random.sample(range(count), count), np.int64)

    row, link = order(plan.num_activities), order(plan.num_links)
    other = permuted(plan, row, link, order(plan.num_ranks), order(len(plan.queue_slots)))
    one, two = simulate(plan), simulate(other)
    for name in ("ready_ns", "start_ns", "end_ns"):
        assert getattr(one, name)[row].tolist() == getattr(two, name).tolist()
    assert one.link_busy_ns[link].tolist() == two.link_busy_ns.tolist()
    assert one.link_bytes[link].tolist() == two.link_bytes.tolist()


def test_two_equal_flows_over_one_link_take_twice_as_long() -> None:
    flow = {"kind": FLOW, "work": 1000, "route": [0]}
    link = {"capacity": 4, "latency": 3}
    assert times(plan_of([flow], [link])) == [(0, 253)]
    assert times(plan_of([flow, flow], [link])) == [(0, 503), (0, 503)]


def test_a_flow_takes_what_others_cannot_use() -> None:
    flows = [{"kind": FLOW, "work": 80, "route": route} for route in ([0, 1], [0], [1])]
    # The first link gives 1 to each of its two flows, and the second one the remaining 4 to its other flow.
    assert times(plan_of(flows, [{"capacity": 2}, {"capacity": 5}])) == [(0, 80), (0, 80), (0, 20)]


def test_a_late_flow_slows_one_that_is_under_way() -> None:
    early = {"kind": FLOW, "work": 100, "route": [0]}
    wait = {"kind": DELAY, "work": 50}
    late = {"kind": FLOW, "work": 25, "route": [0], "after": [1]}
    assert times(plan_of([early, wait, late], [{}])) == [(0, 125), (0, 50), (50, 100)]


def test_computing_slows_down_while_the_rank_communicates() -> None:
    compute = {"kind": COMPUTE, "work": 100, "rank": 1}
    flow = {"kind": FLOW, "work": 40, "route": [0], "rank": 0, "peer": 1}
    ranks = [{}, {"slowdown": 0.5}]
    assert times(plan_of([compute, flow], [{}], ranks))[0] == (0, 120)  # 40 ns at half the speed, then 80


def test_links_slow_down_while_their_rank_computes() -> None:
    compute = {"kind": COMPUTE, "work": 20, "rank": 0}
    flow = {"kind": FLOW, "work": 40, "route": [0], "rank": 0, "peer": 1}
    ranks = [{"link_slowdown": 0.25}, {}]
    assert times(plan_of([compute, flow], [{"owner": 0}], ranks))[1] == (0, 45)  # 15 bytes in 20 ns, then 25


def test_a_straggler_computes_slower_and_waits_as_long() -> None:
    activities = [{"kind": kind, "work": 30, "rank": 0} for kind in (COMPUTE, DELAY)]
    assert times(plan_of(activities, ranks=[{"speed": 0.5}])) == [(0, 60), (0, 30)]


def test_a_queue_is_served_by_time_then_priority_then_key() -> None:
    task = {"kind": DELAY, "work": 10, "takes": 0, "gives": 0}
    tasks = [
        {**task, "key": 5},
        {**task, "key": 4},
        {**task, "key": 9, "priority": -1},
        {**task, "key": 1, "priority": -9, "after": [5]},
        {**task, "key": 2, "work": 0, "after": [5]},
        {"kind": DELAY, "work": 5, "key": 0},
    ]
    # 9 has the lowest priority number; 4 and 5 were ready before 1 and 2.
    assert times(plan_of(tasks, queues=[1])) == [(20, 30), (10, 20), (0, 10), (30, 40), (40, 40), (0, 5)]


def test_a_slot_can_be_held_over_many_activities() -> None:
    def collective(at: int) -> list[dict[str, object]]:
        return [
            {"kind": INSTANT, "takes": 0},
            {"kind": DELAY, "work": 7, "after": [at]},
            {"kind": INSTANT, "gives": 0, "after": [at + 1]},
        ]

    activities = collective(0) + collective(3) + collective(6)
    assert [end for _, end in times(plan_of(activities, queues=[1]))[2::3]] == [7, 14, 21]
    assert [end for _, end in times(plan_of(activities, queues=[2]))[2::3]] == [7, 7, 14]


def test_a_link_fails_and_comes_back() -> None:
    plan = plan_of([{"kind": FLOW, "work": 100, "route": [0]}], [{"latency": 5}])
    assert times(with_faults(plan, [Fault(FaultKind.LINK, 0, 30, 50)])) == [(0, 125)]
    assert times(with_faults(plan, [Fault(FaultKind.LINK, 0, 30, 50, factor=0.5)])) == [(0, 115)]
    outcome = simulate(with_faults(plan, [Fault(FaultKind.LINK, 0, 30)]))
    assert outcome.never_finished.tolist() == [0]
    assert outcome.link_bytes.tolist() == [30]
    assert outcome.link_busy_ns.tolist() == [30]


def test_a_rank_fails_and_what_waits_for_it_never_ends() -> None:
    activities = [
        {"kind": COMPUTE, "work": 100, "rank": 0},
        {"kind": INSTANT, "rank": 1, "after": [0]},
        {"kind": FLOW, "work": 100, "rank": 1, "peer": 0, "route": [0]},
        {"kind": COMPUTE, "work": 100, "rank": 1},
    ]
    plan = plan_of(activities, [{}], [{}, {}])
    assert simulate(with_faults(plan, [Fault(FaultKind.RANK, 0, 40)])).never_finished.tolist() == [0, 1, 2]
    assert times(with_faults(plan, [Fault(FaultKind.RANK, 0, 40, 60)])) == [(0, 120), (120, 120), (0, 120), (0, 100)]


def test_what_ends_as_its_rank_fails_has_ended() -> None:
    activities = [
        {"kind": kind, "work": 40, "rank": 0, "route": [0] * (kind == FLOW)} for kind in (COMPUTE, DELAY, FLOW)
    ]
    plan = plan_of([*activities, {"kind": DELAY, "work": 1, "rank": 0, "after": [1]}], [{}], [{}])
    assert times(with_faults(plan, [Fault(FaultKind.RANK, 0, 40)])) == [(0, 40), (0, 40), (0, 40), (-1, -1)]


def test_circles_never_start() -> None:
    outcome = simulate(plan_of([{"after": [0]}, {"after": [2]}, {"after": [1]}, {}]))
    assert outcome.never_finished.tolist() == [0, 1, 2]


def test_an_empty_plan_ends_at_once() -> None:
    assert simulate(plan_of([])).finish_ns == 0


@pytest.mark.parametrize("distribution", Distribution)
def test_jitter_scatters_durations_by_key(distribution: Distribution) -> None:
    plan = plan_of([{"kind": COMPUTE, "work": 1000}] * 4000 + [{"kind": DELAY, "work": 1000}])
    scattered = jitter(plan, 0.1, seed=3, distribution=distribution)
    assert scattered.work[-1] == 1000
    assert abs(scattered.work[:-1].mean() - 1000) < 6
    assert abs(scattered.work[:-1].std() - 100) < 5
    assert (jitter(plan, 0.1, seed=4, distribution=distribution).work != scattered.work)[:-1].all()
    backwards = jitter(
        replace(plan, key=plan.key[::-1]), 0.1, seed=3, distribution=distribution, kinds=(COMPUTE, DELAY)
    )
    assert backwards.work[1:].tolist() == scattered.work[-2::-1].tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": np.array([1, 1])}, "distinct"),
        ({"rank": np.array([0, 3])}, "rank"),
        ({"work": np.array([1.0, -1.0])}, "work"),
        ({"kind": np.array([2, 2], np.int8)}, "only flows"),
        ({"hop": np.array([0, 0], np.int32), "first_hop": np.array([0, 2, 2])}, "twice"),
        ({"first_hop": np.array([0, 0, 0])}, "divide"),
        ({"priority": np.array([0])}, "length"),
        ({"rank_slowdown": np.array([1.5])}, "between"),
        ({"fault_target": np.array([7], np.int32)}, "strikes"),
        ({"queue_slots": np.array([0])}, "slot"),
    ],
)
def test_a_broken_plan_is_refused(change: dict[str, np.ndarray], message: str) -> None:
    activities = [{"kind": FLOW, "work": 1, "route": [0], "rank": 0}, {"kind": FLOW, "work": 1, "rank": 0}]
    plan = plan_of(activities, [{}], [{}], faults=[(1, FaultKind.LINK, 0, 0)])
    with pytest.raises(ValueError, match=message):
        simulate(replace(plan, **change))


def test_a_flow_gives_its_slot_when_its_last_byte_has_left() -> None:
    flow = {"kind": FLOW, "work": 10, "route": [0], "takes": 0, "gives": 0}
    assert times(plan_of([flow, flow], [{"latency": 100}], queues=[1])) == [(0, 110), (10, 120)]


@pytest.mark.slow
@settings(max_examples=5000)
@given(plans(max_activities=25))
def test_equals_the_exact_reference_in_larger_plans(plan: FairPlan) -> None:
    outcome, reference = simulate(plan), Reference(plan).run()
    assert_near(outcome.start_ns, reference.start)
    assert_near(outcome.end_ns, reference.end)
