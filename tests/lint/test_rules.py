"""Rules over one Chakra trace, and repairs: sound traces are clean, each fault is found and counted, and mended."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretrace.formats.chakra.builder import Builder
from foretrace.formats.chakra.feeder import Feeder
from foretrace.formats.chakra.read import read_chakra
from foretrace.formats.chakra.repair import repair
from foretrace.formats.chakra.rules import RULES, check
from foretrace.formats.chakra.to_graph import to_graph
from foretrace.formats.chakra.trace import ChakraTrace, NodeType, Wire
from foretrace.formats.chakra.write import write_chakra
from foretrace.simulate import simulate
from tests.lint.builders import Node, build, chain, collective, message, sound_nodes

Fault = Callable[[st.DataObject, list[Node]], int]


def found(trace: ChakraTrace) -> dict[str, int]:
    return {one.rule.name: one.count for one in check(trace)[0]}


def fresh(nodes: list[Node], count: int) -> list[int]:
    taken = {node.id for node in nodes}
    taken |= {one for node in nodes for one in (*node.data, *node.control)}
    return [number for number in range(len(taken) + count) if number not in taken][:count]


def drain(trace: ChakraTrace) -> None:
    feeder = Feeder(trace)
    while (row := feeder.next()) is not None:
        feeder.complete(row)
    assert feeder.remaining == 0


def some(data: st.DataObject, nodes: list[Node]) -> list[Node]:
    return data.draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=4, unique_by=id))


# -- sound traces ------------------------------------------------------------------------------------------------------


@given(sound_nodes())
def test_sound_traces_are_clean(nodes: list[Node]) -> None:
    trace = build(nodes)
    assert found(trace) == {}
    mended, done = repair(trace)
    assert done == {} and mended.nodes is trace.nodes and mended.data is trace.data
    drain(trace)


# -- faults ------------------------------------------------------------------------------------------------------------


def dangling(data: st.DataObject, nodes: list[Node]) -> int:
    lost = fresh(nodes, 2)
    chosen = some(data, nodes)
    for node in chosen:
        node.control.append(data.draw(st.sampled_from(lost)))
        node.data.insert(0, lost[0])
    return 2 * len(chosen)


def own(data: st.DataObject, nodes: list[Node]) -> int:
    chosen = some(data, nodes)
    for node in chosen:
        (node.data if data.draw(st.booleans()) else node.control).append(node.id)
    return len(chosen)


def twins(data: st.DataObject, nodes: list[Node]) -> int:
    chosen = some(data, nodes)
    for node in chosen:
        nodes.append(Node(node.id, "twin"))
    return len(chosen)


def rings(data: st.DataObject, nodes: list[Node]) -> int:
    lengths = data.draw(st.lists(st.integers(2, 5), min_size=1, max_size=3))
    for length in lengths:
        ids = fresh(nodes, length)
        for at, one in enumerate(ids):
            control = data.draw(st.booleans())
            before = [ids[at - 1]]
            nodes.append(Node(one, data=[] if control else before, control=before if control else []))
        nodes[-1].data.append(data.draw(st.sampled_from(nodes[:-length])).id)
    return len(lengths)


def strange_types(data: st.DataObject, nodes: list[Node]) -> int:
    chosen = [node for node in some(data, nodes) if node.type == NodeType.COMP]
    for node in chosen:
        node.type = data.draw(st.sampled_from([0, 8, 100, -1]))
    nodes.append(Node(fresh(nodes, 1)[0]))  # one compute node stays
    return len(chosen)


def collectives(change: Callable[[Node], Any]) -> Fault:
    def break_some(data: st.DataObject, nodes: list[Node]) -> int:
        count = data.draw(st.integers(1, 4))
        for number in fresh(nodes, count):
            nodes.append(collective(Node(number)))
            change(nodes[-1])
        return count

    return break_some


def messages(change: Callable[[Node], Any]) -> Fault:
    def break_some(data: st.DataObject, nodes: list[Node]) -> int:
        count = data.draw(st.integers(1, 4))
        for number in fresh(nodes, count):
            sends = data.draw(st.booleans())
            nodes.append(message(Node(number), 0 if sends else 1, 1 if sends else 0, sends=sends))
            change(nodes[-1])
        return count

    return break_some


def set_to(name: str, wire: Wire, value: Any) -> Callable[[Node], Any]:
    return lambda node: node.without(name).attributes.append((name, wire, value))


def peerless(node: Node) -> None:
    node.without("comm_dst" if node.type == NodeType.COMM_SEND else "comm_src")


def to_itself(node: Node) -> None:
    set_to("comm_dst" if node.type == NodeType.COMM_SEND else "comm_src", Wire.INT32, 0)(node)


FAULTS: list[tuple[str, Fault]] = [
    ("dangling-dependency", dangling),
    ("self-dependency", own),
    ("duplicate-id", twins),
    ("cycle", rings),
    ("unknown-node-type", strange_types),
    ("missing-type", collectives(lambda node: node.without("comm_type"))),
    ("unknown-collective", collectives(set_to("comm_type", Wire.INT64, 10))),
    ("unknown-collective", collectives(set_to("comm_type", Wire.INT64, -3))),
    ("missing-size", collectives(lambda node: node.without("comm_size"))),
    ("missing-size", messages(lambda node: node.without("comm_size"))),
    ("impossible-size", collectives(set_to("comm_size", Wire.INT64, -1))),
    ("impossible-size", collectives(set_to("num_ops", Wire.UINT64, 2**63))),
    ("zero-size-collective", collectives(set_to("comm_size", Wire.INT64, 0))),
    ("zero-size-message", messages(set_to("comm_size", Wire.INT64, 0))),
    ("missing-peer", messages(peerless)),
    ("missing-tag", messages(lambda node: node.without("comm_tag"))),
    ("wrong-peer", messages(to_itself)),
    ("wrong-peer", messages(set_to("comm_src", Wire.INT64, -2))),
    ("attribute-not-integer", collectives(set_to("comm_size", Wire.DOUBLE, 4096.0))),
    ("attribute-not-integer", collectives(set_to("comm_type", Wire.STRING, " 2 "))),
    ("attribute-not-integer", collectives(set_to("num_ops", Wire.FLOAT, 8.0))),
    ("attribute-not-int64", collectives(set_to("comm_size", Wire.UINT64, 77))),
    ("attribute-not-int64", collectives(set_to("comm_type", Wire.INT32, 2))),
    ("repeated-attribute", collectives(lambda node: node.attributes.append(("comm_size", Wire.INT64, 5)))),
    ("duration-overflow", collectives(lambda node: setattr(node, "duration", 2**64 - 5))),
    ("impossible-time", collectives(lambda node: setattr(node, "start", 2**64 - 1))),
    ("unsupported-by-simulator", collectives(set_to("comm_type", Wire.INT64, 9))),
    ("unsupported-by-simulator", collectives(set_to("pg_name", Wire.STRING, "dp"))),
    ("unsupported-by-simulator", collectives(set_to("is_cpu_op", Wire.BOOL, True))),
]


@pytest.mark.parametrize(("rule", "fault"), FAULTS, ids=[f"{at}-{rule}" for at, (rule, _) in enumerate(FAULTS)])
@settings(max_examples=10)
@given(st.data(), sound_nodes())
def test_each_fault_is_counted_and_mended(rule: str, fault: Fault, data: st.DataObject, nodes: list[Node]) -> None:
    nodes = list(nodes)
    count = fault(data, nodes)
    trace = build(nodes)
    seen = found(trace)
    assert seen.pop(rule, 0) == count
    assert set(seen) <= {"no-root"}
    assert all(re.match(r"x\.0\.et: node \d+", one.example) for one in check(trace)[0])
    mended, done = repair(trace)
    left = found(mended)
    if not RULES[rule].is_repairable:
        assert left == {**seen, rule: count} if count else left == {}
        return
    assert left == {} and (rule == "cycle" or done == {rule: count})
    assert repair(mended)[1] == {}
    drain(mended)


def test_host_calls_become_compute_where_kernels_communicate() -> None:
    call = Node(1, "c10d::allreduce_", NodeType.COMM_COLL, [0], attributes=[("is_cpu_op", Wire.BOOL, True)])
    nodes = [Node(0), call, collective(Node(2, data=[1]))]
    assert found(build(nodes)) == {"host-collective": 1}
    mended, done = repair(build(nodes))
    assert done == {"host-collective": 1} and mended.nodes["type"].tolist() == [4, 4, 7] and found(mended) == {}
    # Alone they are all that is known of a collective: not to be taken away.
    assert set(found(build(nodes[:2]))) == {"missing-type", "missing-size", "unsupported-by-simulator"}
    assert repair(build(nodes[:2]))[1] == {}


def test_groups() -> None:
    listed = '[{"pg_name": "0", "ranks": []}, {"pg_name": "1", "ranks": [0, 2]}, {"pg_name": "2", "ranks": [1, 3]}]'
    nodes = [Node(0), *(collective(Node(at + 1), group=str(at)) for at in range(4))]
    trace = build(nodes, metadata={"process_groups": listed})
    assert found(trace) == {"unknown-group": 1, "not-in-group": 1}
    examples = {one.rule.name: one.example for one in check(trace)[0]}
    assert "node 4" in examples["unknown-group"] and "node 3" in examples["not-in-group"]
    findings, notes = check(build(nodes))
    assert findings == [] and notes == {"process groups whose members the file does not list": 3}


@pytest.mark.parametrize(
    "text",
    [
        '[\'[{"pg_name": "1", "ranks": [0]}]\']',
        '["[{\\"pg_name\\": \\"1\\", \\"ranks\\": [0]}]"]',
        '[{"pg_name": "1", "ranks": [0]}]',
    ],
)
def test_groups_in_metadata_nodes(text: str) -> None:
    builder = Builder()
    builder.add(0, "## process_group:init ##", NodeType.METADATA, io=(text, *[""] * 5))
    node = collective(Node(1), group="7")
    builder.add(1, "x", node.type, attributes=[(*one, "") for one in node.attributes])
    assert found(builder.trace(rank=0)) == {"unknown-group": 1}


def test_files_without_work() -> None:
    assert found(build([])) == {"no-nodes": 1}
    assert found(build([Node(0, duration=0), Node(1, data=[0], duration=0)])) == {"no-durations": 2}
    timed = Node(2, duration=0, attributes=[("duration_ns", Wire.INT64, 400)])
    assert found(build([Node(0, duration=0), timed])) == {}


def test_all_nodes_wait() -> None:
    nodes = chain(5)
    nodes[0].control = [4]
    assert found(build(nodes)) == {"cycle": 1, "no-root": 1}
    mended, done = repair(build(nodes))
    assert done == {"cycle": 1} and len(mended.data.ids) == 4 and len(mended.control.ids) == 0


def test_starts_that_contradict_dependencies() -> None:
    nodes = [Node(0, start=100), Node(1, start=90, data=[0]), Node(2, start=100, data=[0]), Node(3, start=0, data=[0])]
    assert found(build(nodes)) == {"starts-before-dependency": 1}


def test_the_first_twin_is_meant() -> None:
    nodes = [Node(3, "one"), Node(3, "two", data=[]), Node(4, data=[3])]
    mended, done = repair(build(nodes))
    assert (
        done == {"duplicate-id": 1} and mended.nodes["id"].tolist() == [3, 5, 4] and mended.data.of(2).tolist() == [3]
    )
    top = 2**64 - 1
    mended, _ = repair(build([Node(top), Node(top), Node(0)]))
    assert sorted(mended.nodes["id"].tolist()) == [0, 1, top] and found(mended) == {}


def test_cuts_take_control_before_data_and_late_before_early() -> None:
    # Data 1 -> 5 -> 3 alone is no cycle; control 3 -> 1 closes one.
    nodes = [Node(1, control=[3]), Node(5, data=[1]), Node(3, data=[5])]
    mended, done = repair(build(nodes))
    assert done == {"cycle": 1} and mended.data.ids.tolist() == [1, 5] and len(mended.control.ids) == 0
    # Of data alone, the dependency of the earliest node goes, also where starts say which that is.
    ring = [Node(1, data=[3], start=30), Node(5, data=[1], start=10), Node(3, data=[5], start=20)]
    mended, done = repair(build(ring))
    assert done == {"cycle": 1} and [mended.data.of(row).tolist() for row in range(3)] == [[3], [], [5]]


def test_many_cycles_in_each_other_end_in_time() -> None:
    count = 3000
    nodes = chain(count)
    for node in nodes[:-1]:
        node.control = [count - 1]
    mended, done = repair(build(nodes))
    assert done == {"cycle": count - 1} and found(mended) == {}
    assert len(mended.data.ids) == count - 1


# -- anything at all ---------------------------------------------------------------------------------------------------

VALUES: dict[Wire, st.SearchStrategy[Any]] = {
    Wire.NONE: st.none(),
    Wire.INT32: st.integers(-(2**31), 2**31 - 1),
    Wire.INT64: st.integers(-(2**63), 2**63 - 1),
    Wire.UINT64: st.integers(0, 2**64 - 1),
    Wire.DOUBLE: st.floats(),
    Wire.FLOAT: st.floats(width=32),
    Wire.STRING: st.text(max_size=6) | st.from_regex(r"-?[0-9]{1,22}", fullmatch=True),
    Wire.BOOL: st.booleans(),
    Wire.BYTES: st.binary(max_size=3),
    Wire.INT64_LIST: st.lists(st.integers(0, 5), max_size=3),
    Wire.BOOL_LIST: st.lists(st.booleans(), max_size=3),
}
NAMES = ("comm_type", "comm_size", "comm_src", "comm_dst", "comm_tag", "pg_name", "is_cpu_op", "num_ops", "other")


@st.composite
def any_nodes(draw: st.DrawFn) -> list[Node]:
    ids = st.integers(0, 12) | st.sampled_from([2**32, 2**63, 2**64 - 1])
    attribute = st.sampled_from(sorted(VALUES)).flatmap(
        lambda wire: st.tuples(st.sampled_from(NAMES), st.just(int(wire)), VALUES[Wire(wire)])
    )
    times = st.integers(0, 9) | st.sampled_from([2**53, 2**63, 2**64 - 1])
    node = st.builds(
        Node,
        id=ids,
        name=st.text(max_size=4),
        type=st.integers(0, 9),
        data=st.lists(ids, max_size=4),
        control=st.lists(ids, max_size=4),
        start=times,
        duration=times,
        attributes=st.lists(attribute, max_size=4),
    )
    return draw(st.lists(node, max_size=12))


@given(any_nodes(), st.sampled_from([-1, 0, 3]), st.text(max_size=9) | st.integers())
def test_no_trace_is_too_strange(nodes: list[Node], rank: int, groups: Any) -> None:
    trace = build(nodes, rank=rank, metadata={"process_groups": groups})
    before = check(trace)[0]
    assert all(one.count > 0 for one in before)
    assert len({one.rule.name for one in before}) == len(before)
    mended, _ = repair(trace)
    left = {one.rule.name: one for one in check(mended)[0]}
    for one in before:
        if one.repairable:
            assert one.rule.name not in left
    assert not any(one.repairable for one in left.values())
    assert repair(mended)[1] == {}
    drain(mended)


@given(any_nodes())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_a_file_says_the_same_as_the_trace(tmp_path: Path, nodes: list[Node]) -> None:
    path = tmp_path / "x.0.et"
    trace = build(nodes, path=str(path), metadata={"schema": "x"})
    write_chakra(trace, path)
    assert found(read_chakra(path)) == found(trace)


# -- the recorded file -------------------------------------------------------------------------------------------------


def test_recorded_file_with_dangling_dependencies(shared: Path, tmp_path: Path) -> None:
    trace = read_chakra(shared / "traces/chakra-et/dangling-deps.0.et")
    seen = found(trace)
    assert seen["dangling-dependency"] == 1277
    ids = set(trace.nodes["id"].tolist())
    assert sum(one not in ids for lists in (trace.data, trace.control) for one in lists.ids.tolist()) == 1277
    assert all(one.repairable for one in check(trace)[0])
    mended, done = repair(trace)
    assert done["dangling-dependency"] == 1277
    assert len(mended.data.ids) == len(trace.data.ids)  # nothing but control dependencies is wrong
    write_chakra(mended, tmp_path / "x.0.et")
    again = read_chakra(tmp_path / "x.0.et")
    assert found(again) == {} and repair(again)[1] == {}
    drain(again)
    finish = int(simulate(to_graph([again])).job.timelines[0].end_ns.max())
    device = again.integers("is_cpu_op", 0) == 0
    work = int(again.nodes["duration_micros"].astype(np.int64)[device & (again.nodes["type"] == NodeType.COMP)].sum())
    assert finish >= work * 1000 > 0
