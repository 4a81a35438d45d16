"""Execution graphs as Chakra traces and back: the same times, whatever way they take."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

import foretrace
from foretrace.formats import pictures
from foretrace.formats.chakra import ChakraTrace, NodeType
from foretrace.formats.chakra import operator_details as details
from foretrace.formats.chakra.arrow_form import load_arrow, save_arrow
from foretrace.formats.chakra.columns import whole_micros
from foretrace.formats.chakra.from_graph import from_graph
from foretrace.formats.chakra.from_operators import from_operators
from foretrace.formats.chakra.read import read_chakra
from foretrace.formats.chakra.to_graph import DependencyError, to_graph
from foretrace.formats.chakra.write import write_chakra
from foretrace.formats.pytorch_et import read_operators
from foretrace.link import link
from foretrace.simulate import simulate
from foretrace.trace import FormatError, GraphError, StringTable
from foretrace.trace.steps import device_steps
from tests.formats.execution_traces import node, tensor, trace
from tests.formats.test_pytorch_et import EXAMPLE, written

TRACES = (
    *("megatron-tp8-a100/kineto", "train-a100-8gpu-6steps", "train-v100-2gpu-6steps", "train-v100-ns-timestamps"),
    *("train-a100-2gpu-nccl-metadata", "amd-mi300-resnet-8gpu", "cuda-sync-multi-stream"),
    *("resnet50-v100-2021-categories", "sampled-128gpu", "b200-eager"),
    *(
        f"h100-mi300-pairs/{device}-{model}.json.gz"
        for device in ("h100", "mi300")
        for model in ("Qwen_Qwen1.5-0.5B-Chat", "gaunernst_bert-small-uncased")
    ),
)


@pytest.mark.parametrize("name", TRACES)
def test_a_written_et_takes_as_long_as_the_timeline(shared: Path, tmp_path: Path, name: str) -> None:
    job = foretrace.read(shared / "traces" / name)
    measured = simulate(link(job))
    paths = []
    for one in from_graph(measured.resolved):
        paths.append(tmp_path / f"job.{one.rank}.et")
        write_chakra(one, paths[-1])
    again = simulate(to_graph([read_chakra(path) for path in paths]))
    for rank in job.ranks:
        finish = [int(run.end_ns[run.graph.rank == rank].max()) for run in (measured, again)]
        assert abs(finish[1] - finish[0]) <= 0.01 * finish[0]
        steps = [device_steps(run.job.rank(rank)) for run in (measured, again)]
        lengths = [one.end_ns - one.start_ns for one in steps]
        np.testing.assert_allclose(lengths[1], lengths[0], rtol=0.01)


def test_the_megatron_job_is_exact_and_alone_too(shared: Path) -> None:
    job = foretrace.read(shared / "traces" / "megatron-tp8-a100" / "kineto")
    coupled = simulate(link(job))
    traces = from_graph(coupled.resolved)
    graph = to_graph(traces)
    assert graph.notes["coupled collectives"] == 84
    assert simulate(graph).finish_ns == coupled.finish_ns
    assert graph.count_edges()["recorded"]["launch"] == coupled.graph.count_edges()["recorded"]["launch"]
    alone = simulate(link(job, coupled=False))
    assert simulate(to_graph(traces, coupled=False)).finish_ns == alone.finish_ns
    one = simulate(to_graph(traces[:1]))
    assert one.graph.notes["collective of a group whose ranks are not all there: alone"] == 84


def test_open_waits_are_refused(shared: Path) -> None:
    graph = link(foretrace.read(shared / "traces" / "train-a100-8gpu-6steps"))
    assert graph.waits.num_rows
    with pytest.raises(GraphError, match="resolved"):
        from_graph(graph)


def test_a_dangling_dependency_names_file_and_node(shared: Path) -> None:
    path = shared / "traces" / "chakra-et" / "dangling-deps.0.et"
    with pytest.raises(DependencyError, match=r"dangling-deps\.0\.et: node 216 .* node 3.*1277"):
        to_graph([read_chakra(path)])


def test_rounded_durations_add_up() -> None:
    lane = np.array([0, 1, 0, 1, 0, 0])
    duration = np.array([400, 1600, 400, 1600, 400, 400])
    micros = whole_micros(lane, duration).astype(np.int64)
    assert micros[lane == 0].sum() == 2 and micros[lane == 1].sum() == 3
    many = np.full(10_000, 333)
    assert abs(int(whole_micros(np.zeros(10_000, int), many).sum()) - 3330) <= 1


def example(tmp_path: Path) -> ChakraTrace:
    return from_operators(read_operators(written(tmp_path, EXAMPLE)))


def test_operators_alone(tmp_path: Path) -> None:
    got = example(tmp_path)
    names = got.nodes.texts("name")
    rows = {name: at for at, name in enumerate(names)}
    assert got.nodes["type"][rows["c10d::allreduce_"]] == NodeType.COMM_COLL
    assert got.integers("comm_size")[rows["c10d::allreduce_"]] == 16
    assert got.data.of(rows["aten::cat"]).tolist() == [5]
    assert got.data.of(rows["c10d::allreduce_"]).tolist() == [11]
    assert got.control.of(rows["aten::cat"]).tolist() == [2, 5]
    assert (
        got.nodes.texts("inputs_values")[rows["aten::cat"]] == "[[[3, 4, 0, 4, 4, 'cpu'], [8, 9, 0, 4, 4, 'cpu']], 0]"
    )
    assert got.nodes.texts("inputs_types")[rows["aten::add"]] == "['Tensor(float)', 'Tensor(float)', 'Int']"


def test_both_writers_of_arguments_agree(tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if details._arguments is None:
        pytest.skip("the writer of arguments is not compiled here")
    for path in (written(tmp_path, EXAMPLE), shared / "traces" / "pytorch-et" / "small-1.0.2.json.gz"):
        operators = read_operators(path)
        rows = np.arange(operators.num_nodes)
        one, one_strings = details.operator_texts(operators, rows, StringTable(["first"]))
        monkeypatch.setattr(details, "_arguments", None)
        other, other_strings = details.operator_texts(operators, rows, StringTable(["first"]))
        monkeypatch.undo()
        assert list(one) == list(other)
        for name in one:
            assert one_strings.lookup(one[name]) == other_strings.lookup(other[name])


def test_a_trace_without_arguments(tmp_path: Path) -> None:
    assert from_operators(read_operators(written(tmp_path, trace(node(2, "bare", 1))))).num_nodes == 2


def test_arrow_and_back(tmp_path: Path) -> None:
    before = example(tmp_path)
    save_arrow(before, tmp_path / "x.arrow")
    after = load_arrow(tmp_path / "x.arrow")
    assert after.nodes["id"].tolist() == before.nodes["id"].tolist()
    for name in ("name", "inputs_values", "outputs_shapes"):
        assert after.nodes.texts(name) == before.nodes.texts(name)
    for lists in ("control", "data"):
        for row in range(before.num_nodes):
            assert getattr(after, lists).of(row).tolist() == getattr(before, lists).of(row).tolist()

    def attributes(of: ChakraTrace) -> set[tuple[int, str, int, str]]:
        table = of.attributes
        rows = zip(table["node"].tolist(), table.texts("name"), table["wire"].tolist(), strict=True)
        return {(*row, repr(of.value(at))) for at, row in enumerate(rows)}

    assert attributes(after) == attributes(before) and after.metadata == before.metadata
    (tmp_path / "y.arrow").write_bytes((tmp_path / "x.arrow").read_bytes()[:500])
    with pytest.raises(FormatError):
        load_arrow(tmp_path / "y.arrow")


def test_pictures(tmp_path: Path) -> None:
    got = example(tmp_path)
    edges = len({(int(s), r) for lists in (got.data, got.control) for r in range(got.num_nodes) for s in lists.of(r)})
    graphml = ElementTree.fromstring(pictures.graphml([got]))
    tags = [element.tag.rpartition("}")[2] for element in graphml.iter()]
    assert (tags.count("node"), tags.count("edge")) == (got.num_nodes, edges)
    drawing = ElementTree.fromstring(pictures.svg([got], "x.svg"))
    shapes = [element.tag.rpartition("}")[2] for element in drawing.iter()]
    assert (shapes.count("rect"), shapes.count("path")) == (got.num_nodes, edges)
    assert pictures.dot([got]).count("->") == edges and '\\"and\\"' in pictures.dot([got])


def test_too_many_nodes_for_a_drawing(tmp_path: Path) -> None:
    many = from_operators(
        read_operators(written(tmp_path, trace(*(node(at, "x", 1, [tensor(1, 1)]) for at in range(2, 2100)))))
    )
    with pytest.raises(FormatError, match="too many for a drawing"):
        pictures.svg([many], "x.svg")
