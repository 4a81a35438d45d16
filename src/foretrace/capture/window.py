"""One recorded window of one rank, from the start of the profiler to whole files."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import ExecutionTraceObserver, profile
from torch.profiler.profiler import _ITraceObserver

from foretrace.capture import statistics
from foretrace.capture.collectives import NAMES, Collective, CollectiveWatch, Group, all_groups
from foretrace.capture.execution_trace import TraceText, add_open_scopes, parse, tensors_of
from foretrace.capture.job_file import write_whole
from foretrace.capture.kineto_file import KinetoIds, mended, read_ids
from foretrace.capture.matching import match
from foretrace.capture.statistics import StatisticsWatch
from foretrace.capture.storages import storages


class _ExecutionTrace(ExecutionTraceObserver):
    """PyTorch's observer notes process groups when it starts, before the profiler does: Kineto would not have them."""

    def _record_pg_config(self) -> None:
        pass

    def note_groups(self) -> None:
        """Note them now."""
        super()._record_pg_config()


class Observer(_ITraceObserver):
    """What the profiler starts and stops together with itself: PyTorch's execution trace, and our watches."""

    def __init__(self, folder: Path, with_statistics: bool) -> None:
        self._folder = folder
        self._with_statistics = with_statistics
        self._trace = _ExecutionTrace()
        self.reset()

    def reset(self) -> None:
        """Be ready for another window."""
        self.collectives: CollectiveWatch | None = None
        self.statistics: StatisticsWatch | None = None
        self._path: Path | None = None

    def start(self) -> None:
        self._path = self._folder / f".{socket.gethostname()}.{os.getpid()}.{time.time_ns()}.part.et.json"
        self._trace = _ExecutionTrace()
        self._trace.register_callback(str(self._path))
        if dist.is_available():
            self.collectives = CollectiveWatch()
            self.collectives.install()
        if self._with_statistics:
            self.statistics = StatisticsWatch()
            self.statistics.install()
        self._trace.start()

    def stop(self) -> None:
        self._trace.note_groups()
        self._trace.stop()
        for watch in (self.statistics, self.collectives):
            if watch is not None:
                watch.remove()

    def cleanup(self) -> None:
        self._trace.unregister_callback()
        if self._path is not None:  # of a window that never came beyond its warm-up
            self._path.unlink(missing_ok=True)

    def take_text(self) -> bytes:
        """The execution trace of the window that has stopped; its file is deleted."""
        self._trace.unregister_callback()
        if self._path is None or not self._path.exists():
            return b""
        text = self._path.read_bytes()
        self._path.unlink()
        return text


@dataclass
class WindowResult:
    """What one window gave."""

    files: dict[str, str] = field(default_factory=dict)
    collectives: dict[str, Any] = field(default_factory=dict)
    statistics: dict[str, Any] = field(default_factory=dict)
    storages: dict[str, Any] = field(default_factory=dict)
    nodes: int = 0
    groups: dict[str, Group] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """As it stands in ``job.json``; groups stand beside it."""
        members = ("files", "nodes", "collectives", "statistics", "storages", "problems")
        return {name: getattr(self, name) for name in members}


def write_window(
    profiler: profile, observer: Observer, folder: Path, rank: int, members: dict[str, Any]
) -> WindowResult:
    """Write the files of a window that has stopped. What fails is told in the result; nothing is raised.

    Args:
        members: to add at the top of the execution trace.
    """
    result = WindowResult(groups=all_groups())
    ids = KinetoIds()
    name = f"rank{rank}.kineto.json.gz"
    exported = _attempt(
        result, "the Kineto trace was not written", lambda: mended(_kineto_text(profiler, folder), name)
    )
    if exported:
        ids = _attempt(result, "the Kineto trace was not read", lambda: read_ids(exported)) or ids
        if ids.problem:
            result.problems.append(ids.problem)
        _attempt(result, "the Kineto trace was not written", lambda: write_whole(folder / name, exported))
        result.files["kineto"] = name
    trace = _attempt(result, "the execution trace was not written", lambda: parse(observer.take_text()))
    if trace is not None and trace.text:
        _annotate(trace, profiler, observer, ids, result)
        trace.members |= {"rank": rank, **members}
        name = f"rank{rank}.et.json.gz"
        text = trace.with_additions()
        _attempt(result, "the execution trace was not written", lambda: write_whole(folder / name, text))
        result.files["et"] = name
        result.nodes = len(trace.nodes) + len(trace.new_nodes)
    return result


def _attempt(result: WindowResult, failed: str, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:  # recording must not end the program that is recorded
        result.problems.append(f"{failed}: {error!r}")
        return None


def _kineto_text(profiler: profile, folder: Path) -> bytes:
    path = folder / f".{socket.gethostname()}.{os.getpid()}.{time.time_ns()}.kineto.part.json"
    try:
        profiler.export_chrome_trace(str(path))
        return path.read_bytes()
    finally:
        path.unlink(missing_ok=True)


def _annotate(trace: TraceText, profiler: profile, observer: Observer, ids: KinetoIds, result: WindowResult) -> None:
    """Put into the execution trace what we know more than it."""
    if trace.problem:
        result.problems.append(trace.problem)
    lost = _attempt(result, "open scopes were not mended", lambda: add_open_scopes(trace, ids.open))
    if lost:
        result.problems.append(f"{lost} scopes that were open at the end have no node")
    if observer.collectives is not None:
        _attempt(result, "collectives were not described", lambda: _add_collectives(trace, observer, ids, result))
    if observer.statistics is not None:
        _attempt(result, "statistics were not added", lambda: _add_statistics(trace, observer, ids, result))
    _attempt(result, "storages were not added", lambda: _add_storages(trace, profiler, ids, result))


def _keys(
    trace: TraceText, ids: KinetoIds, operators: set[str]
) -> tuple[list[int], list[tuple[int, str, tuple[int, ...]]]]:
    """Nodes of the given operators that ran, by id, and what they are matched by."""
    nodes = [node for node in trace.nodes.values() if node.name in operators and trace.ran(node)]
    keys = [
        (
            ids.thread_of.get(node.record_id, -1),
            node.name,
            tuple(tensor[3] for tensor in tensors_of(node.inputs.values) if tensor[3]),
        )
        for node in nodes
    ]
    return [node.id for node in nodes], keys


def _add_collectives(trace: TraceText, observer: Observer, ids: KinetoIds, result: WindowResult) -> None:
    watch = observer.collectives
    assert watch is not None
    nodes, keys = _keys(trace, ids, set(NAMES))
    found = match(watch.calls, nodes, keys)
    described = 0
    for at, node in found.items():
        details = watch.calls[at].details
        if isinstance(details, Collective):
            described += 1
            _attach(trace, node, details)
    result.groups = watch.groups | result.groups
    result.collectives = {
        "seen": len(watch.calls),
        "in_trace": len(nodes),
        "matched": described,
        "not_matched": len(watch.calls) - described,
        "nodes_without_details": len(nodes) - described,
        "failures": watch.failures,
    }


def _attach(trace: TraceText, node: int, details: Collective) -> None:
    """To NCCL's own record of the collective where there is one below, what that lacks; else to the operator."""
    target = trace.nodes[node]
    below = [child for child in trace.children.get(node, ()) if child.name == "record_param_comms"]
    target = below[0] if below else target
    known = {attribute.name for attribute in target.attrs}
    trace.attributes[target.record_id] += [one for one in details.attributes() if one["name"] not in known]


def _add_statistics(trace: TraceText, observer: Observer, ids: KinetoIds, result: WindowResult) -> None:
    watch = observer.statistics
    assert watch is not None
    nodes, keys = _keys(trace, ids, statistics.OPERATORS)
    found = match(watch.calls, nodes, keys)
    outer = sum(bool(call.details) for call in watch.calls)
    matched = 0
    texts: dict[int, dict[str, Any]] = {}
    for at, node in found.items():
        document = statistics.document(watch.calls[at]) if watch.calls[at].details else {}
        if document:
            matched += 1
            _spread(trace, node, document, texts)
    for node, document in texts.items():
        value = json.dumps(document)
        attribute = {"name": "integer_statistics", "type": "string", "value": value}
        trace.attributes[trace.nodes[node].record_id].append(attribute)
    result.statistics = {
        "calls_with_integers": outer,
        "matched": matched,
        "not_matched": outer - matched,
        "left_out_for_size": watch.left_out,
        "failures": watch.failures,
    }


def _spread(trace: TraceText, node: int, document: dict[str, Any], texts: dict[int, dict[str, Any]]) -> None:
    """Note the statistics at a node, and at those above it that got the very same tensor."""
    own = trace.nodes[node]
    texts.setdefault(node, {}).update(document)
    tensors = {at: tensors_of(own.inputs.values[int(at)]) for at in document if int(at) < len(own.inputs.values)}
    above = trace.nodes.get(own.parent)
    while above is not None and above.inputs.values:
        for at, value in enumerate(above.inputs.values):
            theirs = tensors_of(value)
            for position, ours in tensors.items():
                if theirs and theirs == ours:
                    texts.setdefault(above.id, {}).setdefault(str(at), document[position])
        above = trace.nodes.get(above.parent)


def _add_storages(trace: TraceText, profiler: profile, ids: KinetoIds, result: WindowResult) -> None:
    results = getattr(profiler.profiler, "kineto_results", None)
    if results is None or not profiler.profile_memory:
        return
    report = storages(trace, results.experimental_event_tree(), ids.record_of)
    trace.members["storages"] = report.rows
    result.storages = report.document()
