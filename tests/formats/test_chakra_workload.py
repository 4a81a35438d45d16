"""Chakra traces of all ranks as a workload: many files together say what each one says, and faults are named."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.formats.chakra import ChakraTrace, NodeType, Wire
from foretrace.formats.chakra.builder import Builder
from foretrace.formats.chakra.read import read_chakra
from foretrace.formats.chakra.read_many import read_workload
from foretrace.formats.chakra.to_workload import to_workload
from foretrace.formats.chakra.write import write_chakra, write_json
from foretrace.trace import FormatError
from foretrace.trace.workload import WORLD, Workload

COMP, SEND, RECV, COLL = NodeType.COMP, NodeType.COMM_SEND, NodeType.COMM_RECV, NodeType.COMM_COLL
INT, TEXT = Wire.INT64, Wire.STRING
ALL_REDUCE = {"comm_type": 0, "comm_size": 64}


def add(builder: Builder, node_id: int, kind: int, needs: Any = (), name: str = "n", **attributes: Any) -> None:
    """Add a node whose attributes have the type that their values have."""
    wires = {int: INT, str: TEXT, float: Wire.DOUBLE, bool: Wire.BOOL, list: Wire.BOOL_LIST}
    items = [(key, wires[type(value)], value, "") for key, value in attributes.items()]
    builder.add(node_id, name, kind, data=needs, duration_micros=3 if kind == COMP else 0, attributes=items)


def trace_of(*nodes: tuple[int, int, Any, dict[str, Any]]) -> ChakraTrace:
    builder = Builder()
    for node_id, kind, needs, attributes in nodes:
        add(builder, node_id, kind, needs, f"node{node_id}", **attributes)
    return builder.trace()


def written(folder: Path, *traces: ChakraTrace) -> list[Path]:
    """One file a rank."""
    paths = [folder / f"job.{rank}.et" for rank in range(len(traces))]
    for trace, path in zip(traces, paths, strict=True):
        write_chakra(trace, path)
    return paths


def described(workload: Workload) -> list[Any]:
    """What every rank does and with whom, whichever program it shares."""
    found = []
    for rank in range(workload.num_ranks):
        index = int(workload.program_of[rank])
        place = int((workload.program_of[:rank] == index).sum())
        program = workload.programs[index]
        nodes = {name: column.tolist() for name, column in program.nodes.items() if name not in ("name", "slot")}
        slots = program.nodes["slot"].tolist()
        tables = workload.peers[index][place].tolist(), workload.groups_of[index][place].tolist()
        names = [program.describe(row) for row in range(program.num_nodes)]
        groups = [(workload.groups[g].number, workload.groups[g].ranks.tolist()) for g in tables[1]]
        graph = program.first_dependency.tolist(), program.dependency.tolist()
        found.append((nodes, slots, tables[0], groups, graph, names))
    return found


# Many files together


@st.composite
def rank_traces(draw: st.DrawFn, rank: int, num_ranks: int) -> ChakraTrace:
    builder = Builder()
    ids = draw(st.lists(st.one_of(st.integers(0, 30), st.integers(0, 2**40)), min_size=1, max_size=6, unique=True))
    for place, node_id in enumerate(ids):
        needs = draw(st.lists(st.sampled_from(ids[:place]), max_size=3)) if place else []
        kind = draw(st.sampled_from([COMP, COLL, NodeType.MEM_LOAD, NodeType.INVALID, SEND, RECV]))
        attributes: dict[str, Any] = {"is_cpu_op": draw(st.booleans())} if kind == COMP else {}
        if kind in (COMP, NodeType.MEM_LOAD):
            attributes |= {"num_ops": draw(st.integers(0, 2**40)), "tensor_size": draw(st.integers(0, 2**40))}
        elif kind == COLL:
            group = draw(st.sampled_from(["", "0", "7", "9", None]))
            attributes |= {"comm_type": draw(st.sampled_from([0, 2, 6, 7])), "comm_size": draw(st.integers(1, 2**40))}
            attributes |= {} if group is None else {"pg_name": group}
            if draw(st.booleans()):
                attributes |= {"involved_dim": [True, draw(st.booleans())], "comm_priority": draw(st.integers(0, 9))}
        elif kind in (SEND, RECV) and num_ranks > 1:
            peer = draw(st.sampled_from([each for each in range(num_ranks) if each != rank]))
            own, theirs = ("comm_src", "comm_dst") if kind == SEND else ("comm_dst", "comm_src")
            attributes = {theirs: peer, "comm_tag": draw(st.integers(0, 2)), "comm_size": draw(st.integers(1, 99))}
            attributes |= {own: rank} if draw(st.booleans()) else {}
        else:
            kind = COMP
        add(builder, node_id, kind, needs, draw(st.sampled_from(["a", "b", "é"])), **attributes)
    return builder.trace()


@st.composite
def jobs(draw: st.DrawFn) -> list[tuple[str, ChakraTrace]]:
    """The form and the trace of every rank; some ranks have equal traces."""
    count = draw(st.integers(1, 5))
    found: list[tuple[str, ChakraTrace]] = []
    for rank in range(count):
        form = draw(st.sampled_from(["et", "et", "et", "et.gz", "json", "json.gz"]))
        trace = draw(rank_traces(rank, count))
        if found and draw(st.booleans()):
            earlier = found[-1][1]
            told = {*earlier.integers("comm_src").tolist(), *earlier.integers("comm_dst").tolist()}
            trace = earlier if not told & set(range(count)) else trace
        found.append((form, trace))
    return found


@settings(max_examples=60)
@given(jobs())
def test_files_read_together_say_what_each_one_says(job: list[tuple[str, ChakraTrace]]) -> None:
    groups = {7: list(range(len(job))), 9: list(reversed(range(len(job))))}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"job.{rank}.{form}" for rank, (form, _) in enumerate(job)]
        for path, (form, trace) in zip(paths, job, strict=True):
            (write_json if form.startswith("json") else write_chakra)(trace, path)
        try:
            one_by_one = to_workload([read_chakra(path) for path in paths], len(paths), groups)
        except FormatError as error:  # a send or receive in the only rank's trace, and such
            with pytest.raises(FormatError) as found:
                read_workload(paths, None, groups)
            assert found.value.problem == error.problem
            return
        together = read_workload(paths, None, groups)
    assert described(together) == described(one_by_one)
    assert together.notes == one_by_one.notes
    assert together.num_nodes == one_by_one.num_nodes


def test_ranks_that_do_the_same_share_a_program(tmp_path: Path) -> None:
    """Their partners differ, and names do not count."""
    traces = [
        trace_of(
            (1, COMP, (), {"num_ops": 5}),
            (2, SEND, [1], {"comm_src": rank, "comm_dst": (rank + 1) % 4, "comm_tag": 1, "comm_size": 8}),
            (3, RECV, [1], {"comm_src": (rank - 1) % 4, "comm_dst": rank, "comm_tag": 1, "comm_size": 8}),
            (4, SEND, [1], {"comm_dst": (rank + 1) % 4, "comm_tag": 2, "comm_size": 8}),
            (5, COLL, [2], {**ALL_REDUCE, "pg_name": str(5 + rank % 2)}),
            (6, COLL, [5], ALL_REDUCE),
        )
        for rank in range(4)
    ]
    workload = read_workload(written(tmp_path, *traces), None, {5: [0, 2], 6: [3, 1]})
    assert len(workload.programs) == 1
    assert workload.program_of.tolist() == [0, 0, 0, 0]
    assert workload.programs[0].nodes["slot"].tolist() == [-1, 0, 1, 0, 0, 1]
    assert workload.peers[0].tolist() == [[1, 3], [2, 0], [3, 1], [0, 2]]
    assert [[workload.groups[g].number for g in row] for row in workload.groups_of[0]] == [[5, 0], [6, 0]] * 2
    assert {group.number: group.ranks.tolist() for group in workload.groups} == {0: [0, 1, 2, 3], 5: [0, 2], 6: [3, 1]}


def test_equal_files_that_name_only_the_other_end_are_of_different_ranks(tmp_path: Path) -> None:
    """Ranks 1 and 2 both send to rank 0, and do not say who they are."""
    message = {"comm_tag": 1, "comm_size": 8}
    receives = trace_of((1, RECV, (), {"comm_src": 1, **message}), (2, RECV, (), {"comm_src": 2, **message}))
    sends = trace_of((1, SEND, (), {"comm_dst": 0, **message}))
    workload = read_workload(written(tmp_path, receives, sends, sends))
    assert workload.program_of.tolist() == [0, 1, 1]
    assert [peers.tolist() for peers in workload.peers] == [[[1, 2]], [[0], [0]]]


def test_one_file_serves_for_all_ranks(tmp_path: Path) -> None:
    paths = written(tmp_path, trace_of((1, COLL, (), ALL_REDUCE)))
    workload = read_workload(paths, 6)
    assert workload.program_of.tolist() == [0] * 6
    assert workload.groups_of[0].tolist() == [[WORLD]] * 6


def test_a_dependency_counts_once_whichever_list_names_it(tmp_path: Path) -> None:
    builder = Builder()
    builder.add(1, "a", COMP)
    builder.add(2, "b", COMP, data=[1, 1], control=[1])
    write_chakra(builder.trace(), tmp_path / "job.0.et")
    program = read_workload([tmp_path / "job.0.et"]).programs[0]
    assert program.first_dependency.tolist() == [0, 0, 1]
    assert program.dependency.tolist() == [0]


def test_self_dependencies_are_accepted_with_a_note(tmp_path: Path) -> None:
    trace = trace_of((1, COMP, (), {}), (2, COMP, [2], {}), (3, COMP, [3, 1], {}))
    workload = read_workload(written(tmp_path, trace))
    assert workload.programs[0].dependency.tolist() == [1, 0, 2]
    assert workload.notes == {"nodes in or behind a cycle of dependencies, which never run": 2}


def test_cycles_are_accepted(tmp_path: Path) -> None:
    trace = trace_of((1, COMP, (), {}), (2, COMP, [3], {}), (3, COMP, [2], {}))
    workload = read_workload(written(tmp_path, trace))
    assert workload.programs[0].dependency.tolist() == [2, 1]


def test_cycles_are_noted(tmp_path: Path) -> None:
    trace = trace_of((1, COMP, (), {}), (2, COMP, [3], {}), (3, COMP, [2], {}))
    assert sum(read_workload(written(tmp_path, trace)).notes.values()) == 2


# Faults

GOOD = {"comm_dst": 0, "comm_tag": 1, "comm_size": 8}
FAULTS = {
    "no comm_size": ([(5, COLL, (), {"comm_type": 0})], "it has no comm_size", "add the attribute comm_size"),
    "float comm_size": (
        [(5, COLL, (), {"comm_type": 0, "comm_size": 64.0})],
        "its comm_size is no integer",
        "write it as int64",
    ),
    "no comm_type": ([(5, COLL, (), {"comm_size": 4})], "it has no comm_type", "add the attribute comm_type"),
    "no comm_tag": (
        [(5, SEND, (), {"comm_dst": 0, "comm_size": 8})],
        "it has no comm_tag",
        "add the attribute comm_tag",
    ),
    "no peer": ([(5, SEND, (), {"comm_tag": 0, "comm_size": 8})], "it has no comm_dst", "add the attribute comm_dst"),
    "dangling": ([(4, COMP, (), {}), (5, COMP, [77], {})], "it depends on node 77, which does not exist", "--repair"),
    "twice": ([(5, COMP, (), {}), (5, COMP, (), {})], "its id occurs twice", "foretrace lint"),
    "all wait": ([(5, COMP, [5], {})], "every node of the trace waits for another", "--repair"),
    "peer": ([(5, SEND, (), {**GOOD, "comm_dst": 9})], "its peer is rank 9 of 2", "check the network's size"),
    "below": ([(5, SEND, (), {**GOOD, "comm_dst": -2})], "its peer is rank -2 of 2", "check the network's size"),
    "itself": ([(5, SEND, (), {**GOOD, "comm_dst": 1})], "its peer is rank 1 of 2", "check the network's size"),
    "own": ([(5, SEND, (), {**GOOD, "comm_src": 0})], "comm_src is 0 in the trace of rank 1", "the order of the files"),
}


@pytest.mark.parametrize("form", ["et", "et.gz"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_file_node_and_remedy(tmp_path: Path, fault: str, form: str) -> None:
    nodes, problem, remedy = FAULTS[fault]
    paths = [tmp_path / f"job.{rank}.{form}" for rank in range(2)]
    write_chakra(trace_of((1, COMP, (), {})), paths[0])
    write_chakra(trace_of(*nodes), paths[1])
    with pytest.raises(FormatError) as found:
        read_workload(paths)
    assert found.value.path == str(paths[1])
    assert found.value.problem == f"node 5 ('node5'): {problem}"
    assert remedy in found.value.remedy


def test_a_group_that_nothing_describes(tmp_path: Path) -> None:
    paths = written(tmp_path, trace_of((1, COMP, (), {})), trace_of((5, COLL, (), {**ALL_REDUCE, "pg_name": "12"})))
    with pytest.raises(FormatError, match=r"job\.1\.et: collectives of group '12'.*; add it to groups\.json"):
        read_workload(paths, None, {3: [0, 1]}, "groups.json")


def test_a_rank_that_is_not_in_its_group(tmp_path: Path) -> None:
    paths = written(tmp_path, trace_of((1, COMP, (), {})), trace_of((5, COLL, (), {**ALL_REDUCE, "pg_name": "3"})))
    with pytest.raises(FormatError, match=r"job\.1\.et: rank 1 runs a collective of group 3, .*groups\.json"):
        read_workload(paths, None, {3: [0]}, "groups.json")


def test_a_group_of_ranks_beyond_the_job(tmp_path: Path) -> None:
    paths = written(tmp_path, trace_of((5, COLL, (), {**ALL_REDUCE, "pg_name": "3"})))
    with pytest.raises(FormatError, match=r"groups\.json: group '3' has rank 4, the job has 2 ranks; check"):
        read_workload(paths, 2, {3: [0, 4]}, "groups.json")


@pytest.mark.parametrize(("files", "ranks"), [(2, 3), (3, 2), (0, 2)])
def test_files_that_are_not_one_a_rank(tmp_path: Path, files: int, ranks: int) -> None:
    paths = written(tmp_path, *[trace_of((1, COMP, (), {}))] * files)
    with pytest.raises(FormatError, match=rf"{files} traces for {ranks} ranks; give one trace a rank"):
        read_workload(paths, ranks)


def test_sends_in_one_file_for_all_ranks(tmp_path: Path) -> None:
    paths = written(tmp_path, trace_of((5, SEND, (), GOOD)))
    with pytest.raises(FormatError, match=r"job\.0\.et: node 5 \('node5'\): it sends or receives.*one trace a rank"):
        read_workload(paths, 2)


def test_a_file_that_does_not_exist(tmp_path: Path) -> None:
    paths = written(tmp_path, trace_of((1, COMP, (), {})))
    with pytest.raises(FormatError, match=r"job\.1\.et: .*; check the path and its permissions"):
        read_workload([*paths, tmp_path / "job.1.et"])


@pytest.mark.parametrize("content", [b"", b"no trace at all", b"\x1f\x8bno gzip"])
def test_a_file_that_is_no_trace(tmp_path: Path, content: bytes) -> None:
    paths = written(tmp_path, trace_of((1, COMP, (), {})), trace_of((1, COMP, (), {})))
    paths[1].write_bytes(content)
    with pytest.raises(FormatError, match=r"job\.1\.et: "):
        read_workload(paths)


@pytest.mark.parametrize("count", [1, 8])
def test_a_cut_file_is_told_of(tmp_path: Path, count: int) -> None:
    trace = trace_of(*((i, COMP, (), {}) for i in range(1, 9)))
    paths = [tmp_path / f"job.{rank}.et" for rank in range(count)]
    for path in paths:
        write_chakra(trace, path)
        path.write_bytes(path.read_bytes()[:-5])
    workload = read_workload(paths)
    assert workload.num_nodes < 8 * count
    assert sum(workload.notes.values()) == count
    assert any("ends within a message" in note for note in workload.notes)
