"""Who waits for whom where ranks of a simulated cluster never finish."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.simulate.cluster.plan import Outcome, Plan
from foretrace.trace.workload import Program, WorkKind, Workload

_MOST_RANKS = 64  # of which the report tells


def explain(workload: Workload, plan: Plan, outcome: Outcome) -> dict[str, Any] | None:
    """What keeps ranks from finishing; None if all finish.

    Returns:
        ``unfinished`` (how many ranks), ``ranks`` (of the first of them: ``rank``, ``waits`` with node, name, kind,
        since when, for which ranks and why, and ``blocked_nodes``), ``cycle`` (ranks that wait for each other, in
        order; empty if none was found) and ``text``.
    """
    stuck = np.flatnonzero(outcome.finish < 0)
    if not len(stuck):
        return None
    reader = _Reader(workload, plan, outcome)
    ranks = [reader.rank(int(rank)) for rank in stuck[:_MOST_RANKS]]
    cycle = _cycle({row["rank"]: [r for wait in row["waits"] for r in wait["for_ranks"]] for row in ranks})
    return {"unfinished": len(stuck), "ranks": ranks, "cycle": cycle, "text": _text(len(stuck), ranks, cycle)}


class _Reader:
    """Looks up what ranks were doing at the end."""

    def __init__(self, workload: Workload, plan: Plan, outcome: Outcome) -> None:
        self._workload, self._plan, self._outcome = workload, plan, outcome
        self._stream: dict[tuple[int, int], set[int]] = {}
        waiting = outcome.waiting
        for rank, node, stream in zip(
            waiting["rank"].tolist(), waiting["node"].tolist(), waiting["stream"].tolist(), strict=True
        ):
            self._stream.setdefault((rank, node), set()).add(stream)

    def _own(self, rank: int) -> int:
        """The rank that was simulated for this one."""
        represent = self._outcome.represent
        return rank if represent is None else int(represent[rank])

    def _program(self, rank: int) -> Program:
        return self._workload.programs[int(self._workload.program_of[rank])]

    def _times(self, rank: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        mine = self._outcome.nodes_of(self._plan, rank)
        return self._outcome.start[mine], self._outcome.end[mine]

    def _place(self, rank: int) -> tuple[int, int]:
        """The rank's program, and its row in the tables of partners."""
        program = int(self._workload.program_of[rank])
        return program, int((self._workload.program_of[:rank] == program).sum())

    def _peer(self, rank: int, row: int) -> int:
        program, place = self._place(rank)
        return int(self._workload.peers[program][place, self._program(rank).nodes["slot"][row]])

    def _group(self, rank: int, row: int) -> NDArray[np.int64]:
        program, place = self._place(rank)
        slot = self._program(rank).nodes["slot"][row]
        return self._workload.groups[int(self._workload.groups_of[program][place, slot])].ranks

    def rank(self, rank: int) -> dict[str, Any]:
        """One rank that does not finish."""
        start, end = self._times(rank)
        is_open = (start >= 0) & (end < 0)
        within = self._program(rank).within
        if within is not None:  # a collective of its own algorithm waits for what the nodes within it wait for
            is_open[within[is_open & (within >= 0)]] = False
        waits = [self._wait(rank, int(row), int(start[row])) for row in np.flatnonzero(is_open)]
        return {"rank": rank, "waits": waits, "blocked_nodes": int((start < 0).sum())}

    def _wait(self, rank: int, row: int, since_ns: int) -> dict[str, Any]:
        program = self._program(rank)
        kind = WorkKind(program.nodes["kind"][row])
        if kind is WorkKind.COLLECTIVE:
            partners, reason = self._of_collective(rank, row)
        elif kind in (WorkKind.SEND, WorkKind.RECEIVE):
            partners, reason = self._of_message(rank, row, kind)
        else:
            partners, reason = [], "the rank has failed before the end of it"
        node, name = int(program.nodes["id"][row]), program.name(row)
        where = {"node": node, "name": name, "kind": kind.label, "since_ns": since_ns}
        return {**where, "for_ranks": partners, "reason": reason}

    def _of_message(self, rank: int, row: int, kind: WorkKind) -> tuple[list[int], str]:
        peer = self._peer(rank, row)
        mine, theirs = self._program(rank).nodes, self._program(peer).nodes
        wanted = WorkKind.SEND if kind is WorkKind.RECEIVE else WorkKind.RECEIVE
        same = (theirs["kind"] == wanted) & (theirs["tag"] == mine["tag"][row])
        rows = [int(r) for r in np.flatnonzero(same) if self._peer(peer, int(r)) == rank]
        text = f"{wanted.label} of tag {mine['tag'][row]} and {mine['bytes'][row]} bytes at rank {peer}"
        if not any(theirs["bytes"][r] == mine["bytes"][row] for r in rows):
            sizes = sorted({int(theirs["bytes"][r]) for r in rows})
            return [peer], f"there is no {text}" + (f", only of {sizes} bytes" if sizes else "")
        start, _ = self._times(peer)
        open_rows = [r for r in rows if start[r] < 0 and theirs["bytes"][r] == mine["bytes"][row]]
        if open_rows:
            return [peer], f"the {text} never starts ({self._program(peer).describe(open_rows[0])})"
        return [peer], f"every {text} went to another one of this rank's {kind.label} nodes"

    def _of_collective(self, rank: int, row: int) -> tuple[list[int], str]:
        members = [int(member) for member in self._group(rank, row) if member != rank]
        if not self._stream:
            return self._of_flows(rank, row, members)
        streams = self._stream.get((self._own(rank), row), set())
        if not streams:
            return members[:_MOST_RANKS], "none of its streams has started: it has no phase, or the queue is taken"
        absent: list[int] = []
        other: list[int] = []
        for member in members:
            found = [ids for (who, _), ids in self._stream.items() if who == self._own(member)]
            if not any(ids & streams for ids in found):
                (other if found else absent).append(member)
        number = min(streams)
        if absent:
            return absent[:_MOST_RANKS], f"they do not take part in stream {number}: they have not come to it, or ended"
        if other:
            return other[:_MOST_RANKS], f"they are in a collective too, but not in stream {number}: orders differ"
        return members[:_MOST_RANKS], f"all are in stream {number}, in phases that do not match (size or direction)"

    def _of_flows(self, rank: int, row: int, members: list[int]) -> tuple[list[int], str]:
        """Of a collective that is flows: who has not come to the one of the same place in the group's order."""
        group = self._group(rank, row)
        place = self._collectives(rank, group).index(row)
        absent = []
        for member in members:
            theirs = self._collectives(member, group)
            if len(theirs) <= place or self._times(member)[0][theirs[place]] < 0:
                absent.append(member)
        if absent:
            return absent[:_MOST_RANKS], "they have not come to this collective"
        return members[:_MOST_RANKS], "its messages never arrive: a link or a rank has failed"

    def _collectives(self, rank: int, group: NDArray[np.int64]) -> list[int]:
        """Rows of a rank's collectives in a group, in the order of their ids."""
        rows = np.flatnonzero(self._program(rank).nodes["kind"] == WorkKind.COLLECTIVE)
        return [int(row) for row in rows if self._group(rank, int(row)) is group]


def _cycle(waits: dict[int, list[int]]) -> list[int]:
    """Ranks that wait for each other, following the first known one that each waits for."""
    for begin in waits:
        seen: dict[int, int] = {}
        path: list[int] = []
        rank: int | None = begin
        while rank is not None and rank not in seen:
            seen[rank] = len(path)
            path.append(rank)
            rank = next((r for r in waits.get(rank, []) if r in waits), None)
        if rank is not None:
            return path[seen[rank] :]
    return []


def _text(count: int, ranks: list[dict[str, Any]], cycle: list[int]) -> str:
    parts = []
    by_rank = {row["rank"]: row for row in ranks}
    for rank in (cycle or list(by_rank))[:4]:
        for wait in by_rank[rank]["waits"][:1]:
            label = f"{wait['name']!r} (node {wait['node']}, {wait['kind']})"
            others = ", ".join(map(str, wait["for_ranks"][:4])) or "nobody"
            more = ", ..." if len(wait["for_ranks"]) > 4 else ""
            parts.append(f"rank {rank} in {label} waits for {others}{more}: {wait['reason']}")
        if not by_rank[rank]["waits"]:
            nodes = by_rank[rank]["blocked_nodes"]
            parts.append(f"rank {rank} has nothing under way, and {nodes} nodes that are never looked at again")
    return f"deadlock: {count} ranks never finish; " + "; ".join(parts)
