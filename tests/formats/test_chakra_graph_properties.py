"""Made-up graphs as Chakra traces and back, hand-made Chakra traces as graphs, and pictures of them."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foretrace
from foretrace.formats import pictures
from foretrace.formats.chakra import ChakraTrace, NodeType
from foretrace.formats.chakra.arrow_form import load_arrow, save_arrow
from foretrace.formats.chakra.columns import dependencies, whole_micros
from foretrace.formats.chakra.from_graph import from_graph
from foretrace.formats.chakra.read import read_chakra
from foretrace.formats.chakra.to_graph import DependencyError, to_graph
from foretrace.formats.chakra.write import write_chakra, write_json
from foretrace.formats.detect import detect
from foretrace.link import link
from foretrace.simulate import Simulation, simulate
from foretrace.trace import EdgeKind, ExecutionGraph, FormatError, GraphLane, Lane, LaneKind, StringTable, TaskKind
from tests.formats.builder import small_trace, write
from tests.formats.chakra_files import SCHEMA, et
from tests.link.synthetic import SCENARIOS
from tests.simulate.twin import twin_starts

HOST = (TaskKind.OPERATOR, TaskKind.RUNTIME, TaskKind.HOST_GAP, TaskKind.HANDOFF, TaskKind.BLOCKED)
DEVICE = (TaskKind.KERNEL, TaskKind.MEMCPY, TaskKind.COLLECTIVE_ALONE, TaskKind.UNEXPLAINED, TaskKind.BEFORE_TRACE)
TIMES = st.one_of(st.integers(0, 4), st.integers(0, 3_000_000))  # many things happen at one moment


@st.composite
def graphs(draw: st.DrawFn) -> ExecutionGraph:
    """Threads and streams of one or two ranks in order, and any edges between them within a rank."""
    lanes = []
    for rank in range(draw(st.integers(1, 2))):
        lanes += [GraphLane(rank, Lane(LaneKind.HOST_THREAD, "1", f"{at}")) for at in range(draw(st.integers(1, 2)))]
        lanes += [
            GraphLane(rank, Lane(LaneKind.DEVICE_STREAM, "0", f"stream {at}", 0, at))
            for at in range(draw(st.integers(0, 2)))
        ]
    count = draw(st.integers(1, 14))
    lane = [draw(st.integers(0, len(lanes) - 1)) for _ in range(count)]
    on_device = [lanes[one].lane.kind is LaneKind.DEVICE_STREAM for one in lane]
    kind = [draw(st.sampled_from(DEVICE if one else HOST)) for one in on_device]
    edges, last = [], {}
    for task, one in enumerate(lane):
        if one in last:
            edges.append((last[one], task, draw(TIMES), EdgeKind.ORDER))
        last[one] = task
        for _ in range(draw(st.integers(0, 2)) if task else 0):
            source = draw(st.integers(0, task - 1))
            if lanes[lane[source]].rank == lanes[one].rank:
                why = (EdgeKind.LAUNCH, EdgeKind.SYNC, EdgeKind.EVENT_WAIT, EdgeKind.HANDOFF, EdgeKind.DATA)
                edges.append((source, task, draw(TIMES), draw(st.sampled_from(why))))
    strings = StringTable()
    tasks = {
        "kind": np.array(kind),
        "name": strings.intern_all([draw(st.sampled_from(["", "gemm", "naïve \x01"])) for _ in range(count)]),
        "duration_ns": np.array([draw(TIMES) for _ in range(count)], np.int64),
        "lane": np.array(lane),
    }
    names = ("source", "target", "lag_ns", "kind")
    columns = {name: np.array([edge[at] for edge in edges], np.int64) for at, name in enumerate(names)}
    graph = ExecutionGraph.from_columns(tasks, columns, lanes, strings)
    run = simulate(graph)
    return graph.with_columns({"measured_start_ns": run.start_ns, "measured_end_ns": run.end_ns})


def spans(run: Simulation) -> Counter[tuple[str, str, int, int]]:
    """When what runs on each lane; names of gaps and of nodes without one are not kept."""
    graph, found = run.graph, Counter[tuple[str, str, int, int]]()
    hidden = (*HOST[2:], TaskKind.START)
    names = graph.names(np.arange(graph.num_tasks))
    columns = zip(
        graph.tasks["lane"].tolist(),
        graph.tasks["kind"].tolist(),
        run.start_ns.tolist(),
        run.end_ns.tolist(),
        names,
        strict=True,
    )
    for lane, kind, start, end, name in columns:
        if lane >= 0 and kind != TaskKind.ARRIVAL:
            shown = "" if kind in hidden or name == TaskKind(kind).label.replace("_", " ") else name
            found[graph.lanes[lane].label, shown, start, end] += 1
    return found


@settings(max_examples=150)
@given(graphs())
def test_a_graph_that_went_through_chakra_runs_alike(graph: ExecutionGraph) -> None:
    before = simulate(graph)
    traces = from_graph(graph)
    again = to_graph(traces)
    after = simulate(again)
    assert spans(after) == spans(before)
    twin = twin_starts(again)
    assert [twin[task] for task in range(again.num_tasks)] == after.start_ns.tolist()
    assert spans(simulate(to_graph(traces, "data"))) == spans(before)
    for trace in traces:  # ids ascend with start, and nothing depends on what comes later
        ids, rows = trace.nodes["id"], trace.data.nodes
        assert (np.diff(ids.astype(np.int64)) > 0).all() and (trace.data.ids < ids[rows]).all()


@settings(max_examples=25)
@given(graph=graphs())
def test_any_file_format_between_keeps_the_times(
    graph: ExecutionGraph, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, before = tmp_path_factory.mktemp("made"), spans(simulate(graph))
    for trace in from_graph(graph):
        write_chakra(trace, folder / f"binary.{trace.rank}.et.gz")
        write_json(trace, folder / f"text.{trace.rank}.json")
        save_arrow(trace, folder / f"columns.{trace.rank}.arrow")
    for pattern, load in (("binary.*", read_chakra), ("text.*", read_chakra), ("columns.*", load_arrow)):
        traces = [load(path) for path in sorted(folder.glob(pattern))]
        assert spans(simulate(to_graph(traces))) == before


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_linked_programs_run_alike(scenario: Any) -> None:
    before = simulate(link(foretrace.Job([scenario(5).timeline])))
    assert spans(simulate(to_graph(from_graph(before.resolved)))) == spans(before)


@settings(max_examples=20)
@given(late=st.lists(st.floats(0, 200), min_size=2, max_size=4))
def test_coupled_jobs_run_alike(late: list[float], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("job")
    for rank, delay in enumerate(late):
        write(folder / f"rank{rank}.json", small_trace(rank, len(late), delay))
    job = foretrace.read(folder)
    coupled = simulate(link(job))
    traces = from_graph(coupled.resolved)
    graph = to_graph(traces)
    assert graph.notes["coupled collectives"] == coupled.graph.notes["coupled collectives"] == 2
    assert spans(simulate(graph)) == spans(coupled)
    alone = simulate(link(job, coupled=False))
    assert simulate(to_graph(traces, coupled=False)).finish_ns == alone.finish_ns
    sizes = [trace.integers("comm_size")[trace.nodes["type"] == NodeType.COMM_COLL].tolist() for trace in traces]
    assert sizes == [[4000, 4000]] * len(late)


def test_notes_count_each_rank_once(tmp_path: Path) -> None:
    for rank in range(3):
        write(tmp_path / f"rank{rank}.json", small_trace(rank, 3))
    resolved = simulate(link(foretrace.read(tmp_path))).resolved
    inferred = resolved.edges["confidence"] < 1
    for trace in from_graph(resolved):
        told = {name.rpartition(": ")[0] or name: count for name, count in trace.report.noted.items()}
        mine = int((inferred & (resolved.rank[resolved.edges["target"]] == trace.rank)).sum())
        assert told.get("not in a Chakra trace: edge that was inferred", 0) == mine
        borders = "not in a Chakra trace: step border, annotation and Python function of the timeline"
        assert trace.report.noted[borders] == 2


def test_what_goes_between_ranks_without_a_collective_is_noted() -> None:
    lanes = [GraphLane(rank, Lane(LaneKind.HOST_THREAD, "1", "0")) for rank in range(2)]
    columns = {"source": np.array([0]), "target": np.array([1])}
    graph = ExecutionGraph.from_columns(
        {"duration_ns": np.array([5, 7]), "lane": np.array([0, 1])}, columns, lanes, StringTable()
    )
    told = [trace.report.noted for trace in from_graph(graph)]
    assert told == [{}, {"not in a Chakra trace: dependency on another rank that is no collective": 1}]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5000)), max_size=40))
def test_whole_microseconds_are_right_in_sum(nodes: list[tuple[int, int]]) -> None:
    lane, duration = (np.array([one[at] for one in nodes], np.int64) for at in (0, 1))
    micros = whole_micros(lane, duration).astype(np.int64)
    assert (micros >= 0).all()
    for one in range(3):
        ends, exact = np.cumsum(micros[lane == one]), np.cumsum(duration[lane == one])
        assert (np.abs(ends * 1000 - exact) <= 500).all()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=20))
def test_dependencies_are_sets(pairs: list[tuple[int, int]]) -> None:
    ids = np.array([10, 7, 30, 2, 1 << 40], np.uint64)
    source, target = (np.array([pair[at] for pair in pairs], np.int64) for at in (0, 1))
    lists = dependencies(source, target, ids)
    for node in range(5):
        assert sorted(lists.of(node).tolist()) == sorted({int(ids[s]) for s, t in pairs if t == node})


# -- hand-made Chakra traces -----------------------------------------------------------------------------------------


def a_node(
    number: int,
    kind: NodeType = NodeType.COMP,
    micros: int = 10,
    data: tuple[int, ...] = (),
    control: tuple[int, ...] = (),
    **attributes: Any,
) -> Any:
    made = SCHEMA.Node(
        id=number, name=f"n{number}", type=int(kind), duration_micros=micros, data_deps=data, ctrl_deps=control
    )
    for name, value in attributes.items():
        item = made.attr.add(name=name)
        setattr(item, {bool: "bool_val", int: "int64_val", str: "string_val"}[type(value)], value)
    return made


def ranks(folder: Path, *nodes: list[Any], **metadata: str) -> list[ChakraTrace]:
    """A trace for each list of nodes, as another program would have written it."""
    found = []
    for rank, mine in enumerate(nodes):
        head = SCHEMA.GlobalMetadata(version="0.0.4")
        for name, value in metadata.items():
            head.attr.add(name=name, string_val=value)
        path = folder / f"job.{rank}.et"
        path.write_bytes(et(mine, head))
        found.append(read_chakra(path))
    return found


def finish(traces: list[ChakraTrace], *options: Any, **more: Any) -> list[int]:
    """When each rank is done, in microseconds."""
    run = simulate(to_graph(traces, *options, **more))
    end = run.end_ns // 1000
    return [int(end[run.graph.rank == trace.rank].max(initial=0)) for trace in traces]


def collective(number: int, micros: int = 10, data: tuple[int, ...] = (), group: str | None = None) -> Any:
    named = {} if group is None else {"pg_name": group}
    return a_node(number, NodeType.COMM_COLL, micros, data, comm_type=0, comm_size=64, is_cpu_op=False, **named)


def test_control_dependencies_count_unless_only_data_do(tmp_path: Path) -> None:
    traces = ranks(
        tmp_path, [a_node(1, micros=10, is_cpu_op=False), a_node(2, NodeType.MEM_LOAD, 5, is_cpu_op=True, control=(1,))]
    )
    assert finish(traces) == finish(traces, "data+ctrl") == [15]
    assert finish(traces, "data") == [10]
    with pytest.raises(ValueError, match="dependencies must be"):
        to_graph(traces, "control")


def test_slots_run_one_node_at_a_time_in_order_of_ids(tmp_path: Path) -> None:
    """As in ASTRA-sim: the CPU, compute and communication each take one."""
    host = [a_node(at, is_cpu_op=True) for at in (5, 6)]
    device = [a_node(at, is_cpu_op=False) for at in (3, 4, 9)]
    traces = ranks(tmp_path, [*reversed(device), *host, collective(7, 25)])
    run = simulate(to_graph(traces))
    start = dict(zip(run.graph.names(np.arange(run.graph.num_tasks)), (run.start_ns // 1000).tolist(), strict=True))
    assert start == {"n3": 0, "n4": 10, "n9": 20, "n5": 0, "n6": 10, "n7": 0}


def test_a_collective_waits_for_the_last_member(tmp_path: Path) -> None:
    traces = ranks(
        tmp_path,
        *(
            [a_node(1, micros=wait, is_cpu_op=False), collective(2, 10, (1,)), a_node(3, data=(2,), is_cpu_op=False)]
            for wait in (5, 40, 20)
        ),
    )
    graph = to_graph(traces)
    assert graph.notes["coupled collectives"] == 1
    assert finish(traces) == [60, 60, 60]
    assert finish(traces, coupled=False) == [25, 60, 40]


def test_groups_meet_by_themselves(tmp_path: Path) -> None:
    groups = [{"pg_name": "5", "ranks": [0, 1], "group_size": 2}, {"pg_name": "6", "ranks": [2, 3], "group_size": 2}]
    jobs = [
        [a_node(1, micros=wait, is_cpu_op=False), collective(2, 10, (1,), "56"[rank > 1])]
        for rank, wait in enumerate((5, 40, 100, 20))
    ]
    traces = ranks(tmp_path, *jobs, process_groups=json.dumps(groups))
    assert finish(traces) == [50, 50, 110, 110]
    assert finish(traces[:3]) == [50, 50, 110]
    graph = to_graph(traces[:3])
    assert graph.notes["collective of a group whose ranks are not all there: alone"] == 1
    assert graph.notes["coupled collectives"] == 1


def test_groups_with_different_numbers_of_collectives(tmp_path: Path) -> None:
    traces = ranks(tmp_path, [collective(1), collective(2)], [collective(1, 30)])
    graph = to_graph(traces)
    assert graph.notes["group whose ranks have different numbers of collectives: the common first ones coupled"] == 1
    assert finish(traces) == [20, 10]


@pytest.mark.parametrize(
    "text",
    ["", "{", "5", "[5]"]
    + [f'[{{"pg_name": "5"{ranks}}}]' for ranks in ("", ', "ranks": 7', ', "ranks": [[0]]', ', "ranks": ["a"]')],
)
def test_nonsense_in_the_metadata_is_survived(tmp_path: Path, text: str) -> None:
    traces = ranks(
        tmp_path,
        [collective(1, group="5")],
        [collective(1, group="5")],
        process_groups=text,
        world_size="two",
        origin_ns="x",
    )
    assert finish(traces) == [10, 10]


def transfer(
    number: int, kind: NodeType, source: int, target: int, tag: int = 0, micros: int = 7, data: tuple[int, ...] = ()
) -> Any:
    return a_node(
        number, kind, micros, data, comm_src=source, comm_dst=target, comm_tag=tag, comm_size=8, is_cpu_op=False
    )


def test_a_send_meets_its_receive(tmp_path: Path) -> None:
    send, receive = NodeType.COMM_SEND, NodeType.COMM_RECV
    traces = ranks(
        tmp_path,
        [a_node(1, micros=30, is_cpu_op=False), transfer(2, send, 0, 1, data=(1,))],
        [transfer(1, receive, 0, 1), a_node(2, micros=5, data=(1,), is_cpu_op=False)],
    )
    assert to_graph(traces).notes["coupled collectives"] == 1
    assert finish(traces) == [37, 42]
    assert finish(traces[1:]) == [12]
    assert to_graph(traces[1:]).notes["send or receive without its counterpart: alone"] == 1


def test_transfers_with_different_tags_are_apart(tmp_path: Path) -> None:
    send, receive = NodeType.COMM_SEND, NodeType.COMM_RECV
    traces = ranks(
        tmp_path,
        [a_node(1, micros=30, is_cpu_op=False), transfer(2, send, 0, 1, 4, data=(1,)), transfer(3, send, 0, 1, 5)],
        [transfer(1, receive, 0, 1, 5), transfer(2, receive, 0, 1, 4), transfer(3, receive, 0, 1, 6)],
    )
    graph = to_graph(traces)
    assert graph.notes["coupled collectives"] == 2
    assert graph.notes["send or receive without its counterpart: alone"] == 1
    assert finish(traces) == [37, 37]


def test_ranks_that_files_do_not_tell_or_tell_twice(tmp_path: Path) -> None:
    traces = ranks(tmp_path, [a_node(1)], [a_node(1)], [a_node(1)])
    for trace, rank in zip(traces, (1, 1, -1), strict=True):
        trace.rank = rank
    graph = to_graph(traces)
    assert graph.ranks == [0, 1, 2]
    assert graph.notes["file without a rank of its own: given the next free one"] == 2


def test_a_dangling_id_is_named(tmp_path: Path) -> None:
    for kind in ("data", "control"):
        (trace,) = ranks(tmp_path, [a_node(4), a_node(9, **{kind: (4, 77)})])
        with pytest.raises(DependencyError, match=r"job\.0\.et: node 9 depends on node 77.*1 such.*lint --repair"):
            to_graph([trace])
    assert finish(ranks(tmp_path, [a_node(4), a_node(9, control=(77,))]), "data") == [20]


def test_no_traces_and_no_nodes(tmp_path: Path) -> None:
    assert to_graph([]).num_tasks == 0
    assert simulate(to_graph(ranks(tmp_path, [], []))).finish_ns == 0


# -- pictures --------------------------------------------------------------------------------------------------------

ODD = ['say "hi"\\', "<b>&amp;</b>", "\x00\x1b line\nbreak", "ünïcödé ☃", "", "x" * 300, "]]>"]


def odd(folder: Path) -> list[ChakraTrace]:
    nodes = [a_node(at + 1, data=(at,) if at else ()) for at in range(len(ODD))]
    for made, name in zip(nodes, ODD, strict=True):
        made.name = name
    return ranks(folder, nodes, [a_node(1), a_node(2, control=(1,), data=(1,))])


def test_pictures_of_odd_names(tmp_path: Path) -> None:
    traces = odd(tmp_path)
    namespace = "{http://graphml.graphdrawing.org/xmlns}"
    root = ElementTree.fromstring(pictures.graphml(traces))
    nodes = {node.get("id"): [data.text or "" for data in node] for node in root.iter(f"{namespace}node")}
    assert len(nodes) == 9 and nodes["r0_n4"] == ["ünïcödé ☃", "COMP", "10"] and nodes["r0_n1"][0] == ODD[0]
    edges = [(edge.get("source"), edge.get("target")) for edge in root.iter(f"{namespace}edge")]
    assert len(edges) == 7 and ("r1_n1", "r1_n2") in edges and all(end in nodes for edge in edges for end in edge)
    drawing = ElementTree.fromstring(pictures.svg(traces, "x.svg"))
    titles = [one.text or "" for one in drawing.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 9 and "<b>&amp;</b> (id 2, COMP, 10 us)" in titles
    boxes = [one.attrib for one in drawing.iter("{http://www.w3.org/2000/svg}rect")]
    assert len({(box["x"], box["y"]) for box in boxes}) == 9  # none covers another
    left = {title: int(box["x"]) for title, box in zip(titles, boxes, strict=True)}
    assert sorted(left.values())[-1] == left[titles[6]]  # the last of the chain is farthest right


def test_dot_is_one_statement_a_line(tmp_path: Path) -> None:
    """Quotes close, and every line is one that Graphviz' grammar has."""
    text = pictures.dot(odd(tmp_path))
    string = r'"(?:[^"\\]|\\.)*"'
    key = r"r\d+_n\d+"
    line = rf"  (?:rankdir=LR|node \[.*\]|{key} \[label={string}, fillcolor={string}\]|{key} -> {key});"
    body = re.fullmatch(r"digraph trace \{\n(.*)\n\}\n", text, re.DOTALL)
    assert body and re.fullmatch(rf"(?:{line}\n)*{line}", body[1], re.DOTALL)
    assert len(re.findall(rf"^  {key} -> {key};$", text, re.MULTILINE)) == 7


def test_a_drawing_of_a_cycle_is_refused(tmp_path: Path) -> None:
    traces = ranks(tmp_path, [a_node(1, data=(2,)), a_node(2, data=(1,)), a_node(3)])
    with pytest.raises(FormatError, match="wait for each other"):
        pictures.svg(traces, "x.svg")
    assert pictures.dot(traces).count("->") == 2


def test_a_drawing_of_nothing(tmp_path: Path) -> None:
    for traces in ([], ranks(tmp_path, [])):
        ElementTree.fromstring(pictures.svg(traces, "x.svg"))
        ElementTree.fromstring(pictures.graphml(traces))
        assert "->" not in pictures.dot(traces)


def test_pictures_leave_out_dependencies_on_nothing(shared: Path) -> None:
    trace = read_chakra(shared / "traces" / "chakra-et" / "dangling-deps.0.et")
    known = set(trace.nodes["id"].tolist())
    pairs = {
        (source, target)
        for lists in (trace.data, trace.control)
        for source, target in zip(lists.ids.tolist(), trace.nodes["id"][lists.nodes].tolist(), strict=True)
        if source in known
    }
    root = ElementTree.fromstring(pictures.graphml([trace]))
    tags = Counter(element.tag.rpartition("}")[2] for element in root.iter())
    assert (tags["node"], tags["edge"]) == (trace.num_nodes, len(pairs))


# -- which kind of file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("megatron-tp8-a100/et/rank0.json.gz", "pytorch-et"),
        ("pytorch-et/small-1.0.2.json.gz", "pytorch-et"),
        ("megatron-tp8-a100/kineto/rank0.json.gz", "kineto"),
        ("large-integers/rank70.json.gz", "kineto"),
        ("chakra-et/dangling-deps.0.et", "chakra"),
    ],
)
def test_real_files_are_told(shared: Path, name: str, kind: str) -> None:
    assert detect(shared / "traces" / name) == kind


def test_our_files_are_told(tmp_path: Path) -> None:
    (trace,) = ranks(tmp_path, [a_node(1)])
    write_chakra(trace, tmp_path / "a.gz")
    write_json(trace, tmp_path / "b")
    save_arrow(trace, tmp_path / "c")
    assert [detect(tmp_path / name) for name in "abc" if name != "a"] == ["chakra-json", "arrow"]
    assert detect(tmp_path / "a.gz") == detect(tmp_path / "job.0.et") == "chakra"


@given(st.binary(max_size=200), st.sampled_from([b"", b"\x1f\x8b\x08", b"{", b"ARROW1", b" [", b'{"nodes": [']))
def test_any_bytes_are_told_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, head: bytes
) -> None:
    path = tmp_path_factory.mktemp("noise") / "x"
    path.write_bytes(head + noise)
    try:
        assert detect(path) in ("kineto", "pytorch-et", "chakra", "chakra-json", "arrow")
    except FormatError as error:
        assert "\n" not in str(error)
