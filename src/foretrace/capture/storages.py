"""Storages: how large each is, where it was allocated and after which node it was gone.

PyTorch's execution trace names storages by numbers that it uses again, without sizes and frees. The profiler of the
same session saw the addresses behind the tensors of each operator, and each allocation and free of an address; the
record function id joins the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from foretrace.capture.execution_trace import Node, TraceText, tensors_of


@dataclass(slots=True)
class _Life:
    """One allocation: ``size_bytes`` is -1 where neither its beginning nor its end was seen."""

    device: str = ""
    size_bytes: int = -1
    allocated: int = -1
    freed: int = -1
    storages: set[int] = field(default_factory=set)
    least_bytes: int = 0


@dataclass
class StorageReport:
    """Rows of the member ``storages``, and what could not be told."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    unknown_size: int = 0
    without_storage: int = 0
    tensors_not_joined: int = 0

    def document(self) -> dict[str, int]:
        """As it stands in ``job.json``."""
        return {
            "rows": len(self.rows),
            "size_is_a_lower_bound": self.unknown_size,
            "allocations_without_a_tensor": self.without_storage,
            "tensors_not_joined": self.tensors_not_joined,
        }


def storages(trace: TraceText, roots: list[Any], record_ids: dict[int, int]) -> StorageReport:
    """Join the profiler's events with the nodes of the execution trace.

    Args:
        trace: the nodes.
        roots: events without parent, of ``torch.profiler``'s experimental event tree.
        record_ids: record function id of each event's correlation id (``External id`` in Kineto's file).
    """
    nodes = {node.record_id: node for node in trace.nodes.values() if node.record_id > 0}
    lives: dict[int, _Life] = {}
    report = StorageReport()
    last_node = -1
    for event, outer in _in_order(roots, nodes, record_ids):
        kind = event.tag.name
        if kind == "TorchOp":
            node = nodes.get(record_ids.get(event.correlation_id, 0))
            if node is not None:
                last_node = max(last_node, node.id)
                _note_inputs(node, event.typed[1].inputs, lives, report)
        elif kind == "Allocation":
            _note_allocation(event.typed[1], outer.id if outer is not None else last_node, last_node, lives)
    _name_outputs(trace, lives)
    _fill_rows(lives, report)
    return report


def _in_order(
    roots: list[Any], nodes: dict[int, Node], record_ids: dict[int, int]
) -> Iterator[tuple[Any, Node | None]]:
    """All events in order of time, each with the innermost node that it lies in."""
    events: list[tuple[int, int, Any, Node | None]] = []
    waiting: list[tuple[Any, Node | None]] = [(root, None) for root in roots]
    while waiting:
        event, outer = waiting.pop()
        events.append((event.start_time_ns, len(events), event, outer))
        children = event.children
        if children:
            inner = nodes.get(record_ids.get(event.correlation_id, 0)) if event.tag.name == "TorchOp" else None
            waiting += [(child, inner or outer) for child in reversed(children)]
    events.sort(key=lambda entry: entry[:2])
    for _, _, event, outer in events:
        yield event, outer


def _note_inputs(node: Node, inputs: list[Any], lives: dict[int, _Life], report: StorageReport) -> None:
    """Which storage of the trace each address is, as the inputs of a node tell."""
    for value, seen in zip(node.inputs.values, inputs, strict=False):
        theirs = tensors_of(value) if seen is not None else []
        ours = [one for one in (seen if isinstance(seen, list) else [seen]) if hasattr(one, "allocation_id")]
        if len(theirs) != len(ours):
            report.tensors_not_joined += len(theirs)
            continue
        for (_, storage, offset, elements, width), tensor in zip(theirs, ours, strict=True):
            if tensor.allocation_id is None:
                report.tensors_not_joined += elements > 0
                continue
            life = lives.setdefault(tensor.allocation_id, _Life())
            life.device = life.device or str(tensor.device)
            life.storages.add(storage)
            if elements:
                reach = sum((size - 1) * stride for size, stride in zip(tensor.sizes, tensor.strides, strict=False))
                life.least_bytes = max(life.least_bytes, (offset + reach + 1) * width)


def _note_allocation(seen: Any, within: int, last: int, lives: dict[int, _Life]) -> None:
    """Note an allocation ``within`` a node, or a free after the ``last`` one that had begun."""
    if seen.allocation_id is None:
        return
    life = lives.setdefault(seen.allocation_id, _Life())
    life.device = str(seen.device)
    life.size_bytes = abs(seen.alloc_size)
    if seen.alloc_size > 0:
        life.allocated = within
    else:
        life.freed = last


def _name_outputs(trace: TraceText, lives: dict[int, _Life]) -> None:
    """Storages that no recorded operator read: the one output of the node that allocated them."""
    taken = {storage for life in lives.values() for storage in life.storages}
    for life in lives.values():
        node = trace.nodes.get(life.allocated)
        while node is not None and not life.storages:
            fresh = {one[1]: (one[2] + one[3]) * one[4] for one in tensors_of(node.outputs.values)}
            fitting = [s for s, least in fresh.items() if s not in taken and least <= life.size_bytes]
            if len(fitting) == 1:
                life.storages.add(fitting[0])
                taken.add(fitting[0])
            if tensors_of(node.outputs.values):
                break
            node = trace.nodes.get(node.parent)


def _fill_rows(lives: dict[int, _Life], report: StorageReport) -> None:
    for life in lives.values():
        if life.size_bytes < 0 and not life.least_bytes:  # an empty tensor has no memory
            continue
        row: dict[str, Any] = {
            "size_bytes": life.size_bytes,
            "device": life.device,
            "allocated": life.allocated,
            "freed": life.freed,
        }
        if life.size_bytes < 0:
            report.unknown_size += 1
            row |= {"size_bytes": life.least_bytes, "size_is_a_lower_bound": True}
        if not life.storages:
            report.without_storage += 1
        report.rows += [{"storage_id": storage, **row} for storage in sorted(life.storages) or [-1]]
    report.rows.sort(key=lambda row: (row["allocated"], row["storage_id"]))
