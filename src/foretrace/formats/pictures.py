"""Graphs of nodes and dependencies as pictures: dot, GraphML, and SVG for small ones."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from foretrace.formats.chakra import ChakraTrace, NodeType
from foretrace.trace import FormatError

MOST_SVG_NODES = 2_000
_COLORS = {
    NodeType.METADATA: "#dddddd",
    NodeType.MEM_LOAD: "#c7b3e5",
    NodeType.MEM_STORE: "#c7b3e5",
    NodeType.COMP: "#9ecae1",
    NodeType.COMM_SEND: "#fdae6b",
    NodeType.COMM_RECV: "#fdae6b",
    NodeType.COMM_COLL: "#fd8d3c",
}
_HOST_COLOR = "#e5f0d8"
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y = 170, 34, 40, 12
_LABEL_CHARACTERS = 24


class Picture:
    """The nodes of one or more traces with labels, colors, rows and dependencies, ready to be drawn."""

    def __init__(self, traces: Sequence[ChakraTrace]) -> None:
        self.labels: list[str] = []
        self.tips: list[str] = []
        self.colors: list[str] = []
        self.keys: list[str] = []
        self.types: list[str] = []
        self.durations: list[int] = []
        edges: list[NDArray[np.int64]] = []
        for trace in traces:
            first = len(self.keys)
            self._add_nodes(trace)
            for lists in (trace.data, trace.control):
                pairs = _rows(trace, lists.ids), lists.nodes
                known = pairs[0] >= 0
                edges.append(np.stack([side[known] + first for side in pairs], axis=1))
        self.edges = np.unique(np.concatenate(edges), axis=0) if edges else np.empty((0, 2), np.int64)

    def _add_nodes(self, trace: ChakraTrace) -> None:
        is_cpu = trace.integers("is_cpu_op", 0)
        prefix = f"r{trace.rank}_" if trace.rank >= 0 else ""
        rows = zip(
            trace.nodes["id"].tolist(),
            trace.nodes.texts("name"),
            trace.nodes["type"].tolist(),
            trace.nodes["duration_micros"].tolist(),
            is_cpu.tolist(),
            strict=True,
        )
        for number, name, kind, duration, on_host in rows:
            node_type = NodeType(kind) if kind in NodeType._value2member_map_ else NodeType.INVALID
            self.keys.append(f"{prefix}n{number}")
            self.labels.append(name)
            self.tips.append(f"{name} (id {number}, {node_type.name}, {duration} us)")
            self.types.append(node_type.name)
            self.durations.append(duration)
            is_host = on_host and node_type is NodeType.COMP
            self.colors.append(_HOST_COLOR if is_host else _COLORS.get(node_type, "#ffffff"))


def _rows(trace: ChakraTrace, ids: NDArray[np.unsignedinteger]) -> NDArray[np.int64]:
    """Rows of the nodes with the given ids, -1 for ids that no node has."""
    own = trace.nodes["id"]
    if not len(own) or not len(ids):
        return np.full(len(ids), -1, np.int64)
    order = np.argsort(own, kind="stable")
    at = np.minimum(np.searchsorted(own[order], ids.astype(own.dtype)), len(own) - 1)
    return np.where(own[order[at]] == ids, order[at], -1)


def dot(traces: Sequence[ChakraTrace]) -> str:
    """The graph in Graphviz' language."""
    picture = Picture(traces)
    lines = ["digraph trace {", "  rankdir=LR;", '  node [shape=box, style=filled, fontname="sans-serif"];']
    for key, label, color in zip(picture.keys, picture.labels, picture.colors, strict=True):
        text = label.replace("\\", "\\\\").replace('"', '\\"')
        lines.append(f'  {key} [label="{text}", fillcolor="{color}"];')
    lines += [f"  {picture.keys[source]} -> {picture.keys[target]};" for source, target in picture.edges.tolist()]
    return "\n".join([*lines, "}", ""])


def graphml(traces: Sequence[ChakraTrace]) -> str:
    """The graph as GraphML, with name, type and duration of each node."""
    picture = Picture(traces)
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        '<graphml xmlns="http://graphml.graphdrawing.org/xmlns">',
        '<key id="name" for="node" attr.name="name" attr.type="string"/>',
        '<key id="type" for="node" attr.name="type" attr.type="string"/>',
        '<key id="duration_micros" for="node" attr.name="duration_micros" attr.type="long"/>',
        '<graph id="trace" edgedefault="directed">',
    ]
    for key, label, kind, duration in zip(picture.keys, picture.labels, picture.types, picture.durations, strict=True):
        lines.append(
            f'<node id="{key}"><data key="name">{_xml(label)}</data><data key="type">{kind}</data>'
            f'<data key="duration_micros">{duration}</data></node>'
        )
    for source, target in picture.edges.tolist():
        lines.append(f'<edge source="{picture.keys[source]}" target="{picture.keys[target]}"/>')
    return "\n".join([*lines, "</graph>", "</graphml>", ""])


def svg(traces: Sequence[ChakraTrace], path: str) -> str:
    """The graph as a drawing: left to right by the longest path to each node.

    Raises:
        FormatError: if it has more than `MOST_SVG_NODES` nodes, or nodes that wait for each other.
    """
    picture = Picture(traces)
    count = len(picture.keys)
    if count > MOST_SVG_NODES:
        remedy = "write .dot or .graphml and open it in Graphviz or Gephi, or look at a timeline (--to perfetto)"
        raise FormatError(path, f"{count} nodes are too many for a drawing (at most {MOST_SVG_NODES})", remedy)
    depth = _depths(picture.edges, count)
    if (depth < 0).any():
        raise FormatError(path, "nodes wait for each other", "run foretrace lint --repair on the trace")
    place = _places(picture.edges, depth)
    x = depth * (_WIDTH + _GAP_X) + _GAP_X
    y = place * (_HEIGHT + _GAP_Y) + _GAP_Y
    width, height = int(x.max(initial=0)) + _WIDTH + _GAP_X, int(y.max(initial=0)) + _HEIGHT + _GAP_Y
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">'
    ]
    for source, target in picture.edges.tolist():
        x1, y1 = int(x[source]) + _WIDTH, int(y[source]) + _HEIGHT // 2
        x2, y2 = int(x[target]), int(y[target]) + _HEIGHT // 2
        middle = (x1 + x2) // 2
        parts.append(f'<path d="M{x1},{y1} C{middle},{y1} {middle},{y2} {x2},{y2}" fill="none" stroke="#888888"/>')
    for at in range(count):
        label = picture.labels[at]
        shown = label if len(label) <= _LABEL_CHARACTERS else label[: _LABEL_CHARACTERS - 1] + "…"
        parts.append(
            f'<g><title>{_xml(picture.tips[at])}</title><rect x="{x[at]}" y="{y[at]}" width="{_WIDTH}" '
            f'height="{_HEIGHT}" rx="4" fill="{picture.colors[at]}" stroke="#555555"/><text x="{x[at] + 8}" '
            f'y="{y[at] + _HEIGHT // 2 + 4}">{_xml(shown)}</text></g>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _xml(text: str) -> str:
    """Text for XML, which has no place for control characters."""
    return escape("".join(c if c.isprintable() or c == " " else "?" for c in text).encode("utf-8", "replace").decode())


def _depths(edges: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Edges on the longest path to each node; -1 for nodes of a cycle and behind one."""
    by_source = edges[np.argsort(edges[:, 0], kind="stable")]
    first = np.concatenate(([0], np.cumsum(np.bincount(by_source[:, 0], minlength=count))))
    depth = np.full(count, -1, np.int64)
    missing = np.bincount(edges[:, 1], minlength=count)
    ready = np.flatnonzero(missing == 0)
    depth[ready] = 0
    waiting = ready.tolist()
    longest = np.zeros(count, np.int64)
    while waiting:
        node = waiting.pop()
        for target in by_source[first[node] : first[node + 1], 1].tolist():
            longest[target] = max(longest[target], depth[node] + 1)
            missing[target] -= 1
            if not missing[target]:
                depth[target] = longest[target]
                waiting.append(target)
    return depth


def _places(edges: NDArray[np.int64], depth: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places within the columns: next to what a node waits for, as far as that is free."""
    place = np.zeros(len(depth), np.int64)
    sources: dict[int, list[int]] = {}
    for source, target in edges.tolist():
        sources.setdefault(target, []).append(source)
    for column in range(int(depth.max(initial=-1)) + 1):
        nodes = np.flatnonzero(depth == column).tolist()
        wish = {node: np.mean([place[s] for s in sources[node]]) if node in sources else node for node in nodes}
        for at, node in enumerate(sorted(nodes, key=lambda node: (wish[node], node))):
            place[node] = at
    return place
