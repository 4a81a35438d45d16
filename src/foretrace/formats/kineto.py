"""Kineto and Chrome traces -> `Timeline`: one pass over the file, in bounded memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import compress
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from foretrace.formats.chrome_events import Event, ExactEvent
from foretrace.formats.columns import (
    Columns,
    RawTexts,
    floats,
    integers,
    interned,
    loses_nanoseconds,
    nanoseconds,
)
from foretrace.formats.json_stream import JsonStream
from foretrace.formats.sources import Source, blocks
from foretrace.trace import Category, Lane, LaneKind, ReadReport, StringTable, Timeline

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
_FLOW_PHASES = frozenset("stf")
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
    stream = JsonStream(blocks(source, report, on_bytes), source.name, report)
    reader = _TimelineReader(report, keep_python)
    for events, text in stream.batches():
        if not stream.exact_times and loses_nanoseconds([event.ts for event in events[:64]]):
            events, stream.exact_times = _with_exact_times(stream, events, text), True
        reader.add(events, text)
    return reader.finish(stream.members)


def _with_exact_times(stream: JsonStream, events: list[Event], text: bytes) -> list[Event]:
    """The batch once more, with times as text; the batches that follow come so at once."""
    try:
        exact: list[Event] = msgspec.json.decode(b"".join((b"[", text, b"]")), type=list[ExactEvent])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return events  # a damaged batch: its times are exact to 250 ns
    return exact if len(exact) == len(events) else events


class _TimelineReader:
    """Turns batches of events into columns."""

    def __init__(self, report: ReadReport, keep_python: bool) -> None:
        self._report = report
        self._keep_python = keep_python
        self._strings = StringTable()
        self._raw = RawTexts(self._strings)
        self._categories: dict[str, Category] = {}
        self._lane_ids: dict[tuple[Any, ...], int] = {}
        self._lane_kinds: dict[int, tuple[LaneKind, int, int]] = {}
        self._thread_names: dict[tuple[str, str], str] = {}
        self._num_events = 0
        self._open: dict[tuple[Any, Any], list[Event]] = {}
        names = ("events", "operators", "kernels", "copies", "collectives", "syncs", "python")
        self._tables = {name: Columns() for name in (*names, "flows", "memory", "counters", "instants")}

    # -- a batch -----------------------------------------------------------------------------------------------

    def add(self, events: list[Event], text: bytes) -> None:
        """Take one batch; ``text`` is its JSON, for the events whose ``args`` are free-form."""
        phases = [event.ph for event in events]
        self._report.phases.update(phases)
        complete = [event for event in events if event.ph == "X"]
        if len(complete) < len(events):
            others = [event for event in events if event.ph != "X"]
            self._add_flows([event for event in others if event.ph in _FLOW_PHASES])
            rest = [event for event in others if event.ph not in _FLOW_PHASES]
            complete += self._add_rest(rest, text)
        self._add_complete(complete)

    def _add_rest(self, events: list[Event], text: bytes) -> list[Event]:
        """Metadata, instants, counters; returns events that were given as begin and end."""
        closed: list[Event] = []
        instants: list[Event] = []
        for event in events:
            phase = event.ph
            if phase == "M":
                if event.name == "thread_name":
                    self._thread_names[str(event.pid), str(event.tid)] = str(event.args.name)
            elif phase in ("i", "I", "R"):
                instants.append(event)
            elif phase == "B":
                self._open.setdefault((event.pid, event.tid), []).append(event)
            elif phase == "E":
                closed += self._close(event)
            elif phase != "C":
                self._report.drop(f"event of phase {phase!r}" if phase else "event without a phase")
        self._add_instants(instants)
        if any(event.ph == "C" for event in events):
            self._add_counters(text)
        return closed

    def _close(self, end: Event) -> list[Event]:
        stack = self._open.get((end.pid, end.tid))
        if not stack:
            self._report.drop("end without a begin")
            return []
        begin = stack.pop()
        times, valid = nanoseconds([begin.ts, end.ts])
        if not valid.all():
            self._report.drop("event without a usable time")
            return []
        begin.dur = int(times[1] - times[0]) / 1000
        return [begin]

    def _add_instants(self, events: list[Event]) -> None:
        if not events:
            return
        time_ns, valid = nanoseconds([event.ts for event in events])
        self._report.drop("event without a usable time", count=int((~valid).sum()))
        is_memory = [event.args.size_bytes != -1 and event.args.device_type != -1 for event in events]
        self._add_memory(list(compress(events, is_memory & valid)), time_ns[is_memory & valid])
        others = ~np.array(is_memory) & valid
        named = list(compress(events, others))
        if named:
            self._tables["instants"].add(
                time_ns=time_ns[others],
                name=interned([event.name for event in named], self._strings),
                lane=self._lanes([(event.pid, event.tid) for event in named]),
            )

    def _add_memory(self, events: list[Event], time_ns: NDArray[np.int64]) -> None:
        if not events:
            return
        args = [event.args for event in events]
        names = ("device_type", "device_id", "size_bytes", "address", "allocated_bytes", "reserved_bytes")
        columns = {name: integers([getattr(a, name) for a in args], self._report, name) for name in names}
        columns["device"] = columns.pop("device_id")
        self._tables["memory"].add(time_ns=time_ns, **columns)

    def _add_counters(self, text: bytes) -> None:
        """Counter events once more: every member of ``args`` is a series of its own."""
        times, names, series, values = [], [], [], []
        for raw in _raw_events(text):
            if not _COUNTER.search(raw):
                continue
            try:
                event = msgspec.json.decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError):
                self._report.drop("damaged counter event")
                continue
            if not isinstance(event, dict) or event.get("ph") != "C" or not isinstance(event.get("args"), dict):
                continue
            for key, value in event["args"].items():
                if isinstance(value, int | float):
                    times.append(event.get("ts"))
                    names.append(str(event.get("name", "")))
                    series.append(key)
                    values.append(value)
        if times:
            time_ns, valid = nanoseconds(times)
            self._report.drop("event without a usable time", count=int((~valid).sum()))
            self._tables["counters"].add(
                time_ns=time_ns[valid],
                name=interned(names, self._strings)[valid],
                series=interned(series, self._strings)[valid],
                value=floats(values)[valid],
            )

    def _add_flows(self, events: list[Event]) -> None:
        if not events:
            return
        time_ns, valid = nanoseconds([event.ts for event in events])
        if not valid.all():
            self._report.drop("event without a usable time", count=int((~valid).sum()))
            events, time_ns = list(compress(events, valid)), time_ns[valid]
        self._tables["flows"].add(
            kind=interned([event.cat or event.name for event in events], self._strings),
            id=integers([event.id for event in events], self._report, "flow id"),
            begins=np.array([event.ph == "s" for event in events], np.bool_),
            time_ns=time_ns,
            lane=self._lanes([(event.pid, event.tid) for event in events]),
        )

    # -- events with a duration ----------------------------------------------------------------------------------

    def _add_complete(self, events: list[Event]) -> None:
        cats = [event.cat for event in events]
        self._report.events.update(cats)
        category = self._category(cats)
        events, cats, category = self._selected(events, cats, category)
        start_ns, start_valid = nanoseconds([event.ts for event in events])
        duration_ns, duration_valid = self._durations(events)
        category, keep = self._plausible(category, start_ns, duration_ns, start_valid & duration_valid)
        if not keep.all():
            events, cats = list(compress(events, keep)), list(compress(cats, keep))
            category, start_ns, duration_ns = category[keep], start_ns[keep], duration_ns[keep]
        if not events:
            return
        args = [event.args for event in events]
        self._tables["events"].add(
            name=interned([event.name for event in events], self._strings),
            category_name=interned(cats, self._strings),
            category=category,
            lane=self._event_lanes(events, category),
            start_ns=start_ns,
            duration_ns=duration_ns,
            correlation=integers([a.correlation for a in args], self._report, "correlation"),
            external_id=self._external_ids(args),
        )
        self._add_details(args, category)
        self._num_events += len(events)

    def _category(self, cats: list[str]) -> NDArray[np.int8]:
        known = self._categories
        for cat in dict.fromkeys(cats):
            if cat not in known:
                known[cat] = _category_of(cat)
        return np.fromiter(map(known.__getitem__, cats), np.int8, len(cats))

    def _selected(
        self, events: list[Event], cats: list[str], category: NDArray[np.int8]
    ) -> tuple[list[Event], list[str], NDArray[np.int8]]:
        """Leave out the span that Kineto draws over the whole trace and, on request, Python functions."""
        drop = np.fromiter((cat == "Trace" for cat in cats), np.bool_, len(cats))
        if not self._keep_python:
            python = category == Category.PYTHON
            self._report.drop("Python function, as asked", count=int(python.sum()))
            drop |= python
        if not drop.any():
            return events, cats, category
        return list(compress(events, ~drop)), list(compress(cats, ~drop)), category[~drop]

    def _durations(self, events: list[Event]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        values = [event.dur for event in events]
        missing = values.count(None)
        if missing:
            self._report.repair("missing duration (taken as 0)", count=missing)
            values = [0 if value is None else value for value in values]
        return nanoseconds(values)

    def _plausible(
        self,
        category: NDArray[np.int8],
        start_ns: NDArray[np.int64],
        duration_ns: NDArray[np.int64],
        valid: NDArray[np.bool_],
    ) -> tuple[NDArray[np.int8], NDArray[np.bool_]]:
        """Mend negative durations in place; say which events have a time that can be true."""
        self._report.drop("event without a usable time", count=int((~valid).sum()))
        negative = valid & (duration_ns < 0)
        self._report.repair("negative duration (taken as 0)", count=int(negative.sum()))
        duration_ns[negative] = 0
        absurd = valid & (duration_ns > _WEEK_NS)
        self._report.drop("duration of more than a week", count=int(absurd.sum()))
        timeless = valid & (start_ns == 0) & (duration_ns == 0) & np.isin(category, _ON_DEVICE)
        self._report.drop("device event without a time (ts 0, dur 0)", count=int(timeless.sum()))
        return category, valid & ~absurd & ~timeless

    def _external_ids(self, args: list[Any]) -> NDArray[np.int64]:
        ids = integers([a.external_id for a in args], self._report, "External id")
        if (ids < 0).any():
            old = integers([a.external_id_2021 for a in args], self._report, "external id")
            ids = np.where(ids < 0, old, ids)
        return ids

    def _event_lanes(self, events: list[Event], category: NDArray[np.int8]) -> NDArray[np.int32]:
        keys: list[tuple[Any, ...]] = [(event.pid, event.tid) for event in events]
        for row in np.flatnonzero(np.isin(category, _ON_DEVICE)).tolist():
            event = events[row]
            device = event.args.device if type(event.args.device) is int and event.args.device >= 0 else event.pid
            stream = event.args.stream if type(event.args.stream) is int else event.tid
            keys[row] = (event.pid, event.tid, device, stream)
        return self._lanes(keys)

    def _lanes(self, keys: list[tuple[Any, ...]]) -> NDArray[np.int32]:
        ids = self._lane_ids
        for key in dict.fromkeys(keys):
            ids.setdefault(key, len(ids))
        return np.fromiter(map(ids.__getitem__, keys), np.int32, len(keys))

    # -- details of some categories --------------------------------------------------------------------------------

    def _add_details(self, args: list[Any], category: NDArray[np.int8]) -> None:
        self._add_operators(*self._of(args, category, Category.OPERATOR, Category.ANNOTATION))
        self._add_kernels(*self._of(args, category, Category.KERNEL))
        self._add_copies(*self._of(args, category, Category.MEMCPY, Category.MEMSET))
        self._add_syncs(*self._of(args, category, Category.SYNC))
        self._add_python(*self._of(args, category, Category.PYTHON))
        marked = [row for row, a in enumerate(args) if a.collective]
        if marked:
            rows = np.array(marked, np.int64) + self._num_events
            self._add_collectives([args[row] for row in marked], rows)

    def _of(
        self, args: list[Any], category: NDArray[np.int8], *wanted: Category
    ) -> tuple[list[Any], NDArray[np.int64]]:
        rows = np.flatnonzero(np.isin(category, wanted))
        return [args[row] for row in rows.tolist()], rows + self._num_events

    def _add_operators(self, args: list[Any], event: NDArray[np.int64]) -> None:
        if not args:
            return
        self._tables["operators"].add(
            event=event,
            input_shapes=self._raw.ids([a.input_shapes for a in args]),
            input_types=self._raw.ids([a.input_types for a in args]),
            input_strides=self._raw.ids([a.input_strides for a in args]),
            concrete_inputs=self._raw.ids([a.concrete_inputs for a in args]),
            sequence=integers([a.sequence for a in args], self._report, "Sequence number"),
            forward_thread=integers([a.forward_thread for a in args], self._report, "Fwd thread id"),
            record_function_id=integers([a.record_function_id for a in args], self._report, "Record function id"),
        )

    def _add_kernels(self, args: list[Any], event: NDArray[np.int64]) -> None:
        if not args:
            return
        self._tables["kernels"].add(
            event=event,
            grid=self._raw.ids([a.grid for a in args]),
            block=self._raw.ids([a.block for a in args]),
            registers=integers([a.registers for a in args], self._report, "registers per thread"),
            shared_memory_bytes=integers([a.shared_memory_bytes for a in args], self._report, "shared memory"),
            blocks_per_sm=floats([a.blocks_per_sm for a in args]),
            warps_per_sm=floats([a.warps_per_sm for a in args]),
            occupancy_pct=floats([a.occupancy_pct for a in args]),
        )

    def _add_copies(self, args: list[Any], event: NDArray[np.int64]) -> None:
        if args:
            size_bytes = integers([a.bytes for a in args], self._report, "bytes")
            self._tables["copies"].add(event=event, size_bytes=size_bytes)

    def _add_syncs(self, args: list[Any], event: NDArray[np.int64]) -> None:
        if not args:
            return
        names = ("wait_on_stream", "wait_on_event_record_correlation", "wait_on_event_id")
        self._tables["syncs"].add(
            event=event,
            kind=interned([a.cuda_sync_kind for a in args], self._strings),
            **{name: integers([getattr(a, name) for a in args], self._report, name) for name in names},
        )

    def _add_python(self, args: list[Any], event: NDArray[np.int64]) -> None:
        if args:
            names = ("python_id", "python_parent_id", "python_module_id")
            columns = {name: integers([getattr(a, name) for a in args], self._report, name) for name in names}
            self._tables["python"].add(event=event, **columns)

    def _add_collectives(self, args: list[Any], event: NDArray[np.int64]) -> None:
        comms_id = integers([a.comms_id for a in args], self._report, "comms_id")
        spaced = integers([a.comms_id_spaced for a in args], self._report, "Comms Id")
        numbers = ("in_elements", "out_elements", "group_size", "source_rank", "target_rank")
        self._tables["collectives"].add(
            event=event,
            collective=interned([a.collective for a in args], self._strings),
            dtype=interned([a.dtype for a in args], self._strings),
            group=interned([a.group for a in args], self._strings),
            group_description=interned([a.group_description for a in args], self._strings),
            group_ranks=self._raw.ids([a.group_ranks for a in args]),
            comms_id=np.where(comms_id == -1, spaced, comms_id),
            **{name: integers([getattr(a, name) for a in args], self._report, name) for name in numbers},
        )

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
        return Timeline(
            lanes=lanes, strings=self._strings, rank=rank, metadata=members, report=self._report, **tables
        )

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
        device_rows = np.isin(events["category"], _ON_DEVICE)
        on_device[events["lane"][device_rows]] = True
        on_host[events["lane"][~device_rows]] = True
        return [self._lane(key, bool(on_device[i]), bool(on_host[i])) for key, i in self._lane_ids.items()]

    def _lane(self, key: tuple[Any, ...], on_device: bool, on_host: bool) -> Lane:
        process, thread = str(key[0]), str(key[1])
        name = self._thread_names.get((process, thread), "")
        if on_device:
            device, stream = _number_of(key[2]), _number_of(key[3])
            return Lane(LaneKind.DEVICE_STREAM, process, thread, device, stream, name)
        return Lane(LaneKind.HOST_THREAD if on_host else LaneKind.OTHER, process, thread, name=name)


_STRING_COLUMNS: dict[str, tuple[str, ...]] = {
    "events": ("name", "category_name"),
    "operators": ("input_shapes", "input_types", "input_strides", "concrete_inputs"),
    "kernels": ("grid", "block"),
    "copies": (),
    "collectives": ("collective", "dtype", "group", "group_description", "group_ranks"),
    "syncs": ("kind",),
    "python": (),
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


def count_by_category(timeline: Timeline) -> Counter[str]:
    """Events with a duration by the category that the file gave them."""
    return Counter(timeline.report.events)
