"""`lower`: a workload, a network and a system as a `Plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.machine.limits import (
    MOST_CHUNKS,
    MOST_DIRECT,
    MOST_LINKS,
    MOST_NS,
    MOST_QUEUES,
    MOST_QUEUES_OF_ALL,
)
from foretrace.machine.network import Network, Topology
from foretrace.machine.system import (
    KINDS_WITH_ALGORITHM,
    Algorithm,
    MemoryKind,
    Pattern,
    Priority,
    RemoteMemory,
    System,
)
from foretrace.simulate.cluster.plan import Action, Plan, Resource
from foretrace.trace.graph import GraphError
from foretrace.trace.workload import WORLD, CommType, Program, WorkKind, Workload

_TAGS = 500_000_000  # a tag of a send counts modulo this
_MOST = 1 << 60  # of any size or time, so that sums stay within 64 bits
_ABSENT_DIMENSIONS = 0b1111  # a collective that names none involves the first four
_NO_TIME_NS = 1  # a node without a recorded duration takes this


@dataclass(frozen=True)
class Options:
    """How a plan is to be run.

    Attributes:
        queues: of a dimension (ASTRA-sim's ``--num-queues-per-dim``).
        rendezvous: messages ask before they go.
        congestion: links carry one message at a time.
        phases_at_once: evaluate phases by formula where that is exact.
        fold: ranks that provably do the same are simulated once.
    """

    queues: int = 1
    rendezvous: bool = False
    congestion: bool = False
    phases_at_once: bool = True
    fold: bool = True


def lower(workload: Workload, network: Network, system: System, memory: RemoteMemory, options: Options) -> Plan:
    """Arrays of a workload on a machine.

    Raises:
        GraphError: where the workload asks for what the machine does not have; the message names file and node.
    """
    _check_machine(workload, network, system, options)
    nodes = [_nodes(program, _path(workload, i), system, memory) for i, program in enumerate(workload.programs)]
    columns: dict[str, Any] = {name: np.concatenate([part[name] for part in nodes]) for name in nodes[0]}
    _check_collectives(workload, network, system)
    first_node = np.cumsum([0, *(program.num_nodes for program in workload.programs)]).astype(np.int64)
    first_child, child, missing = _children(workload.programs, first_node)
    first_peer, peer = _by_rank(workload, workload.peers)
    first_group, group_of = _by_rank(workload, workload.groups_of)
    columns["node_slot"][_is_world(workload, columns)] = -1
    sizes = np.array([0, *(len(group.ranks) for group in workload.groups[1:])], np.int64)
    members = [group.ranks for group in workload.groups[1:]]
    return Plan(
        **columns,
        node_missing=missing,
        **_enclosures(workload.programs, first_node),
        first_child=first_child,
        child=child,
        first_node=first_node,
        program_of=workload.program_of.astype(np.int32),
        first_peer=first_peer,
        peer=peer,
        first_group=first_group,
        group_of=(group_of - 1).astype(np.int32),
        first_member=np.cumsum(sizes),
        member=np.concatenate([np.empty(0, np.int64), *members]).astype(np.int32),
        group_number=np.array([group.number for group in workload.groups[1:]], np.int64),
        **_network(network),
        **_algorithms(system, len(network.dimensions)),
        endpoint_delay=system.endpoint_delay_ns,
        splits=system.splits,
        active_chunks=system.active_chunks,
        queues=options.queues,
        priority=list(Priority).index(system.priority),
        local_bandwidth_aware=system.local_bandwidth_aware,
        memory_bandwidth=system.memory_bytes_per_s or 0.0,
        memory_pool=memory.kind is MemoryKind.POOL,
        rendezvous=options.rendezvous,
        congestion=options.congestion,
        phases_at_once=options.phases_at_once and not _has_pool_queue(columns, memory),
    )


def _has_pool_queue(columns: Mapping[str, NDArray[Any]], memory: RemoteMemory) -> bool:
    """Whether ranks queue for one pool of memory: who is first at equal times only the order of messages tells."""
    return memory.kind is MemoryKind.POOL and bool((columns["node_action"] == Action.MEMORY).any())


def _check_machine(workload: Workload, network: Network, system: System, options: Options) -> None:
    """Refuse machines that make no sense for the workload, and numbers that 64 bits may not hold in the end."""
    if workload.num_ranks != network.num_ranks:
        raise GraphError(f"the workload has {workload.num_ranks} ranks, the network {network.num_ranks}")
    counts = {"queues": options.queues, "splits": system.splits, "active chunks": system.active_chunks}
    for name, count in counts.items():
        if count < 1:
            raise GraphError(f"{count} {name}: at least 1 is needed")
    for kind, algorithms in system.algorithms.items():
        if len(algorithms) > len(network.dimensions) and not algorithms[0].flat:
            raise GraphError(f"{len(algorithms)} algorithms of {kind.label} for {len(network.dimensions)} dimensions")
        for algorithm, dimension in zip(algorithms, network.dimensions, strict=False):
            if algorithm.pattern is Pattern.DOUBLE_BINARY_TREE and dimension.size & (dimension.size - 1):
                raise GraphError(f"a double binary tree over {dimension.size} ranks, which is no power of two")
    _check_counts(network, options, system)
    _check_times(workload, network)
    _check_groups(workload)


def _check_counts(network: Network, options: Options, system: System) -> None:
    """Refuse what takes all memory before there is an answer."""
    ranks, dimensions = network.num_ranks, len(network.dimensions)
    if options.queues > MOST_QUEUES:
        raise GraphError(f"{options.queues} queues of a dimension: at most {MOST_QUEUES} are simulated")
    if options.queues * dimensions * ranks > MOST_QUEUES_OF_ALL:
        of_all = f"{options.queues} queues in {dimensions} dimensions of {ranks} ranks"
        raise GraphError(f"{of_all}: at most {MOST_QUEUES_OF_ALL} in all are simulated")
    if system.splits > MOST_CHUNKS:
        raise GraphError(f"{system.splits} splits: at most {MOST_CHUNKS} are simulated")
    wires = (one.size if one.topology is Topology.FULLY_CONNECTED else 2 for one in network.dimensions)
    links = ranks * sum(wires) if options.congestion else 0
    if links > MOST_LINKS:
        raise GraphError(f"the network has {links} links: this fidelity simulates at most {MOST_LINKS}")


def _check_times(workload: Workload, network: Network) -> None:
    """Refuse sizes and durations that alone take longer than 64 bits hold; engines see to sums of them."""
    slowest = min(dimension.bandwidth_bytes_per_ns for dimension in network.dimensions)
    for index, program in enumerate(workload.programs):
        size, time = program.nodes["bytes"], program.nodes["duration_ns"]
        largest = int(size.max(initial=0))
        if largest * network.num_ranks > _MOST or largest * network.num_ranks / slowest > _MOST:
            where = f"{_path(workload, index)}{program.describe(int(size.argmax()))}"
            raise GraphError(f"{where}: {largest} bytes take longer than 64 bits hold in ns")
        if int(time.min(initial=0)) < 0:
            where = f"{_path(workload, index)}{program.describe(int(time.argmin()))}"
            raise GraphError(f"{where}: its duration is {int(time.min())} ns, below 0")
        if float(time.astype(np.float64).sum()) > _MOST:
            where = f"{_path(workload, index)}{program.describe(int(time.argmax()))}"
            raise GraphError(f"{where} and others take longer together than 64 bits hold in ns")


def _check_groups(workload: Workload) -> None:
    """Refuse groups with a rank twice, and ranks that use groups that they are not in."""
    ranks = workload.num_ranks
    numbers = [np.full(len(group.ranks), index, np.int64) for index, group in enumerate(workload.groups)]
    members = np.concatenate([group.ranks for group in workload.groups])
    if len(members) and not 0 <= members.min() <= members.max() < ranks:
        raise GraphError(f"a group has rank {members.max()}, the workload has {ranks} ranks")
    keys = np.sort(np.concatenate(numbers) * ranks + members)
    twice = np.flatnonzero(keys[1:] == keys[:-1])
    if len(twice):
        group, rank = divmod(int(keys[twice[0]]), ranks)
        raise GraphError(f"group {workload.groups[group].number} has rank {rank} twice")
    for index, groups in enumerate(workload.groups_of):
        mine = np.flatnonzero(workload.program_of == index)
        wanted = (groups.astype(np.int64) * ranks + mine[:, None])[groups != WORLD]
        at = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
        absent = np.flatnonzero(keys[at] != wanted)
        if len(absent):
            group, rank = divmod(int(wanted[absent[0]]), ranks)
            raise GraphError(f"rank {rank} uses group {workload.groups[group].number}, but is not in it")


def _path(workload: Workload, program: int) -> str:
    return f"{workload.paths[program]}: " if program < len(workload.paths) and workload.paths[program] else ""


def _nodes(program: Program, path: str, system: System, memory: RemoteMemory) -> dict[str, NDArray[Any]]:
    """Node columns of a program."""
    nodes = program.nodes
    kind, on_host, dimensions = nodes["kind"], nodes["on_host"], nodes["dimensions"]
    resource = np.full(len(kind), Resource.COMMUNICATION, np.int8)
    resource[kind == WorkKind.RECEIVE] = Resource.NONE
    resource[kind == WorkKind.COMPUTE] = Resource.COMPUTE
    resource[on_host] = Resource.HOST
    action = np.full(len(kind), Action.NOTHING, np.int8)
    for work, what in (
        (WorkKind.COMPUTE, Action.WAIT),
        (WorkKind.SEND, Action.SEND),
        (WorkKind.RECEIVE, Action.RECEIVE),
        (WorkKind.COLLECTIVE, Action.COLLECTIVE),
        (WorkKind.MEMORY, Action.MEMORY),
    ):
        action[kind == work] = what
    action[(kind == WorkKind.COLLECTIVE) & (nodes["collective"] == CommType.BROADCAST)] = Action.WAIT
    is_inner = np.zeros(len(kind), np.bool_)
    if program.within is not None:
        is_inner = program.within >= 0
        resource[is_inner] = Resource.NONE
        action[program.within[is_inner]] = Action.ENCLOSE
    time = np.where(nodes["duration_ns"] == 0, _NO_TIME_NS, nodes["duration_ns"])
    counts = (resource == Resource.COMPUTE) & (kind == WorkKind.COMPUTE)
    if system.replay_only:
        action[:] = Action.WAIT
        counts = resource != Resource.HOST
    elif system.roofline:
        _roofline(program, path, system, (kind == WorkKind.COMPUTE) & ~on_host & ~is_inner, time, action)
    if not system.replay_only:
        _memory(program, path, memory, kind == WorkKind.MEMORY, time)
        _check(program, path, action, on_host)
    return {
        "node_resource": resource,
        "node_action": action,
        "node_time": time.astype(np.int64),
        "node_counts": (counts & (action != Action.NOTHING)).astype(np.int8),
        "node_kind": nodes["collective"].astype(np.int8),
        "node_size": nodes["bytes"].astype(np.int64),
        "node_tag": nodes["tag"].astype(np.int64) % _TAGS,
        "node_priority": nodes["priority"].astype(np.int32),
        "node_slot": nodes["slot"].astype(np.int32),
        "node_dimensions": np.where(dimensions == -1, _ABSENT_DIMENSIONS, dimensions).astype(np.int64),
    }


def _roofline(
    program: Program,
    path: str,
    system: System,
    computes: NDArray[np.bool_],
    time: NDArray[np.int64],
    action: NDArray[np.int8],
) -> None:
    """Durations from FLOPs and bytes: trunc(flops / min(memory bandwidth x intensity, peak) x 1e9)."""
    if not system.memory_bytes_per_s or not system.peak_flops_per_s:
        raise GraphError("a roofline needs local-mem-bw and peak-perf in the system's file")
    flops, size = program.nodes["flops"], program.nodes["bytes"]
    if system.recorded_without_costs:
        computes = computes & (flops > 0) & (size > 0)
    for row in np.flatnonzero(computes & ((flops < 0) | (size < 0)))[:1]:
        raise GraphError(f"{path}{program.describe(row)} has no num_ops or no tensor_size, which a roofline needs")
    for row in np.flatnonzero(computes & (flops == 0) & (size > 0))[:1]:
        raise GraphError(f"{path}{program.describe(row)} has 0 num_ops, for which a roofline gives no time")
    action[computes & (size == 0)] = Action.NOTHING
    rows = np.flatnonzero(computes & (size > 0))
    intensity = flops[rows].astype(np.float64) / size[rows].astype(np.float64)
    rate = np.minimum(system.memory_bytes_per_s * intensity, system.peak_flops_per_s)
    wanted = flops[rows].astype(np.float64) / rate * 1e9
    for row in rows[~(wanted <= MOST_NS)][:1]:
        raise GraphError(f"{path}{program.describe(row)} takes longer than 64 bits hold in ns")
    time[rows] = wanted.astype(np.int64)


def _memory(
    program: Program, path: str, memory: RemoteMemory, is_memory: NDArray[np.bool_], time: NDArray[np.int64]
) -> None:
    for row in np.flatnonzero(is_memory)[:1]:
        if memory.kind is MemoryKind.NONE:
            raise GraphError(f"{path}{program.describe(row)} uses remote memory: the machine has none (--memory)")
        if memory.kind is MemoryKind.PER_NODE:
            raise GraphError(f"{path}{program.describe(row)}: memory-type PER_NODE is not simulated (docs/cluster.md)")
        for bad in np.flatnonzero(is_memory & (program.nodes["bytes"] < 0))[:1]:
            raise GraphError(f"{path}{program.describe(bad)} has no tensor_size")
    time[is_memory] = memory.latency_ns + program.nodes["bytes"][is_memory] // memory.bandwidth_bytes_per_ns


def _check(program: Program, path: str, action: NDArray[np.int8], on_host: NDArray[np.bool_]) -> None:
    """Refuse what has no meaning on a machine."""
    collective, size = program.nodes["collective"], program.nodes["bytes"]
    is_message = (action == Action.SEND) | (action == Action.RECEIVE)
    is_collective = action == Action.COLLECTIVE
    is_any = is_collective | is_message | (action == Action.ENCLOSE)
    for row in np.flatnonzero(is_collective & ~np.isin(collective, KINDS_WITH_ALGORITHM))[:1]:
        kinds = [kind.value for kind in CommType]
        name = CommType(collective[row]).label if collective[row] in kinds else str(collective[row])
        raise GraphError(f"{path}{program.describe(row)}: no algorithm for the collective {name}")
    for row in np.flatnonzero(is_any & (size <= 0))[:1]:
        raise GraphError(f"{path}{program.describe(row)}: its comm_size is {size[row]}, must be at least 1")
    for row in np.flatnonzero(is_any & on_host)[:1]:
        raise GraphError(f"{path}{program.describe(row)}: communication that is_cpu_op says is on the host")


def _check_collectives(workload: Workload, network: Network, system: System) -> None:
    """Refuse collectives for which the system has no algorithm, or chunks that are empty."""
    if system.replay_only:
        return
    for index, program in enumerate(workload.programs):
        kinds, size = program.nodes["collective"], program.nodes["bytes"]
        is_collective = program.nodes["kind"] == WorkKind.COLLECTIVE
        if program.within is not None:
            is_collective[program.within[program.within >= 0]] = False
        for kind in KINDS_WITH_ALGORITHM:
            rows = np.flatnonzero(is_collective & (kinds == kind))
            if not len(rows):
                continue
            if not system.algorithms.get(kind):
                raise GraphError(f"the system has no {kind.label.replace('_', '-')}-implementation")
            patterns = {algorithm.pattern for algorithm in system.algorithms[kind]}
            reduces = kind in (CommType.ALL_REDUCE, CommType.REDUCE_SCATTER)
            if (reduces or Pattern.DOUBLE_BINARY_TREE in patterns) and not system.memory_bytes_per_s:
                raise GraphError("collectives that reduce need local-mem-bw in the system's file")
            _check_direct(workload, network, system.algorithms[kind])
            if kind is CommType.ALL_TO_ALL and Pattern.HALVING_DOUBLING in patterns:
                raise GraphError("halving-doubling has no all-to-all; choose ring or direct")
        few = is_collective & (kinds == CommType.ALL_GATHER) & (size < system.splits)
        for row in np.flatnonzero(few)[:1]:
            raise GraphError(
                f"{_path(workload, index)}{program.describe(row)}: {size[row]} bytes in {system.splits} splits"
            )
        _check_trees(workload, index, system)


def _check_direct(workload: Workload, network: Network, algorithms: Sequence[Algorithm]) -> None:
    """Refuse that very many ranks send to each other: memory and time grow with the square."""
    sizes = [network.num_ranks] if algorithms[0].flat else [dimension.size for dimension in network.dimensions]
    of_rings = [n for n, one in zip(sizes, algorithms, strict=False) if one.pattern is Pattern.DIRECT]
    if len(algorithms) == 1 and of_rings:
        of_rings += [len(group.ranks) for group in workload.groups[1:] if len(group.ranks) != network.num_ranks]
    if max(of_rings, default=0) > MOST_DIRECT:
        raise GraphError(f"a direct collective of {max(of_rings)} ranks: at most {MOST_DIRECT}; choose ring")


def _check_trees(workload: Workload, index: int, system: System) -> None:
    """Groups that are no whole world run on one ring; a tree of them does not exist."""
    program = workload.programs[index]
    for slot in range(workload.groups_of[index].shape[1]):
        groups = workload.groups_of[index][:, slot]
        if all(len(workload.groups[g].ranks) in (0, workload.num_ranks) for g in np.unique(groups)):
            continue
        mine = (program.nodes["kind"] == WorkKind.COLLECTIVE) & (program.nodes["slot"] == slot)
        if program.within is not None:
            mine[program.within[program.within >= 0]] = False
        for kind in np.unique(program.nodes["collective"][mine]):
            algorithms: tuple[Algorithm, ...] = system.algorithms.get(CommType(kind), ())
            if len(algorithms) == 1 and algorithms[0].pattern is Pattern.DOUBLE_BINARY_TREE:
                raise GraphError(f"{_path(workload, index)}a group cannot run the double binary tree: choose ring")


def _enclosures(programs: list[Program], first_node: NDArray[np.int64]) -> dict[str, Any]:
    """Columns for collectives that run an algorithm of their own, and for the nodes within them."""
    within = np.full(int(first_node[-1]), -1, np.int32)
    first, count = np.zeros_like(within), np.zeros_like(within)
    for program, begin in zip(programs, first_node, strict=False):
        if program.within is None:
            continue
        inner = np.flatnonzero(program.within >= 0)
        within[begin + inner] = begin + program.within[inner]
        owner, at, size = np.unique(program.within[inner], return_index=True, return_counts=True)
        first[begin + owner], count[begin + owner] = begin + inner[at], size
    return {"node_within": within, "first_within": first, "num_within": count}


def _children(
    programs: list[Program], first_node: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
    """CSR from a node to those that wait for it, and how many each waits for."""
    sources, targets, missing = [], [], []
    for program, first in zip(programs, first_node, strict=False):
        counts = np.diff(program.first_dependency)
        missing.append(counts)
        sources.append(program.dependency.astype(np.int64) + first)
        targets.append(np.repeat(np.arange(program.num_nodes, dtype=np.int64), counts) + first)
    source, target = np.concatenate(sources), np.concatenate(targets)
    order = np.argsort(source, kind="stable")
    first_child = np.concatenate(([0], np.cumsum(np.bincount(source, minlength=int(first_node[-1]))))).astype(np.int64)
    return first_child, target[order].astype(np.int32), np.concatenate(missing).astype(np.int32)


def _by_rank(workload: Workload, parts: list[NDArray[np.int32]]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Rows of all programs' tables one after the other in the order of ranks, and where each rank's begin."""
    widths = np.array([part.shape[1] for part in parts], np.int64)[workload.program_of]
    first = np.concatenate(([0], np.cumsum(widths))).astype(np.int64)
    values = np.empty(int(first[-1]), np.int32)
    for index, part in enumerate(parts):
        mine = np.flatnonzero(workload.program_of == index)
        values[first[mine][:, None] + np.arange(part.shape[1])] = part
    return first, values


def _is_world(workload: Workload, columns: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
    """Collectives of group `WORLD` for every rank that runs the program."""
    parts = []
    for program, groups in zip(workload.programs, workload.groups_of, strict=True):
        is_world = np.append((groups == WORLD).all(axis=0), False)
        slot = np.where(program.nodes["kind"] == WorkKind.COLLECTIVE, program.nodes["slot"], -1)
        parts.append(is_world[slot])
    return np.concatenate(parts)


def _network(network: Network) -> dict[str, Any]:
    dimensions = network.dimensions
    return {
        "topology": np.array([list(Topology).index(d.topology) for d in dimensions], np.int8),
        "size": np.array([d.size for d in dimensions], np.int64),
        "bandwidth": np.array([d.bandwidth_bytes_per_ns for d in dimensions], np.float64),
        "latency": np.array([d.latency_ns for d in dimensions], np.float64),
    }


def _algorithms(system: System, num_dimensions: int) -> dict[str, Any]:
    lists = [system.algorithms.get(kind, ()) for kind in KINDS_WITH_ALGORITHM]
    most = max(num_dimensions, *(len(each) for each in lists), 1)
    table = np.zeros((len(KINDS_WITH_ALGORITHM), most, 2), np.int32)
    for row, each in enumerate(lists):
        for column, algorithm in enumerate(each):
            table[row, column] = algorithm.pattern, algorithm.window
    return {
        "algorithm": table,
        "algorithms": np.array([len(each) for each in lists], np.int32),
        "flat": np.array([any(a.flat for a in each) for each in lists], np.int8),
    }
