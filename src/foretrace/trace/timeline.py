"""`Timeline`: what ran when, on one rank. Columns over a string table; times are int64 nanoseconds."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.trace.classify import Classifier, KernelKind
from foretrace.trace.lanes import Lane, LaneKind
from foretrace.trace.reading import ReadReport
from foretrace.trace.strings import StringTable
from foretrace.trace.table import Table


class Category(enum.IntEnum):
    """What an event is, whatever the profiler and its version call it."""

    OTHER = 0
    OPERATOR = 1
    ANNOTATION = 2
    PYTHON = 3
    RUNTIME = 4  # CUDA, HIP and MTIA runtime and driver calls
    KERNEL = 5
    MEMCPY = 6
    MEMSET = 7
    SYNC = 8  # ``cuda_sync``: waits as the device saw them
    DEVICE_ANNOTATION = 9
    OVERHEAD = 10  # the profiler's own work

    @property
    def label(self) -> str:
        """Lower-case name for tables."""
        return self.name.lower().replace("_", " ")


DEVICE_WORK = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)

_EMPTY: dict[str, NDArray[Any]] = {}


@dataclass
class Timeline:
    """Events of one rank.

    Attributes:
        events: one row an event, in file order. Columns: ``name`` and ``category_name`` (string ids),
            ``category`` (`Category`), ``lane`` (index into ``lanes``), ``start_ns`` (int64, absolute where the
            trace says so), ``duration_ns`` (int64, >= 0), ``correlation`` (launch <-> device work) and
            ``external_id`` (int64, -1 for none).
        lanes: host threads and device streams.
        strings: the texts of all string columns.
        operators: shapes and autograd data. Columns ``event`` (row of ``events``), ``input_shapes``,
            ``input_types``, ``input_strides``, ``concrete_inputs`` (string ids of their JSON text), ``sequence``,
            ``forward_thread``, ``record_function_id`` (int64, -1).
        kernels: launch data of kernels. Columns ``event``, ``grid`` and ``block`` (string ids, JSON text),
            ``registers``, ``shared_memory_bytes`` (int64, -1), ``blocks_per_sm``, ``warps_per_sm``,
            ``occupancy_pct`` (float64, NaN).
        copies: copies and sets. Columns ``event``, ``size_bytes``.
        collectives: NCCL metadata, on operators and kernels. Columns ``event``, ``collective``, ``dtype``,
            ``group``, ``group_description``, ``group_ranks`` (string ids), ``in_elements``, ``out_elements``,
            ``group_size``, ``comms_id``, ``source_rank``, ``target_rank`` (int64, -1).
        syncs: ``cuda_sync`` data. Columns ``event``, ``kind`` (string id), ``wait_on_stream``,
            ``wait_on_event_record_correlation``, ``wait_on_event_id``.
        python: ``event``, ``python_id``, ``python_parent_id``, ``python_module_id``.
        flows: flow events. Columns ``kind`` (string id), ``id``, ``begins`` (bool), ``time_ns``, ``lane``.
        memory: allocator instants. Columns ``time_ns``, ``device_type``, ``device``, ``size_bytes``, ``address``,
            ``allocated_bytes``, ``reserved_bytes``.
        counters: counter samples. Columns ``time_ns``, ``name``, ``series`` (string ids), ``value`` (float64).
        instants: other instant events. Columns ``time_ns``, ``name``, ``lane``.
        rank: the rank, as given by the trace or guessed (the report says which).
        metadata: everything else at the top of the file (``distributedInfo``, ``deviceProperties``, ...).
    """

    events: Table
    lanes: list[Lane]
    strings: StringTable
    rank: int = 0
    operators: Table = field(default_factory=lambda: Table(_EMPTY))
    kernels: Table = field(default_factory=lambda: Table(_EMPTY))
    copies: Table = field(default_factory=lambda: Table(_EMPTY))
    collectives: Table = field(default_factory=lambda: Table(_EMPTY))
    syncs: Table = field(default_factory=lambda: Table(_EMPTY))
    python: Table = field(default_factory=lambda: Table(_EMPTY))
    flows: Table = field(default_factory=lambda: Table(_EMPTY))
    memory: Table = field(default_factory=lambda: Table(_EMPTY))
    counters: Table = field(default_factory=lambda: Table(_EMPTY))
    instants: Table = field(default_factory=lambda: Table(_EMPTY))
    metadata: dict[str, Any] = field(default_factory=dict)
    report: ReadReport = field(default_factory=lambda: ReadReport(""))

    def __repr__(self) -> str:
        return f"Timeline(rank {self.rank}, {self.num_events} events, {len(self.lanes)} lanes, {self.report.path})"

    @property
    def num_events(self) -> int:
        """Events with a duration."""
        return self.events.num_rows

    @property
    def start_ns(self) -> NDArray[np.int64]:
        """Start of every event, shape ``(num_events,)``."""
        return self.events["start_ns"]

    @property
    def duration_ns(self) -> NDArray[np.int64]:
        """Duration of every event, shape ``(num_events,)``."""
        return self.events["duration_ns"]

    @cached_property
    def end_ns(self) -> NDArray[np.int64]:
        """End of every event, shape ``(num_events,)``."""
        return np.asarray(self.start_ns + self.duration_ns)

    @property
    def category(self) -> NDArray[np.int8]:
        """`Category` of every event, shape ``(num_events,)``."""
        return self.events["category"]

    def rows(self, *categories: Category) -> NDArray[np.intp]:
        """Rows of ``events`` of the given categories, in file order."""
        wanted = np.zeros(len(Category), np.bool_)
        wanted[list(categories)] = True
        return np.flatnonzero(wanted[self.category])

    def are_named(self, rows: NDArray[np.integer], is_wanted: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Which of the rows have a wanted name; each distinct name is asked once. Shape ``(len(rows),)``."""
        names = self.events["name"][rows]
        distinct = np.flatnonzero(np.bincount(names + 1, minlength=1)) - 1
        is_hit = np.zeros(int(names.max(initial=-1)) + 2, np.bool_)  # the last one answers for -1
        is_hit[distinct] = [is_wanted(text) for text in self.strings.lookup(distinct)]
        return np.asarray(is_hit[names])

    @cached_property
    def device_rows(self) -> NDArray[np.intp]:
        """Rows of device work (kernels, copies, sets) sorted by start, ties by end, then by file order."""
        rows = self.rows(*DEVICE_WORK)
        return rows[np.lexsort((self.end_ns[rows], self.start_ns[rows]))]

    @cached_property
    def lane_kinds(self) -> NDArray[np.int8]:
        """`LaneKind` of every lane, shape ``(len(lanes),)``."""
        return np.array([lane.kind for lane in self.lanes], np.int8)

    @cached_property
    def host_rows(self) -> NDArray[np.intp]:
        """Rows that ran on a host thread (operators, runtime calls, annotations, Python, overhead)."""
        return np.flatnonzero(self.lane_kinds[self.events["lane"]] == LaneKind.HOST_THREAD)

    @cached_property
    def classifier(self) -> Classifier:
        """The rules that name kernels; assign another one (`Classifier.from_yaml`) before the first use."""
        return Classifier.default()

    @cached_property
    def kernel_kind(self) -> NDArray[np.int8]:
        """`KernelKind` of every event: by name for kernels, MEMORY for copies and sets, OTHER for host events."""
        kinds = np.zeros(self.num_events, np.int8)
        rows = self.rows(Category.KERNEL)
        names = self.events["name"][rows]
        distinct = np.flatnonzero(np.bincount(names + 1, minlength=1)) - 1
        by_name = np.zeros(len(self.strings) + 1, np.int8)  # the last entry answers for "no name"
        by_name[distinct] = self.classifier.kernel_kinds(self.strings.lookup(distinct))
        kinds[rows] = by_name[names]
        if self.collectives.num_rows:  # metadata that the profiler attached is better evidence than any name
            marked = self.collectives["event"]
            kinds[marked[self.category[marked] == Category.KERNEL]] = KernelKind.COMMUNICATION
        kinds[self.rows(Category.MEMCPY, Category.MEMSET)] = KernelKind.MEMORY
        return kinds

    @cached_property
    def is_communication(self) -> NDArray[np.bool_]:
        """Whether an event is device work of a collective or of send/recv, shape ``(num_events,)``."""
        return np.asarray(self.kernel_kind == KernelKind.COMMUNICATION)

    @cached_property
    def launch_row(self) -> NDArray[np.int64]:
        """For every event the row of the runtime call that launched it, -1 where there is none.

        A launch is the runtime or driver call of the same ``correlation``; one graph launch may start many kernels.
        """
        rows = np.full(self.num_events, -1, np.int64)
        calls = self.rows(Category.RUNTIME)
        calls = calls[self.events["correlation"][calls] >= 0]
        if len(calls) and len(self.device_rows):
            order = np.argsort(self.events["correlation"][calls], kind="stable")
            keys = self.events["correlation"][calls][order]
            wanted = self.events["correlation"][self.device_rows]
            at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            found = (keys[at] == wanted) & (wanted >= 0)
            rows[self.device_rows[found]] = calls[order][at[found]]
        return rows

    def names(self, rows: NDArray[np.integer]) -> list[str]:
        """Event names of the given rows."""
        return self.strings.lookup(self.events["name"][rows])

    @property
    def tables(self) -> dict[str, Table]:
        """All tables by field name."""
        return {name: getattr(self, name) for name in TABLES}


TABLES = (
    "events",
    "operators",
    "kernels",
    "copies",
    "collectives",
    "syncs",
    "python",
    "flows",
    "memory",
    "counters",
    "instants",
)
