"""A workload as Chakra traces, one a rank, and its process groups as the document that ASTRA-sim reads beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.formats.chakra.columns import Attributes, Ints
from foretrace.formats.chakra.trace import ChakraTrace, Dependencies, NodeType, Wire
from foretrace.trace import ReadReport, StringTable, Table
from foretrace.trace.workload import WORLD, Program, WorkKind, Workload

PRODUCER = "foretrace"
SCHEMA = "1.1.1-chakra.0.0.4"
# Node types by `WorkKind`. A workload does not tell loads from stores.
_TYPES = np.array([NodeType.INVALID, NodeType.COMP, NodeType.COMM_SEND, NodeType.COMM_RECV, NodeType.COMM_COLL,
                   NodeType.MEM_LOAD], np.int8)  # fmt: skip


def to_chakra(workload: Workload, rank: int) -> ChakraTrace:
    """The trace of a rank, with the attributes that ASTRA-sim reads.

    ``num_ops`` and ``tensor_size`` of computation, ``comm_type``, ``comm_size`` and ``pg_name`` of collectives,
    ``comm_src``, ``comm_dst`` and ``comm_tag`` of sends and receives, ``comm_priority`` and ``involved_dim`` where they
    are set; ``is_cpu_op`` of every node. A duration is written in whole microseconds, as the format has it.

    Raises:
        IndexError: if there is no such rank.
    """
    if not 0 <= rank < workload.num_ranks:
        raise IndexError(f"rank {rank}: the workload has {workload.num_ranks} ranks")
    number = int(workload.program_of[rank])
    place = int(np.count_nonzero(workload.program_of[:rank] == number))
    program, strings = workload.programs[number], StringTable()
    nodes, objects = program.nodes, list[Any]()
    attributes = Attributes(strings)
    report = ReadReport(f"rank {rank}", "chakra et")
    attributes.add("is_cpu_op", Wire.BOOL, np.arange(program.num_nodes), nodes["on_host"])
    _add_work(attributes, program)
    _add_peers(attributes, program, rank, workload.peers[number][place])
    _add_collectives(attributes, program, _numbers(workload, number, place), objects)
    rounded = int(np.count_nonzero(nodes["duration_ns"] % 1000))
    report.note("duration is rounded to whole microseconds", count=rounded)
    columns = {**_columns(program, strings)}
    first, dependency = program.first_dependency, program.dependency
    data = Dependencies(first, nodes["id"][dependency].astype(np.uint64))
    control = Dependencies(np.zeros_like(first), np.empty(0, np.uint64))
    table = attributes.table(strings)
    metadata = {"schema": SCHEMA, "producer": PRODUCER}
    return ChakraTrace(Table(columns, {"name": strings}), control, data, table, strings, objects, metadata, rank=rank,
                       report=report)  # fmt: skip


def groups_document(workload: Workload) -> dict[str, list[int]]:
    """Ranks by the number of their group, for ``--comm-group-configuration``; all ranks need no entry."""
    return {str(group.number): group.ranks.tolist() for group in workload.groups[WORLD + 1 :]}


def _columns(program: Program, strings: StringTable) -> dict[str, NDArray[Any]]:
    nodes = program.nodes
    distinct, place = np.unique(nodes["name"], return_inverse=True)
    names = strings.intern_all(program.strings.lookup(distinct))[place.reshape(-1)]
    micros = (nodes["duration_ns"].astype(np.int64) + 500) // 1000
    return {
        "id": nodes["id"].astype(np.uint64),
        "name": names.astype(np.int32),
        "type": _TYPES[nodes["kind"]],
        "start_micros": np.zeros(program.num_nodes, np.uint64),
        "duration_micros": micros.astype(np.uint64),
    }


def _numbers(workload: Workload, program: int, place: int) -> Ints:
    """Number of the group in each slot, and of all ranks behind them: slot -1."""
    groups = [*workload.groups_of[program][place].tolist(), WORLD]
    return np.array([workload.groups[group].number if group != WORLD else 0 for group in groups], np.int64)


def _add_work(attributes: Attributes, program: Program) -> None:
    """What computation and memory nodes do."""
    nodes = program.nodes
    rows = np.flatnonzero((nodes["kind"] == WorkKind.COMPUTE) & (nodes["flops"] >= 0))
    attributes.add("num_ops", Wire.INT64, rows, nodes["flops"][rows])
    is_work = (nodes["kind"] == WorkKind.COMPUTE) | (nodes["kind"] == WorkKind.MEMORY)
    rows = np.flatnonzero(is_work & (nodes["bytes"] >= 0))
    attributes.add("tensor_size", Wire.UINT64, rows, nodes["bytes"][rows])


def _add_peers(attributes: Attributes, program: Program, rank: int, peers: NDArray[np.int32]) -> None:
    """Both ends, tag and size of sends and receives."""
    nodes = program.nodes
    is_send, is_receive = nodes["kind"] == WorkKind.SEND, nodes["kind"] == WorkKind.RECEIVE
    rows = np.flatnonzero(is_send | is_receive)
    if not len(rows):
        return
    peer, own = peers[nodes["slot"][rows]], np.full(len(rows), rank)
    attributes.add("comm_src", Wire.INT32, rows, np.where(is_send[rows], own, peer))
    attributes.add("comm_dst", Wire.INT32, rows, np.where(is_send[rows], peer, own))
    attributes.add("comm_tag", Wire.INT32, rows, np.maximum(nodes["tag"][rows], 0))
    attributes.add("comm_size", Wire.INT64, rows, np.maximum(nodes["bytes"][rows], 0))


def _add_collectives(attributes: Attributes, program: Program, numbers: Ints, objects: list[Any]) -> None:
    """Kind, size, group, priority and dimensions of collectives."""
    nodes = program.nodes
    rows = np.flatnonzero(nodes["kind"] == WorkKind.COLLECTIVE)
    attributes.add("comm_type", Wire.INT64, rows, nodes["collective"][rows])
    attributes.add("comm_size", Wire.INT64, rows, np.maximum(nodes["bytes"][rows], 0))
    group = numbers[nodes["slot"][rows]]
    named = rows[group > 0]
    attributes.add_texts("pg_name", named, [str(number) for number in group[group > 0].tolist()])
    urgent = rows[nodes["priority"][rows] != 0]
    attributes.add("comm_priority", Wire.INT32, urgent, nodes["priority"][urgent])
    limited = rows[nodes["dimensions"][rows] >= 0]
    masks, place = np.unique(nodes["dimensions"][limited], return_inverse=True)
    attributes.add("involved_dim", Wire.BOOL_LIST, limited, place.reshape(-1) + len(objects))
    objects += [[bool(mask >> bit & 1) for bit in range(max(mask.bit_length(), 4))] for mask in masks.tolist()]
