"""Kineto and Chrome traces -> `Timeline`: one pass over the file, in bounded memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from foretrace.formats.batches import Batch, Rows
from foretrace.formats.columns import Columns, floats, nanoseconds
from foretrace.formats.json_stream import JsonStream
from foretrace.formats.sources import Source, ahead, blocks
from foretrace.trace import Category, Lane, LaneKind, ReadReport, StringTable, Timeline
from foretrace.trace.timeline import TABLES

CATEGORIES = {
    "cpu_op": Category.OPERATOR,
    "operator": Category.OPERATOR,  # 2021
    "user_annotation": Category.ANNOTATION,
    "python_function": Category.PYTHON,
    "cuda_runtime": Category.RUNTIME,
    "cuda_driver": Category.RUNTIME,
    "runtime": Category.RUNTIME,  # 2021
    "hip_runtime": Category.RUNTIME,
    "mtia_runtime": Category.RUNTIME,
    "xpu_runtime": Category.RUNTIME,
    "xpu_driver": Category.RUNTIME,
    "glow_runtime": Category.RUNTIME,
    "privateuse1_runtime": Category.RUNTIME,
    "privateuse1_driver": Category.RUNTIME,
    "kernel": Category.KERNEL,
    "concurrent_kernel": Category.KERNEL,
    "mtia_ccp_events": Category.KERNEL,
    "hpu_op": Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY,
    "memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET,
    "memset": Category.MEMSET,
    "cuda_sync": Category.SYNC,
    "gpu_user_annotation": Category.DEVICE_ANNOTATION,
    "overhead": Category.OVERHEAD,
}
_ON_DEVICE = (Category.KERNEL, Category.MEMCPY, Category.MEMSET, Category.SYNC, Category.DEVICE_ANNOTATION)
_IS_ON_DEVICE = np.isin(np.arange(len(Category)), _ON_DEVICE)
_WEEK_NS = 7 * 24 * 3600 * 10**9
_COUNTER = re.compile(rb'"ph"\s*:\s*"C"')
_STREAM_NUMBER = re.compile(r"^(?:stream\s*)?(-?\d+)\b")
_RANK_IN_NAME = re.compile(r"(?:rank|worker|trainer|dp|gpu)[-_ ]?(\d+)", re.IGNORECASE)


def read_timeline(
    source: Source, *, keep_python: bool = True, on_bytes: Callable[[int], None] | None = None
) -> Timeline:
    """Read one Kineto or Chrome trace.

    Args:
        keep_python: keep ``python_function`` events, which can be most of a file.
        on_bytes: told the number of (packed) bytes of each block that has been read.

    Raises:
        FormatError: if the file is no trace. Whatever a trace has wrong is mended or dropped, and counted in the
            timeline's ``report``.
    """
    report = ReadReport(source.name)
    strings = StringTable()
    stream = JsonStream(blocks(source, report, on_bytes), source.name, report, strings)
    reader = _TimelineReader(report, strings, keep_python)
    # Scanning releases the interpreter, so it runs ahead in a thread of its own while columns are built here.
    for batch, text in ahead(stream.batches()):
        reader.add(batch, text)
    return reader.finish(stream.members)


class _TimelineReader:
    """Turns batches of events into the tables of a timeline."""

    def __init__(self, report: ReadReport, strings: StringTable, keep_python: bool) -> None:
        self._report = report
        self._keep_python = keep_python
        self._strings = strings
        self._categories: dict[int, Category] = {}  # by string id
        self._lane_ids: dict[tuple[int, int, int, int], int] = {}  # process and thread as string ids, device, stream
        self._thread_names: dict[tuple[int, int], int] = {}
        self._num_events = 0
        self._open: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        self._tables = {name: Columns() for name in TABLES}

    # -- a batch -----------------------------------------------------------------------------------------------

    def add(self, batch: Batch, text: bytes) -> None:
        """Take one batch; ``text`` is its JSON, for counter events, whose ``args`` are free-form."""
        phase = batch.text("ph")
        for phase_id, count in _counts(phase):
            name = self._strings[phase_id] if phase_id >= 0 else ""
            self._report.phases[name] += count
            if name != "X":
                self._add_phase(name, batch, np.flatnonzero(phase == phase_id), text)
        self._add_complete(batch, np.flatnonzero(phase == self._strings.find("X")))

    def _add_phase(self, phase: str, batch: Batch, rows: Rows, text: bytes) -> None:
        if phase in ("s", "t", "f"):
            self._add_flows(batch, rows, begins=phase == "s")
        elif phase in ("i", "I", "R"):
            self._add_instants(batch, rows)
        elif phase == "M":
            self._add_names(batch, rows)
        elif phase == "C":
            self._add_counters(text)
        elif phase not in ("B", "E"):
            self._report.drop(f"event of phase {phase!r}" if phase else "event without a phase", count=len(rows))
        elif phase == "B" or "B" not in self._phases(batch):
            self._add_begins_and_ends(batch)

    def _phases(self, batch: Batch) -> set[str]:
        return set(self._strings.lookup(np.unique(batch.text("ph"))))

    def _add_names(self, batch: Batch, rows: Rows) -> None:
        named = rows[batch.text("name", rows) == self._strings.find("thread_name")]
        columns = (batch.text(field, named).tolist() for field in ("pid", "tid", "args.name"))
        for process, thread, name in zip(*columns, strict=True):
            self._thread_names[process, thread] = name

    def _usable_times(self, batch: Batch, rows: Rows) -> tuple[NDArray[np.int64], Rows]:
        """Times of the rows that have one, and these rows; the others are counted as dropped."""
        time_ns, valid, absent = batch.time("ts", rows)
        usable = valid & ~absent
        self._report.drop("event without a usable time", count=int((~usable).sum()))
        return time_ns[usable], rows[usable]

    def _add_instants(self, batch: Batch, rows: Rows) -> None:
        time_ns, rows = self._usable_times(batch, rows)
        names = ("device_type", "device_id", "size_bytes", "address", "allocated_bytes", "reserved_bytes")
        memory = {name: batch.integer(f"args.{name}", rows) for name in names}
        is_memory = (memory["size_bytes"] != -1) & (memory["device_type"] != -1)
        memory["device"] = memory.pop("device_id")
        if is_memory.any():
            columns = {name: column[is_memory] for name, column in memory.items()}
            self._tables["memory"].add(time_ns=time_ns[is_memory], **columns)
        rows, time_ns = rows[~is_memory], time_ns[~is_memory]
        if len(rows):
            self._tables["instants"].add(
                time_ns=time_ns, name=batch.text("name", rows), lane=self._host_lanes(batch, rows)
            )

    def _add_counters(self, text: bytes) -> None:
        """Counter events once more: every member of ``args`` is a series of its own."""
        times, names, series, values = [], [], [], []
        for event in _counter_events(text, self._report):
            for key, value in event["args"].items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    times.append(event.get("ts"))
                    names.append(str(event.get("name", "")))
                    series.append(key)
                    values.append(value)
        if not times:
            return
        time_ns, valid = nanoseconds(times)
        self._report.drop("event without a usable time", count=int((~valid).sum()))
        self._tables["counters"].add(
            time_ns=time_ns[valid],
            name=self._strings.intern_all(names)[valid],
            series=self._strings.intern_all(series)[valid],
            value=floats(values)[valid],
        )

    def _add_flows(self, batch: Batch, rows: Rows, begins: bool) -> None:
        time_ns, rows = self._usable_times(batch, rows)
        kind = batch.text("cat", rows)
        if (kind < 0).any():
            kind = np.where(kind < 0, batch.text("name", rows), kind)
        self._tables["flows"].add(
            kind=kind,
            id=batch.integer("id", rows),
            begins=np.full(len(rows), begins),
            time_ns=time_ns,
            lane=self._host_lanes(batch, rows),
        )

    def _add_begins_and_ends(self, batch: Batch) -> None:
        """Join begin and end events of each thread; both may lie in different batches."""
        phase = batch.text("ph")
        begin = self._strings.find("B")
        time_ns, rows = self._usable_times(batch, np.flatnonzero((phase == begin) | (phase == self._strings.find("E"))))
        columns = [phase[rows] == begin, time_ns, *(batch.text(field, rows) for field in ("pid", "tid", "name", "cat"))]
        joined: list[tuple[int, int, int, int, int, int]] = []
        for is_begin, at_ns, process, thread, name, cat in zip(*(c.tolist() for c in columns), strict=True):
            stack = self._open.setdefault((process, thread), [])
            if is_begin:
                stack.append((at_ns, name, cat))
            elif stack:
                start_ns, name, cat = stack.pop()
                joined.append((process, thread, name, cat, start_ns, at_ns - start_ns))
            else:
                self._report.drop("end without a begin")
        if joined:
            self._add_joined(joined)

    def _add_joined(self, joined: list[tuple[int, int, int, int, int, int]]) -> None:
        process, thread, name, cat, start_ns, duration_ns = (np.array(c, np.int64) for c in zip(*joined, strict=True))
        none = np.full(len(joined), -1, np.int64)
        self._report.repair("begin and end joined into one event", count=len(joined))
        self._add_events(
            name=name.astype(np.int32),
            category_name=cat.astype(np.int32),
            category=self._category(cat),
            lane=self._lanes(process, thread, none, none),
            start_ns=start_ns,
            duration_ns=np.maximum(duration_ns, 0),
            correlation=none,
            external_id=none,
        )

    # -- events with a duration ----------------------------------------------------------------------------------

    def _add_complete(self, batch: Batch, rows: Rows) -> None:
        cat = batch.text("cat", rows)
        self._report.events.update({self._strings[i] if i >= 0 else "": count for i, count in _counts(cat)})
        rows = self._selected(rows, cat)
        start_ns, duration_ns, rows = self._plausible_times(batch, rows)
        if not len(rows):
            return
        cat = batch.text("cat", rows)
        category = self._category(cat)
        external_id = batch.integer("args.external_id", rows)
        if batch.occurs("args.external_id_2021") and (external_id < 0).any():
            old = batch.integer("args.external_id_2021", rows)
            external_id = np.where(external_id < 0, old, external_id)
        first = self._num_events
        self._add_events(
            name=batch.text("name", rows),
            category_name=cat,
            category=category,
            lane=self._event_lanes(batch, rows, category),
            start_ns=start_ns,
            duration_ns=duration_ns,
            correlation=batch.integer("args.correlation", rows),
            external_id=external_id,
        )
        self._add_details(batch, rows, category, first)

    def _add_events(self, **columns: NDArray[Any]) -> None:
        self._tables["events"].add(**columns)
        self._num_events += len(columns["name"])

    def _category(self, cat: NDArray[np.integer[Any]]) -> NDArray[np.int8]:
        """`Category` of string ids; each distinct one is looked up once."""
        known = self._categories
        table = np.zeros(len(self._strings) + 1, np.int8)  # the last entry answers for -1
        for cat_id, _ in _counts(cat):
            if cat_id not in known:
                known[cat_id] = _category_of(self._strings[cat_id] if cat_id >= 0 else "")
            table[cat_id] = known[cat_id]
        category: NDArray[np.int8] = table[cat]
        return category

    def _selected(self, rows: Rows, cat: NDArray[np.int32]) -> Rows:
        """Leave out the span that Kineto draws over the whole trace and, on request, Python functions."""
        span = self._strings.find("Trace")
        keep = (cat != span) | (span < 0)
        if not self._keep_python:
            python = self._category(cat) == Category.PYTHON
            self._report.drop("Python function, as asked", count=int(python.sum()))
            keep &= ~python
        kept: Rows = rows[keep]
        return kept

    def _plausible_times(self, batch: Batch, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64], Rows]:
        """Start and duration of the rows whose times can be true; mended and dropped ones are counted."""
        start_ns, start_valid, start_absent = batch.time("ts", rows)
        duration_ns, duration_valid, duration_absent = batch.time("dur", rows)
        usable = start_valid & ~start_absent & duration_valid
        self._report.drop("event without a usable time", count=int((~usable).sum()))
        self._report.repair("missing duration (taken as 0)", count=int((usable & duration_absent).sum()))
        negative = usable & (duration_ns < 0)
        self._report.repair("negative duration (taken as 0)", count=int(negative.sum()))
        duration_ns[negative] = 0
        absurd = usable & (duration_ns > _WEEK_NS)
        self._report.drop("duration of more than a week", count=int(absurd.sum()))
        timeless = usable & (start_ns == 0) & (duration_ns == 0)
        if timeless.any():
            timeless &= _IS_ON_DEVICE[self._category(batch.text("cat", rows))]
            self._report.drop("device event without a time (ts 0, dur 0)", count=int(timeless.sum()))
        keep = usable & ~absurd & ~timeless
        kept: Rows = rows[keep]
        return start_ns[keep], duration_ns[keep], kept

    # -- lanes -----------------------------------------------------------------------------------------------------

    def _host_lanes(self, batch: Batch, rows: Rows) -> NDArray[np.int32]:
        none = np.full(len(rows), -1, np.int64)
        return self._lanes(batch.text("pid", rows), batch.text("tid", rows), none, none)

    def _event_lanes(self, batch: Batch, rows: Rows, category: NDArray[np.int8]) -> NDArray[np.int32]:
        device = np.full(len(rows), -1, np.int64)
        stream = np.full(len(rows), -1, np.int64)
        on_device = np.flatnonzero(_IS_ON_DEVICE[category])
        if len(on_device):
            process, thread = batch.text("pid", rows[on_device]), batch.text("tid", rows[on_device])
            device[on_device] = self._or_number(batch.integer("args.device", rows[on_device]), process)
            stream[on_device] = self._or_number(batch.integer("args.stream", rows[on_device]), thread)
        return self._lanes(batch.text("pid", rows), batch.text("tid", rows), device, stream)

    def _or_number(self, numbers: NDArray[np.int64], texts: NDArray[np.int32]) -> NDArray[np.int64]:
        """The numbers; where one is absent, the number in the text (``stream 7``)."""
        absent = numbers < 0
        if absent.any():
            distinct, inverse = np.unique(texts[absent], return_inverse=True)
            numbers[absent] = np.array([_number_of(text) for text in self._strings.lookup(distinct)], np.int64)[inverse]
        return numbers

    def _lanes(
        self,
        process: NDArray[np.integer[Any]],
        thread: NDArray[np.integer[Any]],
        device: NDArray[np.int64],
        stream: NDArray[np.int64],
    ) -> NDArray[np.int32]:
        mixed = process.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + thread.astype(np.uint64)
        mixed = mixed * np.uint64(0xC2B2AE3D27D4EB4F) + device.astype(np.uint64)
        mixed = mixed * np.uint64(0x165667B19E3779F9) + stream.astype(np.uint64)
        # Neighbors mostly share a lane: look at the first row of each run only.
        begins = (
            np.flatnonzero(np.concatenate(([True], mixed[1:] != mixed[:-1]))) if len(mixed) else np.empty(0, np.intp)
        )
        columns = (column[begins].tolist() for column in (process, thread, device, stream))
        known = self._lane_ids
        ids = [known.setdefault(key, len(known)) for key in zip(*columns, strict=True)]
        return np.repeat(np.array(ids, np.int32), np.diff(np.append(begins, len(mixed))))

    # -- details of some categories --------------------------------------------------------------------------------

    def _add_details(self, batch: Batch, rows: Rows, category: NDArray[np.int8], first: int) -> None:
        def of(*wanted: Category) -> tuple[Rows, NDArray[np.int64]]:
            at = np.flatnonzero(_one_of(wanted)[category])
            return rows[at], at + first

        self._add_table("operators", batch, *of(Category.OPERATOR, Category.ANNOTATION))
        self._add_table("kernels", batch, *of(Category.KERNEL))
        self._add_table("copies", batch, *of(Category.MEMCPY, Category.MEMSET))
        self._add_table("syncs", batch, *of(Category.SYNC))
        self._add_table("python", batch, *of(Category.PYTHON))
        if batch.occurs("args.collective"):
            marked = np.flatnonzero(batch.text("args.collective", rows) >= 0)
            self._add_table("collectives", batch, rows[marked], marked + first)

    def _add_table(self, table: str, batch: Batch, rows: Rows, event: NDArray[np.int64]) -> None:
        if not len(rows):
            return
        columns: dict[str, NDArray[Any]] = {}
        for column, field, kind in _DETAILS[table]:
            read: Callable[[str, Rows], NDArray[Any]] = getattr(batch, kind)
            columns[column] = read(f"args.{field}", rows)
        if table == "collectives":
            spaced = columns.pop("comms_id_spaced")
            columns["comms_id"] = np.where(columns["comms_id"] == -1, spaced, columns["comms_id"])
        self._tables[table].add(event=event, **columns)

    # -- the end -----------------------------------------------------------------------------------------------------

    def finish(self, members: dict[str, Any]) -> Timeline:
        """The timeline of all batches, in absolute time where the file has a base time."""
        left_open = sum(map(len, self._open.values()))
        self._report.drop("begin without an end", count=left_open)
        tables = {name: columns.table(self._strings, _STRING_COLUMNS[name]) for name, columns in self._tables.items()}
        if not tables["events"].num_rows:
            tables["events"] = _no_events(self._strings)
        base_ns = members.get("baseTimeNanoseconds", 0)
        if isinstance(base_ns, int) and abs(base_ns) < 1 << 62:
            for table, column in _TIME_COLUMNS:
                if tables[table].num_rows:
                    tables[table][column][:] += base_ns
        rank = self._rank(members)
        lanes = self._finished_lanes(tables["events"])
        return Timeline(lanes=lanes, strings=self._strings, rank=rank, metadata=members, report=self._report, **tables)

    def _rank(self, members: dict[str, Any]) -> int:
        """The recorded rank, else the one in the file's name, else -1: the job numbers those."""
        info = members.get("distributedInfo")
        rank = info.get("rank") if isinstance(info, dict) else None
        if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 1 << 31:
            return rank
        found = _RANK_IN_NAME.findall(self._report.path.rsplit("/", 1)[-1])
        if found and len(found[-1]) < 10:
            self._report.guess("rank from the file's name", found[-1])
            return int(found[-1])
        return -1

    def _finished_lanes(self, events: Any) -> list[Lane]:
        on_device = np.zeros(len(self._lane_ids), np.bool_)
        on_host = np.zeros(len(self._lane_ids), np.bool_)
        device_rows = _IS_ON_DEVICE[events["category"]]
        on_device[events["lane"][device_rows]] = True
        on_host[events["lane"][~device_rows]] = True
        return [self._lane(key, bool(on_device[i]), bool(on_host[i])) for key, i in self._lane_ids.items()]

    def _lane(self, key: tuple[int, int, int, int], on_device: bool, on_host: bool) -> Lane:
        name_id = self._thread_names.get(key[:2], -1)
        process, thread, name = self._strings.lookup(np.array([*key[:2], name_id]))
        if on_device:
            return Lane(LaneKind.DEVICE_STREAM, process, thread, key[2], key[3], name)
        return Lane(LaneKind.HOST_THREAD if on_host else LaneKind.OTHER, process, thread, name=name)


_DETAILS: dict[str, list[tuple[str, str, str]]] = {  # table -> (column, member of args, how to read it)
    "operators": [
        *((name, name, "raw") for name in ("input_shapes", "input_types", "input_strides", "concrete_inputs")),
        *((name, name, "integer") for name in ("sequence", "forward_thread", "record_function_id")),
    ],
    "kernels": [
        *((name, name, "raw") for name in ("grid", "block")),
        *((name, name, "integer") for name in ("registers", "shared_memory_bytes")),
        *((name, name, "number") for name in ("blocks_per_sm", "warps_per_sm", "occupancy_pct")),
    ],
    "copies": [("size_bytes", "bytes", "integer")],
    "collectives": [
        *((name, name, "text") for name in ("collective", "dtype", "group", "group_description")),
        ("group_ranks", "group_ranks", "raw"),
        *((name, name, "integer") for name in ("in_elements", "out_elements", "group_size")),
        *((name, name, "integer") for name in ("source_rank", "target_rank", "comms_id", "comms_id_spaced")),
    ],
    "syncs": [
        ("kind", "cuda_sync_kind", "text"),
        *(
            (name, name, "integer")
            for name in ("wait_on_stream", "wait_on_event_record_correlation", "wait_on_event_id")
        ),
    ],
    "python": [(f"python_{name}", f"python_{name}", "integer") for name in ("id", "parent_id", "module_id")],
}
_STRING_COLUMNS: dict[str, tuple[str, ...]] = {
    **{table: tuple(c for c, _, kind in details if kind in ("text", "raw")) for table, details in _DETAILS.items()},
    "events": ("name", "category_name"),
    "flows": ("kind",),
    "memory": (),
    "counters": ("name", "series"),
    "instants": ("name",),
}
_TIME_COLUMNS = (
    ("events", "start_ns"),
    ("flows", "time_ns"),
    ("memory", "time_ns"),
    ("counters", "time_ns"),
    ("instants", "time_ns"),
)


@cache
def _one_of(wanted: tuple[Category, ...]) -> NDArray[np.bool_]:
    """By category: whether it is one of these."""
    return np.isin(np.arange(len(Category)), wanted)


def _counts(ids: NDArray[np.integer[Any]]) -> list[tuple[int, int]]:
    """(id, how often it occurs) of string ids, -1 included."""
    counts = np.bincount(ids + 1)
    return [(int(i) - 1, int(counts[i])) for i in np.flatnonzero(counts)]


def _category_of(cat: str) -> Category:
    lower = cat.lower()
    if lower in CATEGORIES:
        return CATEGORIES[lower]
    if lower.endswith(("_runtime", "_driver")):
        return Category.RUNTIME
    return Category.OTHER


def _number_of(value: Any) -> int:
    """A device or stream number out of ``7``, ``"7"`` or ``"stream 7"``; -1 if there is none."""
    found = _STREAM_NUMBER.match(str(value))
    number = int(found[1]) if found and len(found[1]) < 19 else -1
    return number


def _counter_events(text: bytes, report: ReadReport) -> Iterator[dict[str, Any]]:
    for raw in _raw_events(text):
        if not _COUNTER.search(raw):
            continue
        try:
            event = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            report.drop("damaged counter event")
            continue
        if isinstance(event, dict) and event.get("ph") == "C" and isinstance(event.get("args"), dict):
            yield event


def _raw_events(text: bytes) -> Iterator[bytes]:
    try:
        yield from map(bytes, msgspec.json.decode(b"".join((b"[", text, b"]")), type=list[msgspec.Raw]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        yield from re.split(rb"(?<=\})\s*,\s*(?=\{)", text)


def _no_events(strings: StringTable) -> Any:
    columns = Columns()
    none64 = np.empty(0, np.int64)
    columns.add(
        name=np.empty(0, np.int32),
        category_name=np.empty(0, np.int32),
        category=np.empty(0, np.int8),
        lane=np.empty(0, np.int32),
        start_ns=none64,
        duration_ns=none64.copy(),
        correlation=none64.copy(),
        external_id=none64.copy(),
    )
    return columns.table(strings, _STRING_COLUMNS["events"])
