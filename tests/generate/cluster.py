"""A small cluster that runs a workload node by node, with ASTRA-sim's slots, and times that a caller makes up."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from foretrace.trace.workload import Program, WorkKind, Workload

_SLOT = {WorkKind.COMPUTE: "compute", WorkKind.SEND: "communication", WorkKind.COLLECTIVE: "communication"}


def dependencies(program: Program, row: int) -> list[int]:
    """What a node waits for."""
    return program.dependency[program.first_dependency[row] : program.first_dependency[row + 1]].tolist()


class _Rank:
    def __init__(self, workload: Workload, rank: int) -> None:
        number = int(workload.program_of[rank])
        place = int(np.flatnonzero(np.flatnonzero(workload.program_of == number) == rank)[0])
        self.rank, self.program = rank, workload.programs[number]
        self.peers, self.groups = workload.peers[number][place], workload.groups_of[number][place]
        self.columns = {name: self.program.nodes[name].tolist() for name in ("kind", "slot", "tag", "bytes")}
        self.missing = np.diff(self.program.first_dependency).tolist()
        self.children: dict[int, list[int]] = defaultdict(list)
        for row in range(self.program.num_nodes):
            for source in dependencies(self.program, row):
                self.children[source].append(row)
        self.free = {row for row, count in enumerate(self.missing) if not count}
        self.busy: set[str] = set()
        self.finished = 0


class Cluster:
    """One compute slot and one communication slot a rank; free nodes are issued in ascending order."""

    def __init__(self, workload: Workload, duration: Callable[[], float]) -> None:
        self.workload, self.duration = workload, duration
        self.ranks = [_Rank(workload, rank) for rank in range(workload.num_ranks)]
        self.events: list[tuple[float, int, int, int]] = []
        self.arrived: dict[tuple[int, int, int, int], int] = defaultdict(int)
        self.posted: dict[tuple[int, int, int, int], list[tuple[int, int]]] = defaultdict(list)
        self.meeting: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.now, self.count = 0.0, 0

    def run(self) -> list[int]:
        """Finished nodes of every rank."""
        for rank in self.ranks:
            self._scan(rank)
        while self.events:
            self.now, _, number, row = heapq.heappop(self.events)
            self._finish(self.ranks[number], row)
        assert not any(self.arrived.values()), "a message that nobody received"
        return [rank.finished for rank in self.ranks]

    def _later(self, number: int, row: int, time: float) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, number, row))

    def _scan(self, rank: _Rank) -> None:
        for row in sorted(rank.free):
            slot = _SLOT.get(WorkKind(rank.columns["kind"][row]))
            if slot in rank.busy:
                continue
            if slot:
                rank.busy.add(slot)
            rank.free.remove(row)
            self._issue(rank, row)

    def _issue(self, rank: _Rank, row: int) -> None:
        kind, slot = rank.columns["kind"][row], rank.columns["slot"][row]
        if kind == WorkKind.COLLECTIVE:
            group = int(rank.groups[slot])
            members = self.workload.groups[group].ranks
            assert rank.rank in members
            self.meeting[group].append((rank.rank, row))
            if len(self.meeting[group]) == len(members):
                self._meet(group)
        elif kind == WorkKind.RECEIVE:
            key = (int(rank.peers[slot]), rank.rank, rank.columns["tag"][row], rank.columns["bytes"][row])
            self.posted[key].append((rank.rank, row))
            self._match(key)
        else:
            self._later(rank.rank, row, self.now + self.duration())

    def _meet(self, group: int) -> None:
        """All members run the same collective at this moment."""
        calls = self.meeting.pop(group)
        nodes = [self.ranks[number].program.nodes for number, _ in calls]
        assert len({number for number, _ in calls}) == len(calls)
        for name in ("collective", "bytes"):
            assert len({int(table[name][row]) for table, (_, row) in zip(nodes, calls, strict=True)}) == 1
        time = self.now + self.duration()
        for number, row in calls:
            self._later(number, row, time)

    def _match(self, key: tuple[int, int, int, int]) -> None:
        while self.arrived[key] and self.posted[key]:
            self.arrived[key] -= 1
            number, row = self.posted[key].pop(0)
            self._later(number, row, self.now)

    def _finish(self, rank: _Rank, row: int) -> None:
        kind = WorkKind(rank.columns["kind"][row])
        rank.finished += 1
        rank.busy.discard(_SLOT.get(kind, ""))
        if kind == WorkKind.SEND:
            target = int(rank.peers[rank.columns["slot"][row]])
            key = (rank.rank, target, rank.columns["tag"][row], rank.columns["bytes"][row])
            self.arrived[key] += 1
            self._match(key)
        for child in rank.children[row]:
            rank.missing[child] -= 1
            if not rank.missing[child]:
                rank.free.add(child)
        self._scan(rank)
