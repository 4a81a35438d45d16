"""The communication events of one rank: what counts as one, and how many bytes it moves."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretrace import analyze
from foretrace.trace.communication import dtype_bytes
from tests.analyze.test_collectives import ALL_REDUCE, job_of, rows
from tests.formats.builder import Event, call, kernel, op


@pytest.mark.parametrize("name", ["nccl:all_to_all", "## all2all_data:lengths ##", "c10d::allreduce_"])
def test_host_events_that_only_enqueue_are_no_collectives(tmp_path: Path, name: str) -> None:
    job = job_of(tmp_path, {rank: [op(name, 100, 10 + rank)] for rank in range(2)})
    assert analyze.collective_summary(job)["reason"] == "no collectives"


@pytest.mark.parametrize(
    ("kernel_name", "size_bytes"),
    [(ALL_REDUCE, 128), ("ncclDevKernel_AllGather_RING_LL", None), ("ncclDevKernel_ReduceScatter_Sum_f32", None)],
)
def test_a_shape_tells_the_size_where_it_is_that_of_the_whole(
    tmp_path: Path, kernel_name: str, size_bytes: int | None
) -> None:
    events: list[Event] = [
        op("record_param_comms", 80, 30, **{"Input Dims": [[4, 8]], "Input type": ["float"]}),
        call("cudaLaunchKernelExC", 90, 10, 5),
        kernel(kernel_name, 100, 100, 5, stream=20),
    ]
    assert rows(job_of(tmp_path, {0: events}))[0]["bytes"] == size_bytes


@pytest.mark.parametrize(
    ("name", "width"),
    [("torch.bfloat16", 2), ("torch.int64", 8), ("uint64", 8), ("c10::Half", 2), ("ComplexHalf", 4), ("Mystery", -1)],
)
def test_spellings_of_data_types(name: str, width: int) -> None:
    assert dtype_bytes(name) == width
