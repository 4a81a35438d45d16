"""Timelines whose waits between streams are known: simulated programs, written down as a profiler would see them.

A program is a list of threads that launch work on streams, record events and wait for them. The timeline shows the
calls but neither streams nor ids of record and wait, as real traces do not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from foretrace.simulate import simulate
from foretrace.trace import (
    Category,
    EdgeKind,
    ExecutionGraph,
    GraphLane,
    Lane,
    LaneKind,
    StringTable,
    Table,
    TaskKind,
    Timeline,
)

LATENCY_NS, GAP_NS, WAIT_NS = 6_000, 1_000, 1_500
_COLUMNS = ("kind", "name", "duration_ns", "lane")
COMPUTE, GATHER, SCATTER, COPY = 7, 20, 24, 13


@dataclass
class Known:
    """A timeline, its true waits as pairs of event rows, and which of them delayed their target by more than 10 us."""

    timeline: Timeline
    waits: np.ndarray
    binds: np.ndarray


@dataclass
class Program:
    """Builds a graph in the order in which a program would make its calls."""

    seed: int
    with_calls: bool = True
    tasks: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in _COLUMNS})
    edges: list[tuple[int, int, int, int]] = field(default_factory=list)
    launched: list[tuple[int, int, int, int]] = field(default_factory=list)
    lanes: list[GraphLane] = field(default_factory=list)
    true: list[tuple[int, int]] = field(default_factory=list)
    hidden: list[int] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.strings = StringTable()
        self._lane: dict[object, int] = {}
        self._last: dict[int, int] = {}
        self._waiting: dict[int, list[int]] = {}
        self._count: dict[int, int] = {}

    def lane(self, key: object) -> int:
        """Streams are numbers, threads are names."""
        if key not in self._lane:
            self._lane[key] = len(self.lanes)
            is_stream = isinstance(key, int)
            kind = LaneKind.DEVICE_STREAM if is_stream else LaneKind.HOST_THREAD
            device, stream = (0, key) if is_stream else (-1, -1)
            self.lanes.append(GraphLane(0, Lane(kind, "0" if is_stream else "1", str(key), device, stream)))
        return self._lane[key]

    def jitter(self, mean_ns: float) -> int:
        return int(mean_ns * self.random.uniform(0.8, 1.25))

    def _add(self, kind: TaskKind, name: str, duration: int, lane: int, lag: int = 0) -> int:
        task = len(self.tasks["kind"])
        row = {"kind": int(kind), "name": self.strings.intern(name), "duration_ns": duration, "lane": lane}
        for column, value in row.items():
            self.tasks[column].append(value)
        if lane in self._last:
            self.edges.append((self._last[lane], task, lag, EdgeKind.ORDER))
        self._last[lane] = task
        return task

    def host(self, thread: str, mean_ns: float, name: str = "aten::op") -> int:
        return self._add(TaskKind.OPERATOR, name, self.jitter(mean_ns), self.lane(thread))

    def call(self, thread: str, name: str, mean_ns: float = 3_000) -> int:
        return self._add(TaskKind.RUNTIME, name, self.jitter(mean_ns), self.lane(thread))

    def launch(self, thread: str, stream: int, name: str, mean_ns: float, host_ns: float = 8_000) -> int:
        """An operator, its launch call, and the work; the first work after waits has to wait."""
        self.host(thread, host_ns)
        on, copy = self.lane(stream), name.startswith("Memcpy")
        # A launch hands its work over when it starts: what is before it on the thread is done.
        before = self._last[self.lane(thread)]
        issue = self.call(thread, "cudaMemcpyAsync" if copy else "cudaLaunchKernel", 5_000)
        work = self._add(TaskKind.MEMCPY if copy else TaskKind.KERNEL, name, self.jitter(mean_ns), on, GAP_NS)
        self.edges.append((before, work, LATENCY_NS, EdgeKind.LAUNCH))
        for source in self._waiting.pop(stream, []):
            self.edges.append((source, work, WAIT_NS, EdgeKind.EVENT_WAIT))
            self.true.append((source, work))
        self._count[on] = self._count.get(on, -1) + 1
        self.launched.append((issue, work, on, self._count[on]))
        return work

    def record(self, thread: str, stream: int) -> int | None:
        """An event on a stream: the last work on it, None before any."""
        task = self.call(thread, "cudaEventRecord", 2_000)
        self.hidden += [] if self.with_calls else [task]
        return self._last.get(self.lane(stream))

    def wait(self, thread: str, stream: int, event: int | None) -> None:
        """Let the next work on a stream wait for an event."""
        task = self.call(thread, "cudaStreamWaitEvent", 2_000)
        self.hidden += [] if self.with_calls else [task]
        if event is not None:
            self._waiting.setdefault(stream, []).append(event)

    def after(self, thread: str, task: int) -> None:
        """A thread goes on when a task of another one has ended."""
        woken = self.host(thread, 2_000, "wake")
        self.edges.append((task, woken, 0, EdgeKind.HANDOFF))

    def last(self, thread: str) -> int:
        return self._last[self.lane(thread)]

    def timeline(self) -> Known:
        """The simulated timeline, its waits, and which of them bind."""
        count = len(self.tasks["kind"])
        tasks = {name: np.array(column) for name, column in self.tasks.items()} | {"event": np.arange(count)}
        source, target, lag, kind = (np.array(column) for column in zip(*self.edges, strict=True))
        graph = ExecutionGraph.from_columns(
            tasks, {"source": source, "target": target, "lag_ns": lag, "kind": kind}, self.lanes, self.strings
        )
        columns = np.array(self.launched, np.int32).T
        graph.launched = Table(dict(zip(("issue", "work", "lane", "position"), columns, strict=True)))
        simulation = simulate(graph)
        timeline = self._with_steps(simulation.job.timelines[0])
        keep = np.ones(timeline.num_events, np.bool_)
        keep[self.hidden] = False
        row = np.cumsum(keep) - 1
        timeline.events = timeline.events.take(keep)
        edges = np.array(self.true, np.int64).reshape(-1, 2)
        start, end = simulation.start_ns, simulation.end_ns
        others = np.full(count, -1, np.int64)
        plain = kind != EdgeKind.EVENT_WAIT
        np.maximum.at(others, target[plain], end[source[plain]] + lag[plain])
        binds = start[edges[:, 1]] - end[edges[:, 0]] <= 2 * WAIT_NS
        binds &= start[edges[:, 1]] - others[edges[:, 1]] > 10_000
        return Known(timeline, row[edges], binds)

    def _with_steps(self, timeline: Timeline) -> Timeline:
        first, last = (np.array(column) for column in zip(*self.steps, strict=True))
        number = len(first)
        more = {
            "name": timeline.strings.intern_all([f"ProfilerStep#{at}" for at in range(number)]),
            "category_name": np.full(number, -1, np.int32),
            "category": np.full(number, Category.ANNOTATION, np.int8),
            "lane": np.full(number, timeline.events["lane"][first[0]], np.int32),
            "start_ns": timeline.start_ns[first],
            "duration_ns": timeline.end_ns[last] - timeline.start_ns[first],
            "correlation": np.full(number, -1),
            "external_id": np.full(number, -1),
        }
        columns = {name: np.concatenate((column, more[name])) for name, column in timeline.events.items()}
        return Timeline(Table(columns, timeline.events.strings), timeline.lanes, timeline.strings)


def _all_reduce(program: Program, thread: str, size: float) -> int | None:
    """As a collective library does it: its stream waits for the compute stream, and an event marks the end."""
    program.wait(thread, GATHER, program.record(thread, COMPUTE))
    program.launch(thread, GATHER, "ncclDevKernel_AllReduce_Sum_f16_RING_LL(args)", size)
    return program.record(thread, GATHER)


def ddp_overlap(seed: int, steps: int = 5, buckets: int = 8, *, with_calls: bool = True) -> Known:
    """Buckets are reduced while the backward pass goes on; all are waited for before the optimizer."""
    program = Program(seed, with_calls)
    sizes, costs = program.random.uniform(5e4, 6e5, buckets), program.random.uniform(1e4, 1.2e5, (buckets, 4))
    for _ in range(steps):
        first = program.host("main", 20_000)
        for cost in costs.ravel():
            program.launch("main", COMPUTE, "gemm", cost / 2)
        program.after("autograd", program.last("main"))
        events = []
        for bucket, size in zip(costs, sizes, strict=True):
            for cost in bucket:
                program.launch("autograd", COMPUTE, "gemm", cost)
            events.append(_all_reduce(program, "autograd", size))
        program.after("main", program.last("autograd"))
        for event in events:
            program.wait("main", COMPUTE, event)
        for _ in range(buckets):
            program.launch("main", COMPUTE, "multi_tensor_apply_kernel", 20_000)
        program.steps.append((first, program.host("main", 20_000)))
    return program.timeline()


def fsdp_prefetch(seed: int, steps: int = 5, layers: int = 12, *, with_calls: bool = True) -> Known:
    """Weights of the next layer are gathered while this one computes; gradients are scattered behind it."""
    program = Program(seed, with_calls)
    gather, cost = program.random.uniform(4e4, 4e5, layers), program.random.uniform(2e4, 2e5, (layers, 3))

    def gathered(layer: int) -> int | None:
        program.wait("main", GATHER, program.record("main", COMPUTE))
        program.launch("main", GATHER, "ncclDevKernel_AllGather_RING_LL(args)", gather[layer])
        return program.record("main", GATHER)

    for _ in range(steps):
        first = program.host("main", 20_000)
        ready = gathered(0)
        for layer in range(layers):
            following = gathered(layer + 1) if layer + 1 < layers else None
            program.wait("main", COMPUTE, ready)
            for kernel in cost[layer]:
                program.launch("main", COMPUTE, "gemm", kernel)
            ready = following
        for layer in range(layers):
            for kernel in cost[layer]:
                program.launch("main", COMPUTE, "gemm", kernel)
            program.wait("main", SCATTER, program.record("main", COMPUTE))
            program.launch("main", SCATTER, "ncclDevKernel_ReduceScatter_Sum_f16_RING_LL(args)", gather[layer])
            done = program.record("main", SCATTER)
        program.wait("main", COMPUTE, done)
        program.launch("main", COMPUTE, "multi_tensor_apply_kernel", 20_000)
        program.steps.append((first, program.host("main", 20_000)))
    return program.timeline()


def copy_streams(seed: int, steps: int = 5, batches: int = 12, *, with_calls: bool = True) -> Known:
    """The next batch is copied on a stream of its own; each side waits for the other."""
    program = Program(seed, with_calls)
    copies, cost = program.random.uniform(3e4, 3e5, batches), program.random.uniform(2e4, 2e5, (batches, 3))
    for _ in range(steps):
        first = program.host("main", 20_000)
        for batch in range(batches):
            program.wait("main", COPY, program.record("main", COMPUTE))
            program.launch("main", COPY, "Memcpy HtoD (Pinned -> Device)", copies[batch])
            program.wait("main", COMPUTE, program.record("main", COPY))
            for kernel in cost[batch]:
                program.launch("main", COMPUTE, "gemm", kernel)
        program.steps.append((first, program.host("main", 20_000)))
    return program.timeline()


def several_threads(seed: int, steps: int = 5, rounds: int = 8, *, with_calls: bool = True) -> Known:
    """Two threads on streams of their own hand results to each other, back and forth."""
    program = Program(seed, with_calls)
    cost = program.random.uniform(2e4, 2e5, (rounds, 2, 3))
    for _ in range(steps):
        first = program.host("main", 20_000)
        program.after("second", first)
        for one in cost:
            for kernel in one[0]:
                program.launch("main", COMPUTE, "gemm", kernel)
            event = program.record("main", COMPUTE)
            program.after("second", program.last("main"))
            program.wait("second", SCATTER, event)
            for kernel in one[1]:
                program.launch("second", SCATTER, "softmax", kernel)
            event = program.record("second", SCATTER)
            program.after("main", program.last("second"))
            program.wait("main", COMPUTE, event)
        program.launch("main", COMPUTE, "gemm", 20_000)
        program.steps.append((first, program.host("main", 20_000)))
    return program.timeline()


SCENARIOS = (ddp_overlap, fsdp_prefetch, copy_streams, several_threads)


@dataclass
class Score:
    """Found and true waits, and how many of each are right, or recalled."""

    found: int = 0
    right: int = 0
    true: int = 0
    recalled: int = 0

    @property
    def precision(self) -> float:
        return self.right / self.found if self.found else 1.0

    @property
    def recall(self) -> float:
        return self.recalled / self.true if self.true else 1.0

    def add(self, known: Known, found: np.ndarray) -> None:
        """Count one timeline. Where the calls are hidden, only waits that bind can be recalled.

        Streams run in order, so a wait of later work for earlier work is implied by a true one: such a found wait is
        right. A true wait is recalled if a found one implies it. A found wait that is stronger than every true one is
        wrong.
        """
        timeline = known.timeline
        has_calls = "cudaStreamWaitEvent" in timeline.names(timeline.rows(Category.RUNTIME))
        to_recall = known.waits if has_calls else known.waits[known.binds]
        place = np.zeros(timeline.num_events, np.int64)
        place[timeline.device_rows] = np.arange(len(timeline.device_rows))  # by start, so in order on each stream
        lane = timeline.events["lane"].astype(np.int64)

        def implied(pairs: np.ndarray, by: np.ndarray) -> int:
            count = 0
            keys = lane[by[:, 0]] * 1000 + lane[by[:, 1]]
            for source, target in pairs.tolist():
                same = by[keys == lane[source] * 1000 + lane[target]]
                count += bool(((place[same[:, 0]] >= place[source]) & (place[same[:, 1]] <= place[target])).any())
            return count

        self.found += len(found)
        self.true += len(to_recall)
        self.right += implied(found, known.waits)
        self.recalled += implied(to_recall, found)
