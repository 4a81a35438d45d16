"""Chakra files made by protobuf, and what a trace holds as plain Python: independent of our decoder and encoder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from foretrace.formats.chakra import ChakraTrace, Wire
from foretrace.formats.chakra.schema import messages
from foretrace.formats.chakra.trace import IO_COLUMNS

SCHEMA = messages()
IO_PARTS = ("values", "shapes", "types")


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def frame(content: bytes) -> bytes:
    return varint(len(content)) + content


def et(nodes: Iterable[Any], metadata: Any = None) -> bytes:
    """A file of messages: metadata (v0.0.4's with a version, if none are given), then nodes."""
    first = SCHEMA.GlobalMetadata(version="0.0.4") if metadata is None else metadata
    parts = [first, *nodes] if first else [*nodes]
    return b"".join(frame(part.SerializeToString()) for part in parts)


def split(data: bytes) -> list[bytes]:
    """The messages of a file that is whole."""
    found, at = [], 0
    while at < len(data):
        size = shift = 0
        while True:
            byte = data[at]
            at += 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        assert at + size <= len(data)
        found.append(data[at : at + size])
        at += size
    return found


def parsed(path: Path) -> tuple[Any, list[Any]]:
    """The metadata and nodes of a file, as protobuf reads them."""
    first, *rest = split(path.read_bytes())
    return SCHEMA.GlobalMetadata.FromString(first), [SCHEMA.Node.FromString(message) for message in rest]


def _attribute(item: Any) -> tuple[str, str, str, str]:
    kind = item.WhichOneof("value")
    value = None if kind is None else getattr(item, kind)
    if kind is not None and kind.endswith("_list"):
        value = list(value.values)
    wire = Wire.NONE if kind is None else Wire(item.DESCRIPTOR.fields_by_name[kind].number)
    return item.name, wire.name, repr(value), item.doc_string


def of_node(node: Any) -> dict[str, Any]:
    """A protobuf node as `of_trace` describes it."""
    return {
        "id": node.id,
        "name": node.name,
        "type": node.type,
        "control": list(node.ctrl_deps),
        "data": list(node.data_deps),
        "start": node.start_time_micros,
        "duration": node.duration_micros,
        "io": [getattr(side, part) for side in (node.inputs, node.outputs) for part in IO_PARTS],
        "attributes": [_attribute(item) for item in node.attr],
    }


def of_metadata(metadata: Any) -> dict[str, tuple[str, str]]:
    return {name: (wire, value) for name, wire, value, _ in map(_attribute, metadata.attr)}


def of_trace(trace: ChakraTrace) -> list[dict[str, Any]]:
    """All that a trace says of each node; values as ``repr``, which tells -0.0 from 0.0 and finds NaN equal."""
    nodes, attributes = trace.nodes, trace.attributes
    io = [nodes.texts(name) if name in nodes else [""] * trace.num_nodes for name in IO_COLUMNS]
    names, keys = nodes.texts("name"), attributes.texts("name")
    docs = attributes.texts("doc_string") if "doc_string" in attributes else [""] * attributes.num_rows
    found = []
    for row in range(trace.num_nodes):
        which = range(int(trace.first_attribute[row]), int(trace.first_attribute[row + 1]))
        node = {
            "id": int(nodes["id"][row]),
            "name": names[row],
            "type": int(nodes["type"][row]),
            "control": trace.control.of(row).tolist(),
            "data": trace.data.of(row).tolist(),
            "start": int(nodes["start_micros"][row]),
            "duration": int(nodes["duration_micros"][row]),
            "io": [texts[row] for texts in io],
            "attributes": [
                (keys[at], Wire(int(attributes["wire"][at])).name, repr(trace.value(at)), docs[at]) for at in which
            ],
        }
        found.append(node)
    return found


def metadata_of_trace(trace: ChakraTrace) -> dict[str, tuple[str, str]]:
    return {name: (trace.metadata_wires[name].name, repr(value)) for name, value in trace.metadata.items()}


def small_nodes(count: int = 12) -> list[Any]:
    """Nodes as a generator writes them: work, with a collective after every third."""
    nodes = []
    for at in range(count):
        is_collective = at % 4 == 3
        node = SCHEMA.Node(
            id=at + 5, name=f"layer{at % 3}", type=7 if is_collective else 4, duration_micros=100 + 30 * at
        )
        node.data_deps.extend(range(max(at + 3, 5), at + 5))
        node.ctrl_deps.extend([5] if at > 4 else [])
        node.attr.add(name="is_cpu_op", bool_val=False)
        if is_collective:
            node.attr.add(name="comm_type", int64_val=at % 3)
            node.attr.add(name="comm_size", uint64_val=1 << at % 60)
            node.attr.add(name="involved_dim").bool_list.values.extend([True, True, False])
            node.attr.add(name="pg_name", string_val="1")
        else:
            node.attr.add(name="num_ops", int64_val=10**9 + at)
            node.inputs.values = f"[[{at}, {at + 1}, 0, 64, 4, 'cuda:0']]"
            node.inputs.shapes, node.outputs.types = "[[64]]", "['Tensor(float)']"
        nodes.append(node)
    return nodes
