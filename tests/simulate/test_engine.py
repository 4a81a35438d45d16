"""The event engine: against a plain twin, by its invariances, and in what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.simulate import simulate
from foretrace.trace import (
    Category,
    EdgeKind,
    ExecutionGraph,
    GraphError,
    GraphLane,
    Lane,
    LaneKind,
    LanePolicy,
    StringTable,
    Table,
    TaskKind,
)
from tests.simulate.twin import twin_starts

Rows = list[tuple[int, ...]]
WAIT_COLUMNS = ("task", "issue", "lane")
LAUNCHED_COLUMNS = ("issue", "work", "lane", "position")
many_examples = settings(max_examples=120)
small_times = st.integers(0, 5)  # so small that many things happen at one moment


def columns(rows: Rows, names: tuple[str, ...], dtype: type = np.int32) -> dict[str, np.ndarray]:
    values = np.array(rows, np.int64).reshape(-1, len(names))
    return {name: values[:, at].astype(dtype) for at, name in enumerate(names)}


def thread(number: int, rank: int = 0, policy: LanePolicy = LanePolicy.IN_ORDER) -> GraphLane:
    return GraphLane(rank, Lane(LaneKind.HOST_THREAD, "1", str(number)), policy)


def stream(number: int, rank: int = 0, policy: LanePolicy = LanePolicy.IN_ORDER) -> GraphLane:
    return GraphLane(rank, Lane(LaneKind.DEVICE_STREAM, "0", f"stream {number}", 0, number), policy)


def graph_of(
    durations: list[int],
    edges: Rows = (),
    waits: Rows = (),
    launched: Rows = (),
    lanes: list[GraphLane] | None = None,
    names: list[str] | None = None,
    **tasks: Any,
) -> ExecutionGraph:
    """Edges are (source, target, lag), waits (task, issue, lane), launched (issue, work, lane, position)."""
    strings = StringTable()
    if names:
        tasks["name"] = strings.intern_all(names)
    return ExecutionGraph.from_columns(
        {"duration_ns": np.array(durations, np.int64), **{name: np.array(values) for name, values in tasks.items()}},
        columns(list(edges), ("source", "target", "lag_ns"), np.int64),
        lanes,
        strings,
        waits=Table(columns(list(waits), WAIT_COLUMNS)),
        launched=Table(columns(list(launched), LAUNCHED_COLUMNS)),
    )


def starts(graph: ExecutionGraph) -> list[int] | None:
    """Start of each task, or nothing where tasks wait for each other."""
    try:
        return simulate(graph).start_ns.tolist()
    except GraphError:
        return None


def by_time(graph: ExecutionGraph) -> ExecutionGraph:
    """The same graph with one more lane, unused, for whose priorities it is visited in order of time."""
    more = graph.with_columns()
    more.lanes = [*graph.lanes, stream(99, policy=LanePolicy.PRIORITY)]
    return more


def pairs(count: int) -> st.SearchStrategy[tuple[int, int]]:
    """Two of the tasks, the earlier first."""
    return st.tuples(st.integers(0, count - 2), st.integers(1, count - 1)).map(
        lambda pair: (pair[0], pair[1]) if pair[0] < pair[1] else (pair[1] - 1, pair[0] + 1)
    )


@st.composite
def edge_rows(draw: st.DrawFn, count: int, max_lag: int) -> Rows:
    """Edges from earlier to later tasks."""
    drawn = draw(st.lists(st.tuples(pairs(count), st.integers(0, max_lag)), max_size=40))
    return [(source, target, lag) for (source, target), lag in drawn]


@st.composite
def dependency_graphs(draw: st.DrawFn, max_lag: int = 5) -> ExecutionGraph:
    """Any acyclic graph, with no lanes; its tasks are in no particular order."""
    durations = draw(st.lists(small_times, min_size=2, max_size=20))
    graph = graph_of(durations, draw(edge_rows(len(durations), max_lag)))
    return graph.permuted(np.array(draw(st.permutations(range(len(durations))))))


@st.composite
def anything(draw: st.DrawFn) -> ExecutionGraph:
    """Acyclic edges with waits, launches and lanes of both policies thrown in; some of these cannot run to the end."""
    durations = draw(st.lists(small_times, min_size=2, max_size=20))
    count = len(durations)
    policies = draw(st.lists(st.sampled_from(LanePolicy), min_size=1, max_size=4))
    lane_ids = st.integers(0, len(policies) - 1)
    waits = draw(st.lists(st.tuples(pairs(count), lane_ids), max_size=6))
    launched = draw(st.lists(st.tuples(pairs(count), lane_ids, st.integers(0, 9)), max_size=10))
    graph = graph_of(
        durations,
        # As in a program, a blocking call is issued before it returns.
        draw(edge_rows(count, max_lag=5)) + [(issue, task, 0) for (issue, task), _ in waits],
        [(task, issue, lane) for (issue, task), lane in waits],
        [(issue, work, lane, position) for (issue, work), lane, position in launched],
        [stream(at, policy=policy) for at, policy in enumerate(policies)],
        lane=draw(st.lists(st.integers(-1, len(policies) - 1), min_size=count, max_size=count)),
        priority=draw(st.permutations(range(count))),
    )
    return graph.permuted(np.array(draw(st.permutations(range(count)))))


class Program:
    """Threads that compute, launch work on streams and block until a stream is empty, as a graph."""

    def __init__(self, threads: int, streams: int, policy: LanePolicy = LanePolicy.IN_ORDER) -> None:
        self.lanes = [thread(at) for at in range(threads)]
        self.lanes += [stream(at, policy=policy) for at in range(streams)]
        self.threads, self.in_order = threads, policy is LanePolicy.IN_ORDER
        self.durations, self.lane_of = [], []
        self.edges, self.waits, self.launched = [], [], []
        self.last: dict[int, int] = {}
        self.length = [0] * len(self.lanes)

    def add(self, lane: int, duration: int, gap: int = 0, ordered: bool = True) -> int:
        task = len(self.durations)
        self.durations.append(duration)
        self.lane_of.append(lane)
        if ordered and lane in self.last:
            self.edges.append((self.last[lane], task, gap))
        self.last[lane] = task
        return task

    def launch(self, on: int, to: int, call_ns: int, latency_ns: int, work_ns: int) -> None:
        call, to = self.add(on, call_ns), self.threads + to
        work = self.add(to, work_ns, ordered=self.in_order)
        self.edges.append((call, work, latency_ns))
        self.launched.append((call, work, to, self.length[to]))
        self.length[to] += 1

    def block(self, on: int, stream: int, issue_ns: int, return_ns: int) -> None:
        issue, back = self.add(on, issue_ns), self.add(on, return_ns)
        self.waits.append((back, issue, self.threads + stream))

    def graph(self, priority: list[int] | None = None) -> ExecutionGraph:
        more = {} if priority is None else {"priority": priority}
        return graph_of(self.durations, self.edges, self.waits, self.launched, self.lanes, lane=self.lane_of, **more)


@st.composite
def programs(draw: st.DrawFn, max_threads: int = 3, policies: tuple[LanePolicy, ...] = tuple(LanePolicy)) -> Any:
    threads, streams = draw(st.integers(1, max_threads)), draw(st.integers(1, 3))
    program = Program(threads, streams, draw(st.sampled_from(policies)))
    thread_ids, stream_ids = st.integers(0, threads - 1), st.integers(0, streams - 1)
    step = st.tuples(st.sampled_from(("work", "launch", "launch", "block")), thread_ids, stream_ids, *[small_times] * 3)
    for what, on, to, first, second, third in draw(st.lists(step, min_size=1, max_size=16)):
        if what == "work":
            program.add(on, first, gap=second)
        elif what == "launch":
            program.launch(on, to, first, second, 2 * third)
        else:
            program.block(on, to, first, second)
    return program.graph(draw(st.permutations(range(len(program.durations)))))


def agrees_with_twin(graph: ExecutionGraph) -> None:
    expected = twin_starts(graph)
    if len(expected) == graph.num_tasks:
        assert simulate(graph).start_ns.tolist() == [expected[task] for task in range(graph.num_tasks)]
    else:
        stuck = graph.num_tasks - len(expected)
        with pytest.raises(GraphError, match=rf"deadlock: {stuck} of {graph.num_tasks} tasks can never start"):
            simulate(graph)


# The engine and its twin


@many_examples
@given(dependency_graphs(max_lag=0) | dependency_graphs())
def test_dependencies_run_as_in_the_twin(graph: ExecutionGraph) -> None:
    agrees_with_twin(graph)


@many_examples
@given(programs())
def test_launches_and_blocking_calls_run_as_in_the_twin(graph: ExecutionGraph) -> None:
    agrees_with_twin(graph)


@many_examples
@given(anything())
def test_any_graph_runs_as_in_the_twin(graph: ExecutionGraph) -> None:
    agrees_with_twin(graph)


@pytest.mark.parametrize("seed", range(3))
def test_long_program_runs_as_in_the_twin(seed: int) -> None:
    random = np.random.default_rng(seed)
    program = Program(threads=3, streams=4, policy=LanePolicy(seed % 2))
    for _ in range(2000):
        on, to = int(random.integers(3)), int(random.integers(4))
        first, second, third = random.integers(0, 50, 3).tolist()
        if random.random() < 0.9:
            program.launch(on, to, first, second, third)
        else:
            program.block(on, on, first, second)  # each thread its own stream: nothing can lock
    agrees_with_twin(program.graph(random.permutation(len(program.durations)).tolist()))


# A few answers by hand


def test_lags_and_joins() -> None:
    # 0 (3) -> 2 after 4 more; 1 (5) -> 2; 2 (1) -> 3
    graph = graph_of([3, 5, 1, 0], [(0, 2, 4), (1, 2, 0), (2, 3, 0)])
    simulation = simulate(graph)
    assert simulation.start_ns.tolist() == [0, 0, 7, 8]
    assert simulation.end_ns.tolist() == [3, 5, 8, 8]
    assert simulation.finish_ns == 8


def test_blocking_call_waits_for_what_was_launched_when_it_started() -> None:
    program = Program(threads=2, streams=1)
    program.launch(on=0, to=0, call_ns=1, latency_ns=2, work_ns=10)  # tasks 0 and 1: ends at 13
    program.block(on=0, stream=0, issue_ns=1, return_ns=1)  # tasks 2 and 3: looks at 1
    program.add(lane=1, duration=5)  # task 4
    program.launch(on=1, to=0, call_ns=1, latency_ns=0, work_ns=10)  # tasks 5 and 6: launched at 5, too late to count
    simulation = simulate(program.graph())
    assert simulation.start_ns.tolist() == [0, 3, 1, 13, 0, 5, 13]
    assert simulation.wait_source.tolist() == [1]


def test_blocking_call_waits_for_what_is_launched_at_the_same_moment() -> None:
    program = Program(threads=2, streams=1)
    program.block(on=0, stream=0, issue_ns=1, return_ns=1)
    program.launch(on=1, to=0, call_ns=1, latency_ns=0, work_ns=7)
    assert simulate(program.graph()).start_ns.tolist() == [0, 8, 0, 1]


@pytest.mark.parametrize(("first_looks_first", "second_returns"), [(True, 7), (False, 0)])
def test_blocking_calls_of_one_moment_look_in_order_of_priority(first_looks_first: bool, second_returns: int) -> None:
    program = Program(threads=2, streams=2)
    program.block(on=0, stream=0, issue_ns=0, return_ns=0)
    program.launch(on=0, to=1, call_ns=0, latency_ns=0, work_ns=7)  # as soon as the first call is back
    program.block(on=1, stream=1, issue_ns=0, return_ns=0)  # tasks 4 and 5
    graph = program.graph([0, 1, 2, 3, 4, 5] if first_looks_first else [4, 1, 2, 3, 0, 5])
    for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]):
        assert starts(graph.permuted(np.array(order)))[order.index(5)] == second_returns


def test_blocking_call_on_an_empty_stream_goes_on() -> None:
    program = Program(threads=1, streams=1)
    program.block(on=0, stream=0, issue_ns=4, return_ns=1)
    simulation = simulate(program.graph())
    assert simulation.start_ns.tolist() == [0, 4]
    assert simulation.wait_source.tolist() == [-1]


def test_priority_lane_runs_one_at_a_time_the_smallest_number_first() -> None:
    lanes = [stream(0, policy=LanePolicy.PRIORITY)]
    graph = graph_of([4, 4, 4, 2], [(3, 1, 0)], lanes=lanes, lane=[0, 0, 0, -1], priority=[9, 1, 5, 0])
    assert simulate(graph).start_ns.tolist() == [8, 4, 0, 0]  # task 1 is ready at 2, and none is interrupted


@pytest.mark.parametrize("lanes", [[], [stream(0, policy=LanePolicy.PRIORITY)]])
def test_graph_without_tasks(lanes: list[GraphLane]) -> None:
    assert simulate(graph_of([], lanes=lanes)).finish_ns == 0


def test_other_durations_than_the_graphs() -> None:
    graph = graph_of([1, 1], [(0, 1, 0)])
    assert simulate(graph, np.array([5, 6])).end_ns.tolist() == [5, 11]
    assert simulate(graph).end_ns.tolist() == [1, 2]


# What must not change the answer, or change it in a known way


@many_examples
@given(dependency_graphs())
def test_order_of_time_and_order_of_dependencies_agree(graph: ExecutionGraph) -> None:
    assert starts(by_time(graph)) == starts(graph)


@many_examples
@given(programs(policies=(LanePolicy.IN_ORDER,)))
def test_resolved_waits_as_edges_give_the_same_run(graph: ExecutionGraph) -> None:
    if starts(graph) is not None:
        simulation = simulate(graph)
        assert simulation.resolved.waits.num_rows == 0
        assert starts(simulation.resolved) == simulation.start_ns.tolist()


@many_examples
@given(anything() | programs(), st.sampled_from((2, 3, 10)))
def test_scaled_times_scale_every_start(graph: ExecutionGraph, factor: int) -> None:
    scaled = graph.with_columns(
        {"duration_ns": factor * graph.tasks["duration_ns"]}, {"lag_ns": factor * graph.edges["lag_ns"]}
    )
    before = starts(graph)
    assert starts(scaled) == (None if before is None else [factor * start for start in before])


@many_examples
@given(anything() | programs(), st.data())
def test_order_of_tasks_means_nothing(graph: ExecutionGraph, data: st.DataObject) -> None:
    order = np.array(data.draw(st.permutations(range(graph.num_tasks))))
    before = starts(graph)
    assert starts(graph.permuted(order)) == (None if before is None else [before[task] for task in order])


@many_examples
@given(anything() | programs(), st.randoms())
def test_order_of_edges_waits_and_launches_means_nothing(graph: ExecutionGraph, random: Any) -> None:
    position = np.arange(graph.launched.num_rows)  # two launches in one place would leave it to their order
    graph.launched = Table({**graph.launched, "position": position.astype(np.int32)})
    before = starts(graph)
    for name in ("edges", "waits", "launched"):
        table = getattr(graph, name)
        setattr(graph, name, table.take(np.array(random.sample(range(table.num_rows), table.num_rows), np.intp)))
    assert starts(graph.with_columns()) == before


# With several threads a faster task may launch earlier, and a blocking call then has more to wait for.
@many_examples
@given(dependency_graphs() | programs(max_threads=1, policies=(LanePolicy.IN_ORDER,)), st.data())
def test_faster_task_never_delays_the_finish(graph: ExecutionGraph, data: st.DataObject) -> None:
    slow = graph.tasks["duration_ns"]
    fast = slow.copy()
    task = data.draw(st.integers(0, graph.num_tasks - 1))
    fast[task] = data.draw(st.integers(0, int(slow[task])))
    assert (simulate(graph, fast).start_ns <= simulate(graph, slow).start_ns).all()
    assert simulate(graph, fast).finish_ns <= simulate(graph, slow).finish_ns


# What is refused


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"edges": [(0, 1, 0), (1, 1, 0)]}, r"edge 1: 'operator' \(task 1, no lane\) waits for itself"),
        ({"durations": [1, -3]}, "task 1: duration_ns is -3, must be at least 0"),
        ({"edges": [(0, 1, -2)]}, "edge 0: lag_ns is -2, must be at least 0"),
        ({"edges": [(0, 2, 0)]}, "edge 0: target is 2, must be from 0 to 1"),
        ({"edges": [(-1, 1, 0)]}, "edge 0: source is -1, must be from 0 to 1"),
        ({"lane": [-1, 1]}, "task 1: lane is 1, must be from -1 to 0"),
        ({"lane": [-2, 0]}, "task 0: lane is -2, must be from -1 to 0"),
        ({"waits": [(2, 0, 0)]}, "wait 0: task is 2, must be from 0 to 1"),
        ({"waits": [(1, -1, 0)]}, "wait 0: issue is -1, must be from 0 to 1"),
        ({"waits": [(1, 0, 1)]}, "wait 0: lane is 1, must be from 0 to 0"),
        ({"launched": [(5, 0, 0, 0)]}, "launched 0: issue is 5, must be from 0 to 1"),
        ({"launched": [(0, 1, 0, 0), (0, 7, 0, 1)]}, "launched 1: work is 7, must be from 0 to 1"),
        ({"launched": [(0, 1, -1, 0)]}, "launched 0: lane is -1, must be from 0 to 0"),
    ],
)
def test_wrong_graph_is_refused_with_the_reason(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(GraphError, match=reason):
        graph_of(**{"durations": [1, 1], "lanes": [thread(1)], **wrong})


@pytest.mark.parametrize("durations", [[1], [1, 1, 1], [1, -1]])
def test_wrong_durations_are_refused(durations: list[int]) -> None:
    with pytest.raises(GraphError, match="durations must be 2 numbers of at least 0"):
        simulate(graph_of([1, 1]), np.array(durations))


@pytest.mark.parametrize("prepare", [lambda graph: graph, by_time])
def test_cycle_is_refused_with_its_chain(prepare: Any) -> None:
    graph = graph_of([1] * 5, [(0, 1, 0), (1, 2, 0), (2, 3, 0), (3, 1, 0), (3, 4, 0)], names=list("abcde"))
    with pytest.raises(GraphError, match=r"deadlock: 4 of 5 tasks can never start\. 3 of them ") as caught:
        simulate(prepare(graph))
    chain = str(caught.value).split("wait for each other: ")[1]
    names = [link.split("'")[1] for link in chain.split(" -> ")[:3]]
    assert "".join(names) in ("bcd", "cdb", "dbc")
    assert chain.endswith("-> (back to the first)")


def test_long_cycle_is_shown_in_part() -> None:
    count = 20
    graph = graph_of([1] * count, [(at, (at + 1) % count, 0) for at in range(count)])
    with pytest.raises(GraphError, match=r"20 of them .* -> \.\.\. 8 more -> \(back to the first\)"):
        simulate(graph)


def test_blocking_call_that_its_own_device_work_needs_is_a_deadlock() -> None:
    graph = graph_of(
        [1, 1, 1],
        [(0, 2, 0), (0, 1, 0), (1, 2, 0)],  # the work needs the call's return
        waits=[(1, 0, 1)],
        launched=[(0, 2, 1, 0)],
        lanes=[thread(1), stream(7)],
        lane=[0, 0, 1],
        names=["issue", "return", "work"],
    )
    with pytest.raises(GraphError, match="deadlock: 2 of 3 tasks can never start") as caught:
        simulate(graph)
    message = str(caught.value)
    assert "'return' (task 1, rank 0 thread 1)" in message
    assert "'work' (task 2, rank 0 device 0 stream 7)" in message
    assert "'issue'" not in message


def test_deadlock_across_ranks_names_tasks_and_ranks() -> None:
    graph = graph_of(
        [1, 1, 1, 1, 1],
        [(0, 1, 0), (1, 2, 0), (2, 3, 0), (3, 0, 0)],
        lanes=[thread(1, rank=0), thread(1, rank=3), thread(1, rank=5)],
        lane=[0, 0, 1, 1, 2],
        names=["send", "wait", "receive", "reply", "free"],
    )
    with pytest.raises(GraphError, match=r"4 of them \(ranks \[0, 3\]\) wait for each other") as caught:
        simulate(graph)
    message = str(caught.value)
    for link in (
        "'send' (task 0, rank 0 thread 1) -> 'wait' (task 1, rank 0 thread 1)",
        "'receive' (task 2, rank 3 thread 1) -> 'reply' (task 3, rank 3 thread 1)",
    ):
        first, second = link.split(" -> ")
        assert link in message or (message.index(second) < message.index(first))
    assert "'free'" not in message


# Timelines of a graph that no trace gave


def two_ranks() -> ExecutionGraph:
    """On each rank an operator in two parts, which launches a kernel in between, and then a copy."""
    lanes = [lane for rank in (0, 4) for lane in (thread(1, rank), stream(7, rank))]
    kinds = [
        TaskKind.OPERATOR,
        TaskKind.RUNTIME,
        TaskKind.OPERATOR,
        TaskKind.HOST_GAP,
        TaskKind.KERNEL,
        TaskKind.MEMCPY,
    ]
    edges = [(0, 1, 0), (1, 2, 0), (2, 3, 0), (1, 4, 5), (4, 5, 1)]
    graph = graph_of(
        [10, 4, 6, 3, 50, 20, 20, 4, 6, 3, 50, 20],
        edges + [(source + 6, target + 6, lag) for source, target, lag in edges],
        launched=[(1, 4, 1, 0), (1 + 6, 4 + 6, 3, 0)],
        lanes=lanes,
        names=["mm", "launch", "mm", "gap", "gemm", "copy"] * 2,
        kind=kinds * 2,
        lane=[0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3],
        event=[0, -1, 0, -1, -1, -1] * 2,
    )
    graph.origin_ns = 1000
    return graph


def test_simulated_timelines_show_one_event_a_task() -> None:
    job = simulate(two_ranks()).job
    assert job.ranks == [0, 4] and job.world_size == 2
    expected = {
        0: {"mm": (1000, 20), "launch": (1010, 4), "gemm": (1019, 50), "copy": (1070, 20)},
        4: {"mm": (1000, 30), "launch": (1020, 4), "gemm": (1029, 50), "copy": (1080, 20)},
    }
    categories = {
        "mm": Category.OPERATOR,
        "launch": Category.RUNTIME,
        "gemm": Category.KERNEL,
        "copy": Category.MEMCPY,
    }
    for timeline in job:
        times = zip(timeline.start_ns.tolist(), timeline.duration_ns.tolist(), strict=True)
        names = timeline.events.texts("name")
        assert dict(zip(names, times, strict=True)) == expected[timeline.rank]
        assert timeline.num_events == 4  # the gap is no event, and the operator's parts are one
        assert dict(zip(names, timeline.category.tolist(), strict=True)) == categories
        assert timeline.lanes == [thread(1).lane, stream(7).lane]
        lanes = dict(zip(names, timeline.events["lane"].tolist(), strict=True))
        assert lanes == {"mm": 0, "launch": 0, "gemm": 1, "copy": 1}
        assert timeline.report.kind == "simulated"


def test_simulated_launch_and_its_work_share_a_correlation() -> None:
    for timeline in simulate(two_ranks()).job:
        correlation = dict(zip(timeline.events.texts("name"), timeline.events["correlation"].tolist(), strict=True))
        assert correlation["launch"] == correlation["gemm"] >= 0
        assert correlation["mm"] == correlation["copy"] == -1


@settings(max_examples=50)
@given(programs())
def test_simulated_events_are_where_the_tasks_ran(graph: ExecutionGraph) -> None:
    if starts(graph) is None:
        return
    graph = graph.with_columns({"kind": np.where(graph.on_device, TaskKind.KERNEL, TaskKind.RUNTIME).astype(np.int8)})
    simulation = simulate(graph)
    (timeline,) = simulation.job
    columns = (timeline.start_ns, timeline.duration_ns, timeline.events["lane"])
    expected = (simulation.start_ns, simulation.duration_ns, graph.tasks["lane"])
    assert sorted(zip(*map(np.ndarray.tolist, columns), strict=True)) == sorted(
        zip(*map(np.ndarray.tolist, expected), strict=True)
    )


def test_rank_without_tasks_has_an_empty_timeline() -> None:
    graph = graph_of([1], lanes=[thread(1), thread(1, rank=1)], lane=[0], kind=[TaskKind.RUNTIME])
    assert [timeline.num_events for timeline in simulate(graph).job] == [1, 0]


def test_edges_are_counted_by_kind() -> None:
    graph = graph_of([1, 1, 1], [(0, 1, 0), (1, 2, 0)], waits=[(2, 0, 0)], lanes=[stream(0)])
    graph = graph.with_columns(edges={"confidence": np.array([1, 0.5], np.float32)})
    data = EdgeKind.DATA.label
    assert graph.count_edges() == {"recorded": {data: 1, "sync_while_simulating": 1}, "inferred": {data: 1}}
