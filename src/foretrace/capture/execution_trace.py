"""The execution trace of one window, as PyTorch wrote it: what we need of its nodes, and text put into it."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

_RECORD_ID = re.compile(rb'"name": ?"rf_id", ?"type": ?"uint64", ?"value": ?(\d+)\}')
_HEAD_OF_NODE = re.compile(rb'("id": ?\d+, ?"name": ?)"(.*?)"(, ?"ctrl_deps": ?\d+,)', re.DOTALL)
_NODES = re.compile(rb'"nodes": ?\[')
_ROOTS = "[pytorch|profiler|execution_trace|"
# Under these stands what a tensor subclass or a mode made of the operator above: the operator itself did not run.
_PYTHON = ("PythonSubclass", "PythonDispatchMode")


class _Attribute(msgspec.Struct):
    name: str
    value: Any


class _Side(msgspec.Struct):
    values: list[Any]


class Node(msgspec.Struct):
    """One node; ``parent`` is the id of another one."""

    id: int
    name: str
    parent: int = msgspec.field(name="ctrl_deps")
    inputs: _Side
    outputs: _Side
    attrs: list[_Attribute]
    record_id: int = -1
    thread: int = -1


class _File(msgspec.Struct):
    nodes: list[Node]


@dataclass
class TraceText:
    """An execution trace as text, with its nodes, and what is to be put into it.

    Attributes:
        text: the file's content.
        nodes: by id, in order of start; empty if the text is no JSON even after repair.
        attributes: to add, by record function id.
        members: to add at the top of the file.
        new_nodes: to add, as JSON.
    """

    text: bytes
    nodes: dict[int, Node] = field(default_factory=dict)
    attributes: dict[int, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    members: dict[str, Any] = field(default_factory=dict)
    new_nodes: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""

    @cached_property
    def children(self) -> dict[int, list[Node]]:
        """Nodes by id of their parent, in order of start."""
        found: dict[int, list[Node]] = defaultdict(list)
        for node in self.nodes.values():
            found[node.parent].append(node)
        return found

    def ran(self, node: Node) -> bool:
        """Whether an operator itself ran, rather than what a tensor subclass or a mode made of it."""
        return not any(child.name in _PYTHON for child in self.children.get(node.id, ()))

    def with_additions(self) -> bytes:
        """The text of the file to write."""
        text = self.text
        if self.attributes:
            text = _RECORD_ID.sub(self._with_attributes, text)
        if self.new_nodes:
            nodes = b",".join(json.dumps(node).encode() for node in self.new_nodes)
            text = _NODES.sub(lambda found: found[0] + b"\n" + nodes + b",", text, count=1)
        end = text.rfind(b"}")
        if self.members and end >= 0:
            members = json.dumps(self.members).encode()[1:-1]
            text = text[:end].rstrip() + b",\n  " + members + b"\n" + text[end:]
        return text

    def _with_attributes(self, found: re.Match[bytes]) -> bytes:
        added = self.attributes.get(int(found[1]))
        return found[0] + b"," + json.dumps(added).encode()[1:-1] if added else found[0]


def parse(text: bytes) -> TraceText:
    """An execution trace from its text. Names with quotes, which PyTorch does not escape, are repaired."""
    trace = TraceText(text)
    try:
        nodes = msgspec.json.decode(text, type=_File).nodes
    except msgspec.DecodeError:
        trace.text = _HEAD_OF_NODE.sub(_with_escaped_name, text)
        try:
            nodes = msgspec.json.decode(trace.text, type=_File).nodes
        except msgspec.DecodeError as error:
            trace.text, trace.problem = text, f"the execution trace is no valid JSON ({error})"
            return trace
    for node in nodes:
        for attribute in node.attrs:
            if attribute.name == "rf_id":
                node.record_id = int(attribute.value)
            elif attribute.name == "tid":
                node.thread = int(attribute.value)
    trace.nodes = {node.id: node for node in sorted(nodes, key=lambda node: node.id)}
    return trace


def _with_escaped_name(found: re.Match[bytes]) -> bytes:
    name = json.dumps(found[2].decode("utf-8", "replace")).encode()
    return found[1] + name + found[3]


def is_root(node: Node) -> bool:
    """Whether a node stands for the process or a thread."""
    return node.name.startswith(_ROOTS)


def tensors_of(values: Any) -> list[tuple[int, ...]]:
    """Tensors in values of a node, in lists too: id, storage, offset, elements, bytes of an element."""
    if not isinstance(values, list):
        return []
    if len(values) == 6 and isinstance(values[5], str) and all(isinstance(part, int) for part in values[:5]):
        return [tuple(values[:5])]
    return [found for part in values for found in tensors_of(part)]


@dataclass(frozen=True)
class OpenScope:
    """A scope that was still open when recording stopped: of that only Kineto knows the name."""

    record_id: int
    name: str
    thread: int


def add_open_scopes(trace: TraceText, scopes: Iterable[OpenScope]) -> int:
    """Nodes for the parents that the trace lacks, for they had not ended. Returns how many are still missing.

    Ids of nodes and record function ids both count in order of start, which tells which scope each parent is.
    """
    missing = sorted({node.parent for node in trace.nodes.values() if node.parent not in trace.nodes and node.id > 1})
    if not missing:
        return 0
    by_record = {scope.record_id: scope for scope in scopes}
    ordered = [(node.id, node.record_id) for node in trace.nodes.values() if node.record_id > 0]
    above: dict[int, int] = {}
    lost = 0
    for parent in missing:
        before = max((record for node, record in ordered if node < parent), default=0)
        after = min((record for node, record in ordered if node > parent), default=before)
        fitting = [record for record in by_record if before < record < after]
        if not fitting:
            lost += 1
            continue
        scope = by_record.pop(fitting[0])
        child = trace.children[parent][0]
        root = next(
            (n.id for n in trace.nodes.values() if is_root(n) and n.thread == child.thread and n.parent == 1), 1
        )
        trace.new_nodes.append(_scope_node(parent, above.get(child.thread, root), scope, child.thread))
        above[child.thread] = parent
    return lost


def _scope_node(node: int, parent: int, scope: OpenScope, thread: int) -> dict[str, Any]:
    empty: dict[str, list[Any]] = {"values": [], "shapes": [], "types": [], "strides": []}
    numbers = {"rf_id": scope.record_id, "fw_parent": 0, "seq_id": -1, "scope": 7, "tid": thread, "fw_tid": 0}
    attributes: list[dict[str, Any]] = [
        {"name": name, "type": "int64" if name == "seq_id" else "uint64", "value": value}
        for name, value in numbers.items()
    ]
    attributes += [
        {"name": name, "type": "string", "value": ""}
        for name in ("op_schema", "kernel_backend", "kernel_file", "tensor_range")
    ]
    return {
        "id": node,
        "name": scope.name,
        "ctrl_deps": parent,
        "inputs": empty,
        "outputs": empty,
        "attrs": attributes,
    }
