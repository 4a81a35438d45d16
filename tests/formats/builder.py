"""Small traces for tests, as Python values: change them, write them, read them back."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def op(name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> Event:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 10, "tid": tid, "ts": ts, "dur": dur, "args": args}


def call(name: str, ts: float, dur: float, correlation: int, tid: int = 1) -> Event:
    args = {"correlation": correlation, "External id": correlation}
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": 10, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(name: str, ts: float, dur: float, correlation: int = -1, stream: int = 7, **args: Any) -> Event:
    details = {"device": 0, "stream": stream, "External id": correlation, **args}
    if correlation >= 0:
        details["correlation"] = correlation
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": details}


def step(number: int, ts: float, dur: float) -> Event:
    return {**op(f"ProfilerStep#{number}", ts, dur), "cat": "user_annotation"}


def small_trace(rank: int = 0, world_size: int = 1, late: float = 0.0) -> dict[str, Any]:
    """Two steps: each launches a GEMM and an all-reduce; ``late`` us delay the rank's host in each step."""
    events: list[Event] = []
    for number in range(2):
        at = 1000.0 * number
        events += [
            step(number, at, 900.0),
            op("aten::mm", at + 10, 60, **{"Input Dims": [[4, 8], [8, 2]], "Input type": ["float", "float"]}),
            call("cudaLaunchKernel", at + 20, 10, 4 * number + 1),
            kernel("ampere_sgemm_128x64_nn", at + 40, 100, 4 * number + 1),
            op("record_param_comms", at + 80 + late, 30),
            call("cudaLaunchKernelExC", at + 90 + late, 10, 4 * number + 2),
            {**_all_reduce(at + 200 + late, 300 - late, 4 * number + 2, world_size)},
        ]
    info = {"backend": "nccl", "rank": rank, "world_size": world_size}
    return {"schemaVersion": 1, "distributedInfo": info, "traceEvents": events, "traceName": "small"}


def _all_reduce(ts: float, dur: float, correlation: int, world_size: int) -> Event:
    metadata = {
        "Collective name": "allreduce",
        "In msg nelems": 1000,
        "Out msg nelems": 1000,
        "Group size": world_size,
        "dtype": "Float",
        "Process Group Name": "0",
        "Process Group Ranks": json.dumps(list(range(world_size))),
    }
    return kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", ts, dur, correlation, stream=20, **metadata)


def write(path: Path, trace: Any, **dump: Any) -> Path:
    text = trace if isinstance(trace, bytes) else json.dumps(trace, **dump).encode()
    path.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)
    return path
