"""Workloads on machines: closed forms of collectives alone, and what is made of each kind of node."""

from __future__ import annotations

from itertools import pairwise
from math import log2

import numpy as np
import pytest

from foretrace.machine.network import Network
from foretrace.machine.system import Algorithm, MemoryKind, Pattern, RemoteMemory, System
from foretrace.simulate.fair import (
    Fault,
    FaultKind,
    Kind,
    Wiring,
    lower,
    node_spans,
    rank_finishes,
    simulate,
    with_faults,
)
from foretrace.simulate.fair.collectives import binary_tree
from foretrace.trace.workload import CommType, WorkKind, Workload
from tests.simulate.fair.workloads import alone, collective, network, system, workload

AR, AG, RS, A2A = (
    CommType.ALL_REDUCE,
    CommType.ALL_GATHER,
    CommType.REDUCE_SCATTER,
    CommType.ALL_TO_ALL,
)
RING, DIRECT, HALVING_DOUBLING, TREE = Pattern
SIZE = 1 << 20
DELAY, MEMORY = 10, 2e12  # endpoint delay in ns, memory bandwidth in bytes/s


def finishes(work: Workload, net: Network, machine: System, **more: object) -> list[int]:
    plan = lower(work, net, machine, **more)
    return rank_finishes(plan, simulate(plan)).tolist()


def sent(size: float) -> float:
    """Latency and transfer on a link of 50 bytes/ns and 500 ns."""
    return 500 + size / 50


def reduced(size: float) -> float:
    return 3 * size / MEMORY * 1e9


def ring_form(kind: CommType, n: int) -> float:
    steps = {AR: 2 * (n - 1), A2A: n * (n - 1) // 2}.get(kind, n - 1)
    size = SIZE if kind == AG else SIZE / n
    return DELAY + steps * (DELAY + sent(size)) + (n - 1) * reduced(size) * (kind in (AR, RS))


@pytest.mark.parametrize("kind", [AR, AG, RS, A2A])
@pytest.mark.parametrize("n", [2, 5, 8])
def test_a_ring_alone_takes_its_closed_form(kind: CommType, n: int) -> None:
    found = finishes(alone(kind, SIZE, n), network(("ring", n, 50, 500)), system(RING, memory_bytes_per_s=MEMORY))
    assert found == [pytest.approx(ring_form(kind, n), abs=1)] * n


@pytest.mark.parametrize("kind", [AR, AG, RS, A2A])
@pytest.mark.parametrize("n", [2, 7])
def test_direct_alone_takes_its_closed_form(kind: CommType, n: int) -> None:
    size = SIZE if kind == AG else SIZE / n
    expected = 2 * DELAY + sent(size) + reduced(size) * (kind in (AR, RS)) + (DELAY + sent(size)) * (kind == AR)
    net = network(("fully_connected", n, 50, 500))
    found = finishes(alone(kind, SIZE, n), net, system(DIRECT, memory_bytes_per_s=MEMORY))
    assert found == [pytest.approx(expected, abs=1)] * n


def test_direct_through_a_switch_shares_the_rank_s_link() -> None:
    found = finishes(alone(A2A, SIZE, 8), network(("switch", 8, 50, 500)), system(DIRECT))
    assert found == [pytest.approx(2 * DELAY + 1000 + 7 * SIZE / 8 / 50, abs=1)] * 8


@pytest.mark.parametrize("window", [1, 2, 3, 7, 9])
def test_a_window_limits_the_messages_under_way(window: int) -> None:
    net = network(("fully_connected", 8, 50, 500))
    rounds = -(-7 // min(window, 7))
    found = finishes(alone(A2A, SIZE, 8), net, system(Algorithm(DIRECT, window)))
    assert found == [pytest.approx(DELAY + rounds * (sent(SIZE / 8) + DELAY), abs=1)] * 8


@pytest.mark.parametrize("kind", [AR, AG, RS])
@pytest.mark.parametrize("n", [2, 4, 16])
def test_halving_and_doubling_alone_takes_its_closed_form(kind: CommType, n: int) -> None:
    rounds = int(log2(n))
    sizes = [SIZE / 2 ** (at + 1) for at in range(rounds)]
    messages = {AR: sizes + sizes[::-1], RS: sizes, AG: [SIZE * 2**at for at in range(rounds)]}[kind]
    expected = DELAY + sum(sent(size) + DELAY for size in messages)
    expected += sum(reduced(size) for size in sizes[1:]) * (kind in (AR, RS))
    net = network(("fully_connected", n, 50, 500))
    found = finishes(alone(kind, SIZE, n), net, system(HALVING_DOUBLING, memory_bytes_per_s=MEMORY))
    assert found == [pytest.approx(expected, abs=1)] * n


def test_halving_and_doubling_needs_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="power of two"):
        lower(alone(AR, SIZE, 6), network(("switch", 6, 50, 500)), system(HALVING_DOUBLING))


def test_a_tree_alone_takes_its_closed_form() -> None:
    """ASTRA-sim's figures for 8 ranks and 1 MiB through a switch of 50 GiB/s and 500 ns a hop, two hops as one."""
    net = network(("fully_connected", 8, 50 * 2**30 / 1e9, 1000))
    machine = system(TREE, memory_bytes_per_s=1.6e12)
    expected = {0: 133081, 1: 112540, 2: 133081, 3: 90034, 4: 133081, 5: 112540, 6: 133081, 7: 67528}
    found = finishes(alone(AR, SIZE, 8), net, machine)
    assert found == [pytest.approx(expected[rank], abs=20) for rank in range(8)]  # they truncate


@pytest.mark.parametrize("n", range(2, 20))
@pytest.mark.parametrize("variant", [0, 1])
def test_trees_are_trees(n: int, variant: int) -> None:
    parent = binary_tree(n, variant)
    root = (n - 1) if variant == 0 else 0
    assert np.flatnonzero(parent < 0).tolist() == [root]
    assert np.bincount(parent[parent >= 0]).max() <= 2
    assert (parent == root).sum() == 1
    at = np.arange(n)
    for _ in range(6):
        at = np.where(at == root, root, parent[at])
    assert (at == root).all()


def test_leaves_of_one_tree_are_inner_in_the_other() -> None:
    leaves = [set(range(16)) - set(binary_tree(16, variant).tolist()) for variant in (0, 1)]
    assert not leaves[0] & leaves[1]


def test_dimensions_follow_one_another() -> None:
    net = network(("ring", 4, 50, 500), ("switch", 2, 50, 500))
    found = finishes(alone(RS, SIZE, 8), net, system(RING, DIRECT))
    first = DELAY + 3 * (DELAY + sent(SIZE / 4))
    second = 2 * DELAY + sent(SIZE / 8) + 500
    assert found == [pytest.approx(first + second, abs=1)] * 8
    aware = finishes(alone(AR, SIZE, 8), net, system(RING, DIRECT, local_bandwidth_aware=True))
    middle = 3 * DELAY + 2 * (500 + sent(SIZE / 8))
    assert aware == [pytest.approx(2 * first + middle, abs=1)] * 8


def test_chunks_overlap_in_different_dimensions() -> None:
    net = network(("ring", 2, 50, 0), ("ring", 2, 50, 0))

    def takes(splits: int, active: int) -> int:
        machine = system(RING, RING, splits=splits, active_chunks=active, endpoint_delay_ns=0)
        return simulate(lower(alone(RS, 3 << 20, 4), net, machine)).finish_ns

    half = (3 << 20) / 2 / 50
    assert takes(1, 1) == pytest.approx(1.5 * half, abs=1)
    assert takes(3, 1) == pytest.approx((1 + 1 / 6) * half, abs=1)
    assert takes(3, 3) == pytest.approx(1.5 * half, abs=1)  # all at once go on together


def test_chunks_of_one_dimension_follow_one_another() -> None:
    net = network(("ring", 4, 50, 500))
    found = finishes(alone(AG, SIZE, 4), net, system(RING, splits=4))
    assert found == [pytest.approx(4 * (DELAY + 3 * (DELAY + sent(SIZE / 4))), abs=1)] * 4


def test_a_flat_ring_ignores_dimensions() -> None:
    net = network(("ring", 2, 50, 500), ("ring", 2, 50, 500))
    plan = lower(alone(AG, SIZE, 4), net, system(Algorithm(RING, flat=True)))
    # 0 -> 1 -> 2 -> 3 -> 0: from 1 to 2 and from 3 to 0 over both dimensions.
    assert sorted(np.diff(plan.first_hop)[plan.kind == Kind.FLOW].tolist()) == [1] * 6 + [2] * 6


def test_groups_share_what_they_share() -> None:
    nodes = [collective(A2A, SIZE, slot=0)]
    work = workload([nodes], [0] * 4, groups_of=[[[1], [2], [1], [2]]], groups=([0, 2], [1, 3]))
    machine = system(RING)
    assert (
        finishes(work, network(("switch", 4, 50, 500)), machine)
        == [pytest.approx(2 * DELAY + 500 + sent(SIZE / 2), abs=1)] * 4
    )
    # On a ring 0 -> 2 goes over 1 and 1 -> 3 over 2: two flows on one link.
    assert (
        finishes(work, network(("ring", 4, 50, 500)), machine)
        == [pytest.approx(2 * DELAY + 500 + sent(2 * SIZE / 2), abs=1)] * 4
    )


def test_a_group_that_fills_a_grid_uses_its_dimensions() -> None:
    nodes = [collective(RS, SIZE, slot=0)]
    net = network(("fully_connected", 2, 50, 500), ("fully_connected", 2, 50, 500), ("fully_connected", 2, 50, 500))
    work = workload(
        [nodes], [0] * 8, groups_of=[[[1 + rank % 2] for rank in range(8)]], groups=([0, 2, 4, 6], [1, 3, 5, 7])
    )
    plan = lower(work, net, system(DIRECT, RING, HALVING_DOUBLING))
    assert sorted(set(plan.work[plan.kind == Kind.FLOW].tolist())) == [SIZE / 4, SIZE / 2]
    assert (np.diff(plan.first_hop)[plan.kind == Kind.FLOW] == 1).all()


def test_two_collectives_at_once_share_links() -> None:
    nodes = [collective(AG, SIZE), collective(AG, SIZE)]
    net = network(("ring", 4, 50, 500))
    both = DELAY + 3 * (DELAY + sent(2 * SIZE))
    assert finishes(workload([nodes], [0] * 4), net, system(RING)) == [pytest.approx(both, abs=1)] * 4
    one_by_one = 2 * ring_form(AG, 4)
    found = finishes(workload([nodes], [0] * 4), net, system(RING), communication_slots=1)
    assert found == [pytest.approx(one_by_one, abs=1)] * 4


def test_sends_meet_receives_in_order() -> None:
    send = {"kind": WorkKind.SEND, "bytes": 5000, "tag": 3, "slot": 0}
    receive = {**send, "kind": WorkKind.RECEIVE}
    sender = [{"duration_ns": 1000}, {**send, "after": [0]}, {"duration_ns": 700, "after": [1]}, {**send, "after": [2]}]
    receiver = [receive, {"duration_ns": 5000}, {**receive, "after": [1]}, {**receive, "tag": 4}]
    work = workload([sender, receiver], [0, 1], peers=[[[1]], [[0]]])
    plan = lower(work, network(("ring", 2, 50, 500)), system(RING))
    start, end = node_spans(plan, simulate(plan))
    assert end[:4].tolist() == [1000, 1600, 2300, 2900]
    assert start[4:].tolist() == [0, 0, 5000, 0]
    assert end[4:].tolist() == [1600, 5000, 5000, -1]
    assert plan.notes == {"receive without a send": 1}
    assert rank_finishes(plan, simulate(plan)).tolist() == [2900, -1]


def test_members_that_disagree_never_finish() -> None:
    work = workload([[collective(AR, 8)], [collective(AG, 8)]], [0, 1])
    plan = lower(work, network(("ring", 2, 50, 500)), system(RING))
    assert rank_finishes(plan, simulate(plan)).tolist() == [-1, -1]
    assert sum(plan.notes.values()) == 2


def test_computing_takes_the_roofline_s_time_where_it_is_known() -> None:
    nodes = [
        {"duration_ns": 5, "flops": 2_000_000, "bytes": 10},
        {"duration_ns": 5, "flops": 10, "bytes": 4_000_000},
        {"duration_ns": 5, "bytes": 4_000_000},
        {"duration_ns": 5, "flops": 2_000_000, "bytes": 10, "on_host": True},
        {"flops": 3_000_000, "bytes": 10},
    ]
    net = network(("ring", 2, 50, 500))

    def spans(**options: object) -> list[int]:
        machine = system(RING, peak_flops_per_s=1e12, memory_bytes_per_s=MEMORY, **options)
        plan = lower(workload([nodes], [0, 0]), net, machine)
        start, end = node_spans(plan, simulate(plan))
        return (end - start)[:5].tolist()

    assert spans(roofline=True) == [2000, 2000, 5, 5, 3000]
    assert spans() == [5, 5, 5, 5, 3000]


def test_resources_are_taken_one_node_at_a_time() -> None:
    nodes = [{"duration_ns": 10}, {"duration_ns": 10, "priority": 1}, {"duration_ns": 10, "on_host": True}]
    plan = lower(workload([nodes], [0, 0]), network(("ring", 2, 50, 500)), system(RING))
    assert node_spans(plan, simulate(plan))[1][:3].tolist() == [20, 10, 10]


def test_replay_takes_recorded_times() -> None:
    nodes = [collective(AR, SIZE, duration_ns=77), {"kind": WorkKind.NOTHING, "after": [0]}]
    assert finishes(workload([nodes], [0, 0]), network(("ring", 2, 50, 500)), system(RING, replay_only=True)) == [
        77,
        77,
    ]


def test_a_barrier_waits_for_everybody_and_a_broadcast_takes_its_time() -> None:
    barrier = collective(CommType.BARRIER, 0, after=[0])
    last = collective(CommType.BROADCAST, 64, duration_ns=40, after=[1])
    programs = [[{"duration_ns": time}, barrier, last] for time in (100, 300)]
    plan = lower(workload(programs, [0, 1]), network(("ring", 2, 50, 500)), system(RING))
    assert rank_finishes(plan, simulate(plan)).tolist() == [340, 340]
    assert plan.notes == {"broadcast that takes its recorded time": 1}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(MemoryKind.PER_RANK, [110] * 4), (MemoryKind.PER_NODE, [110, 220] * 2), (MemoryKind.POOL, [110, 220, 330, 440])],
)
def test_remote_memory(kind: MemoryKind, expected: list[int]) -> None:
    work = workload([[{"kind": WorkKind.MEMORY, "bytes": 200}]], [0] * 4)
    memory = RemoteMemory(kind, 10, 2, 2)
    assert finishes(work, network(("ring", 4, 50, 500)), system(RING), memory=memory) == expected


def test_remote_memory_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="remote memory"):
        lower(workload([[{"kind": WorkKind.MEMORY}]], [0, 0]), network(("ring", 2, 50, 500)), system(RING))


def test_more_ranks_than_the_machine_has() -> None:
    with pytest.raises(ValueError, match="4 ranks"):
        lower(alone(AR, 8, 4), network(("ring", 2, 50, 500)), system(RING))


def test_a_straggler_holds_everybody_up() -> None:
    nodes = [{"duration_ns": 1000}, collective(AR, SIZE, after=[0])]
    net = network(("switch", 4, 50, 500))
    even = finishes(workload([nodes], [0] * 4), net, system(RING))
    slow = finishes(workload([nodes], [0] * 4), net, system(RING), rank_speed=[1, 1, 0.001, 1])
    assert max(even) + 900_000 < min(slow) <= max(slow) <= max(even) + 999_000
    # A short delay travels round the ring and meets ranks that would have waited anyway.
    slow = finishes(workload([nodes], [0] * 4), net, system(RING), rank_speed=[1, 1, 0.5, 1])
    assert sorted(slow) == [*even[1:], even[0] + 1000]


def test_computing_and_communicating_at_once() -> None:
    nodes = [{"duration_ns": 400_000}, collective(AG, SIZE)]
    net = network(("ring", 2, 50, 0))
    machine = system(RING, endpoint_delay_ns=0)
    plan = lower(workload([nodes], [0] * 2), net, machine, slowdown=0.2)
    _, end = node_spans(plan, simulate(plan))
    assert end[:2].tolist() == [pytest.approx(400_000 + 0.2 * SIZE / 50, abs=1), pytest.approx(SIZE / 50, abs=1)]
    plan = lower(workload([nodes], [0] * 2), net, machine, link_slowdown=0.2)
    assert node_spans(plan, simulate(plan))[1][:2].tolist() == [400_000, pytest.approx(SIZE / 40, abs=1)]


def test_a_link_that_fails_stops_the_ring() -> None:
    net = network(("ring", 4, 50, 500))
    plan = lower(alone(AR, SIZE, 4), net, system(RING))
    link = Wiring(net).find(0, 1)
    whole = simulate(plan).finish_ns
    for_good = simulate(with_faults(plan, [Fault(FaultKind.LINK, link, 1000)]))
    assert rank_finishes(plan, for_good).tolist() == [-1] * 4
    for_a_while = simulate(with_faults(plan, [Fault(FaultKind.LINK, link, 1000, 21000)]))
    assert whole + 19_000 < for_a_while.finish_ns <= whole + 20_001


def test_routes_and_names_of_links() -> None:
    net = network(("ring", 5, 1, 1), ("fully_connected", 3, 1, 1), ("switch", 2, 1, 1))
    wiring = Wiring(net)
    source, target = np.array([0, 0, 3, 7]), np.array([4, 2, 23, 7])
    first, links = wiring.routes(source, target)
    named = [[wiring.describe(link) for link in links[a:b]] for a, b in pairwise(first.tolist())]
    assert named == [
        ["dimension 0, rank 0 to rank 4"],
        ["dimension 0, rank 0 to rank 1", "dimension 0, rank 1 to rank 2"],
        ["dimension 1, rank 3 to rank 8", "dimension 2, rank 8 to the switch", "dimension 2, the switch to rank 23"],
        [],
    ]
    assert links[0] == wiring.find(0, 0, 1)
    assert len(wiring.capacity) == 30 * (2 + 3 + 2)
    assert wiring.owner[links].tolist() == [0, 0, 1, 3, 8, 23]
