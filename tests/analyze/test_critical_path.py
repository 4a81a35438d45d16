"""The critical path and the room beside it: by hand, and on random graphs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foretrace
from foretrace.analyze import CriticalPath, critical_path, slack
from foretrace.analyze.critical_path import KINDS
from foretrace.link import link
from foretrace.simulate import Simulation, simulate
from foretrace.trace import EdgeKind, ExecutionGraph, GraphError, GraphLane, Job, LanePolicy, StringTable, TaskKind
from tests.formats.builder import Event, call, kernel, op, small_trace, step, write
from tests.simulate.test_engine import anything, dependency_graphs, graph_of, programs, starts, stream, thread

many_examples = settings(max_examples=200)
BY = ("kind", "kernel", "layer", "rank", "operator")
LANES = [thread(1), stream(7), stream(20), stream(7, rank=1)]
HOST, FIRST, SECOND, OTHER_RANK = range(4)

TaskRow = tuple[str, TaskKind, int, int]  # name, kind, lane, duration
EdgeRow = tuple[int, int, int, EdgeKind]  # source, target, lag, kind


def graph_with(tasks: list[TaskRow], edges: list[EdgeRow], **more: Any) -> ExecutionGraph:
    names, kinds, lanes, durations = zip(*tasks, strict=True)
    strings = StringTable()
    columns = {
        "name": np.array([strings.intern(name) if name else -1 for name in names]),
        "kind": np.array(kinds),
        "lane": np.array(lanes),
        "duration_ns": np.array(durations),
        **more.pop("columns", {}),
    }
    table = np.array(edges, np.int64).reshape(-1, 4).T
    of_edges = dict(zip(("source", "target", "lag_ns", "kind"), table, strict=True))
    return ExecutionGraph.from_columns(columns, of_edges, LANES, strings, **more)


def path_of(simulation: Simulation, **options: Any) -> CriticalPath:
    return critical_path(simulation.resolved, simulation.start_ns, simulation.end_ns, **options)


def shown(path: CriticalPath) -> list[tuple[str, int, int]]:
    """Kind, or name where a task runs, and time."""
    rows = path.segments().to_pylist()
    named = [row["name"] if task >= 0 else row["kind"] for row, task in zip(rows, path.task.tolist(), strict=True)]
    return [(name, row["start_ns"], row["end_ns"]) for name, row in zip(named, rows, strict=True)]


def time_by(path: CriticalPath, by: Any) -> dict[str, int]:
    return {row["name"]: row["time_ns"] for row in path.composition(by).to_pylist()}


def covers(path: CriticalPath, begin_ns: int, end_ns: int) -> None:
    """Segments follow each other without gap or overlap, and everything adds up to the nanosecond."""
    assert (path.duration_ns > 0).all()
    assert path.start_ns[1:].tolist() == path.end_ns[:-1].tolist()
    assert path.length_ns == end_ns - begin_ns
    if len(path.start_ns):
        assert (path.start_ns[0], path.end_ns[-1]) == (begin_ns, end_ns)
    for by in BY:
        rows = path.composition(by).to_pylist()
        assert sum(row["time_ns"] for row in rows) == path.length_ns
        assert sum(row["count"] for row in rows) == len(path.task) == path.segments().num_rows
        assert not rows or sum(row["share_pct"] for row in rows) == pytest.approx(100)
        assert len({row["name"] for row in rows}) == len(rows)
    assert 0 <= path.unexplained_ns <= path.copied_ns <= path.length_ns
    assert 0 <= path.copied_share <= 1


# By hand


def launch_graph(gemm_ns: int = 50) -> ExecutionGraph:
    """A call launches two kernels in a row; another stream waits for the second; the host waits for nothing."""
    return graph_with(
        [
            ("aten::mm", TaskKind.OPERATOR, HOST, 10),
            ("gemm", TaskKind.KERNEL, FIRST, gemm_ns),
            ("relu", TaskKind.KERNEL, FIRST, 20),
            ("copy", TaskKind.MEMCPY, SECOND, 30),
            ("aten::add", TaskKind.OPERATOR, HOST, 40),
        ],
        [
            (0, 1, 5, EdgeKind.LAUNCH),
            (1, 2, 2, EdgeKind.ORDER),
            (0, 4, 1, EdgeKind.ORDER),
            (2, 3, 3, EdgeKind.EVENT_WAIT),
        ],
    )


def test_latencies_and_gaps_between_tasks() -> None:
    simulation = simulate(launch_graph())
    path = path_of(simulation)
    assert shown(path) == [
        ("aten::mm", 0, 10),
        ("launch latency", 10, 15),
        ("gemm", 15, 65),
        ("back-to-back gap", 65, 67),
        ("relu", 67, 87),
        ("event wait latency", 87, 90),
        ("copy", 90, 120),
    ]
    assert path.task.tolist() == [0, -1, 1, -1, 2, -1, 3]
    assert path.owner.tolist() == [0, 1, 1, 2, 2, 3, 3]
    assert path.length_ns == simulation.finish_ns == 120
    assert path.copied_ns == path.unexplained_ns == 0
    assert slack(simulation.resolved, simulation.start_ns, simulation.end_ns).tolist() == [0, 0, 0, 0, 69]


def test_rows_of_segments_and_composition() -> None:
    path = path_of(simulate(launch_graph()))
    assert path.segments().to_pylist()[1] == {
        "rank": 0,
        "lane": "device 0 stream 7",
        "kind": "launch latency",
        "name": "gemm",
        "start_ns": 10,
        "end_ns": 15,
        "duration_ns": 5,
        "layer": None,
    }
    assert path.composition("kernel").to_pylist()[0] == {
        "name": "gemm",
        "time_ns": 50,
        "share_pct": pytest.approx(100 * 50 / 120),
        "count": 1,
    }
    latencies = {"launch latency": 5, "event wait latency": 3, "back-to-back gap": 2}
    assert time_by(path, "kernel") == {"gemm": 50, "copy": 30, "relu": 20, "host": 10, **latencies}
    assert time_by(path, "kind") == {"kernel": 70, "memcpy": 30, "operator": 10, **latencies}
    assert time_by(path, "rank") == {"rank 0": 120}
    assert time_by(path, "layer") == time_by(path, "operator") == {"(none)": 120}


def test_path_from_another_task() -> None:
    simulation = simulate(launch_graph())
    assert shown(path_of(simulation, last=4)) == [("aten::mm", 0, 10), ("order lag", 10, 11), ("aten::add", 11, 51)]


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ((12, 66), [("launch latency", 12, 15), ("gemm", 15, 65), ("back-to-back gap", 65, 66)]),
        ((20, 30), [("gemm", 20, 30)]),
        ((67, 87), [("relu", 67, 87)]),
        ((110, 130), [("copy", 110, 120), ("after the last task", 120, 130)]),
        ((-5, 4), [("before the first task", -5, 0), ("aten::mm", 0, 4)]),
        ((-9, -5), [("before the first task", -9, -5)]),
        ((200, 210), [("after the last task", 200, 210)]),
        ((30, 30), []),
    ],
)
def test_windows_clip_the_path(window: tuple[int, int], expected: list[Any]) -> None:
    path = path_of(simulate(launch_graph()), window=window)
    assert shown(path) == expected
    covers(path, *window)


def test_measured_times_have_delays_and_are_cut() -> None:
    # gemm begins 4 later than its launch explains; relu begins 6 before gemm ends.
    start, end = np.array([0, 19, 60, 90, 11]), np.array([10, 66, 85, 120, 51])
    path = critical_path(launch_graph(), start, end)
    assert shown(path) == [
        ("aten::mm", 0, 10),
        ("launch latency", 10, 15),
        ("delay", 15, 19),
        ("gemm", 19, 60),
        ("relu", 60, 85),
        ("event wait latency", 85, 88),
        ("delay", 88, 90),
        ("copy", 90, 120),
    ]
    assert path.copied_ns == path.unexplained_ns == 6
    assert path.copied_share == 6 / 120
    assert time_by(path, "kernel")["delay"] == 6


def test_lag_is_cut_at_the_start() -> None:
    start, end = np.array([0, 12, 67, 90, 11]), np.array([10, 65, 87, 120, 51])  # 2 after a launch that takes 5
    assert shown(critical_path(launch_graph(), start, end, last=1))[:2] == [
        ("aten::mm", 0, 10),
        ("launch latency", 10, 12),
    ]


def test_cause_that_begins_after_what_waited_for_it_takes_no_time() -> None:
    graph = graph_with(
        [(name, TaskKind.OPERATOR, HOST, 10) for name in "abc"], [(0, 1, 0, EdgeKind.DATA), (1, 2, 0, EdgeKind.DATA)]
    )
    path = critical_path(graph, np.array([0, 40, 20]), np.array([10, 50, 60]))
    assert shown(path) == [("a", 0, 10), ("delay", 10, 20), ("c", 20, 60)]


def test_time_before_the_first_task_is_copied() -> None:
    path = critical_path(launch_graph(), np.array([7, 22, 74, 97, 18]), np.array([17, 72, 94, 127, 58]))
    assert shown(path)[0] == ("before the first task", 0, 7)
    assert (path.copied_ns, path.unexplained_ns) == (7, 0)
    assert path.segments().to_pylist()[0]["rank"] is None
    assert time_by(path, "rank") == {"rank 0": 120, "(none)": 7}


def test_copied_and_unexplained_tasks() -> None:
    graph = graph_with(
        [("", TaskKind.START, HOST, 3), ("work", TaskKind.UNEXPLAINED, FIRST, 4), ("work", TaskKind.KERNEL, FIRST, 13)],
        [(0, 1, 0, EdgeKind.LAUNCH), (1, 2, 0, EdgeKind.ORDER)],
    )
    path = path_of(simulate(graph))
    assert (path.copied_ns, path.unexplained_ns, path.copied_share) == (7, 4, 0.35)
    assert time_by(path, "kernel") == {"work": 13, "unexplained": 4, "host": 3}


def test_path_across_ranks() -> None:
    graph = graph_with(
        [
            ("early", TaskKind.KERNEL, FIRST, 10),
            ("late", TaskKind.KERNEL, OTHER_RANK, 30),
            ("all_reduce", TaskKind.RENDEZVOUS, -1, 0),
            ("all_reduce", TaskKind.COLLECTIVE, FIRST, 5),
        ],
        [(0, 2, 0, EdgeKind.COLLECTIVE), (1, 2, 0, EdgeKind.COLLECTIVE), (2, 3, 0, EdgeKind.COLLECTIVE)],
    )
    simulation = simulate(graph)
    path = path_of(simulation)
    assert shown(path) == [("late", 0, 30), ("all_reduce", 30, 35)]
    assert time_by(path, "rank") == {"rank 1": 30, "rank 0": 5}
    assert slack(graph, simulation.start_ns, simulation.end_ns).tolist() == [20, 0, 0, 0]


@pytest.mark.parametrize("priority", [[0, 1, 2, 3], [0, 3, 2, 1]])
def test_of_equal_causes_device_work_is_taken_then_the_smaller_priority(priority: list[int]) -> None:
    ends = [("host", TaskKind.OPERATOR, HOST, 9), ("one", TaskKind.KERNEL, FIRST, 9), ("two", TaskKind.KERNEL, 2, 9)]
    edges = [(at, 3, 0, EdgeKind.DATA) for at in range(3)]
    tasks = [*ends, ("end", TaskKind.KERNEL, FIRST, 1)]
    graph = graph_with(tasks, edges, columns={"priority": np.array(priority)})
    expected = "one" if priority[1] < priority[2] else "two"
    for order in (edges, edges[::-1]):
        other = graph_with(tasks, order, columns={"priority": graph.tasks["priority"]})
        assert shown(path_of(simulate(other)))[0] == (expected, 0, 9)
    assert shown(path_of(simulate(graph_with(ends, [], columns={"priority": np.array(priority[:3])})))) == [
        (expected, 0, 9)
    ]


def test_finish_of_ones_own() -> None:
    simulation = simulate(launch_graph())
    found = slack(simulation.resolved, simulation.start_ns, simulation.end_ns, finish_ns=130)
    assert found.tolist() == [10, 10, 10, 10, 79]


def test_lanes_with_priorities_have_no_delays() -> None:
    lanes = [stream(0, policy=LanePolicy.PRIORITY)]
    simulation = simulate(graph_of([4, 4, 4, 2], [(3, 1, 0)], lanes=lanes, lane=[0, 0, 0, -1], priority=[9, 1, 5, 0]))
    path = path_of(simulation)
    assert path.task.tolist() == [2, 1, 0]
    assert slack(simulation.graph, simulation.start_ns, simulation.end_ns).tolist() == [0, 0, 0, 2]


def test_graph_without_tasks() -> None:
    graph, none = graph_of([]), np.empty(0, np.int64)
    path = critical_path(graph, none, none)
    covers(path, 0, 0)
    assert path.copied_share == 0
    assert slack(graph, none, none).tolist() == []
    covers(critical_path(graph, none, none, window=(3, 9)), 3, 9)


# What is around a task


@pytest.fixture
def nested(tmp_path: Path) -> Job:
    """Two modules in a step, the second in an annotation; times in us."""
    events: list[Event] = [
        step(0, 0, 100),
        {**op("nn.Module: Linear_0", 10, 20), "cat": "python_function"},
        {**op("forward.py(3): forward", 11, 18), "cat": "python_function"},
        op("aten::linear", 12, 10),
        op("aten::mm", 13, 8),
        call("cudaLaunchKernel", 14, 5, 1),
        kernel("gemm", 30, 20, 1),
        {**op("optimizer", 40, 20), "cat": "user_annotation"},
        op("aten::add_", 42, 3),
        op("aten::zero_", 55, 3),
        op("aten::item", 70, 3),
    ]
    return foretrace.read(write(tmp_path / "nested.json", {"traceEvents": events}))


def rows_by_name(job: Job) -> dict[str, int]:
    timeline = job.timelines[0]
    return {name: row for row, name in enumerate(timeline.names(np.arange(timeline.num_events)))}


@pytest.mark.parametrize("ahead_ns", [0, 777])
def test_layers_and_operators(nested: Job, ahead_ns: int) -> None:
    timeline, row = nested.timelines[0], rows_by_name(nested)
    begin = int(timeline.start_ns[row["ProfilerStep#0"]])
    host = timeline.lanes[timeline.events["lane"][row["aten::mm"]]]
    device = timeline.lanes[timeline.events["lane"][row["gemm"]]]
    tasks = [  # name, kind, lane, start, end in us
        ("aten::linear", TaskKind.OPERATOR, 1, 12, 13),
        ("cudaLaunchKernel", TaskKind.RUNTIME, 1, 14, 19),
        ("gemm", TaskKind.KERNEL, 0, 30, 50),
        ("aten::add_", TaskKind.OPERATOR, 1, 50, 53),
        ("", TaskKind.HOST_GAP, 1, 45, 55),  # lasted until the next operator, within the annotation
        ("aten::zero_", TaskKind.OPERATOR, 1, 55, 58),
        ("", TaskKind.HOST_GAP, 1, 58, 70),
        ("aten::item", TaskKind.OPERATOR, 1, 70, 73),
    ]
    measured = [(42, 45) if name == "aten::add_" else (start, end) for name, _, _, start, end in tasks]
    times = begin + 1000 * np.array(measured) - ahead_ns
    strings = StringTable()
    graph = ExecutionGraph.from_columns(
        {
            "name": np.array([strings.intern(name) if name else -1 for name, *_ in tasks]),
            "kind": np.array([kind for _, kind, *_ in tasks]),
            "lane": np.array([lane for _, _, lane, *_ in tasks]),
            "duration_ns": np.diff(times, axis=1)[:, 0],
            "event": np.array([row.get(name, -1) for name, *_ in tasks]),
            "measured_start_ns": times[:, 0],
            "measured_end_ns": times[:, 1],
        },
        {"source": np.arange(7), "target": np.arange(1, 8)},
        [GraphLane(timeline.rank, device), GraphLane(timeline.rank, host)],
        strings,
        source=nested,
    )
    path = path_of(simulate(graph))
    layers = [r["layer"] for r in path.segments().to_pylist()]
    assert layers == ["nn.Module: Linear_0"] * 3 + ["optimizer"] * 3 + [None] * 2
    assert time_by(path, "layer") == {"nn.Module: Linear_0": 26_000, "optimizer": 16_000, "(none)": 15_000}
    assert time_by(path, "operator") == {
        "aten::mm": 25_000,
        "(none)": 22_000,
        "aten::add_": 3000,
        "aten::zero_": 3000,
        "aten::item": 3000,
        "aten::linear": 1000,
    }


@pytest.mark.parametrize("offsets", [None, {0: 5000, 1: -3000}])
def test_linked_job(tmp_path: Path, offsets: dict[int, int] | None) -> None:
    traces = [small_trace(rank, 2, late=100.0 * rank) for rank in range(2)]
    job = foretrace.read([write(tmp_path / f"{rank}.json", trace) for rank, trace in enumerate(traces)])
    graph = link(job, clock_offsets_ns=offsets)
    simulation = simulate(graph)
    path = path_of(simulation)
    covers(path, 0, simulation.finish_ns)
    assert "delay" not in time_by(path, "kind")
    operators = time_by(path, "operator")
    assert "record_param_comms" in operators
    assert set(operators) <= {"aten::mm", "record_param_comms", "(none)"}
    start, end = (graph.tasks[name] - graph.origin_ns for name in ("measured_start_ns", "measured_end_ns"))
    covers(critical_path(simulation.resolved, start, end), 0, int(end.max()))


# On random graphs


@many_examples
@given(dependency_graphs() | programs() | anything())
def test_path_of_a_simulated_run_explains_all_of_it(graph: ExecutionGraph) -> None:
    if starts(graph) is None:
        return
    simulation = simulate(graph)
    path = path_of(simulation)
    covers(path, 0, simulation.finish_ns)
    assert not {"delay", KINDS[-1], KINDS[-2]} & set(time_by(path, "kind"))
    room = slack(simulation.resolved, simulation.start_ns, simulation.end_ns)
    assert (room >= 0).all()
    assert (room[path.owner] == 0).all()


@many_examples
@given(dependency_graphs(), st.data())
def test_shorter_task_with_slack_changes_nothing(graph: ExecutionGraph, data: st.DataObject) -> None:
    before = simulate(graph)
    room = slack(graph, before.start_ns, before.end_ns)
    free = np.flatnonzero(room > 0).tolist()
    duration = graph.tasks["duration_ns"].copy()
    if free:
        duration[data.draw(st.sampled_from(free))] //= 2
    assert simulate(graph, duration).finish_ns == before.finish_ns


@many_examples
@given(dependency_graphs(), st.data())
def test_slack_is_the_room_and_not_more(graph: ExecutionGraph, data: st.DataObject) -> None:
    before = simulate(graph)
    room = slack(graph, before.start_ns, before.end_ns)
    task, over = data.draw(st.integers(0, graph.num_tasks - 1)), data.draw(st.integers(0, 3))
    longer = graph.tasks["duration_ns"].copy()
    longer[task] += room[task] + over
    assert simulate(graph, longer).finish_ns == before.finish_ns + over


@many_examples
@given(dependency_graphs() | programs(), st.data())
def test_order_of_tasks_and_edges_means_nothing(graph: ExecutionGraph, data: st.DataObject) -> None:
    if starts(graph) is None:
        return
    simulation = simulate(graph)
    resolved = simulation.resolved
    order = np.array(data.draw(st.permutations(range(graph.num_tasks))))
    of_edges = np.array(data.draw(st.permutations(range(resolved.num_edges))), np.intp)
    resolved.edges = resolved.edges.take(of_edges)
    other = resolved.permuted(order)  # as any constructor, this sorts the edges
    path = path_of(simulate(graph))
    found = critical_path(other, simulation.start_ns[order], simulation.end_ns[order])
    assert order[found.owner].tolist() == path.owner.tolist()
    assert (found.kind.tolist(), found.start_ns.tolist()) == (path.kind.tolist(), path.start_ns.tolist())
    room = slack(resolved.with_columns(), simulation.start_ns, simulation.end_ns)
    assert slack(other, simulation.start_ns[order], simulation.end_ns[order]).tolist() == room[order].tolist()


@many_examples
@given(dependency_graphs() | programs(policies=(LanePolicy.IN_ORDER,)), st.data())
def test_measured_times_are_covered_exactly(graph: ExecutionGraph, data: st.DataObject) -> None:
    if starts(graph) is None:
        return
    simulation = simulate(graph)
    noise = st.lists(st.integers(-4, 4), min_size=graph.num_tasks, max_size=graph.num_tasks)
    start = simulation.start_ns + np.array(data.draw(noise))
    end = np.maximum(start, simulation.end_ns + np.array(data.draw(noise)))
    last = data.draw(st.none() | st.integers(0, graph.num_tasks - 1))
    if end.max() >= 0 and last is None:
        covers(critical_path(simulation.resolved, start, end), 0, int(end.max()))
    begin = data.draw(st.integers(-5, 30))
    window = (begin, begin + data.draw(st.integers(0, 40)))
    covers(critical_path(simulation.resolved, start, end, last=last, window=window), *window)


@many_examples
@given(dependency_graphs(), st.integers(-5, 40), st.integers(0, 40))
def test_windows_of_simulated_runs_are_parts_of_the_whole(graph: ExecutionGraph, begin: int, length: int) -> None:
    simulation = simulate(graph)
    whole, part = path_of(simulation), path_of(simulation, window=(begin, begin + length))
    covers(part, begin, begin + length)
    at = {
        moment: (kind, task)
        for kind, task, start, end in zip(whole.kind, whole.task, whole.start_ns, whole.end_ns, strict=True)
        for moment in range(start, end)
    }
    for kind, task, start, end in zip(part.kind, part.task, part.start_ns, part.end_ns, strict=True):
        for moment in range(max(start, 0), min(end, simulation.finish_ns)):
            assert at[moment] == (kind, task)


# What is refused, and what it costs


def test_open_waits_are_refused() -> None:
    graph = graph_of([1, 1], [(0, 1, 0)], [(1, 0, 0)], lanes=[stream(7)])
    times = np.array([0, 1]), np.array([1, 2])
    for ask in (critical_path, slack):
        with pytest.raises(GraphError, match="1 waits are open"):
            ask(graph, *times)


def test_circles_are_refused() -> None:
    graph = graph_of([1, 1, 1], [(0, 1, 0), (1, 0, 0), (1, 2, 0)])
    times = np.array([5, 6, 7]), np.array([6, 7, 8])
    with pytest.raises(GraphError, match=r"wait for each other on the way back from .*task 2"):
        critical_path(graph, *times, window=(0, 8))
    with pytest.raises(GraphError, match="3 tasks wait for each other"):
        slack(graph, *times)


def test_what_does_not_fit_is_refused() -> None:
    graph, times = graph_of([1, 1]), (np.array([0, 0]), np.array([1, 1]))
    with pytest.raises(ValueError, match="must be 2 numbers each"):
        critical_path(graph, times[0], np.array([1]))
    with pytest.raises(ValueError, match="last is 2, must be a task from 0 to 1"):
        critical_path(graph, *times, last=2)
    with pytest.raises(ValueError, match="the window ends at 3, before it begins at 4"):
        critical_path(graph, *times, window=(4, 3))
    with pytest.raises(ValueError, match="by is 'colour', must be one of kind, kernel, layer, rank, operator"):
        critical_path(graph, *times).composition("colour")  # type: ignore[arg-type]


def test_import_does_not_load_the_compiler() -> None:
    code = "import sys, foretrace.analyze.critical_path; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
