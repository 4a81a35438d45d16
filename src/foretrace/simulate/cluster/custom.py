"""Collectives whose algorithm is given as programs: sends, receives and computation for each place in the group.

ASTRA-sim runs such an algorithm as a single stream: a node starts as soon as those that it waits for have ended,
whatever else runs, sizes and tags are those of the algorithm, and the collective ends with the last node. It has a slot
of communication all the while, so that no other collective of the rank meets it, and queues have nothing to decide.
So the nodes are put into the program of the rank, within the node of the collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrace.trace.graph import GraphError
from foretrace.trace.strings import StringTable
from foretrace.trace.table import Table
from foretrace.trace.workload import CommType, Program, WorkKind, Workload

_ALLOWED = (WorkKind.SEND, WorkKind.RECEIVE, WorkKind.COMPUTE)


@dataclass(frozen=True)
class CustomAlgorithms:
    """Algorithms of collectives; the ranks of each are the places in a group.

    Attributes:
        of_kind: by kind of collective. of_node: by the id of a node; these go first.
    """

    of_kind: Mapping[CommType, Workload]
    of_node: Mapping[int, Workload]

    def find(self, program: Program, row: int) -> Workload | None:
        """The algorithm of a node, None if it has none of its own."""
        if program.nodes["kind"][row] != WorkKind.COLLECTIVE:
            return None
        own = self.of_node.get(int(program.nodes["id"][row]))
        return own or self.of_kind.get(CommType(int(program.nodes["collective"][row])))


class _Use(NamedTuple):
    """A collective of a rank: its row, its algorithm, the rank's place in the group, and the group's ranks."""

    row: int
    algorithm: Workload
    place: int
    ranks: NDArray[np.int64]


def with_custom(workload: Workload, algorithms: CustomAlgorithms) -> Workload:
    """The workload with these algorithms in place of what the machine would do.

    Raises:
        GraphError: if an algorithm is for another number of ranks than a group that uses it.
    """
    programs: list[Program] = []
    paths: list[str] = []
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    program_of = np.empty(workload.num_ranks, np.int32)
    peers: list[list[NDArray[np.int32]]] = []
    groups: list[list[NDArray[np.int32]]] = []
    place_in = [0] * len(workload.programs)
    for rank, number in enumerate(workload.program_of.tolist()):
        program, at = workload.programs[number], place_in[number]
        place_in[number] += 1
        uses = _uses(workload, algorithms, number, at, rank)
        key = (number, tuple(use.place for use in uses))
        if key not in known:
            known[key] = len(programs)
            programs.append(_expanded(program, uses, workload.peers[number].shape[1]))
            paths.append(workload.paths[number] if workload.paths else "")
            peers.append([])
            groups.append([])
        program_of[rank] = known[key]
        partners = [use.ranks[_partners(use)] for use in uses]
        peers[known[key]].append(np.concatenate([workload.peers[number][at], *partners]).astype(np.int32))
        groups[known[key]].append(workload.groups_of[number][at])
    tables = [[np.stack(rows) for rows in each] for each in (peers, groups)]
    return replace(
        workload, programs=programs, program_of=program_of, peers=tables[0], groups_of=tables[1], paths=paths
    )


def check_algorithm(algorithm: Workload) -> None:
    """Refuse what is no algorithm of a collective.

    Raises:
        GraphError: if it consists of anything but sends, receives and computation, or of nothing at some place.
    """
    for number, program in enumerate(algorithm.programs):
        where = f"{algorithm.paths[number]}: " if algorithm.paths else ""
        for row in np.flatnonzero(~np.isin(program.nodes["kind"], _ALLOWED))[:1]:
            problem = "only sends, receives and computation make up the algorithm of a collective"
            raise GraphError(f"{where}{program.describe(row)}: {problem}")
        if not program.num_nodes:
            raise GraphError(f"{where}the algorithm of a collective has no node, and would never end")


def _uses(workload: Workload, algorithms: CustomAlgorithms, number: int, at: int, rank: int) -> list[_Use]:
    program, found = workload.programs[number], []
    for row in np.flatnonzero(program.nodes["kind"] == WorkKind.COLLECTIVE).tolist():
        algorithm = algorithms.find(program, row)
        if algorithm is None:
            continue
        slot = int(program.nodes["slot"][row])
        ranks = workload.groups[int(workload.groups_of[number][at, slot]) if slot >= 0 else 0].ranks
        if len(ranks) != algorithm.num_ranks:
            where = f"{workload.paths[number]}: " if workload.paths and workload.paths[number] else ""
            problem = f"its group has {len(ranks)} ranks, its algorithm is given for {algorithm.num_ranks}"
            raise GraphError(f"{where}{program.describe(row)}: {problem}")
        found.append(_Use(row, algorithm, int(np.flatnonzero(ranks == rank)[0]), ranks))
    return found


def _partners(use: _Use) -> NDArray[np.int32]:
    """Places of the peers of the algorithm's program, by slot."""
    number = int(use.algorithm.program_of[use.place])
    row = int((use.algorithm.program_of[: use.place] == number).sum())
    return np.asarray(use.algorithm.peers[number][row], np.int32)


def _expanded(program: Program, uses: list[_Use], peer_slots: int) -> Program:
    """The program with the nodes of its collectives' algorithms behind its own."""
    if not uses:
        return program
    columns = {name: [np.asarray(program.nodes[name])] for name in program.nodes}
    names = program.strings.lookup(program.nodes["name"])
    counts, dependency = [np.diff(program.first_dependency)], [program.dependency]
    within = [np.full(program.num_nodes, -1, np.int32)]
    first, next_id = program.num_nodes, int(program.nodes["id"].max(initial=-1)) + 1
    for use in uses:
        inner = use.algorithm.programs[int(use.algorithm.program_of[use.place])]
        for name, parts in columns.items():
            parts.append(_column(inner, name, next_id, peer_slots))
        names += inner.strings.lookup(inner.nodes["name"])
        counts.append(np.diff(inner.first_dependency))
        dependency.append(inner.dependency + np.int32(first))
        within.append(np.full(inner.num_nodes, use.row, np.int32))
        first, next_id = first + inner.num_nodes, next_id + inner.num_nodes
        peer_slots += len(_partners(use))
    strings = StringTable()
    joined: dict[str, NDArray[Any]] = {name: np.concatenate(parts) for name, parts in columns.items()}
    joined["name"] = strings.intern_all(names)
    starts = np.concatenate(([0], np.cumsum(np.concatenate(counts)))).astype(np.int64)
    return Program(Table(joined), starts, np.concatenate(dependency).astype(np.int32), strings, np.concatenate(within))


def _column(inner: Program, name: str, next_id: int, peer_slots: int) -> NDArray[Any]:
    """A column of an algorithm's nodes in the program that they are put into."""
    column = np.asarray(inner.nodes[name])
    if name == "id":
        return next_id + np.arange(inner.num_nodes)
    if name == "slot":
        return np.where(column >= 0, column + peer_slots, column).astype(column.dtype)
    if name == "on_host":  # where it is computed makes no difference
        return np.zeros_like(column)
    if name in ("flops", "bytes"):  # it takes the time that it says, whatever the machine
        is_message = inner.nodes["kind"] != WorkKind.COMPUTE
        return np.where(is_message, column, -1).astype(column.dtype)
    return column
