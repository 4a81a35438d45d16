"""Chakra traces of all ranks as one execution graph: recorded durations, collectives that wait for their members."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.formats.chakra.columns import Ints
from foretrace.formats.chakra.from_graph import PRODUCER
from foretrace.formats.chakra.groups import groups_of
from foretrace.formats.chakra.trace import ChakraTrace, Dependencies, NodeType, Wire
from foretrace.trace import (
    EdgeKind,
    ExecutionGraph,
    GraphLane,
    Lane,
    LaneKind,
    LanePolicy,
    StringTable,
    Table,
    TaskKind,
)
from foretrace.trace.graph import DEVICE_KINDS

BOTH, DATA_ONLY = "data+ctrl", "data"
_LABELS = {kind.label: kind for kind in TaskKind}
_DELAY = -2
_KIND_OF_TYPE = {
    NodeType.METADATA: TaskKind.HOST_GAP,
    NodeType.INVALID: TaskKind.HOST_GAP,
    NodeType.MEM_LOAD: TaskKind.MEMCPY,
    NodeType.MEM_STORE: TaskKind.MEMCPY,
    NodeType.COMP: TaskKind.KERNEL,
    NodeType.COMM_SEND: TaskKind.COLLECTIVE_ALONE,
    NodeType.COMM_RECV: TaskKind.COLLECTIVE_ALONE,
    NodeType.COMM_COLL: TaskKind.COLLECTIVE_ALONE,
}
# Why work may wait for other work, by whether the first and the second are on a device.
_LIKELY = {
    (False, True): (EdgeKind.LAUNCH,),
    (True, False): (EdgeKind.SYNC, EdgeKind.QUEUE),
    (True, True): (EdgeKind.EVENT_WAIT, EdgeKind.OCCUPANCY),
    (False, False): (EdgeKind.HANDOFF,),
}
_SLOTS = ("compute", "communication", "receive")
_RECEIVES = _SLOTS.index("receive")
_COMMUNICATION = (NodeType.COMM_SEND, NodeType.COMM_RECV, NodeType.COMM_COLL)


class DependencyError(ValueError):
    """A Chakra trace whose dependencies make no graph; the message names the file and the node."""


def to_graph(traces: Sequence[ChakraTrace], dependencies: str = BOTH, coupled: bool = True) -> ExecutionGraph:
    """The execution graph of Chakra traces, one a rank.

    Durations are the recorded ones (exact where this project wrote the file, else whole microseconds). Nodes that name
    a stream or thread run on it one at a time, in the order of their ids; others, as in ASTRA-sim, one at a time on
    the rank's CPU, compute or communication. A collective of which all members are there starts when the last of
    them is ready, and a send with its receive.

    Args:
        traces: at most one for each rank; those without a rank get the next free one.
        dependencies: ``"data+ctrl"``: a node waits for both kinds, as in ASTRA-sim; ``"data"``: for data dependencies
            only, as in mlcommons' feeder.
        coupled: let collectives wait for their members; else each takes the time that was measured for it alone, or
            its recorded one.

    Raises:
        DependencyError: if a node depends on one that does not exist.
    """
    if dependencies not in (BOTH, DATA_ONLY):
        raise ValueError(f"dependencies must be {BOTH!r} or {DATA_ONLY!r}, not {dependencies!r}")
    strings = StringTable()
    lanes: list[GraphLane] = []
    notes: Counter[str] = Counter()
    parts = []
    first = 0
    for rank, trace in zip(_ranks(traces, notes), traces, strict=True):
        parts.append(_Rank(trace, rank, first, lanes, strings, dependencies, notes))
        first += trace.num_nodes
    tasks = {name: np.concatenate([part.tasks[name] for part in parts]) for name in parts[0].tasks} if parts else {}
    edges = {name: np.concatenate([part.edges[name] for part in parts]) for name in parts[0].edges} if parts else {}
    if parts:
        alone = np.concatenate([part.trace.integers("measured_duration_ns") for part in parts])
        transfer = tasks["duration_ns"]
        tasks["duration_ns"] = np.where(alone >= 0, alone, transfer)
        tasks, edges = _coupled(parts, tasks, transfer, edges, notes) if coupled else (tasks, edges)
    launched = _launched(tasks, edges, lanes)
    origin = min((_whole(part.trace.metadata.get("origin_ns"), 0) for part in parts), default=0)
    return ExecutionGraph.from_columns(tasks, edges, lanes, strings, launched=launched, origin_ns=origin, notes=+notes)


def _whole(value: Any, absent: int) -> int:
    """A number of a file's metadata, which another program may have written."""
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else absent


def _ranks(traces: Sequence[ChakraTrace], notes: Counter[str]) -> list[int]:
    taken = {trace.rank for trace in traces if trace.rank >= 0}
    free = iter(rank for rank in range(2 * len(traces) + 1) if rank not in taken)
    seen: set[int] = set()
    ranks = []
    for trace in traces:
        if trace.rank >= 0 and trace.rank not in seen:
            ranks.append(trace.rank)
        else:
            ranks.append(next(free))
            notes["file without a rank of its own: given the next free one"] += 1
        seen.add(ranks[-1])
    return ranks


class _Rank:
    """Tasks and edges of one trace; rows count from ``first``."""

    def __init__(
        self,
        trace: ChakraTrace,
        rank: int,
        first: int,
        lanes: list[GraphLane],
        strings: StringTable,
        dependencies: str,
        notes: Counter[str],
    ) -> None:
        self.trace, self.rank, self.first, self.notes = trace, rank, first, notes
        self.is_ours = trace.metadata.get("producer") == PRODUCER
        self.type = trace.nodes["type"]
        self.is_cpu = trace.integers("is_cpu_op", 0) > 0
        self.kind = self._kinds()
        exact = trace.integers("duration_ns", -1)
        recorded = trace.nodes["duration_micros"].astype(np.int64) * 1000
        self.duration = np.where(exact >= 0, exact, recorded)
        self.start = trace.integers("start_ns", -1)
        self.start = np.where(self.start >= 0, self.start, trace.nodes["start_micros"].astype(np.int64) * 1000)
        lane = self._lanes(lanes)
        self.tasks = self._tasks(lane, strings)
        self.edges = self._edges(dependencies)

    def _kinds(self) -> NDArray[np.int64]:
        """Kind of each task; `_DELAY` for a node that is the lag of an edge."""
        kinds = np.full(len(NodeType), TaskKind.KERNEL, np.int64)
        for of, kind in _KIND_OF_TYPE.items():
            kinds[of] = kind
        found = kinds[np.clip(self.type, 0, len(NodeType) - 1)]
        found[self.is_cpu & (found == TaskKind.KERNEL)] = TaskKind.OPERATOR
        told = self._text_ids("task_kind")
        used = np.flatnonzero(np.bincount(told + 1, minlength=1)[1:])
        meaning = np.full(int(told.max(initial=-1)) + 2, -1, np.int64)  # the last one answers for -1
        labels = {**_LABELS, "delay": _DELAY}
        meaning[used] = [labels.get(text, -1) for text in self.trace.strings.lookup(used)]
        return np.where(meaning[told] != -1, meaning[told], found)

    def _lanes(self, lanes: list[GraphLane]) -> NDArray[np.int32]:
        """The lane of each node, -1 for none; adds the rank's lanes."""
        trace = self.trace
        stream, device = trace.integers("stream", -1), np.maximum(trace.integers("device", 0), 0)
        thread, process = self._thread_ids(), self._text_ids("process")
        on_stream = ~self.is_cpu & (stream >= 0)
        # In other programs' files a receive holds up nothing: it may run beside any other.
        receives = (self.type == NodeType.COMM_RECV) & (not self.is_ours)
        on_cpu, on_stream = self.is_cpu & ~receives, on_stream & ~receives
        in_slot = ~on_cpu & ~on_stream
        slot = np.where(receives, _RECEIVES, np.isin(self.type, _COMMUNICATION))
        first = np.select([on_cpu, on_stream], [process, device], slot)
        second = np.select([on_cpu, on_stream], [thread, stream], 0)
        free = np.isin(self.type, (NodeType.METADATA, NodeType.INVALID)) & (not self.is_ours)
        placed = np.flatnonzero((self.kind != _DELAY) & ~free)
        keys = np.stack((in_slot.astype(np.int64) * 2 + on_stream, first, second), axis=1)[placed]
        distinct, example, which = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        found = np.full(trace.num_nodes, -1, np.int32)
        # In the order in which the nodes of the file name them.
        order = np.argsort(example, kind="stable")
        place = np.empty(len(distinct), np.int32)
        place[order] = len(lanes) + np.arange(len(distinct), dtype=np.int32)
        found[placed] = place[which.reshape(-1)]
        for what, one, other in distinct[order].tolist():
            in_order = self.is_ours or (what, one) == (2, _RECEIVES)
            policy = LanePolicy.IN_ORDER if in_order else LanePolicy.PRIORITY
            lanes.append(GraphLane(self.rank, self._lane(what, one, other), policy))
        return found

    def _lane(self, what: int, one: int, other: int) -> Lane:
        """A thread (0) of a process, a stream (1) of a device, or the slot (2) for a kind of work."""
        if what == 1:
            return Lane(LaneKind.DEVICE_STREAM, str(one), f"stream {other}", one, other)
        if what == 2:
            name = _SLOTS[one]
            return Lane(LaneKind.DEVICE_STREAM, str(self.rank), name, 0, one, name=name)
        process = self.trace.strings[one] if one >= 0 else str(self.rank)
        if self.is_ours:
            return Lane(LaneKind.HOST_THREAD, process, self.trace.strings[other] if other >= 0 else "cpu")
        return Lane(LaneKind.HOST_THREAD, process, str(other) if other >= 0 else "cpu")

    def _thread_ids(self) -> NDArray[np.int64]:
        """A number for each node's thread: a string id in our files, the thread's own number in others."""
        return self._text_ids("tid") if self.is_ours else self.trace.integers("tid", -1)

    def _text_ids(self, name: str) -> NDArray[np.int64]:
        trace = self.trace
        ids = np.full(trace.num_nodes, -1, np.int64)
        rows = trace.attribute_rows(name)
        rows = rows[trace.attributes["wire"][rows] == Wire.STRING]
        ids[trace.attributes["node"][rows]] = trace.attributes["value"][rows]
        return ids

    def _tasks(self, lane: NDArray[np.int32], strings: StringTable) -> dict[str, NDArray[Any]]:
        trace = self.trace
        names = trace.nodes["name"]
        used, which = np.unique(names, return_inverse=True)
        name = strings.intern_all(trace.strings.lookup(used))[which] if len(used) else np.empty(0, np.int32)
        gaps = np.isin(self.kind, (TaskKind.HOST_GAP, TaskKind.START, TaskKind.HANDOFF, TaskKind.BLOCKED))
        order = np.empty(trace.num_nodes, np.int32)
        order[np.argsort(trace.nodes["id"], kind="stable")] = np.arange(trace.num_nodes, dtype=np.int32)
        return {
            "kind": np.where(self.kind == _DELAY, TaskKind.HOST_GAP, self.kind),
            "name": np.where(gaps & self.is_ours, -1, name),
            "duration_ns": np.where(self.kind == _DELAY, 0, self.duration),
            "lane": lane,
            "event": trace.integers("event", -1),
            "step": trace.integers("step", -1),
            "measured_start_ns": self.start,
            "measured_end_ns": self.start + self.duration,
            "priority": order,
        }

    def _edges(self, dependencies: str) -> dict[str, NDArray[Any]]:
        kinds = (self.trace.data, self.trace.control) if dependencies == BOTH else (self.trace.data,)
        pairs = [self._pairs(one) for one in kinds]
        source, target = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
        keys = np.unique(target * max(self.trace.num_nodes, 1) + source)
        target, source = keys // max(self.trace.num_nodes, 1), keys % max(self.trace.num_nodes, 1)
        lag = np.zeros(len(source), np.int64)
        source, lag, keep = self._delays_as_lags(source, target, lag)
        source, target, lag = source[keep], target[keep], lag[keep]
        kind = self._edge_kinds(source, target)
        return {"source": source + self.first, "target": target + self.first, "lag_ns": lag, "kind": kind}

    def _pairs(self, lists: Dependencies) -> tuple[Ints, Ints]:
        """Rows of source and target of each dependency."""
        ids = self.trace.nodes["id"]
        target = lists.nodes
        if not len(lists.ids):
            return np.empty(0, np.int64), target
        order = np.argsort(ids, kind="stable")
        wanted = lists.ids.astype(ids.dtype)
        at = np.minimum(np.searchsorted(ids[order], wanted), len(ids) - 1)
        source = order[at]
        missing = np.flatnonzero(ids[source] != wanted)
        if len(missing):
            node = int(target[missing[0]])
            raise DependencyError(
                f"{self.trace.report.path}: node {ids[node]} depends on node {wanted[missing[0]]}, which is not in the "
                f"file ({len(missing)} such dependencies); run foretrace lint --repair"
            )
        return source, target

    def _delays_as_lags(self, source: Ints, target: Ints, lag: Ints) -> tuple[Ints, Ints, NDArray[np.bool_]]:
        """Nodes that are delays become lags of the edges that leave them; those that follow nothing stay nodes."""
        is_delay = self.kind == _DELAY
        before = np.full(self.trace.num_nodes, -1, np.int64)
        into = is_delay[target]
        before[target[into]] = source[into]
        single = np.bincount(target[into], minlength=self.trace.num_nodes) == 1
        lags = is_delay & single
        leaving = lags[source]
        lag[leaving] = self.duration[source[leaving]]
        self.duration = np.where(lags, 0, self.duration)
        self.tasks["duration_ns"] = np.where(is_delay & ~lags, self.duration, self.tasks["duration_ns"])
        return np.where(leaving, before[source], source), lag, ~lags[target]

    def _edge_kinds(self, source: Ints, target: Ints) -> NDArray[np.int8]:
        """Why each edge is there, as far as the file tells."""
        kind = np.full(len(source), EdgeKind.DATA, np.int8)
        if not self.is_ours:
            return kind
        lane = self.tasks["lane"]
        device = np.isin(self.kind, DEVICE_KINDS) & ~self.is_cpu
        same = (lane[source] == lane[target]) & (lane[source] >= 0)
        kind[same] = EdgeKind.ORDER
        waits, strings = self._text_ids("waits_for"), self.trace.strings
        between = np.flatnonzero(~same & (lane[source] >= 0) & (lane[target] >= 0))
        told = waits[target[between]]
        # One look at each combination of what the target says and where the two are.
        keys = np.stack((told, device[source[between]], device[target[between]]), axis=1)
        distinct, which = np.unique(keys, axis=0, return_inverse=True)
        meaning = np.full(len(distinct), EdgeKind.DATA, np.int8)
        for at, (text, one, other) in enumerate(distinct.tolist()):
            words = set(strings[text].split()) if text >= 0 else set()
            likely = _LIKELY[bool(one), bool(other)]
            meaning[at] = next((one_kind for one_kind in likely if one_kind.label in words), EdgeKind.DATA)
        kind[between] = meaning[which.reshape(-1)]
        return kind


def _launched(tasks: dict[str, Any], edges: dict[str, Any], lanes: list[GraphLane]) -> Table:
    """Which host task launched which work, for the timelines of a simulation."""
    if not edges:
        return Table({name: np.empty(0, np.int32) for name in ("issue", "work", "lane", "position")})
    rows = np.flatnonzero(edges["kind"] == EdgeKind.LAUNCH)
    issue, work = edges["source"][rows], _last_of_event(tasks)[edges["target"][rows]]
    lane = tasks["lane"][work]
    order = np.lexsort((tasks["priority"][work], lane))
    position = np.empty(len(rows), np.int64)
    position[order] = np.arange(len(rows))
    columns = {"issue": issue, "work": work, "lane": lane, "position": position}
    return Table({name: column.astype(np.int32) for name, column in columns.items()})


def _last_of_event(tasks: dict[str, Any]) -> Ints:
    """For each task the last one of its event on its lane: work may begin with a delay, or be in several pieces."""
    own = np.arange(len(tasks["kind"]))
    known = np.flatnonzero((tasks["event"] >= 0) & (tasks["lane"] >= 0))
    key = tasks["lane"][known].astype(np.int64) * (int(tasks["event"].max(initial=0)) + 1) + tasks["event"][known]
    order = known[np.lexsort((tasks["priority"][known], key))]
    sorted_key = np.sort(key)
    last = order[np.searchsorted(sorted_key, key, side="right") - 1]
    own[known] = last
    return own


def _coupled(
    parts: list[_Rank], tasks: dict[str, Any], transfer: Ints, edges: dict[str, Any], notes: Counter[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Let collectives, and sends with their receives, wait for all that take part."""
    meetings = _meetings(parts, notes)
    if not meetings:
        return tasks, edges
    count = len(tasks["kind"])
    members = np.concatenate(meetings)
    hub_of = np.repeat(np.arange(len(meetings)), [len(one) for one in meetings])
    hubs, arrivals = count + np.arange(len(meetings)), count + len(meetings) + np.arange(len(members))
    tasks["kind"] = tasks["kind"].copy()
    tasks["kind"][members] = TaskKind.COLLECTIVE
    shortest = np.full(len(meetings), np.iinfo(np.int64).max)
    np.minimum.at(shortest, hub_of, transfer[members])
    tasks["duration_ns"][members] = shortest[hub_of]  # the last to come waits for nobody
    ready = np.zeros(len(meetings), np.int64)
    np.maximum.at(ready, hub_of, tasks["measured_start_ns"][members])
    more: dict[str, Any] = {
        "kind": np.concatenate((np.full(len(hubs), TaskKind.RENDEZVOUS), np.full(len(members), TaskKind.ARRIVAL))),
        "name": np.concatenate(
            (tasks["name"][members[np.searchsorted(hub_of, np.arange(len(hubs)))]], tasks["name"][members])
        ),
        "lane": np.concatenate((np.full(len(hubs), -1), tasks["lane"][members])),
        "event": np.concatenate((np.full(len(hubs), -1), tasks["event"][members])),
        "step": np.concatenate((np.full(len(hubs), -1), tasks["step"][members])),
        "priority": np.concatenate((np.zeros(len(hubs), np.int64), tasks["priority"][members])),
        "measured_start_ns": np.concatenate((ready, tasks["measured_start_ns"][members])),
    }
    more["measured_end_ns"] = more["measured_start_ns"]
    more["duration_ns"] = np.zeros(len(hubs) + len(members), np.int64)
    # A lane that picks by priority is not held by a member that waits for the others.
    by_priority = np.repeat([not part.is_ours for part in parts], [part.trace.num_nodes for part in parts])
    more["lane"][len(hubs) :][by_priority[members]] = -1
    tasks = {name: np.concatenate((column, more[name])) for name, column in tasks.items()}
    arrival_of = np.arange(count)
    arrival_of[members] = arrivals
    edges["target"] = arrival_of[edges["target"]]
    added = {
        "source": np.concatenate((arrivals, hubs[hub_of], arrivals)),
        "target": np.concatenate((hubs[hub_of], members, members)),
        "lag_ns": np.zeros(3 * len(members), np.int64),
        "kind": np.repeat([EdgeKind.COLLECTIVE, EdgeKind.COLLECTIVE, EdgeKind.ORDER], len(members)),
    }
    notes["coupled collectives"] += len(meetings)
    return tasks, {name: np.concatenate((column, added[name])) for name, column in edges.items()}


def _meetings(parts: list[_Rank], notes: Counter[str]) -> list[Ints]:
    """Rows of the nodes that take part in each collective or transfer between two ranks."""
    ranks = [part.rank for part in parts]
    groups: dict[str, dict[int, Ints]] = {}
    sends: dict[tuple[int, int, int], Ints] = {}
    receives: dict[tuple[int, int, int], Ints] = {}
    for part in parts:
        for name, rows in _collectives(part).items():
            groups.setdefault(name, {})[part.rank] = rows
        _add_transfers(part, sends, NodeType.COMM_SEND)
        _add_transfers(part, receives, NodeType.COMM_RECV)
    meetings: list[Ints] = []
    listed = _listed_groups(parts)
    for name, members in groups.items():
        wanted = listed.get(name, set(ranks))
        if set(members) != wanted or len(members) < 2:
            notes["collective of a group whose ranks are not all there: alone"] += sum(map(len, members.values()))
            continue
        lengths = {len(rows) for rows in members.values()}
        if len(lengths) > 1:
            notes["group whose ranks have different numbers of collectives: the common first ones coupled"] += 1
        meetings += list(np.stack([rows[: min(lengths)] for rows in members.values()]).T)
    for key, rows in sends.items():
        other = receives.get(key, np.empty(0, np.int64))
        count = min(len(rows), len(other))
        notes["send or receive without its counterpart: alone"] += abs(len(rows) - len(other))
        meetings += list(np.stack((rows[:count], other[:count])).T)
    notes["send or receive without its counterpart: alone"] += sum(
        len(rows) for key, rows in receives.items() if key not in sends
    )
    return meetings


def _collectives(part: _Rank) -> dict[str, Ints]:
    """Rows of collectives in their order, by group."""
    trace = part.trace
    is_one = (part.type == NodeType.COMM_COLL) & ~((part.kind == TaskKind.COLLECTIVE_ALONE) & part.is_ours)
    rows = np.flatnonzero(is_one)
    names = trace.texts("pg_name")
    sequence = trace.integers("comm_sequence", -1)
    by_name: dict[str, list[int]] = {}
    for row in rows.tolist():
        by_name.setdefault(names[row] or "0", []).append(row)
    ids = trace.nodes["id"]
    found = {}
    for name, of in by_name.items():
        mine = np.array(of, np.int64)
        found[name] = mine[np.lexsort((ids[mine], sequence[mine]))] + part.first
    return found


def _add_transfers(part: _Rank, found: dict[tuple[int, int, int], Ints], kind: NodeType) -> None:
    rows = np.flatnonzero(part.type == kind)
    rows = rows[np.argsort(part.trace.nodes["id"][rows], kind="stable")]
    source, target, tag = (part.trace.integers(name, -1)[rows] for name in ("comm_src", "comm_dst", "comm_tag"))
    source = np.where((source < 0) & (kind == NodeType.COMM_SEND), part.rank, source)
    target = np.where((target < 0) & (kind == NodeType.COMM_RECV), part.rank, target)
    by_key: dict[tuple[int, int, int], list[int]] = {}
    for key, row in zip(zip(source.tolist(), target.tolist(), tag.tolist(), strict=True), rows.tolist(), strict=True):
        by_key.setdefault(key, []).append(row + part.first)
    found.update({key: np.array(mine, np.int64) for key, mine in by_key.items()})


def _listed_groups(parts: list[_Rank]) -> dict[str, set[int]]:
    """Members of the groups that any of the files lists; of one without ranks all."""
    found: dict[str, set[int]] = {}
    for part in parts:
        world = _whole(part.trace.metadata.get("world_size"), len(parts))
        for name, ranks in groups_of(part.trace).items():
            if ranks or name not in found:
                found[name] = set(ranks or range(world))
    return found
