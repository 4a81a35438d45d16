"""What is wrong with a Chakra trace by itself: dependencies, ids, types, attributes, times, groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.formats.chakra.edges import Edges, Mask, Mentions
from foretrace.formats.chakra.groups import DEFAULT_GROUPS, groups_named, groups_of
from foretrace.formats.chakra.trace import INTEGER_WIRES, ChakraTrace, CommType, NodeType, Wire
from foretrace.trace.findings import Finding, Rule, by_name, damage

Rows = NDArray[np.integer]

# Attributes that simulators read as integers, and those that older feeders read only as int64.
INTEGER_ATTRIBUTES = (
    "comm_type", "comm_size", "comm_priority", "comm_tag", "comm_src", "comm_dst", "num_ops", "tensor_size",
    "tensor_loc", "is_cpu_op",
)  # fmt: skip
INT64_ATTRIBUTES = ("comm_type", "comm_size")
COMMUNICATION = (NodeType.COMM_SEND, NodeType.COMM_RECV, NodeType.COMM_COLL)
SIMULATED_COLLECTIVES = (
    CommType.ALL_REDUCE, CommType.ALL_GATHER, CommType.ALL_TO_ALL, CommType.REDUCE_SCATTER, CommType.BROADCAST,
)  # fmt: skip
_UNSIGNED_64 = (Wire.UINT64, Wire.FIXED64)
_LARGEST_MICROS = np.uint64(np.iinfo(np.int64).max // 1000)
_SHOWN_NODES = 12  # of a cycle

RULES = by_name(
    Rule(
        "no-nodes",
        "The file holds metadata and no node: there is nothing to simulate.",
        "Convert or record the trace again.",
    ),
    Rule(
        "dangling-dependency",
        "A node depends on an id that no node of the file has. mlcommons' converter writes such files when it removes "
        "nodes that others still name; ASTRA-sim aborts on them.",
        "A repair removes the dependency. What the absent node itself waited for is not in the file, so an order "
        "that ran through it cannot be kept.",
        is_repairable=True,
    ),
    Rule(
        "duplicate-id",
        "Several nodes have one id: which of them a dependency means is not defined, and simulators keep only one.",
        "A repair gives all but the first a new id; dependencies go on to name the first.",
        is_repairable=True,
    ),
    Rule(
        "self-dependency",
        "A node depends on itself. It never becomes free; ASTRA-sim leaves it and all behind it out without a word.",
        "A repair removes the dependency.",
        is_repairable=True,
    ),
    Rule(
        "cycle",
        "Nodes wait for each other, through data and control dependencies together, and none of them ever becomes "
        "free. ASTRA-sim leaves them out without a word.",
        "A repair cuts dependencies that lead from a later to an earlier node of the cycle (by data, then start, "
        "then id): control dependencies where the cycle has any, data dependencies only where they alone form it.",
        is_repairable=True,
    ),
    Rule(
        "no-root",
        "Every node depends on something: no node can start, and ASTRA-sim aborts.",
        "A repair of dangling dependencies, self-dependencies and cycles frees at least one node.",
        is_repairable=True,
    ),
    Rule(
        "unknown-node-type",
        "A node's type is none of Chakra v0.0.4's, or INVALID_NODE: simulators skip it or stop.",
        "Give the node a type from 1 (metadata) to 7 (collective).",
    ),
    Rule(
        "missing-type",
        "A collective without an integer attribute comm_type: what it does is not known, and ASTRA-sim hangs on it.",
        "Add comm_type (0 all-reduce, 2 all-gather, 5 broadcast, 6 all-to-all, 7 reduce-scatter).",
    ),
    Rule(
        "unknown-collective",
        "comm_type is none of Chakra v0.0.4's numbers (0 to 9).",
        "Write the number of the collective; v0.0.1 numbered them otherwise.",
    ),
    Rule(
        "host-collective",
        "A communication node that runs on the host (is_cpu_op) and says nothing of a communication: the call of a "
        "collective whose device work is another node. As a communication ASTRA-sim hangs on it.",
        "A repair makes it a compute node of the host, with its recorded duration.",
        is_repairable=True,
    ),
    Rule(
        "missing-size",
        "Communication without an integer attribute comm_size: ASTRA-sim hangs on it.",
        "Add comm_size, in bytes.",
    ),
    Rule(
        "impossible-size",
        "comm_size, num_ops or tensor_size is negative, or above 2^63.",
        "Write the number of bytes or operations.",
    ),
    Rule(
        "zero-size-collective",
        "A collective of no bytes. Older feeders also read 0 where comm_size had another type than int64.",
        "Write the size, or leave the node out.",
    ),
    Rule("zero-size-message", "A send or receive of no bytes, on which ASTRA-sim stops.", "Write the size."),
    Rule(
        "missing-peer",
        "A send without comm_dst, or a receive without comm_src: nobody to pair it with. mlcommons' converter writes "
        "such nodes.",
        "Add the attribute.",
    ),
    Rule(
        "missing-tag",
        "A send or receive without comm_tag, which ASTRA-sim requires.",
        "Add comm_tag; 0 if messages between two ranks keep their order.",
    ),
    Rule(
        "wrong-peer",
        "A send whose comm_src, or a receive whose comm_dst, is another rank than the file's; or a rank that sends to "
        "itself, or to a negative rank.",
        "Correct the rank, or the number in the file's name.",
    ),
    Rule(
        "attribute-not-integer",
        "An attribute that simulators read as an integer is a float, text, bytes or a list.",
        "A repair rewrites whole numbers as int64; others cannot be known.",
        is_repairable=True,
    ),
    Rule(
        "attribute-not-int64",
        "comm_type or comm_size is an integer, but no int64: older feeders then read 0.",
        "A repair rewrites it as int64.",
        is_repairable=True,
    ),
    Rule(
        "repeated-attribute",
        "A node has several attributes of one name. Simulators read the first, others the last.",
        "A repair keeps the first.",
        is_repairable=True,
    ),
    Rule(
        "duration-overflow",
        "duration_micros is more than int64 holds as nanoseconds (292 years), mostly a negative number that was "
        "written as unsigned.",
        "Record or convert the trace again; a repair invents no duration.",
    ),
    Rule(
        "impossible-time",
        "A node ends later than int64 holds as nanoseconds: its start is no time.",
        "Record or convert the trace again.",
    ),
    Rule(
        "starts-before-dependency",
        "A node starts before a node that its data_deps name: either a time or the dependency is wrong.",
        "See which of the two is; a repair cannot know.",
    ),
    Rule(
        "no-durations",
        "No compute node has a duration or num_ops: a simulation would take no time at all.",
        "Link the trace with a timeline, or convert it with costs of operators (foretrace convert).",
    ),
    Rule(
        "unknown-group",
        "A collective of a process group that the file does not list, though it lists groups.",
        "Add the group to the file's metadata, or correct pg_name.",
    ),
    Rule(
        "not-in-group",
        "A collective of a process group that the file's rank is not a member of: ASTRA-sim aborts.",
        "Correct the list of ranks, pg_name, or the number in the file's name.",
    ),
    Rule(
        "unsupported-by-simulator",
        "ASTRA-sim aborts or hangs on it, though it is legal Chakra: collectives other than all-reduce, all-gather, "
        "all-to-all, reduce-scatter and broadcast; a collective on the host; a process group whose name is no number.",
        "Simulate with foretrace, or rewrite the nodes before handing the file on.",
    ),
)  # fmt: skip


class Check:
    """All rules over one trace.

    Attributes:
        findings: rules that the trace breaks.
        notes: what is odd and no fault, counted.
    """

    def __init__(self, trace: ChakraTrace) -> None:
        self.trace = trace
        self.type = trace.nodes["type"]
        self.findings: list[Finding] = damage(trace.report, can_be_written=True)
        self.notes: Counter[str] = Counter()
        self.is_host = trace.integers("is_cpu_op", 0) > 0
        if trace.num_nodes == 0:
            self._add("no-nodes", 1, "no node")
        self._dependencies()
        self._types()
        self._attributes()
        host_call = self._host_calls()
        self._collectives(host_call)
        self._messages(host_call)
        self._times()
        self._groups(host_call)
        self._notes()

    def _add(self, name: str, count: int, place: str, repairable: bool | None = None) -> None:
        rule = RULES[name]
        example = f"{self.trace.report.path}: {place}"
        self.findings.append(Finding(rule, count, example, rule.is_repairable if repairable is None else repairable))

    def _nodes(
        self, name: str, rows: Rows, what: Callable[[int], str] = lambda row: "", repairable: bool | None = None
    ) -> None:
        """A finding about nodes, with the first of them as example."""
        if len(rows):
            said = what(int(rows[0]))
            self._add(name, len(rows), self._node(int(rows[0])) + (f": {said}" if said else ""), repairable)

    def _node(self, row: int) -> str:
        return node_text(self.trace, row)

    # -- dependencies and ids ------------------------------------------------------------------------------------------

    def _dependencies(self) -> None:
        trace = self.trace
        edges = Edges(trace)
        ids = trace.nodes["id"]
        self._mentions("dangling-dependency", edges, lambda kind: kind.is_dangling)
        order = np.argsort(ids, kind="stable")
        self._nodes("duplicate-id", np.sort(order[1:][ids[order][1:] == ids[order][:-1]]))
        self._mentions("self-dependency", edges, lambda kind: kind.is_self)
        self._cycles(edges)
        if trace.num_nodes:
            waiting = np.zeros(trace.num_nodes, np.bool_)
            for kind in edges.kinds:
                waiting[kind.target] = True
            if waiting.all():
                self._nodes("no-root", np.zeros(1, np.intp), lambda row: "the first node waits, as all others")
        self._starts(edges)

    def _mentions(self, name: str, edges: Edges, which: Callable[[Mentions], Mask]) -> None:
        entries = [np.flatnonzero(which(kind)) for kind in edges.kinds]
        count = sum(map(len, entries))
        for kind, found in zip(edges.kinds, entries, strict=True):
            if len(found):
                named = int(kind.lists.ids[found[0]])
                distinct = len(
                    np.unique(np.concatenate([k.lists.ids[e] for k, e in zip(edges.kinds, entries, strict=True)]))
                )
                many = f" ({distinct:,} distinct ids in all)" if distinct < count else ""
                self._add(name, count, f"{self._node(int(kind.target[found[0]]))}: {kind.label} names {named}{many}")
                return

    def _cycles(self, edges: Edges) -> None:
        if not len(edges.source):
            return
        sizes = np.bincount(edges.component, minlength=edges.count)
        cyclic = np.flatnonzero(sizes > 1)
        if not len(cyclic):
            return
        from foretrace.formats.chakra.cycles import components, cycle_through

        smallest = cyclic[np.argmin(sizes[cyclic])]
        members = np.flatnonzero(edges.component == smallest)
        start = int(members[np.argmin(edges.priority[members])])
        cycle = cycle_through(edges.source, edges.target, edges.component, start)
        data = edges.is_data
        by_data = components(edges.source[data], edges.target[data], edges.count)
        only_data = int((np.bincount(by_data, minlength=edges.count) > 1).sum())
        how = f"{only_data:,} through data alone" if only_data else "none through data alone"
        total = int(sizes[cyclic].sum())
        self._add("cycle", len(cyclic), f"{self._walk(edges, cycle)} ({total:,} nodes in cycles, {how})")

    def _walk(self, edges: Edges, cycle: list[int]) -> str:
        ids = self.trace.nodes["id"]
        steps = []
        for source, target in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            between = (edges.source == source) & (edges.target == target)
            steps.append(f"{ids[target]} ({'data' if edges.is_data[between].any() else 'ctrl'})")
            if len(steps) == _SHOWN_NODES and len(cycle) > _SHOWN_NODES:
                steps.append(f"... {len(cycle) - _SHOWN_NODES} more")
                break
        return f"{self._node(cycle[0])} before " + " before ".join(steps)

    def _starts(self, edges: Edges) -> None:
        """Data dependencies that the recorded starts contradict."""
        data = edges.is_data
        source, target = edges.source[data], edges.target[data]
        start = self.trace.nodes["start_micros"]
        early = np.flatnonzero((start[target] > 0) & (start[target] < start[source]))
        if len(early):
            one, other = int(source[early[0]]), int(target[early[0]])
            said = f"starts at {start[other]} us, and {self._node(one)}, on which it depends, at {start[one]} us"
            self._add("starts-before-dependency", len(early), f"{self._node(other)}: {said}")

    # -- types and attributes ------------------------------------------------------------------------------------------

    def _types(self) -> None:
        wrong = np.flatnonzero((self.type <= NodeType.INVALID) | (self.type >= len(NodeType)))
        self._nodes("unknown-node-type", wrong, lambda row: f"type {self.type[row]}")

    def _attributes(self) -> None:
        trace, table = self.trace, self.trace.attributes
        repeated = repeated_attributes(trace)
        self._attribute("repeated-attribute", np.flatnonzero(repeated))
        wrong = wrong_integers(trace)
        whole = np.array([whole_number(trace.value(int(row))) is not None for row in wrong], np.bool_)
        self._attribute("attribute-not-integer", wrong, bool(whole.all()))
        self._attribute("attribute-not-int64", narrow_integers(trace))
        for name in ("comm_size", "num_ops", "tensor_size"):
            rows = trace.attribute_rows(name)
            value, wire = table["value"][rows], table["wire"][rows]
            rows = rows[np.isin(wire, list(INTEGER_WIRES)) & (value < 0)]
            self._attribute("impossible-size", rows)

    def _attribute(self, name: str, rows: Rows, repairable: bool | None = None) -> None:
        """A finding about attributes; several of one rule make one finding."""
        if not len(rows):
            return
        table = self.trace.attributes
        row = int(rows[0])
        wire = Wire(int(table["wire"][row])).name.lower() if int(table["wire"][row]) in list(Wire) else "unknown type"
        said = f"{self.trace.strings[int(table['name'][row])]} = {str(self.trace.value(row))[:60]!r} ({wire})"
        before = next((found for found in self.findings if found.rule is RULES[name]), None)
        if before is not None:
            self.findings.remove(before)
            self.findings.append(Finding(before.rule, before.count + len(rows), before.example, before.repairable))
            return
        self._add(name, len(rows), f"{self._node(int(table['node'][row]))}: {said}", repairable)

    def _has(self, name: str) -> Mask:
        """Which nodes have an attribute, whatever its type."""
        found = np.zeros(self.trace.num_nodes, np.bool_)
        found[self.trace.attributes["node"][self.trace.attribute_rows(name)]] = True
        return found

    def _host_calls(self) -> Mask:
        calls = host_calls(self.trace)
        self._nodes("host-collective", np.flatnonzero(calls))
        return calls

    # -- communication -------------------------------------------------------------------------------------------------

    def _collectives(self, is_call: Mask) -> None:
        trace = self.trace
        is_one = (self.type == NodeType.COMM_COLL) & ~is_call
        kind = trace.integers("comm_type", -1 << 40)
        has_type = self._has("comm_type")
        readable = is_one & (kind != -1 << 40)
        self._nodes("missing-type", np.flatnonzero(is_one & ~has_type))
        known = (kind >= 0) & (kind <= CommType.BARRIER)
        self._nodes("unknown-collective", np.flatnonzero(readable & ~known), lambda row: f"comm_type {kind[row]}")
        is_barrier = kind == CommType.BARRIER
        needs_size = (is_one & ~is_barrier) | ((np.isin(self.type, COMMUNICATION[:2])) & ~is_call)
        self._nodes("missing-size", np.flatnonzero(needs_size & ~self._has("comm_size")))
        size = trace.integers("comm_size", -1)
        self._nodes("zero-size-collective", np.flatnonzero(is_one & ~is_barrier & (size == 0)))
        self._nodes("zero-size-message", np.flatnonzero(needs_size & ~is_one & (size == 0)))
        self._unsupported(is_call, readable & known & ~np.isin(kind, SIMULATED_COLLECTIVES), kind)

    def _unsupported(self, is_call: Mask, other: Mask, kind: NDArray[np.int64]) -> None:
        rows = np.flatnonzero((self.type == NodeType.COMM_COLL) & ~is_call)
        names, place = groups_named(self.trace, rows)
        named = np.zeros(self.trace.num_nodes, np.bool_)
        named[rows] = np.array([not is_number(name) for name in names], np.bool_)[place]
        on_host = np.isin(self.type, COMMUNICATION) & self.is_host & ~is_call

        def why(row: int) -> str:
            if other[row]:
                return f"comm_type {CommType(int(kind[row])).name}"
            name = names[place[np.searchsorted(rows, row)]] if named[row] else ""
            return "communication with is_cpu_op" if on_host[row] else f"pg_name {name[:40]!r}"

        self._nodes("unsupported-by-simulator", np.flatnonzero(other | named | on_host), why)

    def _messages(self, is_call: Mask) -> None:
        trace, own = self.trace, self.trace.rank
        sends, receives = ((self.type == kind) & ~is_call for kind in COMMUNICATION[:2])
        peer = np.where(sends, self._has("comm_dst"), self._has("comm_src"))
        both = sends | receives
        self._nodes("missing-peer", np.flatnonzero(both & ~peer))
        self._nodes("missing-tag", np.flatnonzero(both & ~self._has("comm_tag")))
        absent = -1 << 40
        source, target = trace.integers("comm_src", absent), trace.integers("comm_dst", absent)
        self_of, other = np.where(sends, source, target), np.where(sends, target, source)
        wrong = (other != absent) & ((other < 0) | ((other == own) & (own >= 0)))
        wrong |= (self_of != absent) & (own >= 0) & (self_of != own)
        self._nodes(
            "wrong-peer",
            np.flatnonzero(both & wrong),
            lambda row: (
                ", ".join(f"{n} {v[row]}" for n, v in (("comm_src", source), ("comm_dst", target)) if v[row] != absent)
                + f" in the file of rank {own}"
            ),
        )

    def _groups(self, is_call: Mask) -> None:
        """Groups that collectives name, against those that the file lists."""
        trace = self.trace
        rows = np.flatnonzero((self.type == NodeType.COMM_COLL) & ~is_call)
        listed = groups_of(trace)
        names, place = groups_named(trace, rows)
        is_default = np.array([name in DEFAULT_GROUPS for name in names], np.bool_)
        is_listed = np.array([name in listed for name in names], np.bool_) | is_default
        is_outside = np.array([bool(listed.get(name)) and trace.rank not in listed[name] for name in names], np.bool_)
        if not listed:
            self.notes["process groups whose members the file does not list"] += int((~is_default).sum())
        else:
            unknown = np.flatnonzero(~is_listed[place])
            first = names[place[unknown[0]]] if len(unknown) else ""
            self._nodes("unknown-group", rows[unknown], lambda row: f"pg_name {first[:60]!r}")
        if trace.rank >= 0:
            outside = np.flatnonzero((is_outside & ~is_default)[place])
            of = names[place[outside[0]]] if len(outside) else ""
            said = f"rank {trace.rank} is not among the ranks of group {of[:60]!r}"
            self._nodes("not-in-group", rows[outside], lambda row: said)

    # -- times ---------------------------------------------------------------------------------------------------------

    def _times(self) -> None:
        trace = self.trace
        start, duration = (trace.nodes[name].astype(np.uint64) for name in ("start_micros", "duration_micros"))
        long = duration > _LARGEST_MICROS
        self._nodes("duration-overflow", np.flatnonzero(long), lambda row: f"duration_micros {duration[row]}")
        late = start > _LARGEST_MICROS - np.where(long, np.uint64(0), duration)
        self._nodes("impossible-time", np.flatnonzero(late), lambda row: f"start_time_micros {start[row]}")
        compute = self.type == NodeType.COMP
        timed = (duration > 0) | (trace.integers("duration_ns", 0) > 0) | (trace.integers("num_ops", 0) > 0)
        if compute.any() and not (compute & timed).any():
            self._nodes("no-durations", np.flatnonzero(compute))

    def _notes(self) -> None:
        report = self.trace.report
        self.notes.update(report.guessed + report.noted)
        # Both are findings.
        for reason in [one for one in self.notes if one.startswith("node of a type that v0.0.4")]:
            del self.notes[reason]
        self.notes["metadata nodes, on which ASTRA-sim may stop"] += int((self.type == NodeType.METADATA).sum())
        if self.trace.version != "v0.0.4":
            self.notes[f"file of {self.trace.version}: a repair writes it as v0.0.4"] += 1
        if report.path.endswith(".gz"):
            self.notes["file is packed, which ASTRA-sim's feeder does not read"] += 1
        self.notes = +self.notes


def check(trace: ChakraTrace) -> tuple[list[Finding], Counter[str]]:
    """What is wrong with one trace, and what is odd and no fault."""
    done = Check(trace)
    return done.findings, done.notes


def node_text(trace: ChakraTrace, row: int) -> str:
    """A node in words: id and name."""
    name = trace.strings[int(trace.nodes["name"][row])] if trace.nodes["name"][row] >= 0 else ""
    return f"node {trace.nodes['id'][row]}" + (f" {name[:60]!r}" if name else "")


def is_number(group: str) -> bool:
    """Whether ASTRA-sim takes the name of a group: none, or digits."""
    return group == "" or group.isdecimal()


def host_calls(trace: ChakraTrace) -> Mask:
    """Communication nodes on the host that say nothing of a communication, where other nodes do."""
    is_one = np.isin(trace.nodes["type"], COMMUNICATION)
    told = np.zeros(trace.num_nodes, np.bool_)
    for name in ("comm_type", "comm_size", "comm_src", "comm_dst"):
        told[trace.attributes["node"][trace.attribute_rows(name)]] = True
    on_host = trace.integers("is_cpu_op", 0) > 0
    if not (is_one & told & ~on_host).any():
        return np.zeros(trace.num_nodes, np.bool_)
    return np.asarray(is_one & on_host & ~told)


def repeated_attributes(trace: ChakraTrace) -> Mask:
    """Attributes whose node has one of that name before them, shape ``(attributes,)``."""
    node, name = trace.attributes["node"], trace.attributes["name"]
    order = np.lexsort((name, node))  # stable: the first of a name stays the first
    repeated = np.zeros(len(node), np.bool_)
    same = (node[order][1:] == node[order][:-1]) & (name[order][1:] == name[order][:-1])
    repeated[order[1:][same]] = True
    return repeated


def _attribute_rows(trace: ChakraTrace, names: tuple[str, ...]) -> NDArray[np.intp]:
    ids = [found for name in names if (found := trace.strings.find(name)) >= 0]
    return np.flatnonzero(np.isin(trace.attributes["name"], ids)) if ids else np.empty(0, np.intp)


def wrong_integers(trace: ChakraTrace) -> NDArray[np.intp]:
    """Rows of attributes that are no integers and must be."""
    rows = _attribute_rows(trace, INTEGER_ATTRIBUTES)
    return np.asarray(rows[~np.isin(trace.attributes["wire"][rows], list(INTEGER_WIRES))])


def narrow_integers(trace: ChakraTrace) -> NDArray[np.intp]:
    """Rows of attributes that are integers of another type than int64, which older feeders read as 0.

    What int64 does not hold is another fault.
    """
    rows = _attribute_rows(trace, INT64_ATTRIBUTES)
    wire, value = trace.attributes["wire"][rows], trace.attributes["value"][rows]
    fits = ~(np.isin(wire, _UNSIGNED_64) & (value < 0))
    return np.asarray(rows[np.isin(wire, list(INTEGER_WIRES)) & (wire != Wire.INT64) & fits])


def whole_number(value: Any) -> int | None:
    """A whole number that int64 holds, out of a float or text; None if it is none."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 1 << 63 else None
    if isinstance(value, str):
        digits = value.strip()
        is_plain = digits.isascii() and digits.removeprefix("-").isdecimal() and len(digits) < 20
        return int(digits) if is_plain and -(1 << 63) <= int(digits) < 1 << 63 else None
    return None
