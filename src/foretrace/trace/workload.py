"""`Workload`: what many ranks are to do on a machine that is yet to be chosen; ranks that do the same share a program.

An `ExecutionGraph` says how long each task takes. A workload says what it is: so many FLOPs, a collective of so many
bytes among a group. Only a machine makes times of that.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.trace.strings import StringTable
from foretrace.trace.table import Table

WORLD = 0  # the group of all ranks


class WorkKind(enum.IntEnum):
    """What a node of a program does. The numbers are stable."""

    NOTHING = 0
    COMPUTE = 1
    SEND = 2
    RECEIVE = 3
    COLLECTIVE = 4
    MEMORY = 5  # a load from or a store to remote memory

    @property
    def label(self) -> str:
        """Lower-case name for tables."""
        return self.name.lower()


class CommType(enum.IntEnum):
    """Collectives, as Chakra's attribute ``comm_type`` numbers them from v0.0.4 on; `NONE` is ours."""

    NONE = -1
    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9

    @property
    def label(self) -> str:
        """Lower-case name for tables."""
        return self.name.lower()


WORK_COLUMNS: dict[str, tuple[type[np.generic], Any]] = {
    "id": (np.int64, 0),
    "name": (np.int32, -1),
    "kind": (np.int8, WorkKind.COMPUTE),
    "on_host": (np.bool_, False),
    "duration_ns": (np.int64, 0),
    "flops": (np.int64, -1),
    "bytes": (np.int64, -1),
    "collective": (np.int8, CommType.NONE),
    "tag": (np.int64, -1),
    "slot": (np.int32, -1),
    "priority": (np.int32, 0),
    "dimensions": (np.int64, -1),
}


@dataclass
class Program:
    """The work of one rank, or of many that do the same with other partners.

    Attributes:
        nodes: one row a node, ascending by ``id``. Columns ``id``, ``name`` (string id, -1), ``kind`` (`WorkKind`),
            ``on_host``, ``duration_ns`` (recorded; 0 for none), ``flops`` (-1 unknown), ``bytes`` (of a compute or
            memory node what it moves, of communication the size as Chakra means it: all-reduce and all-to-all the
            buffer, reduce-scatter the input, all-gather the shard of one rank; -1 unknown), ``collective``
            (`CommType`), ``tag`` (of a send or receive), ``slot`` (of a send or receive: column of
            `Workload.peers`; of a collective: column of `Workload.groups_of`; -1 for none), ``priority``,
            ``dimensions`` (bit i: the collective involves dimension i; -1: all).
        first_dependency: where the dependencies of each node begin and end, shape ``(nodes + 1,)``.
        dependency: rows of ``nodes``, every one once a node. A node may wait for itself or in a circle; it never runs.
        strings: the texts of ``name``.
        within: of a node that is a part of a collective's own algorithm, the row of that collective, -1 elsewhere; None
            where there is none. Such nodes are numbered behind all others, and wait only for each other.
    """

    nodes: Table
    first_dependency: NDArray[np.int64]
    dependency: NDArray[np.int32]
    strings: StringTable = field(default_factory=StringTable)
    within: NDArray[np.int32] | None = None

    @property
    def num_nodes(self) -> int:
        """Rows of ``nodes``."""
        return self.nodes.num_rows

    def describe(self, row: int) -> str:
        """A node in words, for messages."""
        return f"node {self.nodes['id'][row]} ({self.name(row) or WorkKind(self.nodes['kind'][row]).label})"

    def name(self, row: int) -> str:
        """The name of a node, ``""`` for none."""
        return self.strings.lookup(self.nodes["name"][row : row + 1])[0]


@dataclass(frozen=True)
class WorkGroup:
    """A process group of a workload.

    Attributes:
        number: what its name says (`pg_name` of Chakra ETs), which simulators count its streams from.
        ranks: its members in their order.
    """

    number: int
    ranks: NDArray[np.int64]


@dataclass
class Workload:
    """Programs, and which rank runs which with whom.

    Attributes:
        programs: each one once.
        program_of: index of every rank's program, shape ``(ranks,)``.
        peers: for each program the peers of its ranks, shape ``(ranks of the program, peer slots)``, ranks ascending.
        groups_of: for each program the groups of its ranks (index into ``groups``), same layout.
        groups: group `WORLD` holds all ranks.
        notes: what was repaired, guessed or left out, counted.
        paths: names of the programs' files, for messages; empty (or empty texts) for generated ones.
    """

    programs: list[Program]
    program_of: NDArray[np.int32]
    peers: list[NDArray[np.int32]]
    groups_of: list[NDArray[np.int32]]
    groups: list[WorkGroup]
    notes: Counter[str] = field(default_factory=Counter)
    paths: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"Workload({self.num_ranks} ranks, {len(self.programs)} programs, {self.num_nodes} nodes)"

    @property
    def num_ranks(self) -> int:
        """Ranks, from 0."""
        return len(self.program_of)

    @property
    def num_nodes(self) -> int:
        """Nodes of all ranks together."""
        sizes = np.array([program.num_nodes for program in self.programs], np.int64)
        return int(sizes[self.program_of].sum())


def merged(workloads: Sequence[Workload]) -> Workload:
    """Several jobs side by side: the ranks of each follow those of the one before.

    What is the group of all ranks in a job becomes a group of that job's ranks.
    """
    programs: list[Program] = []
    program_of, peers, groups_of, paths = [], [], [], []
    groups = [WorkGroup(0, np.arange(sum(w.num_ranks for w in workloads), dtype=np.int64))]
    notes: Counter[str] = Counter()
    first_rank = 0
    for workload in workloads:
        world = len(groups)
        groups.append(WorkGroup(world, np.arange(first_rank, first_rank + workload.num_ranks, dtype=np.int64)))
        for group in workload.groups[WORLD + 1 :]:
            groups.append(WorkGroup(len(groups), group.ranks + first_rank))
        program_of.append(workload.program_of + len(programs))
        for program, own_peers, own_groups in zip(workload.programs, workload.peers, workload.groups_of, strict=True):
            programs.append(_with_world_slot(program, own_groups.shape[1]))
            peers.append(own_peers + first_rank)
            everyone = np.full((len(own_groups), 1), WORLD, np.int32)
            groups_of.append((np.hstack([own_groups, everyone]) + world).astype(np.int32))
        paths += workload.paths or [""] * len(workload.programs)
        notes += workload.notes
        first_rank += workload.num_ranks
    return Workload(programs, np.concatenate(program_of).astype(np.int32), peers, groups_of, groups, notes, paths)


def _with_world_slot(program: Program, slot: int) -> Program:
    """The program with its collectives without a slot in this one."""
    nodes = program.nodes
    is_open = (nodes["kind"] == WorkKind.COLLECTIVE) & (nodes["slot"] < 0)
    columns = {**nodes, "slot": np.where(is_open, slot, nodes["slot"]).astype(np.int32)}
    return replace(program, nodes=Table(columns))
