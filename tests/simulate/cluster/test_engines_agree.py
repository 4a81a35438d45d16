"""Three ways to run a plan give one answer: phases at once, message by message, and the plain twin.

Random machines and random jobs, many of which deadlock: what ends, when, what never ends, and what every link carried
must be the same whichever way is taken.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretrace.machine.network import Dimension, Network, Topology
from foretrace.machine.system import Algorithm, MemoryKind, Pattern, Priority, RemoteMemory, System
from foretrace.simulate.cluster import run as running
from foretrace.simulate.cluster.lower import Options, lower
from foretrace.simulate.cluster.plain import run as run_plain
from foretrace.simulate.cluster.plan import Action, Outcome, Plan
from foretrace.simulate.cluster.run import run_plan
from foretrace.trace.table import Table
from foretrace.trace.workload import WORK_COLUMNS, CommType, Program, WorkGroup, WorkKind, Workload

pytestmark = pytest.mark.skipif(running._engine is None, reason="the engine is not compiled here: no C compiler")

KINDS = (
    CommType.ALL_REDUCE,
    CommType.ALL_GATHER,
    CommType.ALL_TO_ALL,
    CommType.REDUCE_SCATTER,
)
TREE = Algorithm(Pattern.DOUBLE_BINARY_TREE)
quick = settings(max_examples=150, suppress_health_check=list(HealthCheck))
thorough = settings(max_examples=4000, suppress_health_check=list(HealthCheck))


@dataclass
class Node:
    """A node of a rank; ``partner`` is the other rank of a message, or the group of a collective."""

    kind: WorkKind
    needs: list[int]  # places of nodes of the same rank
    partner: int = -1
    columns: dict[str, Any] | None = None


def workload_of(ranks: list[list[Node]], groups: list[WorkGroup]) -> Workload:
    """Nodes of every rank as a workload, in which equal programs are one. A node's place is its id."""
    programs: dict[bytes, Program] = {}
    rows: list[tuple[int, list[int], list[int]]] = []
    for nodes in ranks:
        peers: list[int] = []
        mine: list[int] = []
        columns = {name: np.full(len(nodes), default, dtype) for name, (dtype, default) in WORK_COLUMNS.items()}
        columns["id"] = np.arange(len(nodes), dtype=np.int64)
        for place, node in enumerate(nodes):
            columns["kind"][place] = node.kind
            if node.partner >= 0:
                known = mine if node.kind is WorkKind.COLLECTIVE else peers
                if node.partner not in known:
                    known.append(node.partner)
                columns["slot"][place] = known.index(node.partner)
            for name, value in (node.columns or {}).items():
                columns[name][place] = value
        needs = [sorted(set(node.needs)) for node in nodes]
        first = np.cumsum([0, *map(len, needs)]).astype(np.int64)
        program = Program(Table(columns), first, np.array([*itertools.chain(*needs)], np.int32))
        key = b"".join(column.tobytes() for column in columns.values()) + first.tobytes() + program.dependency.tobytes()
        programs.setdefault(key, program)
        rows.append(([*programs].index(key), peers, mine))
    parts = [[row for row in rows if row[0] == index] for index in range(len(programs))]
    tables = [[np.array([row[at] for row in part], np.int32).reshape(len(part), -1) for part in parts] for at in (1, 2)]
    program_of = np.array([row[0] for row in rows], np.int32)
    return Workload([*programs.values()], program_of, tables[0], tables[1], groups)


# Machines

fractions = st.sampled_from([0.0, 0.25, 1.0, 7.9, 33.3, 500.0, 501.7])
bandwidths = st.sampled_from([0.11, 1.0, 1.3, 13.421772800000001, 53.687091200000005])


@st.composite
def networks(draw: st.DrawFn, most_ranks: int = 16) -> Network:
    dimensions: list[Dimension] = []
    left = most_ranks
    for _ in range(draw(st.integers(1, 3))):
        if left < 2:
            break
        size = draw(st.integers(2, min(5, left)))
        left //= size
        dimensions.append(Dimension(draw(st.sampled_from(Topology)), size, draw(bandwidths), draw(fractions)))
    return Network(tuple(dimensions))


@st.composite
def algorithms(draw: st.DrawFn, kind: CommType, network: Network) -> tuple[Algorithm, ...]:
    """A list that the network can run."""
    patterns = [Pattern.RING, Pattern.DIRECT, Pattern.HALVING_DOUBLING]
    if kind is CommType.ALL_TO_ALL:
        patterns.remove(Pattern.HALVING_DOUBLING)
    one = st.builds(Algorithm, st.sampled_from(patterns), st.sampled_from([0, 0, 1, 2, 3]))
    if draw(st.integers(0, 4)) == 0:
        return (replace(draw(one), flat=True),)
    sizes = [dimension.size for dimension in network.dimensions]
    if draw(st.booleans()):
        return tuple(draw(st.one_of(one, st.just(TREE)) if not n & (n - 1) else one) for n in sizes)
    return tuple(draw(one) for _ in range(draw(st.integers(1, len(sizes)))))


@st.composite
def systems(draw: st.DrawFn, network: Network) -> System:
    return System(
        endpoint_delay_ns=draw(st.integers(0, 50)),
        active_chunks=draw(st.integers(1, 4)),
        splits=draw(st.integers(1, 8)),
        priority=draw(st.sampled_from(Priority)),
        local_bandwidth_aware=draw(st.booleans()),
        algorithms={kind: draw(algorithms(kind, network)) for kind in KINDS},
        memory_bytes_per_s=draw(st.sampled_from([0.9e9, 50e9, 1600e9, 1e15])),
    )


memories = st.builds(
    RemoteMemory,
    st.sampled_from([MemoryKind.PER_RANK, MemoryKind.POOL]),
    st.integers(0, 300),
    st.integers(1, 4),
)


@st.composite
def options(draw: st.DrawFn) -> Options:
    return Options(draw(st.integers(1, 3)), draw(st.booleans()), draw(st.booleans()))


# Jobs


@dataclass
class Job:
    """What the ranks have been given so far."""

    ranks: list[list[Node]]

    def add(self, rank: int, kind: WorkKind, needs: list[int], partner: int = -1, **columns: Any) -> None:
        self.ranks[rank].append(Node(kind, needs, partner, columns))


@st.composite
def needs(draw: st.DrawFn, place: int) -> list[int]:
    """Earlier nodes that a node waits for: the one before it, none, or any."""
    if not place:
        return []
    how = draw(st.integers(0, 3))
    if how == 0:
        return []
    return [place - 1] if how < 3 else draw(st.lists(st.integers(0, place - 1), max_size=3))


def may_use(system: System, kind: CommType, group: WorkGroup, num_ranks: int) -> bool:
    """A group that is not the world cannot run a tree."""
    return len(group.ranks) == num_ranks or system.algorithms[kind] != (TREE,)


@st.composite
def workloads(draw: st.DrawFn, network: Network, system: System, is_even: bool = False) -> Workload:
    """Ranks that compute, talk in pairs and run collectives; not all of it fits together."""
    count = network.num_ranks
    groups = [WorkGroup(0, np.arange(count))]
    for number in range(1, draw(st.integers(1, 4))):
        order = draw(st.permutations(range(count)))
        groups.append(WorkGroup(number * 7, np.array(order[: draw(st.integers(2, count))], np.int64)))
    job = Job([[] for _ in range(count)])
    for _ in range(draw(st.integers(1, 7))):
        what = draw(st.sampled_from(["collective"] * 4 + ["compute"] * 2 + ["message", "memory", "nothing"]))
        if what == "collective":
            _collective(draw, job, system, groups)
        elif what == "message":
            _message(draw, job)
        else:
            _work(draw, job, what, is_even)
    if not is_even and draw(st.integers(0, 3)) == 0:  # one rank does two things in the other order
        nodes = job.ranks[draw(st.integers(0, count - 1))]
        if len(nodes) > 1:
            at = draw(st.integers(0, len(nodes) - 2))
            nodes[at], nodes[at + 1] = nodes[at + 1], nodes[at]
            nodes[at].needs = [place for place in nodes[at].needs if place < at]
    return workload_of(job.ranks, groups)


def _collective(draw: st.DrawFn, job: Job, system: System, groups: list[WorkGroup]) -> None:
    kind = draw(st.sampled_from(KINDS))
    usable = [index for index, group in enumerate(groups) if may_use(system, kind, group, len(job.ranks))]
    group = draw(st.sampled_from(usable))
    least = system.splits if kind is CommType.ALL_GATHER else 1
    columns = {
        "collective": kind,
        "bytes": draw(st.one_of(st.integers(least, 300), st.integers(300, 1 << 20))),
        "priority": draw(st.integers(-2, 2)),
        "dimensions": draw(st.sampled_from([-1, -1, -1, 1, 2, 3, 6, 0])),
    }
    absent = draw(st.sampled_from([-1] * 9 + groups[group].ranks.tolist()[:1]))
    for rank in groups[group].ranks.tolist():
        if rank != absent:
            job.add(rank, WorkKind.COLLECTIVE, draw(needs(len(job.ranks[rank]))), group, **columns)


def _message(draw: st.DrawFn, job: Job) -> None:
    source, target = draw(st.permutations(range(len(job.ranks))))[:2]
    columns = {"tag": draw(st.integers(0, 1)), "bytes": draw(st.sampled_from([1, 64, 5000, 8192]))}
    missing = draw(st.sampled_from([None] * 9 + [WorkKind.SEND, WorkKind.RECEIVE]))
    for rank, kind, other in ((source, WorkKind.SEND, target), (target, WorkKind.RECEIVE, source)):
        if kind is not missing:
            job.add(rank, kind, draw(needs(len(job.ranks[rank]))), other, **columns)


def _work(draw: st.DrawFn, job: Job, what: str, is_even: bool) -> None:
    kind = {"compute": WorkKind.COMPUTE, "memory": WorkKind.MEMORY, "nothing": WorkKind.NOTHING}[what]
    durations = st.sampled_from([0, 1, 10, 500, 12345])
    duration = draw(durations)
    some = range(len(job.ranks)) if is_even else draw(st.sets(st.sampled_from(range(len(job.ranks))), min_size=1))
    on_host = what != "nothing" and draw(st.booleans())
    for rank in sorted(some):
        mine = draw(needs(len(job.ranks[rank])))
        own = duration if is_even else draw(durations)
        job.add(rank, kind, mine, on_host=on_host, duration_ns=own, bytes=own if what == "memory" else -1)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    network = draw(networks())
    system = draw(systems(network))
    workload = draw(workloads(network, system, draw(st.booleans())))
    return lower(workload, network, system, draw(memories), draw(options()))


# What must be equal


def assert_same(one: Outcome, other: Outcome) -> None:
    assert one.finish.tolist() == other.finish.tolist()
    assert one.computed.tolist() == other.computed.tolist()
    assert one.start.tolist() == other.start.tolist()
    assert one.end.tolist() == other.end.tolist()
    assert one.link_bytes.tolist() == other.link_bytes.tolist()
    assert one.link_busy.tolist() == other.link_busy.tolist()
    assert stuck(one) == stuck(other)


def stuck(outcome: Outcome) -> set[tuple[int, ...]]:
    """Streams whose phase has started and never ends: rank, node, number of the stream, dimension and phase."""
    columns = [outcome.waiting[name].tolist() for name in ("rank", "node", "stream", "dimension", "phase")]
    return set(zip(*columns, strict=True))


def check_messages(plan: Plan) -> Outcome:
    """The engine message by message against the plain twin."""
    messages = run_plan(replace(plan, phases_at_once=False), can_fold=False)
    plain = run_plain(plan)
    assert_same(messages, plain)
    assert messages.messages == plain.messages
    return messages


def has_different_collectives(plan: Plan) -> bool:
    rows = np.flatnonzero(plan.node_action == Action.COLLECTIVE)
    return len({*zip(plan.node_kind[rows].tolist(), plan.node_size[rows].tolist(), strict=True)}) > 1


def check(plan: Plan) -> None:
    messages = check_messages(plan)
    at_once = run_plan(plan, can_fold=False)
    if stuck(at_once) and has_different_collectives(plan):
        return  # see test_messages_of_different_collectives_can_meet
    assert_same(at_once, messages)
    if (messages.finish >= 0).all():
        assert at_once.messages == messages.messages
    folded = run_plan(plan)
    assert folded.finish.tolist() == messages.finish.tolist()
    assert folded.computed.tolist() == messages.computed.tolist()
    for rank in range(plan.num_ranks):
        mine, same = folded.nodes_of(plan, rank), messages.nodes_of(plan, rank)
        assert folded.start[mine].tolist() == messages.start[same].tolist()
        assert folded.end[mine].tolist() == messages.end[same].tolist()


@quick
@given(plans())
def test_all_ways_agree(plan: Plan) -> None:
    check(plan)


@pytest.mark.slow
@thorough
@given(plans())
def test_all_ways_agree_on_many(plan: Plan) -> None:
    check(plan)


# Odd jobs


def lines(network: Network, algorithm: Algorithm, **system: Any) -> System:
    """A system with one algorithm in every dimension."""
    kinds = [k for k in KINDS if k is not CommType.ALL_TO_ALL or algorithm.pattern is not Pattern.HALVING_DOUBLING]
    table = {kind: (algorithm,) * len(network.dimensions) for kind in kinds}
    return System(algorithms=table, memory_bytes_per_s=1600e9, **system)


def ring(*sizes: int) -> Network:
    return Network(tuple(Dimension(Topology.RING, size, 53.6, 500.0) for size in sizes))


def collective(members: list[int], num_ranks: int, group: WorkGroup | None = None, **columns: Any) -> Workload:
    """One collective, of all ranks or of a group."""
    groups = [WorkGroup(0, np.arange(num_ranks)), *([group] if group else [])]
    columns = {"collective": CommType.ALL_REDUCE, "bytes": 1000, **columns}
    node = Node(WorkKind.COLLECTIVE, [], len(groups) - 1, columns)
    return workload_of([[node] if rank in members else [] for rank in range(num_ranks)], groups)


def plan_of(workload: Workload, network: Network, system: System, **chosen: Any) -> Plan:
    return lower(workload, network, system, RemoteMemory(), Options(**chosen))


def test_no_nodes_at_all() -> None:
    workload = workload_of([[] for _ in range(8)], [WorkGroup(0, np.arange(8))])
    plan = plan_of(workload, ring(8), System())
    check(plan)
    assert run_plan(plan).finish.tolist() == [0] * 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", Pattern)
def test_two_ranks(pattern: Pattern, kind: CommType) -> None:
    if kind is CommType.ALL_TO_ALL and pattern is Pattern.HALVING_DOUBLING:
        return
    system = lines(ring(2), Algorithm(pattern))
    plan = plan_of(collective([0, 1], 2, collective=kind), ring(2), system)
    check(plan)
    assert (run_plan(plan).finish > 0).all()


@pytest.mark.parametrize("rendezvous", [False, True])
@pytest.mark.parametrize("congestion", [False, True])
@pytest.mark.parametrize(
    ("kind", "finishes"), [(CommType.ALL_REDUCE, 0), (CommType.ALL_GATHER, 12)], ids=lambda v: str(v)
)
def test_halving_doubling_of_twelve(kind: CommType, finishes: int, congestion: bool, rendezvous: bool) -> None:
    """No power of two: partners do not fit together, and an all-reduce never ends."""
    system = lines(ring(12), Algorithm(Pattern.HALVING_DOUBLING), splits=2)
    workload = collective([*range(12)], 12, collective=kind)
    plan = plan_of(workload, ring(12), system, congestion=congestion, rendezvous=rendezvous)
    check(plan)
    assert int((run_plan(plan).finish >= 0).sum()) == finishes


@pytest.mark.parametrize("number", [2147, 2148, 3_000_000, 1 << 40])
def test_large_numbers_of_groups(number: int) -> None:
    group = WorkGroup(number, np.array([5, 1, 2]))
    plan = plan_of(collective([1, 2, 5], 8, group), ring(8), lines(ring(8), Algorithm(Pattern.RING)))
    check(plan)
    assert (run_plan(plan).finish >= 0).all()


def test_large_tags_and_sizes() -> None:
    columns = {"tag": 1 << 62, "bytes": 1 << 52}
    ranks = [[Node(kind, [], 1 - rank, columns)] for rank, kind in enumerate((WorkKind.SEND, WorkKind.RECEIVE))]
    plan = plan_of(workload_of(ranks, [WorkGroup(0, np.arange(2))]), ring(2), System())
    check(plan)
    assert run_plan(plan).finish.tolist() == [int(500 + (1 << 52) / 53.6)] * 2


def test_algorithms_behind_a_flat_one_do_nothing() -> None:
    flat = Algorithm(Pattern.RING, flat=True)
    alone, followed = (
        plan_of(collective([*range(8)], 8), ring(4, 2), replace(System(memory_bytes_per_s=1600e9), algorithms=table))
        for table in ({KINDS[0]: (flat,)}, {KINDS[0]: (flat, Algorithm(Pattern.RING))})
    )
    check(followed)
    assert run_plan(followed).finish.tolist() == run_plan(alone).finish.tolist()


def test_a_group_of_one_rank_never_finishes() -> None:
    plan = plan_of(collective([3], 8, WorkGroup(1, np.array([3]))), ring(8), lines(ring(8), Algorithm(Pattern.RING)))
    assert run_plain(plan).finish.tolist() == [0, 0, 0, -1, 0, 0, 0, 0]
    check(plan)


def test_five_dimensions() -> None:
    network = ring(2, 2, 2, 2, 2)
    check(plan_of(collective([*range(32)], 32), network, lines(network, Algorithm(Pattern.RING))))


def test_messages_of_different_collectives_can_meet() -> None:
    """One rank scatters, the other exchanges: the messages are alike, and both end."""
    kinds = CommType.REDUCE_SCATTER, CommType.ALL_TO_ALL
    ranks = [[Node(WorkKind.COLLECTIVE, [], 0, {"collective": kind, "bytes": 1000})] for kind in kinds]
    plan = plan_of(workload_of(ranks, [WorkGroup(0, np.arange(2))]), ring(2), lines(ring(2), Algorithm(Pattern.RING)))
    messages = check_messages(plan)
    assert (messages.finish >= 0).all()
    assert_same(run_plan(plan, can_fold=False), messages)
