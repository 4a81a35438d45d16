"""An execution graph as Chakra traces, one a rank: nodes for tasks and for delays, finish-to-start dependencies."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.formats.chakra.columns import Attributes, Ints, dependencies, whole_micros
from foretrace.formats.chakra.operator_details import operator_texts
from foretrace.formats.chakra.trace import ChakraTrace, CommType, NodeType, Wire
from foretrace.trace import EdgeKind, ExecutionGraph, GraphError, LaneKind, ReadReport, StringTable, Table, TaskKind
from foretrace.trace.classify import CollectiveKind
from foretrace.trace.communication import communication_of, dtype_bytes
from foretrace.trace.graph import HOST_KINDS
from foretrace.trace.operators import OperatorTrace
from foretrace.trace.steps import profiler_steps

PRODUCER = "foretrace"
SCHEMA = "1.1.1-chakra.0.0.4"
COMM_TYPE = {
    CollectiveKind.ALL_REDUCE: CommType.ALL_REDUCE,
    CollectiveKind.REDUCE: CommType.REDUCE,
    CollectiveKind.ALL_GATHER: CommType.ALL_GATHER,
    CollectiveKind.GATHER: CommType.GATHER,
    CollectiveKind.SCATTER: CommType.SCATTER,
    CollectiveKind.BROADCAST: CommType.BROADCAST,
    CollectiveKind.ALL_TO_ALL: CommType.ALL_TO_ALL,
    CollectiveKind.REDUCE_SCATTER: CommType.REDUCE_SCATTER,
    CollectiveKind.BARRIER: CommType.BARRIER,
}
# Of these, ``comm_size`` is the part of one rank; a timeline counts the whole.
_PER_RANK = (CollectiveKind.ALL_GATHER, CollectiveKind.GATHER)
_COMMUNICATION = (TaskKind.COLLECTIVE, TaskKind.COLLECTIVE_ALONE)
# What a graph knows and a Chakra trace has no place for.
_LOST: dict[str, Callable[[ExecutionGraph, int], int]] = {
    "edge that was inferred: its confidence": lambda graph, rank: _inferred(graph, rank),
    "dependency on another rank that is no collective": lambda graph, rank: _between_ranks(graph, rank),
    "step border, annotation and Python function of the timeline": lambda graph, rank: _annotations(graph, rank),
}


@dataclass
class _Members:
    """Which collectives belong together: for each task its group and its place in the sequence of the group."""

    group: Ints  # number of the group, 0 for all ranks, -1 for none
    sequence: Ints
    ranks: dict[int, tuple[int, ...]]  # of each group


def from_graph(graph: ExecutionGraph, operators: Mapping[int, OperatorTrace] | None = None) -> list[ChakraTrace]:
    """One Chakra trace a rank.

    Host work, gaps between host events and delays of device work become COMP nodes, lags of edges nodes of their own,
    coupled collectives COMM_COLL nodes with their transfer time: a reader that lets a collective start when all
    members are there, and every other node when its ``data_deps`` have ended, arrives at the times of the graph.

    Args:
        graph: without open waits (``Simulation.resolved`` has none).
        operators: operator traces by rank, for the arguments of operators (see `ExecutionGraph.costs`).

    Raises:
        GraphError: if the graph has waits that are only resolved by simulating it.
    """
    if graph.waits.num_rows:
        raise GraphError("the graph has blocking calls whose causes are open: write Simulation.resolved")
    members = _members(graph)
    world = max(graph.source.world_size if graph.source else 0, len(graph.ranks))
    return [_Rank(graph, rank, members, world, (operators or {}).get(rank)).trace() for rank in graph.ranks]


def _inferred(graph: ExecutionGraph, rank: int) -> int:
    return int(((graph.edges["confidence"] < 1) & (graph.rank[graph.edges["target"]] == rank)).sum())


def _between_ranks(graph: ExecutionGraph, rank: int) -> int:
    source, target = (graph.rank[graph.edges[side]] for side in ("source", "target"))
    return int(((target == rank) & (source >= 0) & (source != rank)).sum())


def _annotations(graph: ExecutionGraph, rank: int) -> int:
    if graph.source is None:
        return 0
    event = graph.tasks["event"][graph.rank == rank]
    return graph.source.rank(rank).num_events - len(np.unique(event[event >= 0]))


def _members(graph: ExecutionGraph) -> _Members:
    """Groups of coupled collectives, from the moments at which their members meet."""
    found = _Members(np.full(graph.num_tasks, -1, np.int64), np.full(graph.num_tasks, -1, np.int64), {})
    edges, kind = graph.edges, graph.tasks["kind"]
    leaving = np.flatnonzero((edges["kind"] == EdgeKind.COLLECTIVE) & (kind[edges["source"]] == TaskKind.RENDEZVOUS))
    hub, task = edges["source"][leaving], edges["target"][leaving]
    order = np.lexsort((graph.rank[task], hub))
    hub, task = hub[order], task[order]
    borders = np.flatnonzero(np.append(True, hub[1:] != hub[:-1])) if len(hub) else np.empty(0, np.int64)
    everyone = tuple(range(max(graph.source.world_size if graph.source else 0, len(graph.ranks))))
    numbers: dict[tuple[int, ...], int] = {everyone: 0}
    length: dict[int, int] = {}
    at_time = np.argsort(graph.tasks["measured_start_ns"][hub[borders]], kind="stable")
    parts = np.split(task, borders[1:]) if len(borders) else []
    for one in at_time.tolist():
        ranks = tuple(graph.rank[parts[one]].tolist())
        number = numbers.setdefault(ranks, len(numbers))
        found.group[parts[one]] = number
        found.sequence[parts[one]] = length.get(number, 0)
        length[number] = length.get(number, 0) + 1
    found.ranks = {number: ranks for ranks, number in numbers.items()}
    return found


class _Rank:
    """The nodes of one rank: its tasks in the order of their times, then the delays."""

    def __init__(
        self, graph: ExecutionGraph, rank: int, members: _Members, world: int, operators: OperatorTrace | None
    ) -> None:
        self.graph, self.rank, self.members, self.world, self.operators = graph, rank, members, world, operators
        tasks = graph.tasks
        mine = np.flatnonzero((graph.rank == rank) & (tasks["kind"] != TaskKind.ARRIVAL))
        self.tasks = mine[np.lexsort((mine, tasks["measured_start_ns"][mine]))]
        self.node_of = np.full(graph.num_tasks, -1, np.int64)
        self.node_of[self.tasks] = np.arange(len(self.tasks))
        self.kind = tasks["kind"][self.tasks]
        self.lane = tasks["lane"][self.tasks]
        self.is_host = np.isin(self.kind, HOST_KINDS)
        self.strings = StringTable()
        self.attributes = Attributes(self.strings)
        self.report = ReadReport(f"rank {rank}", "chakra et")

    def trace(self) -> ChakraTrace:
        """The trace of the rank."""
        source, target, delay_ns, kind = self._edges()
        delays = np.flatnonzero(delay_ns > 0)
        # Work that waits equally long for one node shares the delay.
        pairs, delay_of = np.unique(np.stack((source[delays], delay_ns[delays])), axis=1, return_inverse=True)
        count, more = len(self.tasks), pairs.shape[1]
        duration = np.concatenate((self.graph.tasks["duration_ns"][self.tasks], pairs[1]))
        ids = self._ids(pairs[0], count + more)
        via = count + delay_of.reshape(-1)
        prompt = np.flatnonzero(delay_ns <= 0)
        all_source = np.concatenate((source[prompt], via, pairs[0]))
        all_target = np.concatenate((target[prompt], target[delays], count + np.arange(more)))
        data = dependencies(all_source, all_target, ids)
        self._add_attributes(duration, more, np.concatenate((target[prompt], target[delays])),
                             np.concatenate((kind[prompt], kind[delays])))  # fmt: skip
        nodes = self._columns(duration, ids, more)
        strings = self.strings
        if self.operators is not None and self.graph.costs.num_rows:
            rows = np.concatenate((self._operator_node, np.full(more, -1)))
            arguments, strings = operator_texts(self.operators, rows, strings)
            nodes |= arguments
        order = np.argsort(ids, kind="stable")
        return self._in_order(nodes, data, order, strings)

    def _edges(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Source and target nodes, delay and kind of each dependency within the rank, arrivals passed over."""
        edges, graph = self.graph.edges, self.graph
        kinds = graph.tasks["kind"]
        source, target = edges["source"].astype(np.int64), edges["target"].astype(np.int64)
        # An arrival is the moment at which the collective after it can start: what it waits for, that waits for.
        arrives = np.flatnonzero((kinds[source] == TaskKind.ARRIVAL) & (kinds[target] != TaskKind.RENDEZVOUS))
        after = np.arange(graph.num_tasks)
        after[source[arrives]] = target[arrives]
        keep = (kinds[source] != TaskKind.ARRIVAL) & (graph.rank[source] == self.rank)
        target = after[target]
        keep &= (self.node_of[source] >= 0) & (self.node_of[target] >= 0)
        rows = np.flatnonzero(keep)
        lag = edges["lag_ns"][rows]
        return self.node_of[source[rows]], self.node_of[target[rows]], lag, edges["kind"][rows].astype(np.int64)

    def _ids(self, delay_source: Ints, total: int) -> NDArray[np.uint64]:
        """Ids in the order in which nodes start: a delay comes directly after the node that it follows."""
        count = len(self.tasks)
        owner = np.concatenate((np.arange(count), delay_source))
        rank = np.concatenate((np.zeros(count, np.int64), np.ones(total - count, np.int64)))
        order = np.lexsort((np.arange(total), rank, owner))
        ids = np.empty(total, np.uint64)
        ids[order] = np.arange(1, total + 1, dtype=np.uint64)
        return ids

    def _columns(self, duration: Ints, ids: NDArray[np.uint64], delays: int) -> dict[str, NDArray[Any]]:
        names = self.graph.names(self.tasks)
        labels = {kind: TaskKind(kind).label.replace("_", " ") for kind in set(self.kind.tolist())}
        names = [name or labels[kind] for name, kind in zip(names, self.kind.tolist(), strict=True)]
        lane = np.concatenate((self.lane, np.full(delays, -1)))
        starts = self.start_ns
        columns: dict[str, NDArray[Any]] = {
            "id": ids,
            "name": np.concatenate((self.strings.intern_all(names), np.full(delays, self.strings.intern("delay")))),
            "type": np.concatenate((self.node_type, np.full(delays, NodeType.COMP))).astype(np.int8),
            "start_micros": np.concatenate((np.maximum(starts, 0) // 1000, np.zeros(delays, np.int64))).astype(
                np.uint64
            ),
            "duration_micros": whole_micros(lane, duration),
        }
        columns["name"] = columns["name"].astype(np.int32)
        return columns

    @cached_property
    def start_ns(self) -> Ints:
        """Measured start of each task, since the beginning of the graph."""
        return np.asarray(self.graph.tasks["measured_start_ns"][self.tasks] - self.graph.origin_ns)

    def _steps(self) -> Ints:
        """The number of each task's step, as the timeline numbers them, -1 outside."""
        step = self.graph.tasks["step"][self.tasks].astype(np.int64)
        if self.graph.source is None:
            return step
        numbers = np.append(profiler_steps(self.graph.source.rank(self.rank)).number, -1)
        return np.where((step >= 0) & (step < len(numbers) - 1), numbers[np.minimum(step, len(numbers) - 1)], -1)

    @cached_property
    def node_type(self) -> NDArray[np.int8]:
        """Chakra's type of each task."""
        types = np.full(len(self.tasks), NodeType.COMP, np.int8)
        types[self.communication["collective"] >= 0] = NodeType.COMM_COLL
        types[self.communication["is_send"] > 0] = NodeType.COMM_SEND
        types[self.communication["is_recv"] > 0] = NodeType.COMM_RECV
        return types

    @cached_property
    def communication(self) -> dict[str, Ints]:
        """By node: ``collective`` (`CommType`), ``size_bytes``, ``is_send``, ``is_recv``, ``peer``, ``size``."""
        count = len(self.tasks)
        found = {name: np.full(count, -1, np.int64) for name in ("collective", "size_bytes", "peer", "size")}
        found |= {name: np.zeros(count, np.int64) for name in ("is_send", "is_recv")}
        nodes = np.flatnonzero(np.isin(self.kind, _COMMUNICATION))
        if self.graph.source is None or not len(nodes):
            return found
        timeline = self.graph.source.rank(self.rank)
        all_of = communication_of(timeline)
        place = np.full(timeline.num_events, -1, np.int64)
        place[all_of.event] = np.arange(len(all_of.event))
        at = place[self.graph.tasks["event"][self.tasks[nodes]]]
        nodes, at = nodes[at >= 0], at[at >= 0]
        kind, size = all_of.kind[at], all_of.size_bytes[at].copy()
        size = np.where(size < 0, self._sizes_of_operators()[nodes], size)
        members = np.maximum(all_of.group_size[at], 1)
        group = self.members.group[self.tasks[nodes]]
        members = np.where(group >= 0, [len(self.members.ranks.get(g, ())) or 1 for g in group.tolist()], members)
        size[np.isin(kind, _PER_RANK) & (size > 0)] //= members[np.isin(kind, _PER_RANK) & (size > 0)]
        types = np.array([COMM_TYPE.get(CollectiveKind(k), -1) for k in range(len(CollectiveKind))], np.int64)
        found["collective"][nodes], found["size_bytes"][nodes], found["size"][nodes] = types[kind], size, members
        named = [
            (node, all_of.group[row])
            for node, row in zip(nodes.tolist(), at.tolist(), strict=True)
            if all_of.group[row]
        ]
        self.attributes.add_texts(
            "pg_desc", np.array([node for node, _ in named], np.int64), [name for _, name in named]
        )
        peer = self._peers(timeline, all_of.event[at])
        for name, wanted in (("is_send", CollectiveKind.SEND), ("is_recv", CollectiveKind.RECV)):
            found[name][nodes] = (kind == wanted) & (peer >= 0)
        found["peer"][nodes] = peer
        self.report.note("size of a collective is not known: written as 0", count=int((size < 0).sum()))
        point = (types[kind] < 0) & ((found["is_send"] + found["is_recv"])[nodes] == 0)
        self.report.note("send or receive without a known peer: written as computation", count=int(point.sum()))
        return found

    def _sizes_of_operators(self) -> Ints:
        """By node the bytes of its collective, as the operator trace tells them; -1 if unknown."""
        found = np.full(len(self.tasks), -1, np.int64)
        trace = self.operators
        if trace is None or not trace.collectives.num_rows or not self.graph.costs.num_rows:
            return found
        table = trace.collectives
        width = np.array([dtype_bytes(name) for name in table.texts("dtype")], np.int64)
        elements = np.maximum(table["in_elements"], table["out_elements"])
        by_node = np.full(trace.num_nodes + 1, -1, np.int64)
        by_node[table["node"]] = np.where((width > 0) & (elements >= 0), elements * width, -1)
        return np.asarray(by_node[self._operator_node])

    def _add_operator_communication(self) -> None:
        """What only an operator trace knows of a collective: how it reduces, and splits that are not even."""
        trace = self.operators
        if trace is None or not trace.collectives.num_rows or not self.graph.costs.num_rows:
            return
        row_of = np.full(trace.num_nodes + 1, -1, np.int64)
        row_of[trace.collectives["node"]] = np.arange(trace.collectives.num_rows)
        row = row_of[self._operator_node]
        nodes = np.flatnonzero((row >= 0) & np.isin(self.kind, _COMMUNICATION))
        for name in ("reduction", "in_split", "out_split", "dtype"):
            texts = trace.strings.lookup(trace.collectives[name][row[nodes]])
            has = [at for at, text in enumerate(texts) if text]
            self.attributes.add_texts(name, nodes[has], [texts[at] for at in has])

    def _peers(self, timeline: Any, events: Ints) -> Ints:
        """The other rank of each send or receive, from the metadata of the event; -1 if unknown."""
        table = timeline.collectives
        if not table.num_rows:
            return np.full(len(events), -1, np.int64)
        by_event = np.full(timeline.num_events, -1, np.int64)
        by_event[table["event"]] = np.arange(table.num_rows)
        row = by_event[events]
        source, target = (np.where(row >= 0, table[name][row], -1) for name in ("source_rank", "target_rank"))
        return np.where(source == self.rank, target, np.where(target == self.rank, source, np.maximum(source, target)))

    @cached_property
    def _operator_node(self) -> Ints:
        """Row of the operator trace for each node, -1 for none."""
        of_task = np.full(self.graph.num_tasks, -1, np.int64)
        of_task[self.graph.costs["task"]] = self.graph.costs["node"]
        return of_task[self.tasks]

    def _add_attributes(self, duration: Ints, delays: int, targets: Ints, kinds: Ints) -> None:
        graph, add, count = self.graph, self.attributes.add, len(self.tasks)
        every = np.arange(count + delays)
        own = np.arange(count)
        is_host = np.concatenate((self.is_host, np.ones(delays, np.bool_)))
        add("is_cpu_op", Wire.BOOL, every, is_host)
        labels = [TaskKind(kind).label for kind in range(len(TaskKind))]
        self.attributes.add_texts("task_kind", own, [labels[kind] for kind in self.kind.tolist()])
        self.attributes.add_texts("task_kind", count + np.arange(delays), ["delay"] * delays)
        add("duration_ns", Wire.INT64, every, duration)
        add("start_ns", Wire.INT64, own, self.start_ns)
        step = self._steps()
        add("step", Wire.INT64, own[step >= 0], step[step >= 0])
        event = graph.tasks["event"][self.tasks]
        add("event", Wire.INT64, own[event >= 0], event[event >= 0])
        self._add_lanes()
        self._add_edge_kinds(targets, kinds)
        self._add_communication()
        self._add_operator_communication()
        self._add_costs()

    def _add_lanes(self) -> None:
        lanes = [lane.lane for lane in self.graph.lanes]
        is_stream = np.array([lane.kind is LaneKind.DEVICE_STREAM for lane in lanes], np.bool_)
        on_stream = np.flatnonzero((self.lane >= 0) & is_stream[self.lane])
        on_thread = np.flatnonzero((self.lane >= 0) & ~is_stream[self.lane])
        for name in ("stream", "device"):
            values = np.array([getattr(lane, name) for lane in lanes], np.int64)
            self.attributes.add(name, Wire.INT64, on_stream, values[self.lane[on_stream]])
        for name, texts in (("tid", [lane.thread for lane in lanes]), ("process", [lane.process for lane in lanes])):
            ids = self.strings.intern_all(texts)
            self.attributes.add(name, Wire.STRING, on_thread, ids[self.lane[on_thread]])

    def _add_edge_kinds(self, targets: Ints, kinds: Ints) -> None:
        """Why a node waits, where it is more than its order."""
        special = kinds != EdgeKind.ORDER
        pairs = np.unique(targets[special] * len(EdgeKind) + kinds[special])
        nodes, kinds = pairs // len(EdgeKind), pairs % len(EdgeKind)
        bits = np.zeros(len(self.tasks), np.int64)
        np.add.at(bits, nodes, 1 << kinds)
        used = np.flatnonzero(bits)
        texts = {
            mask: " ".join(kind.label for kind in EdgeKind if mask >> kind & 1)
            for mask in np.unique(bits[used]).tolist()
        }
        self.attributes.add_texts("waits_for", used, [texts[mask] for mask in bits[used].tolist()])

    def _add_communication(self) -> None:
        found, add = self.communication, self.attributes.add
        coll = np.flatnonzero(self.node_type == NodeType.COMM_COLL)
        peers = np.flatnonzero(np.isin(self.node_type, (NodeType.COMM_SEND, NodeType.COMM_RECV)))
        both = np.concatenate((coll, peers))
        add("comm_type", Wire.INT64, coll, found["collective"][coll])
        add("comm_size", Wire.INT64, both, np.maximum(found["size_bytes"][both], 0))
        group, sequence = self.members.group[self.tasks[coll]], self.members.sequence[self.tasks[coll]]
        is_known = group >= 0
        self.attributes.add_texts("pg_name", coll[is_known], [str(one) for one in group[is_known].tolist()])
        add("comm_sequence", Wire.INT64, coll[is_known], sequence[is_known])
        add("comm_group_size", Wire.INT64, coll, found["size"][coll])
        sends = self.node_type[peers] == NodeType.COMM_SEND
        own = np.full(len(peers), self.rank)
        add("comm_src", Wire.INT64, peers, np.where(sends, own, found["peer"][peers]))
        add("comm_dst", Wire.INT64, peers, np.where(sends, found["peer"][peers], own))
        add("comm_tag", Wire.INT64, peers, np.zeros(len(peers), np.int64))
        # What was measured, waiting for the others included.
        event = self.graph.tasks["event"][self.tasks[coll]]
        if self.graph.source is not None:
            span = self.graph.source.rank(self.rank).duration_ns[event]
            add("measured_duration_ns", Wire.INT64, coll[event >= 0], span[event >= 0])

    def _add_costs(self) -> None:
        costs = self.graph.costs
        if not costs.num_rows:
            return
        node = self.node_of[costs["task"]]
        known = (node >= 0) & (costs["flops"] >= 0)
        total = costs["read_bytes"] + costs["written_bytes"]
        self.attributes.add("num_ops", Wire.INT64, node[known], costs["flops"][known])
        sized = (node >= 0) & (costs["read_bytes"] >= 0) & (costs["written_bytes"] >= 0)
        self.attributes.add("tensor_size", Wire.INT64, node[sized], total[sized])
        if self.operators is not None:
            self._add_operator(self.operators)

    def _add_operator(self, trace: OperatorTrace) -> None:
        """What the operator trace says of the operator that a node is part of, as mlcommons' converter names it."""
        rows = self._operator_node
        nodes = np.flatnonzero(rows >= 0)
        rows = rows[nodes]
        names = ("rf_id", "fw_parent", "seq_id", "scope", "fw_tid")
        columns = ("record_function_id", "forward_parent", "sequence", "scope", "forward_thread")
        for name, column in zip(names, columns, strict=True):
            self.attributes.add(name, Wire.INT64, nodes, trace.nodes[column][rows])
        for name, column in (("operator", "name"), ("op_schema", "schema")):
            self.attributes.add_texts(name, nodes, trace.strings.lookup(trace.nodes[column][rows]))

    def _in_order(
        self, nodes: dict[str, NDArray[Any]], data: Any, order: NDArray[np.intp], strings: StringTable
    ) -> ChakraTrace:
        """The trace with its nodes in the order of their ids."""
        attributes = self.attributes.table(strings)
        place = np.empty(len(order), np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        moved = place[attributes["node"]]
        attributes = Table({**attributes, "node": moved}, attributes.strings).take(np.argsort(moved, kind="stable"))
        count = len(order)
        owner = place[data.nodes]
        by_owner = np.argsort(owner, kind="stable")
        first = np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=count)))).astype(np.int64)
        texts = [name for name in nodes if name == "name" or name.startswith(("inputs_", "outputs_"))]
        for reason, counted in _LOST.items():
            self.report.note(f"not in a Chakra trace: {reason}", count=counted(self.graph, self.rank))
        none = np.zeros(count + 1, np.int64), np.empty(0, np.uint32)
        return ChakraTrace(
            Table({name: column[order] for name, column in nodes.items()}, dict.fromkeys(texts, strings)),
            type(data)(*none),
            type(data)(first, data.ids[by_owner]),
            attributes,
            strings,
            metadata=self._metadata(),
            rank=self.rank,
            report=self.report,
        )

    def _metadata(self) -> dict[str, Any]:
        groups = [
            {"pg_name": str(number), "ranks": list(ranks) if number else [], "group_size": len(ranks)}
            for number, ranks in sorted(self.members.ranks.items())
            if not number or self.rank in ranks
        ]
        return {
            "schema": SCHEMA,
            "producer": PRODUCER,
            "rank": self.rank,
            "world_size": self.world,
            "origin_ns": self.graph.origin_ns,
            "process_groups": json.dumps(groups),
        }
