"""An operator trace alone as a Chakra trace: program order as control, tensors as data dependencies, no times."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.formats.chakra.columns import Attributes, dependencies
from foretrace.formats.chakra.from_graph import COMM_TYPE, SCHEMA
from foretrace.formats.chakra.operator_details import operator_texts
from foretrace.formats.chakra.trace import ChakraTrace, NodeType, Wire
from foretrace.trace import ReadReport, StringTable, Table
from foretrace.trace.classify import Classifier, CollectiveKind
from foretrace.trace.communication import dtype_bytes
from foretrace.trace.operators import OperatorTrace

_ON_HOST = ("cpu", "")
_GROUP_NODE = "## process_group:init ##"
_NOT_COMMUNICATION = ("wait", "init", "")


def from_operators(trace: OperatorTrace, costs: Table | None = None) -> ChakraTrace:
    """One Chakra node for each node of an operator trace, with the same id.

    ``ctrl_deps`` are the caller and the node before it on its thread (program order), ``data_deps`` the nodes that
    wrote the storages of its inputs last. There are no times: durations are 0, and a simulator needs ``num_ops`` and
    ``tensor_size``, which the innermost operators with a known cost carry.

    Args:
        trace: what to write.
        costs: columns ``node``, ``flops``, ``read_bytes``, ``written_bytes`` (`foretrace.machine.trace_costs`).
    """
    strings = StringTable()
    ids = trace.nodes["id"].astype(np.uint64)
    report = ReadReport(trace.report.path, "chakra et")
    attributes = Attributes(strings)
    rows = np.arange(trace.num_nodes)
    communication = _communication(trace)
    types = np.full(trace.num_nodes, NodeType.COMP, np.int8)
    types[trace.nodes["name"] == trace.strings.find(_GROUP_NODE)] = NodeType.METADATA
    types[communication["node"]] = communication["type"]
    on_host = ~_on_device(trace)
    on_host[communication["node"]] = False
    attributes.add("is_cpu_op", Wire.BOOL, rows, on_host)
    _add_members(trace, attributes)
    _add_communication(trace, communication, attributes, report)
    if costs is not None:
        _add_costs(trace, costs, types, attributes)
    names = _renamed(trace, trace.nodes["name"], strings)
    more, all_strings = operator_texts(trace, rows, strings)
    zeros = np.zeros(trace.num_nodes, np.uint64)
    columns: dict[str, NDArray[Any]] = {
        "id": ids,
        "name": names,
        "type": types,
        "start_micros": zeros,
        "duration_micros": zeros,
        **more,
    }
    texts = [name for name in columns if name == "name" or name.startswith(("inputs_", "outputs_"))]
    report.note("node without a duration: an execution trace has no times", count=trace.num_nodes)
    return ChakraTrace(
        Table(columns, dict.fromkeys(texts, all_strings)),
        _control(trace, ids),
        _data(trace, ids),
        attributes.table(all_strings),
        all_strings,
        metadata=_metadata(trace),
        rank=trace.rank,
        report=report,
    )


def _renamed(trace: OperatorTrace, column: NDArray[np.int32], strings: StringTable) -> NDArray[np.int32]:
    """String ids of the trace as ids of another table."""
    used = np.flatnonzero(np.bincount(column + 1, minlength=1)[1:])
    new = np.full(len(trace.strings) + 1, -1, np.int32)
    new[used] = strings.intern_all(trace.strings.lookup(used))
    return np.asarray(new[column])


def _control(trace: OperatorTrace, ids: NDArray[np.uint64]) -> Any:
    """Each node's caller, and the node before it on its thread."""
    parent, thread = trace.nodes["parent"].astype(np.int64), trace.nodes["thread"]
    order = np.argsort(thread, kind="stable")
    follows = np.flatnonzero(thread[order][1:] == thread[order][:-1]) + 1
    source = np.concatenate((parent[parent >= 0], order[follows - 1]))
    target = np.concatenate((np.flatnonzero(parent >= 0), order[follows]))
    return dependencies(source, target, ids)


def _data(trace: OperatorTrace, ids: NDArray[np.uint64]) -> Any:
    """The nodes that wrote what a node reads; what it or its callers write themselves is none of it."""
    tensors = trace.tensors
    rows = np.flatnonzero(~tensors["is_output"] & (tensors["producer"] >= 0))
    source, target = tensors["producer"][rows].astype(np.int64), tensors["node"][rows].astype(np.int64)
    keep = source < target
    return dependencies(source[keep], target[keep], ids)


def _on_device(trace: OperatorTrace) -> NDArray[np.bool_]:
    """Whether any tensor of a node lies on a device."""
    device = trace.tensors["device"]
    used = np.flatnonzero(np.bincount(device + 1, minlength=1)[1:])
    is_device = np.zeros(len(trace.strings) + 1, np.bool_)
    is_device[used] = [text.split(":")[0] not in _ON_HOST for text in trace.strings.lookup(used)]
    found = np.zeros(trace.num_nodes, np.bool_)
    found[trace.tensors["node"][is_device[device]]] = True
    return found


def _communication(trace: OperatorTrace) -> dict[str, Any]:
    """Rows of the innermost nodes that communicate, with Chakra's types of them."""
    table = trace.collectives
    if not table.num_rows:
        return {"row": np.empty(0, np.int64), "node": np.empty(0, np.int64), "type": np.empty(0, np.int8)}
    names = table.texts("collective")
    classifier = Classifier.default()
    kinds = np.array(
        [classifier.collective_kind("", name) if name else CollectiveKind.NONE for name in names], np.int64
    )
    keep = np.array([name.lower() not in _NOT_COMMUNICATION for name in names], np.bool_)
    keep &= ~_has_inner(trace, table["node"])
    comm_type = np.array([COMM_TYPE.get(CollectiveKind(k), -1) for k in range(len(CollectiveKind))], np.int64)[kinds]
    types = np.where(kinds == CollectiveKind.SEND, NodeType.COMM_SEND, NodeType.COMM_COLL)
    types = np.where(kinds == CollectiveKind.RECV, NodeType.COMM_RECV, types)
    rows = np.flatnonzero(keep & ((comm_type >= 0) | (types != NodeType.COMM_COLL)))
    return {"row": rows, "node": table["node"][rows], "type": types[rows], "comm_type": comm_type[rows]}


def _has_inner(trace: OperatorTrace, nodes: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Which of the nodes have another one of them among their descendants."""
    parent = trace.nodes["parent"]
    has = np.zeros(trace.num_nodes + 1, np.bool_)
    above = parent[nodes]
    while (above >= 0).any():
        above = above[above >= 0]
        has[above] = True
        above = np.unique(parent[above])
    return np.asarray(has[nodes])


def _add_members(trace: OperatorTrace, attributes: Attributes) -> None:
    rows = np.arange(trace.num_nodes)
    for name, column in (
        ("rf_id", "record_function_id"),
        ("fw_parent", "forward_parent"),
        ("seq_id", "sequence"),
        ("scope", "scope"),
        ("tid", "thread"),
        ("fw_tid", "forward_thread"),
    ):
        attributes.add(name, Wire.INT64, rows, trace.nodes[column])
    for name, column in (("op_schema", "schema"), ("kernel_backend", "kernel_backend"), ("kernel_file", "kernel_file")):
        ids = _renamed(trace, trace.nodes[column], attributes.strings)
        has = np.flatnonzero((ids >= 0) & (ids != attributes.strings.find("")))
        attributes.add(name, Wire.STRING, has, ids[has])


def _add_communication(trace: OperatorTrace, found: dict[str, Any], attributes: Attributes, report: ReadReport) -> None:
    table, row, node = trace.collectives, found["row"], found["node"]
    if not len(row):
        return
    is_coll = found["type"] == NodeType.COMM_COLL
    width = np.array([max(dtype_bytes(name), 0) for name in table.texts("dtype")], np.int64)[row]
    # Today's recorders write input elements; of an all-gather these are the part of one rank, as Chakra wants it.
    elements = np.where(table["in_elements"][row] > 0, table["in_elements"][row], table["out_elements"][row])
    size = np.maximum(elements, 0) * width
    report.note("size of communication is not known: written as 0", count=int((size == 0).sum()))
    attributes.add("comm_type", Wire.INT64, node[is_coll], found["comm_type"][is_coll])
    attributes.add("comm_size", Wire.INT64, node, size)
    groups = table.texts("group")
    named = [at for at in range(len(row)) if groups[int(row[at])]]
    attributes.add_texts("pg_name", node[named], [groups[int(row[at])] for at in named])
    for name in ("in_split", "out_split", "reduction"):
        texts = table.texts(name)
        has = [at for at in range(len(row)) if texts[int(row[at])]]
        attributes.add_texts(name, node[has], [texts[int(row[at])] for at in has])
    peers = ~is_coll
    for name, column in (("comm_src", "source_rank"), ("comm_dst", "target_rank"), ("comm_tag", "tag")):
        attributes.add(name, Wire.INT64, node[peers], table[column][row][peers])


def _add_costs(trace: OperatorTrace, costs: Table, types: NDArray[np.int8], attributes: Attributes) -> None:
    """FLOPs and bytes of the innermost operators that have any, so that nothing counts twice."""
    total = costs["read_bytes"] + costs["written_bytes"]
    real = ((costs["flops"] > 0) | (total > 0)) & ~trace.is_wrapper[costs["node"]]
    node = costs["node"][real]
    keep = ~_has_inner(trace, node) & (types[node] == NodeType.COMP)
    attributes.add("num_ops", Wire.INT64, node[keep], costs["flops"][real][keep])
    attributes.add("tensor_size", Wire.INT64, node[keep], total[real][keep])


def _metadata(trace: OperatorTrace) -> dict[str, Any]:
    kept = {name: value for name, value in trace.metadata.items() if isinstance(value, int | float | str | bool)}
    groups = [
        {"pg_name": group.name, "pg_desc": group.description, "ranks": list(group.ranks), "group_size": group.size}
        for group in trace.groups.values()
    ]
    return {"schema": trace.schema or SCHEMA, **kept, "rank": trace.rank, "process_groups": json.dumps(groups)}
