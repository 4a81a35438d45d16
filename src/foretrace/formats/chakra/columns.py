"""Columns of attributes, collected by name and put in the order of nodes at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.formats.chakra.trace import Dependencies, Wire
from foretrace.trace import StringTable, Table

Ints = NDArray[np.int64]


class Attributes:
    """Attributes of many nodes; `table` gives them sorted by node, in the order in which they were added."""

    def __init__(self, strings: StringTable) -> None:
        self.strings = strings
        self._parts: list[tuple[NDArray[np.integer], int, int, NDArray[Any]]] = []

    def add(self, name: str, wire: Wire, nodes: NDArray[np.integer], values: NDArray[Any]) -> None:
        """Give the nodes an integer, Boolean, float or (as string ids) text attribute; no nodes, no attribute."""
        if len(nodes):
            if wire in (Wire.DOUBLE, Wire.FLOAT):
                values = np.ascontiguousarray(values, np.float64).view(np.int64)
            self._parts.append((nodes, self.strings.intern(name), int(wire), np.asarray(values).astype(np.int64)))

    def add_texts(self, name: str, nodes: NDArray[np.integer], texts: Sequence[str]) -> None:
        """Give the nodes a text each."""
        self.add(name, Wire.STRING, nodes, self.strings.intern_all(texts))

    def table(self, strings: StringTable) -> Table:
        """The table `ChakraTrace.attributes`, over a table that begins with the texts of this one."""
        lengths = [len(part[0]) for part in self._parts]
        node = np.concatenate([np.empty(0, np.int32), *(part[0] for part in self._parts)]).astype(np.int32)
        order = np.argsort(node, kind="stable")
        columns: dict[str, NDArray[Any]] = {"node": node[order]}
        columns["name"] = np.repeat(np.array([p[1] for p in self._parts], np.int32), lengths)[order]
        columns["wire"] = np.repeat(np.array([p[2] for p in self._parts], np.int8), lengths)[order]
        columns["value"] = np.concatenate([np.empty(0, np.int64), *(part[3] for part in self._parts)])[order]
        return Table(columns, {"name": strings})


def dependencies(source: NDArray[np.integer], target: NDArray[np.integer], ids: NDArray[Any]) -> Dependencies:
    """Lists of ids out of pairs of rows: ``target`` depends on ``source``. Each pair counts once.

    Args:
        source, target: rows of nodes, one pair an edge.
        ids: id of every node.
    """
    count = len(ids)
    pair = np.sort(target.astype(np.int64) * max(count, 1) + source)
    pair = pair[np.append(True, pair[1:] != pair[:-1])] if len(pair) else pair
    target, source = pair // max(count, 1), pair % max(count, 1)
    first = np.concatenate(([0], np.cumsum(np.bincount(target, minlength=count)))).astype(np.int64)
    narrow = np.uint32 if not count or int(ids.max()) < 1 << 32 else np.uint64
    return Dependencies(first, ids[source].astype(narrow))


def whole_micros(lane: NDArray[np.integer], duration_ns: Ints) -> NDArray[np.uint64]:
    """Durations in whole microseconds such that sums along a lane stay right: what is rounded off one goes to the next.

    Args:
        lane: of each node; nodes of one lane stand in their order.
        duration_ns: of each node.
    """
    order = np.argsort(lane, kind="stable")
    total = np.cumsum(duration_ns[order])
    is_first = np.append(True, lane[order][1:] != lane[order][:-1]) if len(order) else np.zeros(0, np.bool_)
    before = total - duration_ns[order]
    base = np.maximum.accumulate(np.where(is_first, before, 0))
    ends, begins = (total - base + 500) // 1000, (before - base + 500) // 1000
    micros = np.empty(len(order), np.uint64)
    micros[order] = (ends - begins).astype(np.uint64)
    return micros
