"""What one rank of a simulated cluster did, as a `Timeline`: so every analysis, picture and export works on it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.simulate.cluster.plan import Outcome, Plan, Resource
from foretrace.trace import Category, Lane, LaneKind, StringTable, Table, Timeline
from foretrace.trace.workload import CommType, WorkKind, Workload

_STREAMS = {Resource.COMPUTE: 7, Resource.COMMUNICATION: 20, Resource.NONE: 21}
_DEVICE_LANE = {resource: place for place, resource in enumerate(_STREAMS, start=1)}


def timeline(workload: Workload, plan: Plan, outcome: Outcome, rank: int) -> Timeline:
    """The events of one rank: host work on a thread, the rest on streams; communication has kernel names of NCCL."""
    program = workload.programs[int(workload.program_of[rank])]
    first = int(plan.first_node[workload.program_of[rank]])
    mine = outcome.nodes_of(plan, rank)
    start, end = outcome.start[mine], outcome.end[mine]
    rows = np.flatnonzero(end >= 0)
    resource = plan.node_resource[first : first + program.num_nodes][rows]
    on_host = resource == Resource.HOST
    kind = program.nodes["kind"][rows]
    category = np.where(on_host, Category.OPERATOR, Category.KERNEL)
    category[(kind == WorkKind.MEMORY) & ~on_host] = Category.MEMCPY
    strings = StringTable()
    columns: dict[str, NDArray[Any]] = {
        "name": strings.intern_all(_names(program, rows, kind)),
        "category_name": np.array([strings.intern(name) for name in ("cpu_op", "kernel")], np.int32)[1 - on_host * 1],
        "category": category.astype(np.int8),
        "lane": np.array([0, *_DEVICE_LANE.values()], np.int32)[resource],
        "start_ns": start[rows],
        "duration_ns": (end - start)[rows],
        "correlation": np.full(len(rows), -1, np.int64),
        "external_id": np.full(len(rows), -1, np.int64),
    }
    order = np.argsort(columns["start_ns"], kind="stable")
    lanes = [Lane(LaneKind.HOST_THREAD, str(rank), "1", name=f"rank {rank}")]
    for stream in _STREAMS.values():
        lanes.append(Lane(LaneKind.DEVICE_STREAM, "0", f"stream {stream}", device=0, stream=stream))
    return Timeline(Table(columns).take(order), lanes, strings, rank)


def _names(program: Any, rows: NDArray[np.intp], kind: NDArray[np.int8]) -> list[str]:
    """Names as the trace has them, with NCCL's in front of communication so that tools know it as such."""
    own = program.strings.lookup(program.nodes["name"][rows])
    collectives = program.nodes["collective"][rows]
    names = []
    for name, what, collective in zip(own, kind.tolist(), collectives.tolist(), strict=True):
        if what in (WorkKind.SEND, WorkKind.RECEIVE):
            names.append(f"ncclDevKernel_SendRecv {name}".rstrip())
        elif what == WorkKind.COLLECTIVE:
            label = "".join(part.capitalize() for part in CommType(collective).label.split("_"))
            names.append(f"ncclDevKernel_{label} {name}".rstrip())
        else:
            names.append(name or WorkKind(what).label)
    return names
