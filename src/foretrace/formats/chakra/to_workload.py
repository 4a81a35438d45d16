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
_COMPARED = ("id", "kind", "on_host", "duration_ns", "flops", "bytes", "collective", "tag", "priority", "dimensions")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio


@dataclass(frozen=True)
class Batch:
    """Traces of several files in one table, where nodes that several have in common stand once.

    Attributes:
        trace: the nodes.
        row: of each node of all files, file by file, its row in ``trace``.
        file: which of ``paths`` each of these is of, ascending.
        paths: of the files.
        ranks: that each file is for.
        copies: how many equal files the trace was read from once.
    """

    trace: ChakraTrace
    row: Ints
    file: Ints
    paths: Sequence[str]
    ranks: Sequence[Sequence[int]]
    copies: int = 1

    @classmethod
    def of(cls, trace: ChakraTrace, ranks: Sequence[int], copies: int = 1) -> Batch:
        """A single file, or several equal ones."""
        count = trace.num_nodes
        return cls(trace, np.arange(count), np.zeros(count, np.int64), [trace.report.path], [ranks], copies)


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
        nodes = _Nodes(batch)
        work = nodes.work()
        order = _Order(nodes)
        peers = _Slots(order.file, nodes.peers(work["kind"], self._num_ranks)[order.row], len(batch.paths))
        groups = _Slots(order.file, self._group_of_nodes(nodes, work["kind"])[order.row], len(batch.paths))
        slot = np.maximum(peers.slot, groups.slot)
        numbers: dict[bytes, int] = {}
        key = nodes.classes(work)[order.row] * (int(slot.max(initial=-1)) + 2) + slot + 1
        for file, ranks in enumerate(batch.ranks):
            mine = slice(order.first[file], order.first[file + 1])
            what = key[mine].tobytes()
            if what not in numbers:
                numbers[what] = self._number_of_program(order.program(file, work, slot[mine]), batch.paths[file])
            mine_peers, mine_groups = peers.of(file), groups.of(file)
            for rank in ranks:
                self._program_of[rank] = numbers[what]
                self._peers[rank], self._groups_of[rank] = mine_peers, mine_groups
                for group in mine_groups.tolist():
                    self._groups.check(group, rank, batch.paths[file])

    def _number_of_program(self, program: Program, path: str) -> int:
        """The number of a program, which joins the others when it is new."""
        columns = [program.nodes[name].tobytes() for name in (*_COMPARED, "slot")]
        key = b"".join((*columns, program.first_dependency.tobytes(), program.dependency.tobytes()))
        number = self._index.setdefault(key, len(self._programs))
        if number == len(self._programs):
            self._programs.append(program)
            self._note_cycles(program)
            self._paths.append(path)
        return number

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

    def _group_of_nodes(self, nodes: _Nodes, kind: NDArray[Any]) -> Ints:
        """The group of every collective, -1 elsewhere."""
        ids = nodes.text_ids("pg_name")
        is_collective = kind == WorkKind.COLLECTIVE
        found = np.full(len(ids), -1, np.int64)
        pairs, first, place = np.unique(ids[is_collective], return_index=True, return_inverse=True)
        names = nodes.trace.strings.lookup(pairs)
        files = nodes.file[is_collective][first]
        index = [self._groups.index(name, nodes.batch, int(file)) for name, file in zip(names, files, strict=True)]
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


class _Nodes:
    """Columns of the distinct nodes of a batch."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.trace = batch, batch.trace
        self.file = np.zeros(self.trace.num_nodes, np.int64)  # the first file that has the node
        self.file[batch.row[::-1]] = batch.file[::-1]
        self._node = self.trace.attributes["node"]

    def work(self) -> dict[str, NDArray[Any]]:
        """Columns of `Program.nodes` that need no other rank."""
        nodes, count = self.trace.nodes, self.trace.num_nodes
        types = nodes["type"]
        kind = np.full(count, WorkKind.NOTHING, np.int8)
        for node_type, work_kind in _KIND_OF_TYPE.items():
            kind[types == node_type] = work_kind
        is_message = (kind == WorkKind.SEND) | (kind == WorkKind.RECEIVE)
        is_communication = is_message | (kind == WorkKind.COLLECTIVE)
        size = self.integers("comm_size", is_communication, is_needed=True)
        tensor = self.integers("tensor_size", ~is_communication, absent=-1)
        micros = nodes["duration_micros"]
        if len(micros) and int(micros.max()) > 1 << 52:
            self.refuse(int(np.argmax(micros)), f"duration_micros {int(micros.max())}", "no node lasts that long")
        return {
            "id": nodes["id"].astype(np.int64),
            "name": nodes["name"],
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
        is_message = (kind == WorkKind.SEND) | (kind == WorkKind.RECEIVE)
        peers = np.full(len(kind), -1, np.int64)
        for work_kind, theirs, own in (
            (WorkKind.SEND, "comm_dst", "comm_src"),
            (WorkKind.RECEIVE, "comm_src", "comm_dst"),
        ):
            mine = kind == work_kind
            if mine.any():
                peers[mine] = self.integers(theirs, mine, is_needed=True)[mine]
                self._check_sender(mine, self.integers(own, mine), own)
        outside = is_message & ((peers < 0) | (peers >= num_ranks))
        rows, ranks = self._with_ranks(is_message)
        for bad in (*np.flatnonzero(outside)[:1].tolist(), *rows[peers[rows] == ranks][:1].tolist()):
            self.refuse(bad, f"its peer is rank {peers[bad]} of {num_ranks}", "check the network's size")
        return peers

    def _check_sender(self, mine: NDArray[np.bool_], stated: Ints, attribute: str) -> None:
        """Refuse sends or receives of a trace that many ranks run, and those that are said to be another rank's."""
        is_shared = np.array([len(ranks) != 1 for ranks in self.batch.ranks])[self.file]
        for bad in np.flatnonzero(mine & is_shared)[:1].tolist():
            self.refuse(bad, "it sends or receives, and the trace is for many ranks", "give one trace a rank")
        rows, ranks = self._with_ranks(mine)
        for at in np.flatnonzero((stated[rows] != ranks) & (stated[rows] != _ABSENT))[:1].tolist():
            problem = f"{attribute} is {stated[rows[at]]} in the trace of rank {ranks[at]}"
            self.refuse(int(rows[at]), problem, "check the order of the files")

    def _with_ranks(self, mine: NDArray[np.bool_]) -> tuple[Ints, Ints]:
        """These nodes as often as a file has one, and the (first) rank of that file."""
        first_rank = np.array([ranks[0] if len(ranks) else -1 for ranks in self.batch.ranks], np.int64)
        at = np.flatnonzero(mine[self.batch.row])
        return self.batch.row[at], first_rank[self.batch.file[at]]

    def integers(
        self, name: str, needed: NDArray[np.bool_] | None = None, absent: int = _ABSENT, is_needed: bool = False
    ) -> Ints:
        """An integer attribute; the first of that name counts. Needed ones must be there, and none may be a float."""
        rows = self.trace.attribute_rows(name)
        wires = self.trace.attributes["wire"][rows]
        found = np.full(self.trace.num_nodes, absent, np.int64)
        is_integer = _IS_INTEGER[wires]
        found[self._node[rows[is_integer]]] = self.trace.attributes["value"][rows[is_integer]]
        if not is_integer.all() and needed is not None:
            wrong = np.zeros(self.trace.num_nodes, np.bool_)
            wrong[self._node[rows[~is_integer]]] = True
            for bad in np.flatnonzero(wrong & needed)[:1]:
                self.refuse(int(bad), f"its {name} is no integer", "write it as int64")
        if is_needed and needed is not None:
            there = np.zeros(self.trace.num_nodes, np.bool_)
            there[self._node[rows]] = True
            for bad in np.flatnonzero(needed & ~there)[:1]:
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
        return ids

    def _dimensions(self) -> Ints:
        bits = np.full(self.trace.num_nodes, -1, np.int64)
        for row in self.trace.attribute_rows("involved_dim"):
            flags = self.trace.value(int(row))
            if isinstance(flags, list):
                bits[self._node[row]] = sum(1 << i for i, flag in enumerate(flags[:62]) if flag)
        return bits

    @cached_property
    def dependencies(self) -> tuple[Ints, NDArray[np.uint64]]:
        """CSR of the ids of data and control dependencies, ascending and each one once."""
        control, data = self.trace.control, self.trace.data
        node = np.concatenate([control.nodes, data.nodes])
        ids = np.concatenate([control.ids.astype(np.uint64), data.ids.astype(np.uint64)])
        if ((node[1:] < node[:-1]) | ((node[1:] == node[:-1]) & (ids[1:] <= ids[:-1]))).any():
            order = np.lexsort((ids, node))
            node, ids = node[order], ids[order]
            is_new = np.append(True, (node[1:] != node[:-1]) | (ids[1:] != ids[:-1]))
            node, ids = node[is_new], ids[is_new]
        return _starts(np.bincount(node, minlength=self.trace.num_nodes)), ids

    def classes(self, work: Mapping[str, NDArray[Any]]) -> Ints:
        """Numbers of nodes, equal for those that differ in name, partner and group alone; shape ``(nodes,)``.

        Nodes are brought together by a hash, and compared: where two have the same by chance, all are told apart.
        """
        apart = np.arange(self.trace.num_nodes)
        if len(self.batch.paths) == 1:
            return apart
        first, ids = self.dependencies
        counts = np.diff(first)
        place = np.arange(len(ids)) - np.repeat(first[:-1], counts)
        sums = np.append(np.uint64(0), np.cumsum((ids + place.astype(np.uint64) + np.uint64(1)) * _MULTIPLIER))
        mixed = sums[first[1:]] - sums[first[:-1]]
        for name in _COMPARED:
            mixed = (mixed ^ work[name].astype(np.int64).view(np.uint64)) * _MULTIPLIER
            mixed ^= mixed >> np.uint64(32)
        _, example, number = np.unique(mixed, return_index=True, return_inverse=True)
        like = example[number]
        if not all(np.array_equal(work[name], work[name][like]) for name in _COMPARED):
            return apart
        is_equal = np.array_equal(counts, counts[like])
        return number if is_equal and np.array_equal(ids, ids[np.repeat(first[like], counts) + place]) else apart

    def refuse(self, row: int, problem: str, remedy: str) -> None:
        """Say that a node cannot be used.

        Raises:
            FormatError: always.
        """
        node = int(self.trace.nodes["id"][row])
        name = self.trace.strings.lookup(self.trace.nodes["name"][row : row + 1])[0]
        raise FormatError(self.batch.paths[int(self.file[row])], f"node {node} ({name!r}): {problem}", remedy)


class _Order:
    """The nodes of each file of a batch in the order of their ids."""

    def __init__(self, nodes: _Nodes) -> None:
        self.row, self.file, self._nodes = nodes.batch.row, nodes.batch.file, nodes
        ids = nodes.trace.nodes["id"][self.row]
        if ((ids[1:] < ids[:-1]) & (self.file[1:] == self.file[:-1])).any():  # most traces are in order
            self.row = self.row[np.lexsort((ids, self.file))]
        self.first = np.searchsorted(self.file, np.arange(len(nodes.batch.paths) + 1))

    def program(self, file: int, work: Mapping[str, NDArray[Any]], slot: Ints) -> Program:
        """What a file has to be done, with its dependencies as rows."""
        mine = self.row[self.first[file] : self.first[file + 1]]
        columns = {name: work[name][mine] if name != "slot" else slot for name in WORK_COLUMNS}
        table = Table({name: columns[name].astype(dtype) for name, (dtype, _) in WORK_COLUMNS.items()})
        first, dependency = self._dependencies(mine)
        return Program(table, first, dependency.astype(np.int32), self._nodes.trace.strings)

    def _dependencies(self, mine: Ints) -> tuple[Ints, Ints]:
        """CSR of the dependencies among the nodes of a file, which are these rows of the trace."""
        nodes = self._nodes
        ids = nodes.trace.nodes["id"][mine].astype(np.uint64)
        for twice in np.flatnonzero(ids[1:] == ids[:-1])[:1]:
            nodes.refuse(int(mine[twice]), "its id occurs twice", "run foretrace lint on the file")
        of_node, wanted = nodes.dependencies
        first = _starts(of_node[mine + 1] - of_node[mine])
        counts = np.diff(first)
        wanted = wanted[np.arange(first[-1]) + np.repeat(of_node[mine] - first[:-1], counts)]
        source = _places(ids, wanted)
        for bad in np.flatnonzero(source < 0)[:1]:
            problem = f"it depends on node {wanted[bad]}, which does not exist"
            row = int(mine[np.searchsorted(first, bad, "right") - 1])
            nodes.refuse(row, problem, "run foretrace lint --repair on the file")
        if len(mine) and counts.all():
            problem = "every node of the trace waits for another"
            nodes.refuse(int(mine[0]), problem, "run foretrace lint --repair on the file")
        return first, source


def _starts(counts: NDArray[np.integer[Any]]) -> Ints:
    """Where lists of these lengths begin and end, one behind the other."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int64)


def _places(ids: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> Ints:
    """Where ids stand among ascending ones, -1 for none."""
    if not len(ids) or not len(wanted):
        return np.full(len(wanted), -1, np.int64)
    # Most traces number their nodes without gaps: then the place of an id is known.
    guess = (wanted - ids[0]).astype(np.int64)
    guess[(guess < 0) | (guess >= len(ids))] = 0
    if not np.array_equal(ids[guess], wanted):
        guess = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    return np.where(ids[guess] == wanted, guess, -1)


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
