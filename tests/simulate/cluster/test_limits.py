"""What is too large is refused at once, and times beyond 64 bits are never taken for an answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from foretrace.machine import limits
from foretrace.machine.network import Dimension, Network, Topology
from foretrace.machine.system import Algorithm, MemoryKind, Pattern, RemoteMemory, System
from foretrace.simulate.cluster import Conditions, simulate_fluid
from foretrace.simulate.cluster import run as running
from foretrace.simulate.cluster.lower import Options, lower
from foretrace.simulate.cluster.plain import run as run_plain
from foretrace.simulate.cluster.run import run_plan
from foretrace.trace import GraphError
from foretrace.trace.workload import CommType, WorkGroup, WorkKind, Workload
from tests.simulate.cluster.test_engines_agree import Node, workload_of

RING = (Algorithm(Pattern.RING),)
DIRECT = (Algorithm(Pattern.DIRECT),)
SYSTEM = System(algorithms={CommType.ALL_REDUCE: RING, CommType.ALL_GATHER: RING}, memory_bytes_per_s=1e12)


def network(ranks: int = 4, topology: Topology = Topology.RING, latency: float = 500.0, speed: float = 50.0) -> Network:
    return Network((Dimension(topology, ranks, speed, latency),))


def chain(length: int, kind: WorkKind, **columns: Any) -> list[Node]:
    """Nodes one behind the other."""
    return [Node(kind, [at - 1] if at else [], columns=columns) for at in range(length)]


def collective(size: int, kind: CommType = CommType.ALL_REDUCE) -> Node:
    return Node(WorkKind.COLLECTIVE, [], columns={"bytes": size, "collective": kind})


def job(*nodes: Node) -> Workload:
    return workload_of([list(nodes)] * 4, [WorkGroup(0, np.arange(4))])


def on_ranks(one: Workload, ranks: int) -> Workload:
    """The program of rank 0 on so many ranks."""
    peers, groups_of = ([table[:1].repeat(ranks, axis=0) for table in part] for part in (one.peers, one.groups_of))
    return Workload(one.programs, one.program_of[:1].repeat(ranks), peers, groups_of, [WorkGroup(0, np.arange(ranks))])


@pytest.mark.parametrize(
    ("options", "system", "where", "said"),
    [
        ({"queues": 10**9}, SYSTEM, network(), "1000000000 queues of a dimension: at most 1024"),
        ({}, replace(SYSTEM, splits=10**9), network(), "1000000000 splits: at most 65536"),
        ({"congestion": True}, SYSTEM, network(1 << 14, Topology.FULLY_CONNECTED), "268435456 links: .* at most"),
        ({}, replace(SYSTEM, algorithms={CommType.ALL_REDUCE: DIRECT}), network(1 << 15), "direct .*32768 ranks"),
        ({"queues": 1024}, SYSTEM, network(1 << 17), "1024 queues in 1 dimensions of 131072 ranks: at most"),
    ],
    ids=("queues", "chunks", "links", "direct", "queues of all"),
)
def test_too_much_is_refused(options: Any, system: System, where: Network, said: str) -> None:
    workload = job(collective(1000))
    many = on_ranks(workload, where.num_ranks)
    with pytest.raises(GraphError, match=said):
        run_plan(lower(many, where, system, RemoteMemory(), Options(**options)))


def test_chunks_count_on_ranks_that_are_simulated() -> None:
    """A fold needs the memory of one rank; without it all chunks of all ranks would be there at once."""
    ranks = 1024
    plan = lower(
        on_ranks(job(collective(1 << 20)), ranks),
        network(ranks),
        replace(SYSTEM, splits=1 << 16),
        RemoteMemory(),
        Options(),
    )
    with pytest.raises(GraphError, match="65536 chunks of a collective on 1024 ranks"):
        run_plan(plan, can_fold=False)


LONGEST = 1 << 59
CASES: dict[str, tuple[list[Node], Network, System]] = {
    "computation": (
        chain(20, WorkKind.COMPUTE, flops=10**18, bytes=1),
        network(),
        replace(SYSTEM, roofline=True, peak_flops_per_s=1e9),
    ),
    "latency": ([collective(1000)], network(latency=float(1 << 61)), SYSTEM),
    "ring": (chain(16, WorkKind.COLLECTIVE, bytes=1 << 57, collective=CommType.ALL_REDUCE), network(speed=0.5), SYSTEM),
    "reduction": ([collective(1 << 40)], network(), replace(SYSTEM, memory_bytes_per_s=1.0)),
    "direct": (
        [collective(1 << 40)],
        network(latency=float(1 << 62)),
        replace(SYSTEM, algorithms={CommType.ALL_REDUCE: DIRECT}),
    ),
    "halving": (
        [collective(1 << 40)],
        network(latency=float(1 << 61)),
        replace(SYSTEM, algorithms={CommType.ALL_REDUCE: (Algorithm(Pattern.HALVING_DOUBLING),)}),
    ),
    "tree": (
        [collective(1 << 40)],
        network(latency=float(1 << 61)),
        replace(SYSTEM, algorithms={CommType.ALL_REDUCE: (Algorithm(Pattern.DOUBLE_BINARY_TREE),)}),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_times_beyond_64_bits_are_refused_by_every_engine(name: str) -> None:
    nodes, where, system = CASES[name]
    workload = job(*nodes)
    for options in (Options(), Options(fold=False), Options(phases_at_once=False), Options(congestion=True)):
        plan = lower(workload, where, system, RemoteMemory(), options)
        if running._engine is not None:
            with pytest.raises(GraphError, match="longer than 64 bits hold"):
                run_plan(plan, options.fold)
        with pytest.raises(GraphError, match="longer than 64 bits hold"):
            run_plain(plan)
    with pytest.raises(GraphError, match="longer than 64 bits hold"):
        simulate_fluid(workload, where, system, None, Conditions())


def test_the_longest_times_that_fit_are_right() -> None:
    nodes = chain(2, WorkKind.COMPUTE, duration_ns=LONGEST)
    plan = lower(job(*nodes), network(), SYSTEM, RemoteMemory(), Options())
    assert run_plan(plan).finish.tolist() == run_plain(plan).finish.tolist() == [2 * LONGEST] * 4
    assert 2 * LONGEST < limits.MOST_NS


@pytest.mark.skipif(running._engine is None, reason="the engine is not compiled here: no C compiler")
def test_the_rank_is_named() -> None:
    busy = chain(30, WorkKind.MEMORY, bytes=1 << 58)
    idle = [Node(WorkKind.COMPUTE, [], columns={"duration_ns": 5})]
    workload = workload_of([idle, idle, busy, idle], [WorkGroup(0, np.arange(4))])
    memory = RemoteMemory(MemoryKind.PER_RANK, 0, 1)
    with pytest.raises(GraphError, match="rank 2 is busy for longer"):
        run_plan(lower(workload, network(speed=1e6), SYSTEM, memory, Options()))
