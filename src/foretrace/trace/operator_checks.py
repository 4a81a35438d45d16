"""What is wrong with an operator trace: its tree, ids, schema and tensors."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.trace.communication import dtype_bytes
from foretrace.trace.findings import Finding, Rule, by_name, damage
from foretrace.trace.operators import OperatorTrace

Ints = NDArray[np.int64]

RULES = by_name(
    Rule(
        "missing-schema",
        "The file does not say which version of PyTorch's format it has: what its fields mean is guessed.",
        'Add "schema" at the top of the file, as PyTorch writes it.',
    ),
    Rule(
        "unknown-schema",
        "The file has a version of PyTorch's format that is not known here.",
        "Use a newer foretrace, or see whether the operators below make sense.",
    ),
    Rule(
        "repeated-node-id",
        "Several nodes of an execution trace have one id: which of them is a parent is not defined.",
        "Record the trace again; two recordings may have been joined by hand.",
    ),
    Rule(
        "dangling-parent",
        "A node's parent (ctrl_deps) is not in the file: the node stands as a root of its own.",
        "Record the trace again; the file may have been cut or filtered.",
    ),
    Rule(
        "parent-cycle",
        "Nodes are each other's parents.",
        "Record the trace again: its ids have been mixed up.",
    ),
    Rule(
        "child-starts-before-parent",
        "A node has a smaller id than its parent, though ids count up as operators start.",
        "Record the trace again: its ids have been mixed up.",
    ),
    Rule(
        "duplicate-record-function-id",
        "Several nodes have one record-function id (rf_id): a timeline cannot be joined with them by it.",
        "Record with one observer at a time; foretrace joins such nodes by name and order.",
    ),
    Rule(
        "tensor-shape-mismatch",
        "A tensor's number of elements is not the product of its shape.",
        "Sizes derived from it are wrong; record the trace again.",
    ),
    Rule(
        "tensor-type-mismatch",
        "A tensor's bytes per element are not those of its data type.",
        "Sizes derived from it are wrong; record the trace again.",
    ),
    Rule(
        "tensor-storage-mismatch",
        "A node names one tensor on two storages at once.",
        "Which operator waits for which is told from storages, and may be wrong; record the trace again.",
    ),
    Rule(
        "storage-too-small",
        "A tensor reaches beyond the end of its storage as the file states it.",
        "Sizes derived from it are wrong; record the trace again.",
    ),
)
_KNOWN_SCHEMAS = ("1.0.1", "1.0.2", "1.0.3", "1.0.4", "1.1.0", "1.1.1")


def check_operators(
    trace: OperatorTrace, stated: tuple[Ints, Ints] | None = None
) -> tuple[list[Finding], Counter[str]]:
    """What is wrong with one operator trace, and what is odd and no fault.

    Args:
        trace: as read, with a tree that has been mended where the file's own made no sense.
        stated: ids and parents as the file states them, of all nodes in any order; None if they are not to be had.
    """
    check = _Check(trace)
    check.schema()
    if stated is not None:
        check.tree(*stated)
    check.record_function_ids()
    check.tensors()
    check.storages()
    return check.findings, Counter(trace.report.guessed + trace.report.noted)


class _Check:
    def __init__(self, trace: OperatorTrace) -> None:
        self.trace = trace
        self.findings: list[Finding] = damage(trace.report)

    def _add(self, name: str, count: int, place: str) -> None:
        if count:
            self.findings.append(Finding(RULES[name], count, f"{self.trace.report.path}: {place}", False))

    def _node(self, row: int) -> str:
        return f"node {self.trace.nodes['id'][row]} {self.trace.names(np.array([row]))[0][:60]!r}"

    def _node_of(self, number: int) -> str:
        row = int(np.searchsorted(self.trace.nodes["id"], number))
        is_there = row < self.trace.num_nodes and self.trace.nodes["id"][row] == number
        return self._node(row) if is_there else f"node {number}"

    def schema(self) -> None:
        """Whether the version of the format is stated, and known."""
        stated = self.trace.schema
        self._add("missing-schema", int(not stated), "no schema at the top of the file")
        self._add("unknown-schema", int(bool(stated) and stated.split("-")[0] not in _KNOWN_SCHEMAS), stated[:60])

    def tree(self, ids: Ints, parents: Ints) -> None:
        """Ids and parents; a node without a parent names itself, 0, or less."""
        order = np.argsort(ids, kind="stable")
        ids, parents = ids[order], parents[order]
        twins = np.flatnonzero(ids[1:] == ids[:-1]) + 1
        self._add("repeated-node-id", len(twins), self._node_of(int(ids[twins[0]])) if len(twins) else "")
        at = np.minimum(np.searchsorted(ids, parents), max(len(ids) - 1, 0))
        is_known = ids[at] == parents if len(ids) else np.zeros(0, np.bool_)
        is_root = (parents == ids) | (parents <= 0)
        dangling = np.flatnonzero(~is_known & ~is_root)
        self._parents("dangling-parent", ids, parents, dangling)
        above = np.where(is_known & ~is_root, at, -1)
        on_cycle = _on_cycle(above)
        cyclic = np.flatnonzero(on_cycle)
        if len(cyclic):
            walk = [int(cyclic[0])]
            while (step := int(above[walk[-1]])) != walk[0] and len(walk) < 12:
                walk.append(step)
            names = " under ".join(self._node_of(int(ids[one])) if one == walk[0] else str(ids[one]) for one in walk)
            self._add("parent-cycle", _num_cycles(above, cyclic), f"{names} under {ids[int(above[walk[-1]])]}")
        late = np.flatnonzero((above >= 0) & (parents > ids) & ~on_cycle)
        self._parents("child-starts-before-parent", ids, parents, late)

    def _parents(self, name: str, ids: Ints, parents: Ints, rows: NDArray[np.intp]) -> None:
        if len(rows):
            self._add(name, len(rows), f"{self._node_of(int(ids[rows[0]]))}: parent {parents[rows[0]]}")

    def record_function_ids(self) -> None:
        """Each record-function id once; 0 and less are none."""
        ids = self.trace.nodes["record_function_id"]
        rows = np.flatnonzero(ids > 0)
        rows = rows[np.argsort(ids[rows], kind="stable")]
        twins = rows[1:][ids[rows][1:] == ids[rows][:-1]]
        first = int(twins.min()) if len(twins) else 0
        place = f"{self._node(first)}: rf_id {ids[first]}" if len(twins) else ""
        self._add("duplicate-record-function-id", len(twins), place)

    def tensors(self) -> None:
        """Shapes, data types and storages of tensors."""
        tensors = self.trace.tensors
        if not tensors.num_rows:
            return
        product = self._by_text("shape", _product)
        is_undefined = (product == 1) & (tensors["elements"] == 0)
        wrong = np.flatnonzero((product >= 0) & (tensors["elements"] != product) & ~is_undefined)
        self._tensors("tensor-shape-mismatch", wrong, lambda row: f"shape {self._text('shape', row)}")
        width = self._by_text("dtype", dtype_bytes)
        stated = tensors["element_bytes"]
        self._tensors(
            "tensor-type-mismatch",
            np.flatnonzero((width > 0) & (stated > 0) & (stated != width)),
            lambda row: f"{stated[row]} bytes an element, {self._text('dtype', row)}",
        )
        key = (tensors["storage_id"], tensors["tensor_id"], tensors["is_output"], tensors["node"])
        order = np.lexsort(key)
        same = np.all([column[order][1:] == column[order][:-1] for column in key[1:]], axis=0)
        differs = same & (key[0][order][1:] != key[0][order][:-1])
        self._tensors(
            "tensor-storage-mismatch",
            np.sort(order[1:][differs & (tensors["tensor_id"][order][1:] > 0)]),
            lambda row: f"storage {tensors['storage_id'][row]} and another one",
        )

    def _tensors(self, name: str, rows: NDArray[np.intp], what: Any) -> None:
        if len(rows):
            row, tensors = int(rows[0]), self.trace.tensors
            told = f"tensor {tensors['tensor_id'][row]} ({tensors['elements'][row]} elements)"
            self._add(name, len(rows), f"{self._node(int(tensors['node'][row]))}: {told}: {what(row)}")

    def _text(self, column: str, row: int) -> str:
        return self.trace.strings.lookup(self.trace.tensors[column][[row]])[0][:60]

    def _by_text(self, column: str, number: Any) -> Ints:
        """A number for each tensor out of its text, each distinct one asked once."""
        ids = self.trace.tensors[column]
        used = np.flatnonzero(np.bincount(ids + 1, minlength=1)[1:])
        found = np.full(len(self.trace.strings) + 1, -1, np.int64)
        found[used] = [number(text) for text in self.trace.strings.lookup(used)]
        return np.asarray(found[ids])

    def storages(self) -> None:
        """Tensors within their storages, where the file states the sizes of these."""
        storages, tensors = self.trace.storages, self.trace.tensors
        if not storages.num_rows or not tensors.num_rows:
            return
        # One storage id has several lives; the largest of these is what a tensor must fit into.
        order = np.lexsort((storages["size_bytes"], storages["storage_id"]))
        ids, sizes = storages["storage_id"][order], storages["size_bytes"][order]
        at = np.searchsorted(ids, tensors["storage_id"], side="right") - 1
        known = (at >= 0) & (ids[at] == tensors["storage_id"]) & (sizes[at] >= 0)
        reach = (tensors["offset"] + self._reach()) * tensors["element_bytes"]
        wrong = np.flatnonzero(known & (tensors["elements"] > 0) & (reach > sizes[at]))
        self._tensors("storage-too-small", wrong, lambda row: f"{reach[row]} bytes of {sizes[at[row]]}")

    def _reach(self) -> Ints:
        """Elements from the first to the last of each tensor: by strides, or at least one."""
        tensors = self.trace.tensors
        pair = tensors["shape"].astype(np.int64) * (len(self.trace.strings) + 1) + tensors["strides"]
        _, first, which = np.unique(pair, return_index=True, return_inverse=True)
        shapes, strides = (self.trace.strings.lookup(tensors[name][first]) for name in ("shape", "strides"))
        reach = np.array([_span(shape, stride) for shape, stride in zip(shapes, strides, strict=True)], np.int64)
        return np.asarray(reach[which])


def _on_cycle(above: Ints) -> NDArray[np.bool_]:
    """Nodes that are their own ancestors: where all end up that never reach a root."""
    count = len(above)
    step = np.append(above, count)
    step[step < 0] = count  # one node more, above all roots, that stays where it is
    for _ in range(max(count, 1).bit_length()):
        step = step[step]
    found = np.zeros(count + 1, np.bool_)
    found[step] = True
    return found[:-1]


def _num_cycles(above: Ints, cyclic: NDArray[np.intp]) -> int:
    """How many cycles nodes on cycles form: each is known by its smallest node."""
    place = np.full(len(above), -1, np.int64)
    place[cyclic] = np.arange(len(cyclic))
    step, smallest = place[above[cyclic]], np.arange(len(cyclic))
    for _ in range(len(cyclic).bit_length()):
        smallest = np.minimum(smallest, smallest[step])
        step = step[step]
    return len(np.unique(smallest))


def _lists(text: str) -> list[int] | None:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_list = isinstance(values, list) and all(isinstance(value, int) and value >= 0 for value in values)
    return values if is_list else None


def _product(text: str) -> int:
    """Elements of a shape; -1 if the text is none."""
    values = _lists(text)
    if values is None:
        return -1
    product = 1
    for value in values:
        product *= value
    return product if product < 1 << 62 else -1


def _span(shape: str, strides: str) -> int:
    sizes, steps = _lists(shape), _lists(strides)
    if sizes is None or steps is None or len(sizes) != len(steps):
        return 1
    span = 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    return max(min(span, 1 << 40), 1)
