"""Linking: small traces of which one can say what waits for what."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foretrace
from foretrace.link import link
from foretrace.link.blocking import blocking_calls
from foretrace.link.device import device_work
from foretrace.link.host import GAP, ISSUE, START, HostSlices, host_slices
from foretrace.simulate import Simulation, simulate
from foretrace.trace import EdgeKind, ExecutionGraph, Job, TaskKind, Timeline
from foretrace.trace.graph import HOST_KINDS
from tests.formats.builder import Event, call, kernel, op, small_trace, step, write

US = 1000
LATENCY = 20


def job_of(*traces: Any) -> Job:
    with tempfile.TemporaryDirectory() as folder:
        for rank, trace in enumerate(traces):
            write(Path(folder) / f"rank{rank}.json", trace)
        return foretrace.read(folder)


def timeline_of(events: list[Event]) -> Timeline:
    info = {"backend": "nccl", "rank": 0, "world_size": 1}
    return job_of({"schemaVersion": 1, "distributedInfo": info, "traceEvents": events}).timelines[0]


def graph_of(events: list[Event], **options: Any) -> ExecutionGraph:
    return link(timeline_of(events), **options)


def launch(at: float, name: str, start: float, dur: float, correlation: int, **where: Any) -> list[Event]:
    """A launch call of 10 us and the kernel that it launches."""
    stream, tid = where.get("stream", 7), where.get("tid", 1)
    return [
        call("cudaLaunchKernel", at, 10, correlation, tid),
        kernel(name, start, dur, correlation, stream),
    ]


def device_event(category: str, name: str, ts: float, dur: float, correlation: int, stream: int) -> Event:
    return {**kernel(name, ts, dur, correlation, stream), "cat": category}


def warm(stream: int = 7) -> list[Event]:
    """Launches to an idle stream, which tell the latency."""
    return [e for at in range(5) for e in launch(100 * at, "warm", 100 * at + LATENCY, 10, 900 + at, stream=stream)]


def stream_sync(correlation: int, stream: int, ts: float, dur: float) -> Event:
    args = {"cuda_sync_kind": "Stream Sync", "stream": stream, "correlation": correlation, "device": 0}
    name = "Stream Sync"
    return {"ph": "X", "cat": "cuda_sync", "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": args}


def named(graph: ExecutionGraph, name: str, *kinds: TaskKind) -> np.ndarray:
    """Tasks of an event's name (and of some kinds), in the order of rows, which is the order on their lane."""
    found = graph.tasks["name"] == graph.strings.find(name)
    if kinds:
        found &= np.isin(graph.tasks["kind"], kinds)
    return np.flatnonzero(found)


def of_kind(graph: ExecutionGraph, kind: TaskKind) -> np.ndarray:
    return np.flatnonzero(graph.tasks["kind"] == kind)


def edges(graph: ExecutionGraph, kind: EdgeKind) -> list[tuple[int, int, int, float]]:
    rows = graph.edges.take(graph.edges["kind"] == kind)
    columns = (rows[name].tolist() for name in ("source", "target", "lag_ns", "confidence"))
    return [(s, t, lag, round(c, 3)) for s, t, lag, c in zip(*columns, strict=True)]


def edge_names(graph: ExecutionGraph, kind: EdgeKind) -> list[tuple[str, str]]:
    pairs = np.array([(s, t) for s, t, _, _ in edges(graph, kind)], np.int64).reshape(-1, 2)
    return list(zip(graph.names(pairs[:, 0]), graph.names(pairs[:, 1]), strict=True))


def with_durations(graph: ExecutionGraph, tasks: np.ndarray, duration_ns: Any) -> Simulation:
    duration = graph.tasks["duration_ns"].copy()
    duration[tasks] = duration_ns
    return simulate(graph, duration)


def assert_reproduced(graph: ExecutionGraph) -> Simulation:
    """Every device task starts exactly where it was measured."""
    simulation = simulate(graph)
    device = graph.on_device
    measured = graph.tasks["measured_start_ns"] - graph.origin_ns
    np.testing.assert_array_equal(simulation.start_ns[device], measured[device])
    return simulation


# Launches


def test_a_launch_starts_its_work_after_a_latency_from_its_own_start() -> None:
    graph = graph_of([op("aten::mm", 0, 30), call("cudaLaunchKernel", 10, 10, 1), kernel("gemm", 30, 100, 1)])
    (edge,) = edges(graph, EdgeKind.LAUNCH)
    source, target, lag, confidence = edge
    assert graph.names(np.array([source, target])) == ["cudaLaunchKernel", "gemm"]
    assert (lag, confidence) == (20 * US, 1.0)
    assert graph.tasks["measured_start_ns"][source] - graph.origin_ns == 10 * US
    assert graph.figures["rank 0: launch latency ns"] == 20 * US
    simulation = assert_reproduced(graph)
    assert simulation.finish_ns == 130 * US
    (gemm,) = named(graph, "gemm")
    before, after = named(graph, "aten::mm", TaskKind.OPERATOR)
    issue, rest = named(graph, "cudaLaunchKernel", TaskKind.RUNTIME)
    assert graph.tasks["duration_ns"][[before, issue, rest, after]].tolist() == [10 * US, 0, 10 * US, 10 * US]
    # What comes before the call delays the kernel, what comes after its start does not.
    assert with_durations(graph, before, 15 * US).start_ns[gemm] == 35 * US
    assert with_durations(graph, np.array([rest, after]), 500 * US).start_ns[gemm] == 30 * US


def test_a_slow_launch_call_hands_its_work_over_late() -> None:
    events = [*warm(), call("cudaLaunchKernel", 1000, 500, 1), kernel("compiled", 1498, 50, 1)]
    graph = graph_of(events)
    assert graph.notes["slow launch call"] == 1
    assert not len(of_kind(graph, TaskKind.UNEXPLAINED))
    assert_reproduced(graph)
    issue, rest = named(graph, "cudaLaunchKernel")[-2:]
    assert graph.tasks["duration_ns"][[issue, rest]].tolist() == [478 * US, 22 * US]
    (compiled,) = named(graph, "compiled")
    assert with_durations(graph, issue, 0).start_ns[compiled] == 1020 * US


def test_work_on_one_stream_runs_in_order_with_the_usual_gap() -> None:
    events = warm()
    for at in range(3):  # queued behind each other, 2 us apart
        events += launch(1000 + 10 * at, f"k{at}", 1020 + 102 * at, 100, at)
    graph = graph_of(events)
    assert_reproduced(graph)
    (first,), (last,) = named(graph, "k0"), named(graph, "k2")
    longer = with_durations(graph, first, 300 * US)
    assert longer.start_ns[last] == (1020 + 300 + 2 + 100 + 2) * US


def test_work_that_overlaps_the_work_before_it_on_its_stream() -> None:
    events = warm() + launch(1000, "long", 1020, 200, 1) + launch(1010, "inner", 1100, 50, 2)
    events += launch(1020, "after", 1222, 10, 3)
    graph = graph_of(events)
    assert graph.notes["work that overlaps the work before it on its stream"] == 1
    simulation = assert_reproduced(graph)
    assert simulation.job.timelines[0].duration_ns.sum() == graph.source.timelines[0].duration_ns.sum()
    head, tail = named(graph, "long")
    assert graph.tasks["duration_ns"][[head, tail]].tolist() == [80 * US, 120 * US]
    # What comes after waits for both.
    (after,) = named(graph, "after")
    assert with_durations(graph, tail, 220 * US).start_ns[after] == 1322 * US
    assert with_durations(graph, named(graph, "inner"), 150 * US).start_ns[after] >= 1250 * US


def test_holes_of_a_graph_launch_are_work_that_the_trace_lacks() -> None:
    events = [*warm(), call("cudaGraphLaunch", 1000, 10, 1)]
    events += [kernel("a", 1020, 10, 1), kernel("b", 1050, 10, 1), kernel("c", 1062, 10, 1)]
    graph = graph_of(events)
    (hole,) = of_kind(graph, TaskKind.UNRECORDED_GRAPH_WORK)
    assert graph.names(np.array([hole])) == ["b"]
    assert graph.notes["unrecorded graph work"] == 1
    lag = {graph.names(np.array([t]))[0]: lag for _, t, lag, _ in edges(graph, EdgeKind.ORDER) if graph.on_device[t]}
    assert graph.tasks["duration_ns"][hole] == 20 * US - lag["c"]
    assert_reproduced(graph)


def test_work_launched_before_the_trace() -> None:
    events = [kernel("old", 0, 50, 77), kernel("older", 300, 50, 78), *launch(310, "new", 352, 20, 1)]
    events += [call("cudaStreamSynchronize", 330, 50, 2)]
    graph = graph_of(events)
    (delay,) = of_kind(graph, TaskKind.BEFORE_TRACE)
    assert graph.names(np.array([delay])) == ["older"]
    assert graph.notes["launched before the trace"] == 1
    simulation = simulate(graph)
    assert simulation.start_ns[named(graph, "older", TaskKind.KERNEL)].tolist() == [300 * US]
    # It is on its stream: what is launched later has to wait for it.
    (new,) = named(graph, "new")
    longer = with_durations(graph, named(graph, "older", TaskKind.KERNEL), 550 * US)
    assert longer.start_ns[new] - simulation.start_ns[new] == 500 * US


# Host threads


@st.composite
def host_events(draw: st.DrawFn) -> list[Event]:
    """Operators, calls, launches and blocking calls of two threads, nested, crossing, or apart."""
    kinds = st.sampled_from(["op", "call", "launch", "cudaStreamSynchronize", "cudaDeviceSynchronize", "copy"])
    drawn = draw(
        st.lists(
            st.tuples(kinds, st.integers(1, 2), st.integers(0, 60), st.integers(0, 40), st.integers(1, 30)),
            min_size=1,
            max_size=12,
        )
    )
    events: list[Event] = []
    for at, (kind, tid, ts, dur, length) in enumerate(drawn):
        if kind == "op":
            events.append(op("aten::op", ts, dur, tid))
        elif kind == "launch":
            events += [call("cudaLaunchKernel", ts, dur, at, tid), kernel("gemm", ts + dur // 2, length, at)]
        elif kind == "copy":
            copy = device_event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", ts + dur // 3, dur // 3, at, 9)
            events += [call("cudaMemcpyAsync", ts, dur, at, tid), copy]
        else:
            events.append(call("cudaMalloc" if kind == "call" else kind, ts, dur, at, tid))
    return events


@settings(max_examples=60)
@given(host_events())
def test_slices_cover_every_thread_without_gap_or_overlap(events: list[Event]) -> None:
    timeline = timeline_of(events)
    blocking = blocking_calls(device_work(timeline))
    begin = int(timeline.start_ns.min())
    slices = host_slices(timeline, blocking, begin)
    for lane, rows in slices.lanes():
        mine = HostSlices(*(getattr(slices, name)[rows] for name in HostSlices.__dataclass_fields__))
        on_lane = timeline.host_rows[timeline.events["lane"][timeline.host_rows] == lane]
        last_end = int(timeline.end_ns[on_lane].max())
        assert mine.start_ns[0] == begin and mine.part[0] == START
        assert mine.end_ns[-1] == last_end
        hole = mine.start_ns[1:] - mine.end_ns[:-1]
        assert (hole >= 0).all()
        opened = np.flatnonzero(hole)
        assert (mine.part[opened] == ISSUE).all()
        call_of = mine.event[opened]
        until = np.minimum(blocking.resume_ns[call_of], timeline.end_ns[call_of])
        np.testing.assert_array_equal(mine.start_ns[opened + 1], until)
        length = mine.end_ns - mine.start_ns
        assert (length >= 0).all()
        assert length.sum() + hole.sum() == last_end - begin
        # Time is counted for events in which it lies, and as a gap only where there is none.
        own = np.flatnonzero((mine.event >= 0) & (length > 0))
        assert (mine.start_ns[own] >= timeline.start_ns[mine.event[own]]).all()
        assert (mine.end_ns[own] <= timeline.end_ns[mine.event[own]]).all()
        for gap in np.flatnonzero((mine.part == GAP) & (length > 0)).tolist():
            begins, ends = timeline.start_ns[on_lane], timeline.end_ns[on_lane]
            assert not ((begins < mine.end_ns[gap]) & (ends > mine.start_ns[gap])).any()


@settings(max_examples=30)
@given(host_events())
def test_any_trace_can_be_simulated(events: list[Event]) -> None:
    graph = graph_of(events)
    graph.check()
    simulation = simulate(graph)
    host = graph.on_device | (graph.tasks["lane"] < 0)
    assert set(graph.tasks["kind"][~host].tolist()) <= set(HOST_KINDS)
    assert simulation.finish_ns >= 0 and (simulation.start_ns >= 0).all()


def test_a_backward_pass_on_a_thread_of_its_own_and_back() -> None:
    events = [op("forward", 0, 100), *launch(50, "f", 70, 40, 1)]
    events += [op("backward", 150, 250, tid=2), *launch(200, "b", 220, 40, 2, tid=2)]
    events += [op("optimizer", 420, 80), *launch(450, "o", 470, 40, 3)]
    graph = graph_of(events)
    assert sorted(edge_names(graph, EdgeKind.HANDOFF)) == [("backward", ""), ("forward", "")]
    gaps = of_kind(graph, TaskKind.HANDOFF)
    assert sorted(graph.tasks["duration_ns"][gaps].tolist()) == [20 * US, 50 * US]
    assert_reproduced(graph)
    # A slower forward pass delays all that follows, a slower backward pass the optimizer.
    for name, part in (("forward", 0), ("backward", -1)):
        slower = named(graph, name)[part]
        simulation = with_durations(graph, slower, graph.tasks["duration_ns"][slower] + 1000 * US)
        assert simulation.start_ns[named(graph, "o")].tolist() == [1470 * US]
        assert simulation.start_ns[named(graph, "b")].tolist() == [(1220 if name == "forward" else 220) * US]


def test_a_gap_that_no_thread_explains_stays_a_gap() -> None:
    events = [op("first", 0, 100), *launch(50, "a", 70, 40, 1), op("second", 420, 80), *launch(450, "b", 470, 40, 2)]
    graph = graph_of(events)
    assert not edges(graph, EdgeKind.HANDOFF)
    assert graph.tasks["duration_ns"][of_kind(graph, TaskKind.HOST_GAP)].tolist() == [320 * US]


# Calls that block


def blocked(name: str) -> tuple[list[Event], str]:
    """A call that lasts from 1040 to 1135 and waits for 100 us of device work to end at 1130."""
    if name == "cudaMemcpyAsync":
        copy = "Memcpy DtoH (Device -> Pageable)"
        events = [call(name, 1010, 125, 1), device_event("gpu_memcpy", copy, 1030, 100, 1, 7)]
        return events, copy
    events = [*launch(1010, "gemm", 1030, 100, 1), call(name.removesuffix(" recorded"), 1040, 95, 2)]
    if name.endswith("recorded"):
        events[-1]["name"] = "cudaStreamSynchronize"
        events.append(stream_sync(2, 7, 1040, 90))
    return events, "gemm"


@pytest.mark.parametrize(
    "name",
    [
        "cudaStreamSynchronize",
        "cudaStreamSynchronize recorded",
        "cudaDeviceSynchronize",
        "hipDeviceSynchronize",
        "cudaEventSynchronize",
        "cudaMemcpyAsync",
        "cudaFree",
    ],
)
def test_a_blocking_call_returns_after_its_work(name: str) -> None:
    events, work = blocked(name)
    graph = graph_of([*warm(), *events, op("after", 1140, 10)])
    simulation = simulate(graph)
    (after,) = named(graph, "after")
    assert simulation.start_ns[after] == 1140 * US
    # Its waiting is no work of the host: 5 us remain of it, and what it takes to issue.
    call_name = name.removesuffix(" recorded")
    host_ns = int(graph.tasks["duration_ns"][named(graph, call_name, TaskKind.RUNTIME)].sum())
    assert host_ns <= 10 * US
    assert not len(of_kind(graph, TaskKind.BLOCKED))
    work_tasks = named(graph, work, TaskKind.KERNEL, TaskKind.MEMCPY)
    twice = with_durations(graph, work_tasks, 2 * graph.tasks["duration_ns"][work_tasks])
    assert twice.start_ns[after] == 1240 * US
    none = with_durations(graph, work_tasks, 0)
    assert none.start_ns[after] <= 1050 * US


@pytest.mark.parametrize(("is_recorded", "waits_for"), [(True, "on 7"), (False, "on 8")])
def test_the_stream_of_a_synchronizing_call(is_recorded: bool, waits_for: str) -> None:
    """As recorded; else the stream whose work ended last while the call lasted."""
    events = warm() + launch(1000, "on 7", 1020, 100, 1) + launch(1010, "on 8", 1030, 110, 2, stream=8)
    events += [call("cudaStreamSynchronize", 1030, 130, 3), op("after", 1170, 10)]
    if is_recorded:
        events.append(stream_sync(3, 7, 1030, 90))
    graph = graph_of(events)
    (after,) = named(graph, "after")
    for name in ("on 7", "on 8"):
        delayed = with_durations(graph, named(graph, name), 1000 * US).start_ns[after] > 1500 * US
        assert delayed == (name == waits_for), name


def test_a_device_wide_wait_waits_for_all_streams() -> None:
    events = warm() + launch(1000, "on 7", 1020, 100, 1) + launch(1010, "on 8", 1030, 110, 2, stream=8)
    events += [call("cudaDeviceSynchronize", 1030, 130, 3), op("after", 1170, 10)]
    graph = graph_of(events)
    (after,) = named(graph, "after")
    assert simulate(graph).start_ns[after] == 1170 * US
    for name in ("on 7", "on 8"):
        assert with_durations(graph, named(graph, name), 1000 * US).start_ns[after] > 1500 * US, name


def test_what_is_launched_later_is_not_waited_for() -> None:
    events = warm() + launch(1000, "before", 1020, 100, 1)
    events += [call("cudaStreamSynchronize", 1020, 105, 2), *launch(1130, "later", 1150, 50, 3), op("after", 1160, 10)]
    graph = graph_of(events)
    (after,) = named(graph, "after")
    assert with_durations(graph, named(graph, "later"), 900 * US).start_ns[after] == 1160 * US


def test_a_wait_that_nothing_explains_is_copied() -> None:
    events = [*warm(), call("cudaEventSynchronize", 1000, 300, 1), op("after", 1310, 10)]
    graph = graph_of(events)
    (task,) = of_kind(graph, TaskKind.BLOCKED)
    assert graph.tasks["duration_ns"][task] == 300 * US
    assert graph.notes["blocking call that nothing explains"] == 1


DEPTH = 128


def full_queue(kernel_us: float, op_us: float) -> tuple[list[Event], float]:
    """160 long kernels through a queue of 128 entries, then 300 short ones; and when the host is done.

    A launch call of 4 us returns when there is room.
    """
    events: list[Event] = []
    now, stream_end = 0.0, 0.0
    ends: list[float] = []
    for at in range(460):
        if at == 160:
            events.append(call("cudaDeviceSynchronize", now, max(stream_end - now, 0) + 2, 9999))
            now = max(now, stream_end) + 2
        events.append(op("aten::op", now, op_us))
        now += op_us
        room = max(now, ends[at - DEPTH]) if at >= DEPTH else now
        is_long = at < 160
        start = max(now + LATENCY, stream_end + 1)
        stream_end = start + (kernel_us if is_long else 1)
        events += [
            call("cudaLaunchKernel", now, room + 4 - now, at),
            kernel("long" if is_long else "short", start, stream_end - start, at),
        ]
        ends.append(stream_end)
        now = room + 4
    return [*events, op("done", now, 1)], now


def test_a_full_launch_queue_holds_the_host() -> None:
    events, done = full_queue(100, 2)
    graph = graph_of(events)
    assert graph.figures["rank 0: launch queue depth"] == DEPTH
    (task,) = named(graph, "done")
    assert simulate(graph).start_ns[task] == done * US
    long = named(graph, "long")
    for kernel_us in (50, 200, 1000):
        expected = full_queue(kernel_us, 2)[1]
        assert with_durations(graph, long, kernel_us * US).start_ns[task] == pytest.approx(expected * US, rel=1e-3)
    ops = named(graph, "aten::op", TaskKind.OPERATOR)
    for op_us in (1, 10, 300):
        expected = full_queue(100, op_us)[1]
        assert with_durations(graph, ops, op_us * US).start_ns[task] == pytest.approx(expected * US, rel=1e-3)


# Waits between streams


def wait_record(correlation: int, record: int, on: int, stream: int, ts: float) -> Event:
    args = {"cuda_sync_kind": "Stream Wait Event", "stream": stream, "correlation": correlation, "device": 0}
    args |= {"wait_on_stream": on, "wait_on_cuda_event_record_corr_id": record, "wait_on_cuda_event_id": 1}
    return {**stream_sync(correlation, stream, ts, 1), "name": "Stream Wait Event", "args": args}


def two_streams(how: str) -> list[Event]:
    """``target`` on stream 8 waits for ``source`` on stream 7, as the times, the calls or a record tell."""
    events = warm() + launch(1000, "source", 1020, 200, 1)
    if how == "timing":
        return events + launch(1030, "target", 1222, 50, 2, stream=8)
    events += [call("cudaEventRecord", 1015, 2, 3), call("cudaStreamWaitEvent", 1018, 2, 4)]
    if how == "recorded":
        events.append(wait_record(4, 3, 7, 8, 1018))
    return events + launch(1300, "target", 1320, 50, 2, stream=8)  # late enough not to need to wait


@pytest.mark.parametrize(("how", "confidence"), [("timing", 0.7), ("calls", 0.9), ("recorded", 1.0)])
def test_a_stream_waits_for_an_event_of_another(how: str, confidence: float) -> None:
    graph = graph_of(two_streams(how))
    assert edge_names(graph, EdgeKind.EVENT_WAIT) == [("source", "target")]
    assert edges(graph, EdgeKind.EVENT_WAIT)[0][3] == pytest.approx(confidence)
    assert_reproduced(graph)
    (target,) = named(graph, "target")
    longer = with_durations(graph, named(graph, "source"), 800 * US)
    assert longer.start_ns[target] == pytest.approx(1820 * US, abs=3 * US)
    if confidence < 1:
        assert "event_wait" not in graph.count_edges()["recorded"]
    else:
        assert graph.count_edges()["recorded"]["event_wait"] == 1


def test_work_on_other_devices_explains_nothing() -> None:
    events = warm() + launch(1000, "source", 1020, 200, 1) + launch(1030, "target", 1222, 50, 2, stream=8)
    events[-1]["args"]["device"] = events[-1]["pid"] = 1
    events += launch(1040, "target", 1300, 50, 3, stream=8)
    events[-1]["args"]["device"] = events[-1]["pid"] = 1
    graph = graph_of(events)
    assert not edges(graph, EdgeKind.EVENT_WAIT) and not edges(graph, EdgeKind.OCCUPANCY)
    assert not len(named(graph, "source", TaskKind.BEFORE_TRACE))


def steps_of(*target_starts: float) -> list[Event]:
    """In each step ``source`` runs on stream 7 from 100 to 300, and ``target`` is launched on stream 8 at 110."""
    events = []
    for number, start in enumerate(target_starts):
        at = 1000.0 * number
        events += [step(number, at, 950), *launch(at + 10, "warm", at + 10 + LATENCY, 10, 10 * number)]
        events += launch(at + 50, "warm", at + 50 + LATENCY, 10, 10 * number + 1)
        events += launch(at + 80, "source", at + 100, 200, 10 * number + 2)
        events += launch(at + 110, "target", at + start, 50, 10 * number + 3, stream=8)
    return events


def test_waits_hold_in_every_step_or_in_none() -> None:
    graph = graph_of(steps_of(302, 302, 302))
    assert edge_names(graph, EdgeKind.EVENT_WAIT) == [("source", "target")] * 3
    # A step in which the launch comes late does not contradict, and gets the wait, too.
    graph = graph_of(steps_of(302, 340, 302))
    assert edge_names(graph, EdgeKind.EVENT_WAIT) == [("source", "target")] * 3
    # A step in which the target starts before the source ends does.
    graph = graph_of(steps_of(302, 130, 302))
    assert not edges(graph, EdgeKind.EVENT_WAIT)
    assert simulate(graph).start_ns[named(graph, "target", TaskKind.KERNEL)[1]] == 1130 * US


def test_a_step_that_is_left_out_gets_its_waits_from_the_others() -> None:
    full, left_out = (graph_of(steps_of(302, 302, 200), leave_out=one) for one in (None, 2))
    assert not edges(full, EdgeKind.EVENT_WAIT)
    assert edge_names(left_out, EdgeKind.EVENT_WAIT) == [("source", "target")] * 3


def test_room_that_another_kernel_leaves_holds_in_its_own_step_only() -> None:
    events = steps_of(250, 250)
    full, left_out = (graph_of(events, leave_out=one) for one in (None, 1))
    assert edge_names(full, EdgeKind.OCCUPANCY) == [("source", "target")] * 2
    assert all(confidence < 0.5 for *_, confidence in edges(full, EdgeKind.OCCUPANCY))
    assert_reproduced(full)
    assert edge_names(left_out, EdgeKind.OCCUPANCY) == [("source", "target")]
    first, second = simulate(left_out).start_ns[named(left_out, "target", TaskKind.KERNEL)] // US
    assert (first, second) == (250, 1130)


def test_a_delay_without_cause_is_named_so() -> None:
    graph = graph_of(warm() + launch(1000, "late", 1400, 50, 1))
    (delay,) = of_kind(graph, TaskKind.UNEXPLAINED)
    assert graph.tasks["duration_ns"][delay] == 380 * US
    assert graph.notes["unexplained"] == 1 and graph.figures["rank 0: unexplained ns"] == 380 * US
    assert_reproduced(graph)


# Ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_collective_starts_when_its_last_member_arrives(ranks: int) -> None:
    job = job_of(*(small_trace(rank, ranks, late=100.0 * rank) for rank in range(ranks)))
    graph = link(job)
    assert graph.notes["coupled collectives"] == 2
    assert len(edges(graph, EdgeKind.COLLECTIVE)) == 2 * 2 * ranks
    members = of_kind(graph, TaskKind.COLLECTIVE)
    transfer = 300 - 100 * (ranks - 1)
    assert graph.tasks["duration_ns"][members].tolist() == [transfer * US] * 2 * ranks
    measured = graph.tasks["measured_end_ns"] - graph.tasks["measured_start_ns"]
    assert measured[members].tolist() == [transfer * US] * 2 * ranks
    simulation = simulate(graph)
    ready = 200 + 100 * (ranks - 1)
    assert sorted(simulation.start_ns[members] // US) == sorted([ready, ready + 1000] * ranks)
    # The last rank 50 us earlier: all of them are done earlier by as much.
    last = ranks - 1
    gap = np.flatnonzero((graph.rank == last) & (graph.tasks["kind"] == TaskKind.HOST_GAP))[0]
    faster = with_durations(graph, gap, graph.tasks["duration_ns"][gap] - 50 * US)
    assert sorted(faster.start_ns[members] // US)[0] == ready - 50
    assert len(set((faster.start_ns[members] // US).tolist())) == 2
    # Another rank 10 us earlier: no collective starts earlier.
    gap = np.flatnonzero((graph.rank == 0) & (graph.tasks["kind"] == TaskKind.HOST_GAP))[0]
    faster = with_durations(graph, gap, graph.tasks["duration_ns"][gap] - 10 * US)
    np.testing.assert_array_equal(faster.start_ns[members], simulation.start_ns[members])


def test_ranks_that_are_not_coupled_keep_their_times() -> None:
    job = job_of(*(small_trace(rank, 2, late=100.0 * rank) for rank in range(2)))
    graph = link(job, coupled=False)
    assert not edges(graph, EdgeKind.COLLECTIVE) and not len(of_kind(graph, TaskKind.COLLECTIVE))
    alone = of_kind(graph, TaskKind.COLLECTIVE_ALONE)
    assert sorted(graph.tasks["duration_ns"][alone] // US) == [200, 200, 300, 300]


@pytest.mark.parametrize("present", [1, 2])
def test_a_collective_whose_peers_are_absent_keeps_its_duration(present: int) -> None:
    graph = link(job_of(*(small_trace(rank, 3, late=100.0 * rank) for rank in range(present))))
    assert not edges(graph, EdgeKind.COLLECTIVE)
    assert len(of_kind(graph, TaskKind.COLLECTIVE_ALONE)) == 2 * present
    assert len(of_kind(graph, TaskKind.ARRIVAL)) == 2 * present
    assert_reproduced(graph)


def test_clocks_of_ranks_are_corrected() -> None:
    early, late = small_trace(0, 2), small_trace(1, 2, late=100.0)
    for event in late["traceEvents"]:
        event["ts"] += 5_000
    graph = link(job_of(early, late), clock_offsets_ns={1: 5_000 * US})
    assert graph.notes["coupled collectives"] == 2
    members = of_kind(graph, TaskKind.COLLECTIVE)
    assert sorted(simulate(graph).start_ns[members] // US) == [300, 300, 1300, 1300]


# Traces that lack something


@pytest.mark.parametrize(
    ("events", "tasks"),
    [
        ([op("aten::mm", 5, 10), op("aten::add", 20, 10)], 4),
        ([kernel("a", 5, 10), kernel("b", 20, 10)], 2),
        ([step(0, 0, 100)], 0),
    ],
    ids=["no device", "no host", "nothing"],
)
def test_traces_without_a_part(events: list[Event], tasks: int) -> None:
    graph = graph_of(events)
    assert graph.num_tasks == tasks
    simulation = simulate(graph)
    assert simulation.finish_ns == (25 * US if tasks else 0)
    assert simulation.job.timelines[0].num_events == len(events)


def test_no_events_at_all() -> None:
    graph = graph_of([])
    assert (graph.num_tasks, graph.num_edges) == (0, 0)
    assert simulate(graph).finish_ns == 0


def test_times_below_zero_are_times() -> None:
    """A clock whose zero lies after the run: the graph is the same, though -1 is then a time."""
    events = [op("aten::item", 0, 900), *launch(10, "gemm", 40, 300, 1)]
    events += [call("cudaStreamSynchronize", 60, 400, 2), *launch(500, "gemm", 530, 100, 3)]
    before = simulate(graph_of(events))
    shifted = [{**event, "ts": event["ts"] - 5_000} if "ts" in event else event for event in events]
    after = simulate(graph_of(shifted))
    assert after.finish_ns == before.finish_ns
    assert after.graph.count_edges() == before.graph.count_edges()
