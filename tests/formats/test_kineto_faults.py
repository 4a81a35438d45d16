"""Faults of real traces, each with a small input: what is read, and what the report says of it."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foretrace
from foretrace.formats import arrow, batches, sources
from foretrace.trace import Category, FormatError, Job, LaneKind, Timeline
from foretrace.trace.checks import consistency
from tests.formats.builder import call, kernel, op, small_trace, step, write


@pytest.fixture(params=["scanner", "structs"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to read a batch must agree."""
    if request.param == "structs":
        monkeypatch.setattr(batches, "_scanner", None)
    elif batches._scanner is None:
        pytest.skip("the scanner is not compiled here")
    return str(request.param)


def read_events(tmp_path: Path, events: list[dict[str, Any]], **members: Any) -> Timeline:
    return foretrace.read(write(tmp_path / "rank0.json", {"traceEvents": events, **members})).timelines[0]


def read_text(tmp_path: Path, text: bytes | str, name: str = "rank0.json") -> Timeline:
    data = text if isinstance(text, bytes) else text.encode()
    return foretrace.read(write(tmp_path / name, data)).timelines[0]


def same(one: Timeline, other: Timeline) -> None:
    for name, table in one.tables.items():
        assert list(table) == list(other.tables[name])
        for column in table:
            if column in table.strings:
                assert table.texts(column) == other.tables[name].texts(column), (name, column)
            else:
                np.testing.assert_array_equal(table[column], other.tables[name][column], err_msg=f"{name}.{column}")
    assert one.lanes == other.lanes
    assert one.report.events == other.report.events
    assert one.report.phases == other.report.phases


VALID = json.dumps({"schemaVersion": 1, "traceEvents": [op("a", 1, 2), op("b", 4, 2)]})


def test_a_small_trace(tmp_path: Path, decoder: str) -> None:
    timeline = foretrace.read(write(tmp_path / "x.json", small_trace(rank=3, world_size=8))).timelines[0]
    assert timeline.rank == 3
    assert timeline.num_events == 14
    assert timeline.report.events == {"cpu_op": 4, "cuda_runtime": 4, "kernel": 4, "user_annotation": 2}
    assert not timeline.report.warnings
    gemm = timeline.device_rows[0]
    assert timeline.names(timeline.launch_row[[gemm]]) == ["cudaLaunchKernel"]
    assert timeline.operators.texts("input_shapes")[1] == "[[4,8],[8,2]]"
    assert timeline.collectives.texts("group_ranks")[0] == "[0,1,2,3,4,5,6,7]"
    kinds = {lane.label: lane.kind for lane in timeline.lanes}
    assert kinds == {"thread 1": LaneKind.HOST_THREAD, **dict.fromkeys(("device 0 stream 7", "device 0 stream 20"), 2)}


def test_both_decoders_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "rank0.json", small_trace())
    scanned = foretrace.read(path).timelines[0]
    monkeypatch.setattr(batches, "_scanner", None)
    same(scanned, foretrace.read(path).timelines[0])


@pytest.mark.parametrize("size", [64, 97, 256, 1000])
def test_any_block_size_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, decoder: str
) -> None:
    for indent in (None, 1, 2):
        path = write(tmp_path / f"rank{indent}.json", small_trace(), indent=indent)
        whole = foretrace.read(path).timelines[0]
        monkeypatch.setattr(sources, "BLOCK_BYTES", size)
        same(whole, foretrace.read(path).timelines[0])
        monkeypatch.undo()
        if decoder == "structs":
            monkeypatch.setattr(batches, "_scanner", None)


# -- the faults that users reported, in the order of the notes -------------------------------------------------------


def test_01_missing_quote_or_brace(tmp_path: Path, decoder: str) -> None:
    text = VALID.replace('"name": "b"', '"name": "b')
    timeline = read_text(tmp_path, text)
    assert timeline.names(np.arange(timeline.num_events)) == ["a"]
    assert sum(timeline.report.dropped.values()) >= 1
    assert "byte" in next(iter(timeline.report.examples.values()))


def test_02_windows_backslashes(tmp_path: Path, decoder: str) -> None:
    timeline = read_text(tmp_path, VALID.replace('"name": "b"', r'"name": "C:\Users\me"'))
    assert timeline.names(np.array([1])) == [r"C:\Users\me"]
    assert timeline.report.repaired == {"invalid escape": 1}


def test_03_raw_newline_in_a_name(tmp_path: Path, decoder: str) -> None:
    timeline = read_text(tmp_path, VALID.replace('"name": "b"', '"name": "b\nc"'))
    assert timeline.names(np.array([1])) == ["b\nc"]
    assert timeline.report.repaired == {"control character in a string": 1}


@pytest.mark.parametrize("raw", [b"b\xff\xfe", b"\xc3"])
def test_04_05_bytes_that_are_no_utf8(tmp_path: Path, raw: bytes, decoder: str) -> None:
    timeline = read_text(tmp_path, VALID.encode().replace(b'"name": "b"', b'"name": "' + raw + b'"'))
    assert timeline.num_events == 2
    assert "\ufffd" in timeline.names(np.array([1]))[0]
    assert timeline.report.repaired == {"invalid UTF-8": 1}


def test_06_integers_beyond_int64(tmp_path: Path, decoder: str) -> None:
    events = [op("record_param_comms", 1, 2, **{"Collective name": "allreduce", "Comms Id": 10159970886766084423})]
    timeline = read_events(tmp_path, events)
    assert int(timeline.collectives["comms_id"].astype(np.uint64)[0]) == 10159970886766084423
    assert timeline.report.repaired == {"integer beyond int64 (kept modulo 2^64)": 1}


def test_06_unescaped_quotes(tmp_path: Path, decoder: str) -> None:
    timeline = read_text(tmp_path, VALID.replace('"name": "b"', '"name": "say "b" twice"'))
    assert timeline.names(np.array([1])) == ['say "b" twice']
    assert timeline.report.repaired == {"unescaped quote in a name": 1}


@pytest.mark.parametrize("word", ["NaN", "nan", "Infinity", "-Infinity", "inf"])
def test_07_nan(tmp_path: Path, word: str, decoder: str) -> None:
    text = VALID.replace('"args": {}}]', f'"args": {{"blocks per SM": {word}}}}}]')
    timeline = read_text(tmp_path, text)
    assert timeline.num_events == 2
    assert timeline.report.repaired["NaN or Infinity"] >= 1


def test_07_nan_as_a_time_drops_the_event(tmp_path: Path, decoder: str) -> None:
    timeline = read_text(tmp_path, VALID.replace('"ts": 4', '"ts": NaN'))
    assert timeline.num_events == 1
    assert timeline.report.dropped == {"event without a usable time": 1}


def test_08_truncated_at_any_byte(tmp_path: Path, decoder: str) -> None:
    """Every event that is whole before the cut is kept."""
    trace = small_trace()
    text = json.dumps(trace)
    ends = []
    at = text.index("[")
    for event in trace["traceEvents"]:
        at = text.index(json.dumps(event), at) + len(json.dumps(event))
        ends.append(at)
    for cut in range(text.index("[", text.index("traceEvents")) + 1, len(text), 7):
        timeline = read_text(tmp_path, text[:cut])
        whole = sum(end <= cut for end in ends)
        assert timeline.num_events == whole, cut
        if cut < ends[-1]:
            assert timeline.report.warnings, cut


def test_08_truncated_gzip(tmp_path: Path, decoder: str) -> None:
    events = [op(f"operator {i}", i, 1, value=i * 7919 % 104729) for i in range(5000)]
    data = gzip.compress(json.dumps({"traceEvents": events}).encode())
    timeline = read_text(tmp_path, data[: len(data) * 2 // 3], "rank0.json")
    assert 1000 < timeline.num_events < 5000
    assert timeline.report.repaired["truncated gzip stream: kept what precedes the cut"] == 1


def test_08_damaged_gzip(tmp_path: Path) -> None:
    events = [op(f"operator {i}", i, 1, value=i * 7919 % 104729) for i in range(5000)]
    data = bytearray(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    data[len(data) // 2 : len(data) // 2 + 40] = b"\xff" * 40
    timeline = read_text(tmp_path, bytes(data))
    assert timeline.num_events > 100
    assert timeline.report.warnings


def test_gzip_of_several_members(tmp_path: Path, decoder: str) -> None:
    text = VALID.encode()
    data = gzip.compress(text[:40]) + gzip.compress(text[40:]) + b"\0" * 512
    assert read_text(tmp_path, data).num_events == 2


def test_09_no_rank(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", {"traceEvents": [op("a", 1, 1)], "distributedInfo": {"backend": "nccl"}})
    job = foretrace.read(path)
    assert job.ranks == [0]
    assert job.all_warnings == {"no rank in the trace or its name": 1}
    named = foretrace.read(write(tmp_path / "my_rank-12.json", {"traceEvents": [op("a", 1, 1)]}))
    assert named.ranks == [12]
    assert named.all_warnings == {"rank from the file's name": 1}


def test_10_an_execution_trace_instead(tmp_path: Path) -> None:
    path = write(tmp_path / "et.json", {"schema": "1.0.2", "pid": 1, "nodes": [{"id": 1}]})
    with pytest.raises(FormatError, match="PyTorch execution trace") as error:
        foretrace.read(path)
    assert str(path) in str(error.value)


def test_11_metadata_only(tmp_path: Path) -> None:
    job = foretrace.read(write(tmp_path / "rank0.json", {"schemaVersion": 1, "deviceProperties": [], "traceName": "x"}))
    assert job.timelines[0].num_events == 0
    assert foretrace.analyze.breakdown(job).to_pylist()[0]["span_ns"] == 0
    assert job.timelines[0].report.noted == {"no traceEvents: the file holds metadata only": 1}
    empty = foretrace.read(write(tmp_path / "rank0.json", {"schemaVersion": 1, "traceEvents": []}))
    assert empty.timelines[0].num_events == 0 and not empty.timelines[0].report.noted


def test_12_python_functions_are_dropped_on_request(tmp_path: Path) -> None:
    python = {
        **op("train.py(3): step", 0, 9),
        "cat": "python_function",
        "args": {"Python id": 1, "Python parent id": None},
    }
    path = write(tmp_path / "rank0.json", {"traceEvents": [python, op("a", 1, 1)]})
    kept, dropped = foretrace.read(path).timelines[0], foretrace.read(path, keep_python=False).timelines[0]
    assert kept.python["python_parent_id"].tolist() == [-1]
    assert (kept.num_events, dropped.num_events) == (2, 1)
    assert dropped.report.dropped == {"Python function, as asked": 1}


def test_13_27_call_stacks_out_of_order(tmp_path: Path) -> None:
    events = [op("child", 2, 3), op("parent", 1, 10), op("twin", 2, 3), op("grandchild", 3, 1)]
    job = foretrace.read(write(tmp_path / "rank0.json", {"traceEvents": events}))
    rows = {row["name"]: row["self_ns"] for row in foretrace.analyze.operators(job).to_pylist()}
    assert rows == {"parent": 7000, "child": 0, "twin": 2000, "grandchild": 1000}


def test_14_nanoseconds_are_exact(tmp_path: Path, decoder: str) -> None:
    events = VALID.replace('"ts": 1,', '"ts": 1712195495519689.047,').replace('"dur": 2', '"dur": 63.813')
    timeline = read_text(tmp_path, events)
    assert int(timeline.start_ns[0]) == 1712195495519689047
    assert int(timeline.duration_ns[0]) == 63813
    relative = read_events(tmp_path, [op("a", 6543210987.123, 0.001)], baseTimeNanoseconds=1711964646000000000)
    assert int(relative.start_ns[0]) == 1711964646000000000 + 6543210987123
    assert int(relative.duration_ns[0]) == 1


def test_14_base_time_may_stand_before_the_events(tmp_path: Path, decoder: str) -> None:
    text = json.dumps({"baseTimeNanoseconds": 5_000_000_000, "traceEvents": [op("a", 1, 1)]})
    assert read_text(tmp_path, text).start_ns.tolist() == [5_000_001_000]


def test_14_a_child_that_outlasts_its_parent_is_clipped(tmp_path: Path) -> None:
    job = foretrace.read(write(tmp_path / "rank0.json", {"traceEvents": [op("p", 1, 2), op("c", 2, 1.001)]}))
    rows = {row["name"]: row for row in foretrace.analyze.operators(job).to_pylist()}
    assert rows["p"]["self_ns"] == 1000 and rows["p"]["outlasting"] == 1
    assert consistency(job.timelines[0]) == {"host events that outlast the event around them": 1}


def test_15_overlapping_events_on_a_stream(tmp_path: Path) -> None:
    events = [
        kernel("k1", 0, 10, 1),
        kernel("k2", 5, 10, 2),
        call("cudaLaunchKernel", 0, 1, 1),
        call("cudaLaunchKernel", 1, 1, 2),
    ]
    job = foretrace.read(write(tmp_path / "rank0.json", {"traceEvents": events}))
    assert foretrace.analyze.breakdown(job).to_pylist()[0]["exposed_compute_ns"] == 15_000
    assert consistency(job.timelines[0])["device events that overlap on one stream"] == 1


def test_16_negative_and_absurd_durations(tmp_path: Path, decoder: str) -> None:
    timeline = read_events(tmp_path, [op("a", 1, -5), op("b", 1, 1e15), op("c", 1e30, 1), op("d", 1, 1)])
    assert timeline.names(np.arange(timeline.num_events)) == ["a", "d"]
    assert timeline.duration_ns.tolist() == [0, 1000]
    assert timeline.report.repaired == {"negative duration (taken as 0)": 1}
    assert timeline.report.dropped == {"duration of more than a week": 1, "event without a usable time": 1}


def test_17_kernels_without_a_time(tmp_path: Path, decoder: str) -> None:
    timeline = read_events(tmp_path, [kernel("k", 0, 0, 1), kernel("k", 10**9, 5, 2)])
    assert timeline.num_events == 1
    assert timeline.report.dropped == {"device event without a time (ts 0, dur 0)": 1}


def test_18_launches_without_kernels(tmp_path: Path) -> None:
    events = [
        call("cudaLaunchKernel", 1, 1, 1),
        call("cudaLaunchKernel", 3, 1, 2),
        kernel("k", 2, 5, 1),
        kernel("x", 9, 1, 99),
    ]
    found = consistency(read_events(tmp_path, events))
    assert found == {"launch calls without device work": 1, "device work without a launch in the trace": 1}


def test_19_20_cuda_sync_events(tmp_path: Path, decoder: str) -> None:
    args = {"stream": 7, "device": 0, "wait_on_stream": 20, "cuda_sync_kind": "Stream Wait Event", "correlation": 4}
    args |= {"wait_on_cuda_event_record_corr_id": 3, "wait_on_cuda_event_id": 9}
    timeline = read_events(tmp_path, [{**op("Stream Wait Event", 1, 2), "cat": "cuda_sync", "args": args}])
    assert timeline.category.tolist() == [Category.SYNC]
    syncs = timeline.syncs
    assert (syncs.texts("kind"), syncs["wait_on_stream"].tolist()) == (["Stream Wait Event"], [20])
    assert (syncs["wait_on_event_record_correlation"].tolist(), syncs["wait_on_event_id"].tolist()) == ([3], [9])


def test_21_graph_launches(tmp_path: Path) -> None:
    events = [call("cudaGraphLaunch", 1, 5, 7), *(kernel(f"k{i}", 10 + i, 1, 7) for i in range(5))]
    timeline = read_events(tmp_path, events)
    assert set(timeline.names(timeline.launch_row[timeline.device_rows])) == {"cudaGraphLaunch"}
    assert consistency(timeline) == {"calls that launched several device events": 1}


def test_22_only_correlation_links_a_launch(tmp_path: Path) -> None:
    work = kernel("k", 10, 1, 5)
    work["args"]["External id"] = 77
    timeline = read_events(
        tmp_path, [op("aten::mm", 0, 9, **{"External id": 5}), call("cudaLaunchKernel", 1, 1, 5), work]
    )
    assert timeline.names(timeline.launch_row[timeline.device_rows]) == ["cudaLaunchKernel"]


@pytest.mark.parametrize("name", ["cudaLaunchKernelExC", "cuLaunchKernelEx", "hipExtModuleLaunchKernel", "anything"])
def test_23_any_runtime_call_of_the_correlation_is_the_launch(tmp_path: Path, name: str) -> None:
    for cat in ("cuda_runtime", "cuda_driver"):
        timeline = read_events(tmp_path, [{**call(name, 1, 1, 5), "cat": cat}, kernel("k", 3, 1, 5)])
        assert timeline.launch_row[timeline.device_rows].tolist() == [0]


def test_24_a_kernel_before_its_launch_call(tmp_path: Path) -> None:
    job = foretrace.read(
        write(tmp_path / "rank0.json", {"traceEvents": [call("cudaLaunchKernel", 9, 2, 1), kernel("k", 8, 4, 1)]})
    )
    assert foretrace.analyze.launches(job).to_pylist()[0]["negative_delays"] == 1
    assert consistency(job.timelines[0]) == {"device work that starts before its launch call": 1}


def test_25_rocm(tmp_path: Path, decoder: str) -> None:
    """Stream 0 is a stream, streams may have 64-bit ids, and old traces have no correlation."""
    huge = 2**40 + 5
    events = [
        kernel("Cijk_Alik", 1, 2, -1, stream=0),
        kernel("k", 5, 2, 3, stream=huge),
        call("hipLaunchKernel", 4, 1, 3),
    ]
    del events[0]["args"]["External id"]
    events[2]["args"]["stream"] = "0x0"
    timeline = read_events(tmp_path, events)
    assert {lane.stream for lane in timeline.lanes if lane.kind is LaneKind.DEVICE_STREAM} == {0, huge}
    assert timeline.launch_row[timeline.device_rows].tolist() == [-1, 2]


def test_26_names_of_communication_kernels(tmp_path: Path) -> None:
    names = ["ncclDevKernel_Generic(ncclDevComm*)", "ncclKernel_AllReduce_RING_LL_Sum_float", "my_secret_all_to_all"]
    events = [kernel(name, 10 * at, 5, at) for at, name in enumerate(names)]
    events[2]["args"]["Collective name"] = "all_to_all"
    assert read_events(tmp_path, events).is_communication.tolist() == [True, True, True]


def test_28_other_devices(tmp_path: Path, decoder: str) -> None:
    work = {**kernel("pe_exe", 5, 3, 9, stream=108), "cat": "mtia_ccp_events", "pid": 17}
    del work["args"]["device"]
    host = {**call("runFunction", 1, 2, 9), "cat": "mtia_runtime"}
    private = {**call("x", 1, 2, 10), "cat": "privateuse1_runtime"}
    timeline = read_events(tmp_path, [work, host, private])
    assert timeline.category.tolist() == [Category.KERNEL, Category.RUNTIME, Category.RUNTIME]
    assert (timeline.lanes[0].device, timeline.lanes[0].stream) == (17, 108)


def test_29_ids_that_are_missing(tmp_path: Path, decoder: str) -> None:
    timeline = read_events(tmp_path, [op("a", 1, 1)])
    assert timeline.events["external_id"].tolist() == [-1]
    assert timeline.operators["record_function_id"].tolist() == [-1]


def test_31_categories_of_2021(tmp_path: Path, decoder: str) -> None:
    events = [
        {**op("ProfilerStep#5", 0, 100), "cat": "Operator", "tid": "5555"},
        {**call("cudaLaunchKernel", 1, 1, 3), "cat": "Runtime", "args": {"correlation": 3, "external id": 9}},
        {**kernel("k", 5, 5, 3), "cat": "Kernel", "tid": "stream 7", "args": {"correlation": 3, "external id": 9}},
        {**kernel("Memcpy HtoD", 12, 5, 4), "cat": "Memcpy", "tid": "stream 7", "args": {"bytes": 64}},
        {**kernel("Memset", 20, 5, 4), "cat": "Memset", "tid": "stream 7", "args": {"bytes": 8}},
        {
            "ph": "X",
            "cat": "Trace",
            "name": "PyTorch Profiler (0)",
            "pid": "Traces",
            "tid": "Trace",
            "ts": 0,
            "dur": 100,
        },
    ]
    timeline = read_events(tmp_path, events)
    wanted = [Category.OPERATOR, Category.RUNTIME, Category.KERNEL, Category.MEMCPY, Category.MEMSET]
    assert timeline.category.tolist() == wanted
    assert timeline.events["external_id"].tolist()[1:3] == [9, 9]
    assert timeline.copies["size_bytes"].tolist() == [64, 8]
    assert [lane.stream for lane in timeline.lanes if lane.kind is LaneKind.DEVICE_STREAM] == [7]
    assert timeline.report.events["Trace"] == 1


def test_32_comms_id(tmp_path: Path, decoder: str) -> None:
    events = [kernel("ncclDevKernel_X", 1, 2, 3, **{"Collective name": "allreduce", "comms_id": 42})]
    assert read_events(tmp_path, events).collectives["comms_id"].tolist() == [42]


# -- forms that a trace may have ---------------------------------------------------------------------------------------


def test_top_level_list(tmp_path: Path, decoder: str) -> None:
    assert read_text(tmp_path, json.dumps([op("a", 1, 1), op("b", 2, 1)])).num_events == 2
    assert read_text(tmp_path, "[]").num_events == 0


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n", " :\t")])
def test_separators_and_braces_in_strings(tmp_path: Path, separators: tuple[str, str], decoder: str) -> None:
    events = [op("x},{y", 1, 1, note='},{"ph":"X"'), op("z", 2, 1, nested=[{"a": 1}, {"b": [{}, {}]}, {"c": "}]"}])]
    text = json.dumps({"traceEvents": events, "after": [{"d": 1}, {"e": 2}]}, separators=separators)
    timeline = read_text(tmp_path, text)
    assert timeline.names(np.arange(2)) == ["x},{y", "z"]
    assert timeline.metadata["after"] == [{"d": 1}, {"e": 2}]
    assert not timeline.report.dropped and not timeline.report.repaired


def test_begin_and_end_events(tmp_path: Path, decoder: str) -> None:
    base = {"cat": "cpu_op", "pid": 1, "tid": 2}
    events = [
        {**base, "ph": "B", "name": "outer", "ts": 1},
        {**base, "ph": "B", "name": "inner", "ts": 2},
        {**base, "ph": "E", "ts": 4},
        {**base, "ph": "E", "ts": 9},
        {**base, "ph": "E", "ts": 10},
        {**base, "ph": "B", "name": "open", "ts": 11},
    ]
    timeline = read_events(tmp_path, events)
    assert dict(zip(timeline.names(np.arange(2)), timeline.duration_ns.tolist(), strict=True)) == {
        "inner": 2000,
        "outer": 8000,
    }
    assert timeline.report.dropped == {"end without a begin": 1, "begin without an end": 1}


def test_counters_instants_memory_and_flows(tmp_path: Path, decoder: str) -> None:
    memory = {
        "Total Allocated": 100,
        "Total Reserved": 200,
        "Bytes": -50,
        "Addr": 2**47,
        "Device Id": 0,
        "Device Type": 1,
    }
    events = [
        {"ph": "C", "name": "power", "pid": 1, "ts": 3, "args": {"watts": 250.5, "limit": 400}},
        {
            "ph": "i",
            "name": "[memory]",
            "cat": "cpu_instant_event",
            "s": "t",
            "pid": 1,
            "tid": 1,
            "ts": 2,
            "args": memory,
        },
        {"ph": "i", "name": "Iteration Start", "s": "g", "pid": "Traces", "tid": "Trace", "ts": 1},
        {"ph": "s", "id": 5, "pid": 1, "tid": 1, "ts": 1, "cat": "ac2g", "name": "ac2g"},
        {"ph": "f", "id": 5, "pid": 0, "tid": 7, "ts": 4, "cat": "ac2g", "name": "ac2g", "bp": "e"},
        {"ph": "M", "name": "thread_name", "pid": 10, "tid": 1, "args": {"name": "main"}},
        op("a", 1, 1),
    ]
    timeline = read_events(tmp_path, events)
    assert timeline.counters.texts("series") == ["watts", "limit"]
    assert timeline.counters["value"].tolist() == [250.5, 400.0]
    assert timeline.memory["allocated_bytes"].tolist() == [100]
    assert timeline.instants.texts("name") == ["Iteration Start"]
    assert (timeline.flows["id"].tolist(), sorted(timeline.flows["begins"].tolist())) == ([5, 5], [False, True])
    assert "main" in {lane.name for lane in timeline.lanes}


def test_unknown_phases_are_counted(tmp_path: Path) -> None:
    timeline = read_events(tmp_path, [{"ph": "b", "name": "async", "ts": 1, "id": 1}, {"name": "no phase", "ts": 1}])
    assert timeline.report.dropped == {"event of phase 'b'": 1, "event without a phase": 1}


@pytest.mark.parametrize("member", ["pid", "tid", "name", "cat", "args", "id"])
@pytest.mark.parametrize("value", [None, True, 1.5, [], {}, "text", [[{}]]])
def test_members_of_any_type(tmp_path: Path, member: str, value: Any, decoder: str) -> None:
    timeline = read_events(tmp_path, [{**op("a", 1, 1), member: value}, op("b", 2, 1)])
    assert timeline.num_events == 2


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.json", b"", "empty"),
        ("space.json", b" \n ", "empty"),
        ("page.json", b"<html></html>", "not JSON"),
        ("binary.json", bytes(range(256)), "not JSON"),
        ("other.json", b'{"a": 1, "b": [1, 2]}', "no traceEvents"),
        ("number.json", b"42", "not JSON"),
        ("chakra.et", b"\x0a\x08", "not JSON"),
        ("open.json", b'{"traceEvents"', "no traceEvents"),
        ("lines.json", b'{"two\\nlines\n": 1, "b": 2}', "no traceEvents"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message) as error:
        foretrace.read(write(tmp_path / name, content))
    assert name in str(error.value) and "\n" not in str(error.value)


def test_missing_paths(tmp_path: Path) -> None:
    for path in (tmp_path / "nope.json", tmp_path / "*.json", tmp_path):
        with pytest.raises(FormatError):
            foretrace.read(path)
    with pytest.raises(FormatError):
        foretrace.read([])


def job_of_two(folder: Path) -> Job:
    for rank in range(2):
        write(folder / f"trace_{rank}.json.gz", small_trace(rank, 2, late=50.0 * rank))
    return foretrace.read(folder)


def test_folder_glob_list_and_archives(tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    wanted = job_of_two(folder)
    assert (wanted.ranks, wanted.world_size) == ([0, 1], 2)
    assert wanted.groups["0"].ranks == (0, 1)
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        for at, path in enumerate(sorted(folder.iterdir())):
            archive.write(path, f"../../escape/{at}/{path.name}")
    for mode, name in (("w", "t.tar"), ("w:gz", "t.tar.gz")):
        with tarfile.open(tmp_path / name, mode) as tar:  # type: ignore[call-overload]
            tar.add(folder, "ranks")
            info = tarfile.TarInfo("/etc/evil.json")
            info.size = 0
            tar.addfile(info, io.BytesIO())
    paths: list[Any] = [
        str(folder / "*.json.gz"),
        list(folder.iterdir())[::-1],
        tmp_path / "z.zip",
        tmp_path / "t.tar.gz",
    ]
    for path in [*paths, tmp_path / "t.tar"]:
        job = foretrace.read(path)
        assert job.ranks == [0, 1]
        for one, other in zip(wanted, job, strict=True):
            same(one, other)
    assert not (tmp_path.parent / "escape").exists()


def test_other_files_in_a_folder_are_passed_over_and_counted(tmp_path: Path) -> None:
    job_of_two(tmp_path)
    write(tmp_path / "et.json", {"schema": "1.0.2", "nodes": []})
    job = foretrace.read(tmp_path)
    assert job.ranks == [0, 1]
    assert job.warnings == {"file that is no Kineto trace, passed over": 1}
    with pytest.raises(FormatError):
        foretrace.read([tmp_path / "et.json", tmp_path / "trace_0.json.gz"])


def test_missing_and_duplicate_ranks(tmp_path: Path) -> None:
    for at, rank in enumerate((0, 2, 2)):
        write(tmp_path / f"{at}.json", small_trace(rank, 4))
    job = foretrace.read(tmp_path)
    assert job.ranks == [0, 1, 2]
    assert job.all_warnings == {
        "missing rank": 1,
        "rank 2 occurs twice: given the next free one": 1,
        "no rank in the trace or its name": 1,
    }


def test_executors_and_progress(tmp_path: Path) -> None:
    wanted = job_of_two(tmp_path)
    seen: list[tuple[int, int]] = []
    foretrace.read(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == sum(path.stat().st_size for path in tmp_path.iterdir())
    for executor in (ThreadPoolExecutor(2), ProcessPoolExecutor(1)):
        with executor:
            for one, other in zip(wanted, foretrace.read(tmp_path, executor=executor), strict=True):
                same(one, other)


# -- Arrow -------------------------------------------------------------------------------------------------------------


def test_arrow_file_round_trip_and_cache(tmp_path: Path) -> None:
    path = write(tmp_path / "rank0.json", small_trace())
    cache = tmp_path / "cache"
    first = foretrace.read(path, cache=cache).timelines[0]
    (file,) = cache.iterdir()
    second = foretrace.read(path, cache=cache).timelines[0]
    same(first, second)
    assert (second.rank, second.metadata) == (first.rank, first.metadata)
    assert not second.start_ns.flags.owndata  # memory-mapped, not copied
    file.write_bytes(file.read_bytes()[:100])
    same(first, foretrace.read(path, cache=cache).timelines[0])  # a damaged cache file is written again
    write(path, small_trace(rank=5))
    assert foretrace.read(path, cache=cache).ranks == [5]
    assert not list(cache.glob("*.part"))


def test_arrow_shares_memory(tmp_path: Path) -> None:
    events = foretrace.read(write(tmp_path / "rank0.json", small_trace())).timelines[0].events
    table = events.to_arrow()
    for name in ("start_ns", "lane", "category"):
        view = table.column(name).chunk(0).to_numpy(zero_copy_only=True)
        assert np.shares_memory(view, events[name])
    assert table.column("name").to_pylist() == events.texts("name")
    assert events.to_pandas()["name"].tolist() == events.texts("name")
    assert events.to_polars()["start_ns"].to_list() == events["start_ns"].tolist()


def test_arrow_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "x.arrow").write_bytes(b"ARROW1\0\0nonsense")
    for name in ("x.arrow", "nope.arrow"):
        with pytest.raises(FormatError):
            arrow.load(tmp_path / name)


def test_steps_of_a_small_trace(tmp_path: Path) -> None:
    job = foretrace.read(write(tmp_path / "rank0.json", small_trace()))
    rows = foretrace.analyze.steps(job).to_pylist()
    assert [(row["step"], row["start_ns"], row["end_ns"]) for row in rows] == [
        (0, 40_000, 500_000),
        (1, 500_000, 1_500_000),
    ]
    assert step(3, 0, 1)["name"] == "ProfilerStep#3"
