"""Chakra traces for the tests of lint: sound ones, drawn at random, and nodes to break them with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from foretrace.formats.chakra.builder import Builder
from foretrace.formats.chakra.trace import ChakraTrace, NodeType, Wire
from foretrace.trace import ReadReport

SIMULATED = (0, 2, 6, 7, 5)


@dataclass
class Node:
    """One node, easily changed."""

    id: int
    name: str = "op"
    type: int = NodeType.COMP
    data: list[int] = field(default_factory=list)
    control: list[int] = field(default_factory=list)
    start: int = 0
    duration: int = 1
    attributes: list[tuple[str, int, Any]] = field(default_factory=list)

    def without(self, name: str) -> Node:
        self.attributes = [one for one in self.attributes if one[0] != name]
        return self


def collective(node: Node, kind: int = 0, size: int = 1024, group: str | None = None) -> Node:
    node.type = NodeType.COMM_COLL
    node.attributes = [("comm_type", Wire.INT64, kind), ("comm_size", Wire.INT64, size)]
    if group is not None:
        node.attributes.append(("pg_name", Wire.STRING, group))
    return node


def message(node: Node, source: int, target: int, size: int = 64, tag: int = 0, *, sends: bool) -> Node:
    node.type = NodeType.COMM_SEND if sends else NodeType.COMM_RECV
    node.attributes = [
        ("comm_src", Wire.INT32, source),
        ("comm_dst", Wire.INT32, target),
        ("comm_tag", Wire.INT32, tag),
        ("comm_size", Wire.INT64, size),
    ]
    return node


def build(nodes: Sequence[Node], rank: int = 0, path: str = "x.0.et", **members: Any) -> ChakraTrace:
    builder = Builder()
    for node in nodes:
        builder.add(
            node.id,
            node.name,
            node.type,
            control=node.control,
            data=node.data,
            start_micros=node.start,
            duration_micros=node.duration,
            attributes=[(*one, "") for one in node.attributes],
        )
    return builder.trace(ReadReport(path, "chakra et"), rank=rank, **members)


def chain(count: int) -> list[Node]:
    """Compute nodes, each after the one before."""
    return [Node(at, f"op{at}", data=[at - 1] if at else []) for at in range(count)]


@st.composite
def sound_nodes(draw: st.DrawFn, low: int = 1, high: int = 25) -> list[Node]:
    """Nodes without any fault: ids sparse and of up to 64 bits, in any order in the file."""
    count = draw(st.integers(low, high))
    wide = st.one_of(st.integers(0, 60), st.integers(0, 2**64 - 1))
    ids = draw(st.lists(wide, min_size=count, max_size=count, unique=True))
    nodes = []
    for at, one in enumerate(ids):
        before = st.lists(st.sampled_from(ids[:at]), max_size=4) if at else st.just([])
        node = Node(one, draw(st.sampled_from(["", "aten::mm", "é"])), data=[*draw(before)], control=[*draw(before)])
        node.duration = draw(st.integers(1, 10**6))
        if draw(st.booleans()):
            collective(
                node,
                draw(st.sampled_from(SIMULATED)),
                draw(st.integers(1, 2**40)),
                draw(st.sampled_from([None, "0", ""])),
            )
        nodes.append(node)
    nodes[0].type, nodes[0].attributes = NodeType.COMP, [("is_cpu_op", Wire.BOOL, True)]
    return draw(st.permutations(nodes))
