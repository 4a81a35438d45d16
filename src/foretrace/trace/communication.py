"""The communication events of one rank: which group, which collective, how many bytes."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretrace.trace.classify import CollectiveKind
from foretrace.trace.timeline import Category, Timeline

DTYPE_BYTES = {
    **dict.fromkeys(("double", "float64", "long", "int64", "uint64", "long int"), 8),
    **dict.fromkeys(("complex64", "complexfloat"), 8),
    **dict.fromkeys(("float", "float32", "int", "int32", "uint32", "complex32", "complexhalf"), 4),
    **dict.fromkeys(("half", "float16", "bfloat16", "short", "int16", "uint16"), 2),
    **dict.fromkeys(("byte", "char", "bool", "uint8", "int8", "unsigned char", "signed char"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    "complex128": 16,
    "complexdouble": 16,
}
# Of these, the number of bytes that nccl-tests reports is that of the larger side.
_BY_LARGER_SIDE = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.GATHER,
    CollectiveKind.SCATTER,
)


# Of these, the first tensor of the operator is all that nccl-tests counts.
_BY_FIRST_TENSOR = (
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.BROADCAST,
    CollectiveKind.REDUCE,
    CollectiveKind.ALL_TO_ALL,
    CollectiveKind.SEND,
    CollectiveKind.RECV,
    CollectiveKind.SEND_RECV,
)
# These enqueue work on a device: the host event is not the collective.
_DEVICE_LIBRARIES = ("nccl:", "rccl:")
_META_COLUMNS = ("collective", "dtype", "group", "group_ranks", "in_elements", "out_elements", "group_size")


@dataclass(frozen=True, slots=True)
class _Details:
    """What the metadata says of an event, and what follows from it and the event's name."""

    group: str
    ranks: str
    dtype: str
    group_size: int
    kind: CollectiveKind
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Communication:
    """Communication events of one rank in order of start; one entry per event.

    Attributes:
        event: row of the timeline's events.
        group: name of the process group; ``""`` where the trace names none.
        stream: of the device, -1 on the host.
        kind: `CollectiveKind`.
        size_bytes: as nccl-tests counts them, -1 where unknown.
        ranks: JSON text of the group's ranks, ``""`` where unknown.
    """

    event: NDArray[np.int64]
    group: list[str]
    stream: NDArray[np.int64]
    kind: NDArray[np.int64]
    size_bytes: NDArray[np.int64]
    dtype: list[str]
    ranks: list[str]
    group_size: NDArray[np.int64]


def communication_of(timeline: Timeline) -> Communication:
    """The communication events of a timeline, with what its metadata says of them.

    Device work comes first. On a host without any, the events of the communication library count (``gloo:...``).
    Metadata is taken from the event itself, else from the operator of the same external id, else from the
    operator that encloses the launch.
    """
    rows = timeline.device_rows[timeline.is_communication[timeline.device_rows]]
    if not len(timeline.device_rows):
        rows = _host_rows(timeline)
    found = _details(timeline, rows, _metadata_rows(timeline, rows))
    kind = np.fromiter((d.kind for d in found), np.int64, len(found))
    sizes = np.fromiter((d.size_bytes for d in found), np.int64, len(found))
    lacking = np.flatnonzero((sizes < 0) & np.isin(kind, _BY_FIRST_TENSOR))
    if len(lacking):
        sizes[lacking] = _sizes_from_shapes(timeline, rows[lacking])
    streams = np.array([lane.stream for lane in timeline.lanes], np.int64)
    return Communication(
        event=rows.astype(np.int64),
        group=[d.group for d in found],
        stream=streams[timeline.events["lane"][rows]] if len(rows) else np.empty(0, np.int64),
        kind=kind,
        size_bytes=sizes,
        dtype=[d.dtype for d in found],
        ranks=[d.ranks for d in found],
        group_size=np.fromiter((d.group_size for d in found), np.int64, len(found)),
    )


def host_communication(timeline: Timeline) -> NDArray[np.bool_]:
    """Which host events are collectives by their name (``gloo:all_reduce``, ``c10d::allreduce_``), shape ``(n,)``."""
    candidates = np.isin(timeline.category, (Category.OPERATOR, Category.ANNOTATION))
    names, inverse = np.unique(timeline.events["name"], return_inverse=True)
    texts = timeline.strings.lookup(names)
    is_collective = np.array([timeline.classifier.is_communication(text) for text in texts], np.bool_)
    found: NDArray[np.bool_] = candidates & is_collective[inverse] if len(names) else candidates
    return found


def _host_rows(timeline: Timeline) -> NDArray[np.intp]:
    """Work of the communication library itself, not of the operators that issue it."""
    rows = np.flatnonzero(host_communication(timeline))
    names = timeline.names(rows)
    library = np.array([_is_library(name) for name in names], np.bool_)
    rows = rows[library] if len(rows) else rows
    return rows[np.argsort(timeline.start_ns[rows], kind="stable")]


def _is_library(name: str) -> bool:
    """Whether the event is work of a library that runs on the host (``gloo:all_reduce``), by its name."""
    return re.fullmatch(r"\w+:\w+", name) is not None and not name.startswith(_DEVICE_LIBRARIES)


def _details(timeline: Timeline, rows: NDArray[np.intp], meta: NDArray[np.int64]) -> list[_Details]:
    """The details of each event. Most are alike, so each distinct combination is looked at once."""
    table = timeline.collectives
    if table.num_rows:
        columns = [np.where(meta >= 0, table[name][meta], -1).tolist() for name in _META_COLUMNS]
    else:
        columns = [[-1] * len(rows)] * len(_META_COLUMNS)
    keys = list(zip(timeline.events["name"][rows].tolist(), *columns, strict=True))
    known = {key: _detail(timeline, *key) for key in set(keys)}
    return [known[key] for key in keys]


def _detail(
    timeline: Timeline, name: int, collective: int, dtype: int, group: int, ranks: int, in_: int, out: int, size: int
) -> _Details:
    def text(at: int) -> str:
        return timeline.strings[at] if at >= 0 else ""

    kind = timeline.classifier.collective_kind(text(name), text(collective))
    width = dtype_bytes(text(dtype))
    elements = max(in_, out) if kind in _BY_LARGER_SIDE else in_
    size_bytes = elements * width if width > 0 and elements >= 0 else -1
    return _Details(text(group), text(ranks), text(dtype), size, kind, size_bytes)


def dtype_bytes(name: str) -> int:
    """Bytes of one element of a data type as PyTorch, NumPy or NCCL spells it; -1 if unknown."""
    return DTYPE_BYTES.get(name.lower().removeprefix("c10::").removeprefix("torch."), -1)


def _metadata_rows(timeline: Timeline, rows: NDArray[np.intp]) -> NDArray[np.int64]:
    """For each event the row of the collectives table that describes it, -1 if none does."""
    found = np.full(len(rows), -1, np.int64)
    table = timeline.collectives
    if not table.num_rows or not len(rows):
        return found
    described = table["event"]
    by_event = np.full(timeline.num_events, -1, np.int64)
    by_event[described] = np.arange(len(described))
    found = by_event[rows]
    operators = described[timeline.category[described] == Category.OPERATOR]
    if len(operators) and (found < 0).any():
        external = timeline.events["external_id"]
        order = np.argsort(external[operators], kind="stable")
        at = np.minimum(np.searchsorted(external[operators][order], external[rows]), len(order) - 1)
        same = (external[operators][order][at] == external[rows]) & (external[rows] >= 0) & (found < 0)
        found[same] = by_event[operators[order][at[same]]]
        enclosing = enclosing_event(timeline, timeline.launch_row[rows], operators)
        missing = (found < 0) & (enclosing >= 0)
        found[missing] = by_event[enclosing[missing]]
    return found


def enclosing_event(timeline: Timeline, rows: NDArray[np.int64], candidates: NDArray[np.int64]) -> NDArray[np.int64]:
    """The latest candidate on the same lane that is running when each row starts; -1 if none is (or the row is -1)."""
    found = np.full(len(rows), -1, np.int64)
    if not len(candidates):
        return found
    lane, start, end = timeline.events["lane"], timeline.start_ns, timeline.end_ns
    order = candidates[np.lexsort((start[candidates], lane[candidates]))]
    for one in np.unique(lane[order]).tolist():
        mine = order[np.searchsorted(lane[order], one) : np.searchsorted(lane[order], one, side="right")]
        asked = np.flatnonzero((rows >= 0) & (lane[rows] == one))
        at = np.searchsorted(start[mine], start[rows[asked]], side="right") - 1
        inside = (at >= 0) & (end[mine[np.maximum(at, 0)]] >= start[rows[asked]])
        found[asked[inside]] = mine[at[inside]]
    return found


def _sizes_from_shapes(timeline: Timeline, rows: NDArray[np.intp]) -> NDArray[np.int64]:
    """Bytes from the shapes of the operator that issued a collective, for traces without metadata; -1 if unknown."""
    table = timeline.operators
    sizes = np.full(len(rows), -1, np.int64)
    if not table.num_rows:
        return sizes
    names = timeline.events["name"][table["event"]]
    issuing = np.isin(names, [timeline.strings.find("record_param_comms")])
    issuing |= np.isin(table["event"], rows)
    candidates = table["event"][issuing & (table["input_shapes"] >= 0)]
    on_host = timeline.launch_row[rows] < 0
    source = np.where(on_host, rows, enclosing_event(timeline, timeline.launch_row[rows], candidates))
    by_event = np.full(timeline.num_events, -1, np.int64)
    by_event[table["event"]] = np.arange(table.num_rows)
    operator = np.where(source >= 0, by_event[source], -1)
    known = np.flatnonzero(operator >= 0)
    pairs = (timeline.strings.lookup(table[name][operator[known]]) for name in ("input_shapes", "input_types"))
    sizes[known] = [tensor_bytes(shapes, types) for shapes, types in zip(*pairs, strict=True)]
    return sizes


@functools.lru_cache(maxsize=4096)
def tensor_bytes(shapes_text: str, types_text: str) -> int:
    """Bytes of the first tensor of an operator, -1 where its shape or type is unknown."""
    try:
        shapes, types = json.loads(shapes_text), json.loads(types_text)
    except ValueError:
        return -1
    for shape, kind in zip(shapes, types, strict=False):
        width = dtype_bytes(str(kind))
        if width > 0 and isinstance(shape, list) and shape and all(isinstance(n, int) for n in shape):
            return int(np.prod(shape, dtype=np.int64)) * width
    return -1
