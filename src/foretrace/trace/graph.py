"""`ExecutionGraph`: what must wait for what. Tasks with durations, and edges with lags; columns, as all nouns."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.trace.job import Job
from foretrace.trace.lanes import Lane, LaneKind
from foretrace.trace.strings import StringTable
from foretrace.trace.table import Table


class _Labeled(enum.IntEnum):
    @property
    def label(self) -> str:
        """Lower-case name for tables."""
        return self.name.lower()


class TaskKind(_Labeled):
    """What a task is. The numbers are stable."""

    OPERATOR = 0  # the part of an operator between two of the calls in it
    RUNTIME = 1  # a runtime or driver call, or a part of one
    HOST_GAP = 2  # time of a thread that no event covers
    HANDOFF = 3  # from the end of another thread's work to this thread's next event
    START = 4  # before the first event of a thread
    BLOCKED = 5  # time in a blocking call that no device work explains
    KERNEL = 6
    MEMCPY = 7
    MEMSET = 8
    COLLECTIVE = 9  # a collective's transfer, once all members are there
    COLLECTIVE_ALONE = 10  # a collective whose other members are not known: waiting and transfer
    ARRIVAL = 11  # a rank is ready for a collective
    RENDEZVOUS = 12  # the moment at which the last member of a collective is ready
    UNRECORDED_GRAPH_WORK = 13  # a graph launch holds its stream for work that the trace lacks
    BEFORE_TRACE = 14  # delay of device work whose launch precedes the trace
    UNEXPLAINED = 15  # delay of device work that no cause was found for


class EdgeKind(_Labeled):
    """Why a task waits for another. The numbers are stable."""

    ORDER = 0  # the next on the same thread or stream
    HANDOFF = 1  # one thread goes on when another has finished
    LAUNCH = 2  # device work after its runtime call
    SYNC = 3  # a blocking call returns after device work
    QUEUE = 4  # a launch call waits for room in the launch queue
    EVENT_WAIT = 5  # one stream waits for an event of another
    OCCUPANCY = 6  # a kernel starts when another one leaves room; true of this run only
    COLLECTIVE = 7  # arrival of a member, and the transfer after the last
    DATA = 8  # a dependency that the source of the graph states


class LanePolicy(_Labeled):
    """How a lane picks among ready tasks."""

    IN_ORDER = 0  # in the order that ``ORDER`` edges give
    PRIORITY = 1  # one at a time: the ready task with the smallest ``priority``


HOST_KINDS = (
    TaskKind.OPERATOR,
    TaskKind.RUNTIME,
    TaskKind.HOST_GAP,
    TaskKind.HANDOFF,
    TaskKind.START,
    TaskKind.BLOCKED,
)
DEVICE_KINDS = (
    TaskKind.KERNEL,
    TaskKind.MEMCPY,
    TaskKind.MEMSET,
    TaskKind.COLLECTIVE,
    TaskKind.COLLECTIVE_ALONE,
    TaskKind.UNRECORDED_GRAPH_WORK,
    TaskKind.BEFORE_TRACE,
    TaskKind.UNEXPLAINED,
)
COPIED_KINDS = (
    TaskKind.HOST_GAP,
    TaskKind.HANDOFF,
    TaskKind.START,
    TaskKind.BLOCKED,
    TaskKind.COLLECTIVE_ALONE,
    TaskKind.UNRECORDED_GRAPH_WORK,
    TaskKind.BEFORE_TRACE,
    TaskKind.UNEXPLAINED,
)


class GraphError(ValueError):
    """A graph that cannot be simulated; the message says why and where."""


@dataclass(frozen=True, slots=True)
class GraphLane:
    """A thread or stream of one rank, as a resource."""

    rank: int
    lane: Lane
    policy: LanePolicy = LanePolicy.IN_ORDER

    @property
    def label(self) -> str:
        """A short name for messages."""
        return f"rank {self.rank} {self.lane.label}"


TASK_COLUMNS: dict[str, tuple[type[np.generic], int]] = {
    "kind": (np.int8, 0),
    "name": (np.int32, -1),
    "duration_ns": (np.int64, 0),
    "lane": (np.int32, -1),
    "event": (np.int32, -1),
    "step": (np.int32, -1),
    "measured_start_ns": (np.int64, 0),
    "measured_end_ns": (np.int64, 0),
    "priority": (np.int32, 0),
}
EDGE_COLUMNS: dict[str, tuple[type[np.generic], Any]] = {
    "source": (np.int32, 0),
    "target": (np.int32, 0),
    "lag_ns": (np.int64, 0),
    "kind": (np.int8, EdgeKind.DATA),
    "confidence": (np.float32, 1.0),
}


COST_COLUMNS = ("task", "operator", "node", "flops", "read_bytes", "written_bytes")


def table_with(columns: Mapping[str, NDArray[Any]], schema: Mapping[str, tuple[type[np.generic], Any]]) -> Table:
    """A table of the schema's columns; those that are missing hold the schema's default."""
    count = len(next(iter(columns.values()))) if columns else 0
    full = {
        name: _exactly(name, columns[name], dtype) if name in columns else np.full(count, default, dtype)
        for name, (dtype, default) in schema.items()
    }
    return Table(full)


def _exactly(name: str, column: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    """A column as another type, refused where that would change a number."""
    column = np.asarray(column)
    if column.dtype == dtype:
        return column
    with np.errstate(invalid="ignore"):
        converted = column.astype(dtype)
    if np.issubdtype(dtype, np.integer) and (bad := np.flatnonzero(converted != column)).size:
        raise GraphError(
            f"row {bad[0]}: {name} is {column[bad[0]]}, must be a whole number that {dtype.__name__} holds"
        )
    return converted


@dataclass
class ExecutionGraph:
    """Tasks and what they wait for. A task starts when each of its sources has ended, plus the edge's lag.

    Attributes:
        tasks: one row a task. Columns ``kind`` (`TaskKind`), ``name`` (string id), ``duration_ns`` (>= 0), ``lane``
            (index into ``lanes``, -1 for none), ``event`` (row of the rank's timeline, -1), ``step`` (index of the
            rank's device step, or in a graph without ``source`` the number of the step; -1 outside),
            ``measured_start_ns`` and ``measured_end_ns`` (where measured), ``priority`` (the order on lanes with
            `LanePolicy.PRIORITY`, and among equals everywhere: a number that belongs to the task, so that the order
            of rows means nothing).
        edges: sorted by ``source``. Columns ``source``, ``target`` (rows of ``tasks``), ``lag_ns`` (>= 0), ``kind``
            (`EdgeKind`), ``confidence`` (1 where the trace records it, below 1 where it was inferred).
        waits: blocking calls whose causes are found while simulating: task ``task`` goes on when the work that is on
            stream ``lane`` as task ``issue`` starts has ended.
        launched: what a call puts on a stream when it starts: ``issue`` (task), ``work`` (the last task of it),
            ``lane`` and ``position`` (its place on the stream).
        costs: what is known of the operators that tasks are part of. Columns ``task``, ``operator`` (row of the rank's
            timeline, -1), ``node`` (row of the rank's operator trace, -1), ``flops``, ``read_bytes``, ``written_bytes``
            (int64, -1 for unknown; an operator's cost stands at its longest piece of device work).
        lanes: threads and streams of all ranks.
        strings: the texts of ``name``.
        origin_ns: time 0 of a simulation, as the measured clock shows it.
        source: the job it was linked from, if any.
        notes: what was found, assumed or left out, counted.
        figures: numbers that were estimated from the trace, by name (latencies, gaps, depth of queues).
    """

    tasks: Table
    edges: Table
    lanes: list[GraphLane]
    strings: StringTable
    waits: Table = field(default_factory=lambda: Table({n: np.empty(0, np.int32) for n in ("task", "issue", "lane")}))
    launched: Table = field(
        default_factory=lambda: Table({n: np.empty(0, np.int32) for n in ("issue", "work", "lane", "position")})
    )
    origin_ns: int = 0
    source: Job | None = None
    notes: Counter[str] = field(default_factory=Counter)
    figures: dict[str, float] = field(default_factory=dict)
    costs: Table = field(default_factory=lambda: Table({n: np.empty(0, np.int64) for n in COST_COLUMNS}))

    def __post_init__(self) -> None:
        source = self.edges["source"]
        if np.any(source[1:] < source[:-1]):
            self.edges = self.edges.take(np.argsort(source, kind="stable"))

    @classmethod
    def from_columns(
        cls,
        tasks: Mapping[str, NDArray[Any]],
        edges: Mapping[str, NDArray[Any]],
        lanes: list[GraphLane] | None = None,
        strings: StringTable | None = None,
        **more: Any,
    ) -> ExecutionGraph:
        """A graph of the given columns (see the class); missing ones are filled, ``priority`` with the row number.

        Raises:
            GraphError: if a column holds what it must not.
        """
        tasks = dict(tasks)
        count = len(next(iter(tasks.values()))) if tasks else 0
        tasks.setdefault("priority", np.arange(count, dtype=np.int32))
        tables = table_with(tasks, TASK_COLUMNS), table_with(edges, EDGE_COLUMNS)
        graph = cls(*tables, lanes or [], strings or StringTable(), **more)
        graph.check()
        return graph

    def __repr__(self) -> str:
        return f"ExecutionGraph({self.num_tasks} tasks, {self.num_edges} edges, {len(self.lanes)} lanes)"

    @property
    def num_tasks(self) -> int:
        """Rows of ``tasks``."""
        return self.tasks.num_rows

    @property
    def num_edges(self) -> int:
        """Rows of ``edges``; waits that are resolved while simulating are not among them."""
        return self.edges.num_rows

    @cached_property
    def rank(self) -> NDArray[np.int32]:
        """Rank of every task, -1 where it has no lane; shape ``(num_tasks,)``."""
        of_lane = np.array([*(lane.rank for lane in self.lanes), -1], np.int32)
        return of_lane[self.tasks["lane"]]

    @cached_property
    def on_device(self) -> NDArray[np.bool_]:
        """Whether a task runs on a stream, shape ``(num_tasks,)``."""
        is_stream = np.array([*(lane.lane.kind is LaneKind.DEVICE_STREAM for lane in self.lanes), False], np.bool_)
        return is_stream[self.tasks["lane"]]

    @property
    def ranks(self) -> list[int]:
        """The ranks that have lanes, ascending."""
        return sorted({lane.rank for lane in self.lanes})

    def names(self, rows: NDArray[np.integer]) -> list[str]:
        """Names of the given tasks."""
        return self.strings.lookup(self.tasks["name"][rows])

    def describe(self, task: int) -> str:
        """A task in words, for messages."""
        lane = int(self.tasks["lane"][task])
        where = self.lanes[lane].label if lane >= 0 else "no lane"
        name = self.names(np.array([task]))[0] or TaskKind(self.tasks["kind"][task]).label
        return f"{name[:60]!r} (task {task}, {where})"

    def count_edges(self) -> dict[str, dict[str, int]]:
        """Numbers of edges by kind, ``recorded`` and ``inferred`` ones apart."""
        counts: dict[str, dict[str, int]] = {"recorded": {}, "inferred": {}}
        is_recorded = self.edges["confidence"] >= 1
        for kind in EdgeKind:
            mine = self.edges["kind"] == kind
            for how, which in (("recorded", mine & is_recorded), ("inferred", mine & ~is_recorded)):
                if which.any():
                    counts[how][kind.label] = int(which.sum())
        if self.waits.num_rows:
            counts["recorded"]["sync_while_simulating"] = self.waits.num_rows
        return counts

    def check(self) -> None:
        """Refuse a graph that no simulation could make sense of.

        Raises:
            GraphError: naming the first task or edge that is wrong.
        """
        count, lanes = self.num_tasks, len(self.lanes)
        _at_least(self.tasks["duration_ns"], 0, "task", "duration_ns")
        _at_least(self.edges["lag_ns"], 0, "edge", "lag_ns")
        _at_least(self.tasks["priority"], 0, "task", "priority")
        _at_least(self.launched["position"], 0, "launched", "position")
        _within(self.tasks["kind"], 0, len(TaskKind), "task", "kind")
        _within(self.tasks["lane"], -1, lanes, "task", "lane")
        for table, columns, what in (
            (self.edges, ("source", "target"), "edge"),
            (self.waits, ("task", "issue"), "wait"),
            (self.launched, ("issue", "work"), "launched"),
        ):
            for column in columns:
                _within(table[column], 0, count, what, column)
        for table, what in ((self.waits, "wait"), (self.launched, "launched")):
            _within(table["lane"], 0, lanes, what, "lane")
        own = np.flatnonzero(self.edges["source"] == self.edges["target"])
        if len(own):
            raise GraphError(f"edge {own[0]}: {self.describe(int(self.edges['source'][own[0]]))} waits for itself")

    def with_columns(
        self, tasks: Mapping[str, NDArray[Any]] | None = None, edges: Mapping[str, NDArray[Any]] | None = None
    ) -> ExecutionGraph:
        """A copy in which the given columns are replaced; everything else is shared."""
        return replace(self, tasks=Table({**self.tasks, **(tasks or {})}), edges=Table({**self.edges, **(edges or {})}))

    def without_edges(self, drop: NDArray[np.bool_]) -> ExecutionGraph:
        """A copy without the marked edges."""
        return replace(self, edges=self.edges.take(~drop))

    def permuted(self, order: NDArray[np.integer]) -> ExecutionGraph:
        """The same graph with its tasks in another order: row ``i`` of the result is row ``order[i]`` of this one."""
        place = np.empty(self.num_tasks, np.int32)
        place[order] = np.arange(self.num_tasks, dtype=np.int32)

        def moved(table: Table, *columns: str) -> Table:
            return Table({name: place[column] if name in columns else column for name, column in table.items()})

        return replace(
            self,
            tasks=self.tasks.take(order),
            edges=moved(self.edges, "source", "target"),
            waits=moved(self.waits, "task", "issue"),
            launched=moved(self.launched, "issue", "work"),
            costs=moved(self.costs, "task"),
        )


def offsets(sorted_ids: NDArray[np.integer], count: int) -> NDArray[np.int64]:
    """Where the rows of each id begin and end in a sorted column, shape ``(count + 1,)``."""
    return np.concatenate(([0], np.cumsum(np.bincount(sorted_ids, minlength=count)))).astype(np.int64)


def _at_least(column: NDArray[Any], smallest: int, what: str, name: str) -> None:
    bad = np.flatnonzero(column < smallest)
    if len(bad):
        raise GraphError(f"{what} {bad[0]}: {name} is {column[bad[0]]}, must be at least {smallest}")


def _within(column: NDArray[Any], first: int, end: int, what: str, name: str) -> None:
    bad = np.flatnonzero((column < first) | (column >= end))
    if len(bad):
        raise GraphError(f"{what} {bad[0]}: {name} is {column[bad[0]]}, must be from {first} to {end - 1}")
