"""From a `Workload` on a machine to a `FairPlan`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from foretrace.machine.network import Network
from foretrace.machine.system import KINDS_WITH_ALGORITHM, MemoryKind, RemoteMemory, System
from foretrace.simulate.fair.builder import Builder
from foretrace.simulate.fair.collectives import Collectives, Lines, layout, logical_dimensions
from foretrace.simulate.fair.plan import F64, I64, FairPlan, Kind
from foretrace.simulate.fair.wiring import Wiring
from foretrace.trace.workload import WORLD, CommType, Program, WorkKind, Workload


def lower(
    workload: Workload,
    network: Network,
    system: System,
    *,
    memory: RemoteMemory | None = None,
    communication_slots: int | None = None,
    rank_speed: ArrayLike = 1.0,
    slowdown: ArrayLike = 0.0,
    link_slowdown: ArrayLike = 0.0,
) -> FairPlan:
    """The activities of a workload on a machine.

    Args:
        workload: what the ranks do.
        network: what connects them.
        system: how they compute and run collectives.
        memory: remote memory, for nodes that use it.
        communication_slots: how many sends, collectives and memory requests of a rank may be under way; None: any
            number. Receives need none.
        rank_speed, slowdown, link_slowdown: of each rank or of all, as in `FairPlan`.

    Raises:
        ValueError: the machine cannot run the workload.
    """
    if workload.num_ranks > network.num_ranks:
        raise ValueError(f"the workload has {workload.num_ranks} ranks, but the network only {network.num_ranks}")
    lowering = _Lowering(workload, network, system, memory or RemoteMemory(), communication_slots)
    return lowering.plan(*(_per_rank(value, network.num_ranks) for value in (rank_speed, slowdown, link_slowdown)))


def _per_rank(value: ArrayLike, ranks: int) -> F64:
    return np.broadcast_to(np.asarray(value, np.float64), ranks).copy()


def durations(program: Program, system: System) -> F64:
    """Time of each node by itself, ns: by the roofline where the system asks for it or nothing was recorded, and FLOPs
    and bytes are known; else as recorded.
    """
    nodes = program.nodes
    recorded = nodes["duration_ns"].astype(np.float64)
    if system.peak_flops_per_s is None or system.memory_bytes_per_s is None:
        return recorded
    known = (nodes["kind"] == WorkKind.COMPUTE) & ~nodes["on_host"] & (nodes["flops"] >= 0) & (nodes["bytes"] >= 0)
    roofline = np.maximum(nodes["flops"] / system.peak_flops_per_s, nodes["bytes"] / system.memory_bytes_per_s) * 1e9
    return np.where(known & (system.roofline | (recorded == 0)), roofline, recorded)


@dataclass
class _Rows:
    """Nodes of some kind of all ranks, in order of rank and node; all of one length.

    ``peer`` is the partner of a send or receive and the group of a collective.
    """

    rank: I64
    node: I64
    peer: I64
    begin: I64
    end: I64
    columns: dict[str, I64]


_COLUMNS = ("collective", "bytes", "tag", "dimensions", "duration_ns")


class _Lowering:
    """What `lower` does, step by step."""

    def __init__(
        self, workload: Workload, network: Network, system: System, memory: RemoteMemory, slots: int | None
    ) -> None:
        self.workload, self.network, self.system, self.memory = workload, network, system, memory
        self.builder = Builder()
        ranks = network.num_ranks
        self.host, self.compute = self.builder.queues(ranks), self.builder.queues(ranks)
        self.slot = np.full(ranks, -1) if slots is None else self.builder.queues(ranks, slots=slots)
        self.place = np.full(ranks, -1)  # where each rank's remote memory is
        if memory.kind is MemoryKind.POOL:
            self.place = np.repeat(self.builder.queues(1), ranks)
        elif memory.kind is MemoryKind.PER_NODE:
            node = np.arange(ranks) // memory.ranks_per_node
            self.place = self.builder.queues(int(node[-1]) + 1)[node]
        self.members: dict[WorkKind, list[_Rows]] = defaultdict(list)
        sizes = np.array([program.num_nodes for program in workload.programs], np.int64)
        self.first_node = np.zeros(workload.num_ranks + 1, np.int64)
        np.cumsum(sizes[workload.program_of] if len(sizes) else [], out=self.first_node[1:])
        self.begin = np.zeros(self.first_node[-1], np.int64)
        self.end = np.zeros(self.first_node[-1], np.int64)

    def plan(self, rank_speed: F64, slowdown: F64, link_slowdown: F64) -> FairPlan:
        """The whole of it."""
        for number in range(len(self.workload.programs)):
            self._program(number)
        self._messages()
        self._collectives()
        wiring = Wiring(self.network)
        more = {"first_node": self.first_node, "node_begin": self.begin, "node_end": self.end}
        return self.builder.build(wiring, rank_speed, slowdown, link_slowdown, **more)

    def _program(self, number: int) -> None:
        """The nodes of all ranks that run a program, and what they wait for."""
        program = self.workload.programs[number]
        ranks = np.flatnonzero(self.workload.program_of == number)
        kind, on_host = program.nodes["kind"], program.nodes["on_host"]
        begin = np.zeros((len(ranks), program.num_nodes), np.int64)
        end = np.zeros_like(begin)
        inner = np.zeros(len(kind), np.bool_) if program.within is None else program.within >= 0
        priority = -program.nodes["priority"].astype(np.int64)
        work = durations(program, self.system)
        b = self.builder
        rows = kind == WorkKind.NOTHING
        begin[:, rows] = end[:, rows] = b.add(Kind.INSTANT, np.repeat(ranks[:, None], rows.sum(), axis=1))
        for rows, queues, what in (
            ((kind == WorkKind.COMPUTE) & on_host, self.host, Kind.DELAY),
            ((kind == WorkKind.COMPUTE) & ~on_host & ~inner, self.compute, Kind.COMPUTE),
        ):
            queue = queues[ranks][:, None]
            tasks = b.add(what, ranks[:, None], work[rows], priority=priority[rows], takes=queue, gives=queue)
            begin[:, rows] = end[:, rows] = tasks
        rows = (kind == WorkKind.COMPUTE) & inner
        begin[:, rows] = end[:, rows] = b.add(Kind.DELAY, ranks[:, None], work[rows])
        rows = np.isin(kind, (WorkKind.SEND, WorkKind.COLLECTIVE, WorkKind.MEMORY, WorkKind.RECEIVE))
        slot = np.where((kind[rows] != WorkKind.RECEIVE) & ~inner[rows], self.slot[ranks][:, None], -1)
        begin[:, rows] = b.add(Kind.INSTANT, ranks[:, None], priority=priority[rows], takes=slot)
        end[:, rows] = b.add(Kind.INSTANT, ranks[:, None], priority=priority[rows], gives=slot)
        if self.system.replay_only:
            self._replay(ranks, work[rows], begin[:, rows], end[:, rows])
        else:
            for communication in (WorkKind.SEND, WorkKind.RECEIVE, WorkKind.COLLECTIVE):
                self._remember(number, ranks, communication, begin, end)
            self._memory(program, ranks, begin, end)
        if program.within is not None:  # nodes of a collective's own algorithm begin with it, and it ends with them
            b.wait(begin[:, program.within[inner]], begin[:, inner])
            b.wait(end[:, inner], end[:, program.within[inner]])
        waiter = np.repeat(np.arange(program.num_nodes), np.diff(program.first_dependency))
        b.wait(end[:, program.dependency], begin[:, waiter])
        place = self.first_node[ranks][:, None] + np.arange(program.num_nodes)
        self.begin[place], self.end[place] = begin, end

    def _replay(self, ranks: I64, work: F64, begin: I64, end: I64) -> None:
        """Communication that takes its recorded time."""
        delay = self.builder.add(Kind.DELAY, ranks[:, None], work)
        self.builder.wait(begin, delay)
        self.builder.wait(delay, end)

    def _memory(self, program: Program, ranks: I64, begin: I64, end: I64) -> None:
        """Requests to remote memory; those to one place are served one after the other."""
        rows = np.flatnonzero(program.nodes["kind"] == WorkKind.MEMORY)
        if not len(rows):
            return
        if self.memory.kind is MemoryKind.NONE:
            raise ValueError(f"{program.describe(int(rows[0]))} needs remote memory, but the machine has none")
        size = np.maximum(program.nodes["bytes"][rows], 0)
        queue = self.place[ranks][:, None]
        work = self.memory.latency_ns + size / self.memory.bandwidth_bytes_per_ns
        request = self.builder.add(Kind.DELAY, ranks[:, None], work, takes=queue, gives=queue)
        self.builder.wait(begin[:, rows], request)
        self.builder.wait(request, end[:, rows])

    def _remember(self, number: int, ranks: I64, kind: WorkKind, begin: I64, end: I64) -> None:
        """Put the nodes of a kind aside until the partners of all ranks are known."""
        program = self.workload.programs[number]
        rows = np.flatnonzero(program.nodes["kind"] == kind)
        if program.within is not None:
            rows = np.setdiff1d(rows, program.within)
        if not len(rows):
            return
        slot = program.nodes["slot"][rows]
        if kind == WorkKind.COLLECTIVE:
            table, absent = self.workload.groups_of[number], WORLD
        else:
            table, absent = self.workload.peers[number], -1
            if (slot < 0).any():
                raise ValueError(f"{program.describe(int(rows[np.argmin(slot)]))} has no partner")
        partners = table[:, np.maximum(slot, 0)] if table.shape[1] else np.full((len(ranks), len(rows)), absent)
        shape = (len(ranks), len(rows))
        self.members[kind].append(
            _Rows(
                rank=np.broadcast_to(ranks[:, None], shape).ravel(),
                node=np.broadcast_to(rows, shape).ravel(),
                peer=np.where(slot < 0, absent, partners).ravel().astype(np.int64),
                begin=begin[:, rows].ravel(),
                end=end[:, rows].ravel(),
                columns={
                    name: np.broadcast_to(program.nodes[name][rows].astype(np.int64), shape).ravel()
                    for name in _COLUMNS
                },
            )
        )

    def _all(self, kind: WorkKind) -> _Rows:
        """What was put aside of a kind."""
        parts = self.members[kind]

        def joined(pieces: list[I64]) -> I64:
            return np.concatenate([np.empty(0, np.int64), *pieces])

        columns = {name: joined([part.columns[name] for part in parts]) for name in _COLUMNS}
        return _Rows(
            rank=joined([part.rank for part in parts]),
            node=joined([part.node for part in parts]),
            peer=joined([part.peer for part in parts]),
            begin=joined([part.begin for part in parts]),
            end=joined([part.end for part in parts]),
            columns=columns,
        )

    def _messages(self) -> None:
        """Sends, and the receives that belong to them: the k-th of each source, target, tag and size."""
        send, receive = self._all(WorkKind.SEND), self._all(WorkKind.RECEIVE)
        b = self.builder
        for rows, what in ((send, "send"), (receive, "receive")):
            if ((rows.peer < 0) | (rows.peer >= self.workload.num_ranks)).any():
                raise ValueError(f"a {what} has a partner that is no rank of the workload")
        flow = b.add(Kind.FLOW, send.rank, np.maximum(send.columns["bytes"], 0), send.peer)
        b.wait(send.begin, flow)
        b.wait(flow, send.end)
        b.wait(receive.begin, receive.end)
        one, other = _match(_envelope(send.rank, send.peer, send), _envelope(receive.peer, receive.rank, receive))
        b.wait(flow[one], receive.end[other])
        alone = np.ones(len(receive.rank), np.bool_)
        alone[other] = False
        b.never(receive.end[alone], "receive without a send")
        if len(one) < len(flow):
            b.notes["send without a receive"] += len(flow) - len(one)

    def _collectives(self) -> None:
        """Collectives: the k-th of a group on all of its members. Those of one shape are expanded together."""
        rows = self._all(WorkKind.COLLECTIVE)
        batches: dict[_Shape, list[I64]] = defaultdict(list)
        for group, members in self._meetings(rows):
            shape = self._shape(rows, group, members)
            if shape.grid:
                members = members[np.argsort(rows.rank[members])]
            batches[shape].append(members)
        expanded = (one for shape, found in batches.items() if shape.kind in KINDS_WITH_ALGORITHM for one in found)
        # Each member has a message and a delay of each chunk, or more.
        self.builder.reserve(2 * self.system.splits * sum(len(one) for one in expanded))
        expander = Collectives(self.builder, self.system)
        for shape, found in batches.items():
            which = np.stack(found)
            self._expand(expander, shape, rows, which)

    def _meetings(self, rows: _Rows) -> list[tuple[int, I64]]:
        """Group and rows of each collective that all members take part in, in the group's order."""
        ordinal = _count_equal(np.stack([rows.peer, rows.rank], axis=1), rows.node)
        order = np.lexsort((rows.rank, ordinal, rows.peer))
        key = np.stack([rows.peer[order], ordinal[order]], axis=1)
        cuts = np.flatnonzero((np.diff(key, axis=0) != 0).any(axis=1)) + 1
        meetings = []
        for members in np.split(order, cuts) if len(order) else []:
            group = int(rows.peer[members[0]])
            wanted = self.workload.groups[group].ranks
            same = all(
                len(np.unique(rows.columns[name][members])) == 1 for name in ("collective", "bytes", "dimensions")
            )
            if not same or not np.array_equal(np.sort(wanted), rows.rank[members]):
                self.builder.never(rows.end[members], "collective that its members do not agree about")
                continue
            meetings.append((group, members[np.argsort(np.argsort(wanted))]))
        return meetings

    def _shape(self, rows: _Rows, group: int, members: I64) -> _Shape:
        kind = CommType(int(rows.columns["collective"][members[0]]))
        kind = CommType.REDUCE_SCATTER if kind is CommType.REDUCE_SCATTER_BLOCK else kind
        involved = int(rows.columns["dimensions"][members[0]]) if group == WORLD else -1
        algorithms = self.system.algorithms.get(kind, ())
        is_flat = bool(algorithms) and algorithms[0].flat
        grid = () if is_flat else layout(self.network, rows.rank[members])
        return _Shape(kind, int(rows.columns["bytes"][members[0]]), len(members), involved, grid)

    def _expand(self, expander: Collectives, shape: _Shape, rows: _Rows, which: I64) -> None:
        """All collectives of one shape; ``which``: rows, shape ``(collectives, members)``."""
        b, ranks, begin, end = self.builder, rows.rank[which], rows.begin[which], rows.end[which]
        if shape.kind in KINDS_WITH_ALGORITHM:
            lines = shape.lines(self.system)
            expander.expand(shape.kind, float(max(shape.size, 0)), ranks, lines, begin, end)
            return
        everybody = b.add(Kind.INSTANT, np.full(len(which), -1))
        b.wait(begin, everybody[:, None])
        transfer = b.add(Kind.DELAY, ranks, rows.columns["duration_ns"][which])
        b.wait(everybody[:, None], transfer)
        b.wait(transfer, end)
        if shape.kind is not CommType.BARRIER:
            b.notes[f"{shape.kind.label} that takes its recorded time"] += len(which)


@dataclass(frozen=True)
class _Shape:
    """What collectives that are expanded together have in common."""

    kind: CommType
    size: int
    members: int
    involved: int
    grid: tuple[tuple[int, int], ...]

    def lines(self, system: System) -> list[Lines]:
        """The logical dimensions that take part."""
        if self.members == 1:
            return []
        lines = logical_dimensions(system.algorithms.get(self.kind, ()), self.members, self.grid)
        if not self.grid:
            return lines
        return [line for line, (dimension, _) in zip(lines, self.grid, strict=True) if self.involved >> dimension & 1]


def _envelope(source: I64, target: I64, rows: _Rows) -> I64:
    """What a send and its receive have in common, shape ``(rows, 5)``; the last column counts equals."""
    alike = np.stack([source, target, rows.columns["tag"], rows.columns["bytes"]], axis=1)
    return np.column_stack([alike, _count_equal(alike, rows.node)])


def _count_equal(keys: I64, order: I64) -> I64:
    """How many rows with an equal key come before each one, by ``order``."""
    if not len(keys):
        return np.empty(0, np.int64)
    _, which = np.unique(keys, axis=0, return_inverse=True)
    which = which.ravel()
    sorted_rows = np.lexsort((order, which))
    first = np.append(True, np.diff(which[sorted_rows]) != 0)
    place = np.arange(len(keys))
    count = np.empty(len(keys), np.int64)
    count[sorted_rows] = place - np.maximum.accumulate(np.where(first, place, 0))
    return count


def _match(one: I64, other: I64) -> tuple[I64, I64]:
    """Pairs of equal rows; within each side rows are distinct."""
    if not len(one) or not len(other):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    _, which = np.unique(np.concatenate([one, other]), axis=0, return_inverse=True)
    which = which.ravel()
    _, left, right = np.intersect1d(which[: len(one)], which[len(one) :], assume_unique=True, return_indices=True)
    return left, right
