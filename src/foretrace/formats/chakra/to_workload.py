"""Chakra traces of all ranks as one `Workload`: what the nodes are, for a machine that is chosen later.

Ranks whose nodes are equal but for their partners and names share a program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.formats.chakra.groups import DEFAULT_GROUPS, groups_of
from foretrace.formats.chakra.trace import INTEGER_WIRES, ChakraTrace, NodeType, Wire
from foretrace.trace import FormatError, Table
from foretrace.trace.workload import WORK_COLUMNS, WORLD, Program, WorkGroup, WorkKind, Workload

Ints = NDArray[np.int64]

_KIND_OF_TYPE = {
    NodeType.MEM_LOAD: WorkKind.MEMORY,
    NodeType.MEM_STORE: WorkKind.MEMORY,
    NodeType.COMP: WorkKind.COMPUTE,
    NodeType.COMM_SEND: WorkKind.SEND,
    NodeType.COMM_RECV: WorkKind.RECEIVE,
    NodeType.COMM_COLL: WorkKind.COLLECTIVE,
}
_IS_INTEGER = np.isin(np.arange(max(Wire) + 1), list(INTEGER_WIRES))
_MOST_DIGITS = 9
_ABSENT = np.iinfo(np.int64).min
_COMPARED = ("id", "kind", "on_host", "duration_ns", "flops", "bytes", "collective", "tag", "slot", "priority",
             "dimensions")  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """Traces of several files in one table.

    Attributes:
        trace: rows of all files, file by file.
        file: which of ``paths`` each row is of, ascending; -1 for rows to leave out.
        paths: of the files.
        ranks: that each file is for.
        copies: how many equal files the trace was read from once.
    """

    trace: ChakraTrace
    file: NDArray[np.int64]
    paths: Sequence[str]
    ranks: Sequence[Sequence[int]]
    copies: int = 1

    @classmethod
    def of(cls, trace: ChakraTrace, ranks: Sequence[int], copies: int = 1) -> Batch:
        """A single file, or several equal ones."""
        return cls(trace, np.zeros(trace.num_nodes, np.int64), [trace.report.path], [ranks], copies)


def to_workload(
    traces: Sequence[ChakraTrace],
    num_ranks: int | None = None,
    groups: Mapping[int, Sequence[int]] | None = None,
    groups_path: str = "the groups' file",
) -> Workload:
    """The workload of Chakra traces, one a rank in their order; a single one serves for all ``num_ranks``.

    Args:
        traces: of ranks 0, 1, ...
        num_ranks: ranks of the job; as many as traces if None.
        groups: members of numbered groups, in their order (ASTRA-sim's communicator groups). Groups that the traces
            list themselves count where this has none of that name.
        groups_path: where ``groups`` come from, for messages.

    Raises:
        FormatError: naming file and node, where a node lacks what it needs or depends on one that does not exist.
    """
    num_ranks = len(traces) if num_ranks is None else num_ranks
    ranks = ranks_of_files([trace.report.path for trace in traces], num_ranks)
    batches = (Batch.of(trace, mine) for trace, mine in zip(traces, ranks, strict=True))
    return from_batches(batches, num_ranks, groups, groups_path)


def ranks_of_files(paths: Sequence[str], num_ranks: int) -> list[list[int]]:
    """The ranks of each file: one each, or all for a single one.

    Raises:
        FormatError: if there is neither one file nor one a rank.
    """
    if len(paths) == 1:
        return [list(range(num_ranks))]
    if len(paths) != num_ranks:
        path, problem = paths[0] if paths else "traces", f"{len(paths)} traces for {num_ranks} ranks"
        raise FormatError(path, problem, "give one trace a rank, or a single one for all")
    return [[rank] for rank in range(num_ranks)]


def from_batches(
    batches: Iterable[Batch], num_ranks: int, groups: Mapping[int, Sequence[int]] | None, groups_path: str
) -> Workload:
    """As `to_workload`, from traces that were read together."""
    builder = _Builder(num_ranks, groups or {}, groups_path)
    for batch in batches:
        builder.add(batch)
    return builder.workload()


class _Groups:
    """Groups by name, each one once."""

    def __init__(self, num_ranks: int, given: Mapping[int, Sequence[int]], path: str) -> None:
        self.groups = [WorkGroup(0, np.arange(num_ranks, dtype=np.int64))]
        self.path = path
        self._num_ranks, self._given = num_ranks, given
        self._index: dict[str, int] = {}
        self._members: dict[int, frozenset[int]] = {}
        self._numbers = {0, *given}

    def index(self, name: str, batch: Batch, file: int) -> int:
        """The group of that name."""
        if name in DEFAULT_GROUPS:
            return WORLD
        if name not in self._index:
            ranks = self._ranks(name, batch, file)
            self._index[name] = len(self.groups)
            number = int(name) if name.isdecimal() else max(self._numbers) + 1
            self._numbers.add(number)
            self._members[len(self.groups)] = frozenset(ranks)
            self.groups.append(WorkGroup(number, np.array(ranks, np.int64)))
        return self._index[name]

    def check(self, group: int, rank: int, path: str) -> None:
        """Refuse a rank that uses a group that it is not in."""
        if group != WORLD and rank not in self._members[group]:
            problem = f"rank {rank} runs a collective of group {self.groups[group].number}, but is not in it"
            raise FormatError(path, problem, f"correct the group in {self.path}, or give one trace a rank")

    def _ranks(self, name: str, batch: Batch, file: int) -> Sequence[int]:
        if name.isdecimal() and len(name) > _MOST_DIGITS:
            raise FormatError(batch.paths[file], f"group {name!r}", f"number groups with at most {_MOST_DIGITS} digits")
        ranks: Sequence[int] | None = self._given.get(int(name)) if name.isdecimal() else None
        if ranks is None:
            stated = groups_of(batch.trace).get(name)
            if stated is None:
                problem = f"collectives of group {name!r}, which nothing describes"
                raise FormatError(batch.paths[file], problem, f"add it to {self.path} (--comm-groups)")
            ranks = stated or range(self._num_ranks)
        if len(set(ranks)) < len(ranks):
            raise FormatError(self.path, f"group {name!r} has a rank twice", "name each rank once")
        if len(ranks) and not 0 <= min(ranks) <= max(ranks) < self._num_ranks:
            problem = f"group {name!r} has rank {max(ranks)}, the job has {self._num_ranks} ranks"
            raise FormatError(self.path, problem, "check the network's size and the groups")
        return ranks


class _Builder:
    """Collects programs, each one once, and which ranks run them with whom."""

    def __init__(self, num_ranks: int, groups: Mapping[int, Sequence[int]], groups_path: str) -> None:
        self._num_ranks = num_ranks
        self._groups = _Groups(num_ranks, groups, groups_path)
        self._notes: Counter[str] = Counter()
        self._index: dict[bytes, int] = {}
        self._programs: list[Program] = []
        self._paths: list[str] = []
        self._program_of = np.empty(num_ranks, np.int32)
        self._peers: dict[int, Ints] = {}
        self._groups_of: dict[int, Ints] = {}

    def add(self, batch: Batch) -> None:
        """Add the programs of a batch of files; what reading them repaired or left out is among the notes."""
        for reason, count in batch.trace.report.warnings.items():
            self._notes[reason] += count * batch.copies
        columns = _Columns(batch)
        work = columns.work()
        peers = _Slots(columns.file, columns.peers(work["kind"], self._num_ranks), len(batch.paths))
        groups = _Slots(columns.file, self._group_of_nodes(columns, work["kind"]), len(batch.paths))
        work["slot"] = np.maximum(peers.slot, groups.slot)
        first, dependency = columns.dependencies()
        compared = np.stack([np.asarray(work[name], np.int64) for name in _COMPARED], axis=1)
        for file, ranks in enumerate(batch.ranks):
            a, b = columns.first[file], columns.first[file + 1]
            mine = dependency[first[a] : first[b]] - a
            key = compared[a:b].tobytes() + (first[a : b + 1] - first[a]).tobytes() + mine.tobytes()
            number = self._index.setdefault(key, len(self._programs))
            if number == len(self._programs):
                self._programs.append(_program(work, batch.trace, a, b, first[a : b + 1] - first[a], mine))
                self._note_cycles(self._programs[-1])
                self._paths.append(batch.paths[file])
            for rank in ranks:
                self._program_of[rank] = number
                self._peers[rank], self._groups_of[rank] = peers.of(file), groups.of(file)
                for group in groups.of(file).tolist():
                    self._groups.check(group, rank, batch.paths[file])

    def _note_cycles(self, program: Program) -> None:
        """Count nodes that wait for each other, and those behind them."""
        counts = np.diff(program.first_dependency)
        target = np.repeat(np.arange(program.num_nodes), counts)
        if (program.dependency < target).all():
            return
        from foretrace.trace.topology import topological_order  # imports Numba

        order = np.argsort(program.dependency, kind="stable")
        first = np.concatenate(([0], np.cumsum(np.bincount(program.dependency, minlength=program.num_nodes))))
        done = topological_order(first.astype(np.int64), target[order], counts.astype(np.int64))
        if len(done) < program.num_nodes:
            self._notes["nodes in or behind a cycle of dependencies, which never run"] += program.num_nodes - len(done)

    def _group_of_nodes(self, columns: _Columns, kind: NDArray[Any]) -> Ints:
        """The group of every collective, -1 elsewhere."""
        ids = columns.text_ids("pg_name")
        is_collective = kind == WorkKind.COLLECTIVE
        found = np.full(len(ids), -1, np.int64)
        pairs, first, place = np.unique(ids[is_collective], return_index=True, return_inverse=True)
        names = columns.batch.trace.strings.lookup(pairs)
        files = columns.file[is_collective][first]
        index = [self._groups.index(name, columns.batch, int(file)) for name, file in zip(names, files, strict=True)]
        found[is_collective] = np.array(index, np.int64)[place] if index else 0
        return found

    def workload(self) -> Workload:
        """All that was added."""
        members = [np.flatnonzero(self._program_of == index) for index in range(len(self._programs))]
        return Workload(
            self._programs,
            self._program_of,
            [np.array([self._peers[int(r)] for r in mine], np.int32).reshape(len(mine), -1) for mine in members],
            [np.array([self._groups_of[int(r)] for r in mine], np.int32).reshape(len(mine), -1) for mine in members],
            self._groups.groups,
            +self._notes,
            self._paths,
        )


def _program(
    work: Mapping[str, NDArray[Any]], trace: ChakraTrace, a: int, b: int, first: Ints, dependency: Ints
) -> Program:
    nodes = {name: np.asarray(work[name][a:b]).astype(dtype) for name, (dtype, _) in WORK_COLUMNS.items()}
    return Program(Table(nodes), first, dependency.astype(np.int32), trace.strings)


class _Columns:
    """Columns of the nodes of a batch, file by file in the order of their ids."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.trace = batch, batch.trace
        self.order = np.flatnonzero(batch.file >= 0)
        ids, file = self.trace.nodes["id"][self.order], batch.file[self.order]
        if ((ids[1:] < ids[:-1]) & (file[1:] == file[:-1])).any():  # most traces are in order
            self.order = self.order[np.lexsort((ids, file))]
        self.file = batch.file[self.order]
        self.first = np.searchsorted(self.file, np.arange(len(batch.paths) + 1))
        self._node = self.trace.attributes["node"]

    @cached_property
    def _rank(self) -> Ints:
        """The (first) rank of each node's file."""
        return np.array([ranks[0] if len(ranks) else -1 for ranks in self.batch.ranks], np.int64)[self.file]

    def work(self) -> dict[str, NDArray[Any]]:
        """Columns of `Program.nodes` that need no other rank."""
        nodes, count = self.trace.nodes, len(self.order)
        types = nodes["type"][self.order]
        kind = np.full(count, WorkKind.NOTHING, np.int8)
        for node_type, work_kind in _KIND_OF_TYPE.items():
            kind[types == node_type] = work_kind
        is_message = (kind == WorkKind.SEND) | (kind == WorkKind.RECEIVE)
        is_communication = is_message | (kind == WorkKind.COLLECTIVE)
        size = self.integers("comm_size", is_communication, is_needed=True)
        tensor = self.integers("tensor_size", ~is_communication, absent=-1)
        micros = nodes["duration_micros"][self.order]
        if len(micros) and int(micros.max()) > 1 << 52:
            self.refuse(int(np.argmax(micros)), f"duration_micros {int(micros.max())}", "no node lasts that long")
        return {
            "id": nodes["id"][self.order].astype(np.int64),
            "name": nodes["name"][self.order],
            "kind": kind,
            "on_host": self.integers("is_cpu_op", absent=0) != 0,
            "duration_ns": micros.astype(np.int64) * 1000,
            "flops": self.integers("num_ops", kind == WorkKind.COMPUTE, absent=-1),
            "bytes": np.where(is_communication, size, tensor),
            "collective": self.integers("comm_type", kind == WorkKind.COLLECTIVE, absent=-1, is_needed=True),
            "tag": self.integers("comm_tag", is_message, absent=-1, is_needed=True),
            "priority": self.integers("comm_priority", is_communication, absent=0),
            "dimensions": self._dimensions(),
        }

    def peers(self, kind: NDArray[Any], num_ranks: int) -> Ints:
        """The other rank of every send and receive, -1 elsewhere; shape ``(nodes,)``."""
        is_shared = np.array([len(ranks) != 1 for ranks in self.batch.ranks])[self.file]
        peers = np.full(len(kind), -1, np.int64)
        for work_kind, theirs, own in (
            (WorkKind.SEND, "comm_dst", "comm_src"),
            (WorkKind.RECEIVE, "comm_src", "comm_dst"),
        ):
            mine = kind == work_kind
            if not mine.any():
                continue
            peers[mine] = self.integers(theirs, mine, is_needed=True)[mine]
            for bad in np.flatnonzero(mine & is_shared)[:1]:
                self.refuse(int(bad), "it sends or receives, and the trace is for many ranks", "give one trace a rank")
            stated = self.integers(own, mine)
            for bad in np.flatnonzero(mine & (stated != self._rank) & (stated != _ABSENT))[:1]:
                problem = f"{own} is {stated[bad]} in the trace of rank {self._rank[bad]}"
                self.refuse(int(bad), problem, "check the order of the files")
        outside = (peers >= num_ranks) | ((peers < 0) & ((kind == WorkKind.SEND) | (kind == WorkKind.RECEIVE)))
        for bad in np.flatnonzero(outside | ((peers == self._rank) & (peers >= 0)))[:1]:
            self.refuse(int(bad), f"its peer is rank {peers[bad]} of {num_ranks}", "check the network's size")
        return peers

    def integers(
        self, name: str, needed: NDArray[np.bool_] | None = None, absent: int = _ABSENT, is_needed: bool = False
    ) -> Ints:
        """An integer attribute; the first of that name counts. Needed ones must be there, and none may be a float."""
        rows = self.trace.attribute_rows(name)
        wires = self.trace.attributes["wire"][rows]
        found = np.full(self.trace.num_nodes, absent, np.int64)
        is_integer = _IS_INTEGER[wires]
        found[self._node[rows[is_integer]]] = self.trace.attributes["value"][rows[is_integer]]
        found = found[self.order]
        if not is_integer.all() and needed is not None:
            wrong = np.zeros(self.trace.num_nodes, np.bool_)
            wrong[self._node[rows[~is_integer]]] = True
            for bad in np.flatnonzero(wrong[self.order] & needed)[:1]:
                self.refuse(int(bad), f"its {name} is no integer", "write it as int64")
        if is_needed and needed is not None:
            there = np.zeros(self.trace.num_nodes, np.bool_)
            there[self._node[rows]] = True
            for bad in np.flatnonzero(needed & ~there[self.order])[:1]:
                self.refuse(int(bad), f"it has no {name}", f"add the attribute {name}")
        return found

    def text_ids(self, name: str) -> Ints:
        """String ids of a text attribute, -1 for none; numbers are taken as their digits."""
        ids = np.full(self.trace.num_nodes, -1, np.int64)
        rows = self.trace.attribute_rows(name)
        wires = self.trace.attributes["wire"][rows]
        is_text = wires == Wire.STRING
        ids[self._node[rows[is_text]]] = self.trace.attributes["value"][rows[is_text]]
        for row in rows[_IS_INTEGER[wires]]:
            ids[self._node[row]] = self.trace.strings.intern(str(int(self.trace.attributes["value"][row])))
        return ids[self.order]

    def _dimensions(self) -> Ints:
        bits = np.full(self.trace.num_nodes, -1, np.int64)
        for row in self.trace.attribute_rows("involved_dim"):
            flags = self.trace.value(int(row))
            if isinstance(flags, list):
                bits[self._node[row]] = sum(1 << i for i, flag in enumerate(flags[:62]) if flag)
        return bits[self.order]

    def dependencies(self) -> tuple[Ints, Ints]:
        """CSR of the set union of data and control dependencies, over rows in this order."""
        trace, count = self.trace, len(self.order)
        ids, file = trace.nodes["id"][self.order].astype(np.uint64), self.file
        for twice in np.flatnonzero((ids[1:] == ids[:-1]) & (file[1:] == file[:-1]))[:1]:
            self.refuse(int(twice), "its id occurs twice", "run foretrace lint on the file")
        place = np.full(trace.num_nodes, -1, np.int64)
        place[self.order] = np.arange(count)
        node = np.concatenate([place[trace.control.nodes], place[trace.data.nodes]])
        wanted = np.concatenate([trace.control.ids.astype(np.uint64), trace.data.ids.astype(np.uint64)])
        source = self._rows_of(ids, wanted, node)
        for bad in np.flatnonzero(source < 0)[:1]:
            problem = f"it depends on node {wanted[bad]}, which does not exist"
            self.refuse(int(node[bad]), problem, "run foretrace lint --repair on the file")
        pair = np.sort(node * max(count, 1) + source)
        pair = pair[np.append(True, pair[1:] != pair[:-1])] if len(pair) else pair
        node, source = pair // max(count, 1), pair % max(count, 1)
        first = np.concatenate(([0], np.cumsum(np.bincount(node, minlength=count)))).astype(np.int64)
        is_free = np.cumsum(np.append(0, np.diff(first) == 0))[self.first]
        for bad in np.flatnonzero((np.diff(is_free) == 0) & (np.diff(self.first) > 0))[:1]:
            problem = "every node of the trace waits for another"
            self.refuse(int(self.first[bad]), problem, "run foretrace lint --repair on the file")
        return first, source

    def _rows_of(self, ids: NDArray[np.uint64], wanted: NDArray[np.uint64], node: Ints) -> Ints:
        """Rows of the wanted ids in the file of the node that wants them, -1 for none."""
        if not len(ids):
            return np.full(len(wanted), -1, np.int64)
        # Most traces number their nodes without gaps: then the place of an id is known.
        begin = self.first[self.file[node]]
        guess = begin + (wanted - ids[begin]).astype(np.int64)
        guess = np.where((wanted >= ids[begin]) & (guess < self.first[self.file[node] + 1]), guess, begin)
        if np.array_equal(ids[guess], wanted):
            return guess
        found = np.full(len(wanted), -1, np.int64)
        for file in np.unique(self.file[node]):
            a, b = self.first[file], self.first[file + 1]
            mine = np.flatnonzero(self.file[node] == file)
            at = np.minimum(a + np.searchsorted(ids[a:b], wanted[mine]), b - 1)
            found[mine] = np.where(ids[at] == wanted[mine], at, -1)
        return found

    def refuse(self, row: int, problem: str, remedy: str) -> None:
        """Say that a node cannot be used.

        Raises:
            FormatError: always.
        """
        node = int(self.trace.nodes["id"][self.order[row]])
        name = self.trace.strings.lookup(self.trace.nodes["name"][self.order[row : row + 1]])[0]
        raise FormatError(self.batch.paths[int(self.file[row])], f"node {node} ({name!r}): {problem}", remedy)


class _Slots:
    """Distinct partners of each file from slot 0 up, in the order in which its nodes name them."""

    def __init__(self, file: Ints, values: Ints, files: int) -> None:
        self.slot = np.full(len(values), -1, np.int64)
        rows = np.flatnonzero(values >= 0)
        self._values = np.empty(0, np.int64)
        self._first = np.zeros(files + 1, np.int64)
        if not len(rows):
            return
        most = int(values.max()) + 1
        pairs, first, place = np.unique(file[rows] * most + values[rows], return_index=True, return_inverse=True)
        order = np.lexsort((first, pairs // most))
        self._values = (pairs % most)[order]
        self._first = np.searchsorted((pairs // most)[order], np.arange(files + 1))
        slot = np.empty(len(order), np.int64)
        slot[order] = np.arange(len(order))
        self.slot[rows] = slot[place] - self._first[file[rows]]

    def of(self, file: int) -> Ints:
        """The partners of a file by slot."""
        return self._values[self._first[file] : self._first[file + 1]]
