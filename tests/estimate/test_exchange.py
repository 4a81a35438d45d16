"""What files hold, told by their content; Chakra traces of timelines and operator traces; their simulation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foretrace
from foretrace.estimate.exchange import chakra_traces, files_of, group_ranks, read_inputs
from foretrace.formats.chakra import ChakraTrace, NodeType
from foretrace.formats.chakra.arrow_form import save_arrow
from foretrace.formats.chakra.to_graph import to_graph
from foretrace.formats.chakra.write import write_chakra, write_json
from foretrace.formats.pytorch_et import read_operators
from foretrace.link import link
from foretrace.report.simulation import chakra_document, simulation_document
from foretrace.simulate import simulate
from foretrace.trace import FormatError
from tests.formats.builder import small_trace, write
from tests.formats.execution_traces import node, tensor, trace

FACTORS = {"kernel:gemm": 2.0, "gap:": 10.0}
MM = "aten::mm(Tensor self, Tensor mat2) -> Tensor"


def timelines(folder: Path, ranks: int = 2) -> list[Path]:
    return [write(folder / f"rank{rank}.json", small_trace(rank, ranks, 50.0 * rank)) for rank in range(ranks)]


def operators(folder: Path, rank: int = 0, name: str = "", **members: Any) -> Path:
    """The operators of `small_trace`, as an execution trace would show them."""
    a, b, c = ([2, 3, 0, 32, 4, "cuda:0"], [4, 5, 0, 16, 4, "cuda:0"], [6, 7, 0, 8, 4, "cuda:0"])
    nodes = []
    for at in (10, 30):
        mm = node(at, "aten::mm", 1, [a, b], [c], op_schema=MM)
        for side, shapes in (("inputs", [[4, 8], [8, 2]]), ("outputs", [[4, 2]])):
            mm[side]["shapes"] = shapes
        told = {"collective_name": "allreduce", "in_msg_nelems": 1000, "dtype": "Float", "pg_name": "0"}
        nodes += [mm, node(at + 10, "record_param_comms", 1, [c], [c], **told)]
    return write(folder / (name or f"et_rank{rank}.json.gz"), trace(*nodes, **members))


# -- reading ---------------------------------------------------------------------------------------------------------


def test_a_folder_of_everything(tmp_path: Path) -> None:
    timelines(tmp_path)
    for rank in (1, 0):
        operators(tmp_path, rank)
    one = chakra_traces(foretrace.read(tmp_path / "rank0.json"), {}).traces[0]
    (tmp_path / "inner").mkdir()
    write_chakra(one, tmp_path / "inner" / "job.2.et.gz")
    one.rank = 1
    write_json(one, tmp_path / "inner" / "job.1.json")
    one.rank = 3
    save_arrow(one, tmp_path / "inner" / "job.arrow")
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "job.json").write_text("{}")
    seen: list[tuple[int, int]] = []
    found = read_inputs([tmp_path], lambda done, total: seen.append((done, total)))
    assert found.job is not None and found.job.ranks == [0, 1]
    assert sorted(found.operators) == [0, 1]
    assert [one.rank for one in found.chakra] == [1, 2, 3]
    assert found.warnings["rank from the file's name"] >= 2
    assert all(0 <= done <= total for done, total in seen) and seen[-1][0] == seen[-1][1]


def test_content_tells_the_kind_not_the_name(tmp_path: Path) -> None:
    (timeline,) = timelines(tmp_path, 1)
    shutil.move(timeline, tmp_path / "odd.et")
    shutil.move(operators(tmp_path), tmp_path / "odd.arrow")
    found = read_inputs([tmp_path / "odd.et", tmp_path / "odd.arrow"])
    assert found.job is not None and list(found.operators) == [0] and not found.chakra


def test_which_files_a_path_stands_for(tmp_path: Path) -> None:
    paths = timelines(tmp_path, 3)
    (tmp_path / "x.txt").write_text("")
    assert files_of([tmp_path]) == paths
    assert files_of([paths[1], tmp_path / "x.txt"]) == [paths[1], tmp_path / "x.txt"]
    assert files_of([tmp_path / "rank[12].json"]) == paths[1:]
    (tmp_path / "empty").mkdir()
    for wrong, problem in (("empty", "no trace in this folder"), ("absent.json", "no such"), ("absent*", "no such")):
        with pytest.raises(FormatError, match=problem):
            files_of([tmp_path / wrong])


def test_ranks_of_operator_traces(tmp_path: Path) -> None:
    (timeline, *_) = timelines(tmp_path, 1)
    nameless = operators(tmp_path, name="et.json")
    assert list(read_inputs([nameless]).operators) == [0]
    shutil.copy(timeline, tmp_path / "rank5.json")
    text = json.loads((tmp_path / "rank5.json").read_text())
    text["distributedInfo"]["rank"] = 5
    write(tmp_path / "rank5.json", text)
    assert list(read_inputs([tmp_path / "rank5.json", nameless]).operators) == [5]
    both = [nameless, operators(tmp_path, name="other.json"), operators(tmp_path, 1)]
    assert sorted(read_inputs(both).operators) == [0, 1, 2]
    with pytest.raises(FormatError, match=r"rank 1 as .*rank1\.json\.gz is"):
        read_inputs([operators(tmp_path, 1), operators(tmp_path, name="again_rank1.json")])


def test_one_bad_file_is_named(tmp_path: Path) -> None:
    timelines(tmp_path)
    (tmp_path / "bad.et").write_bytes(b"\xff\xfe\xfd" * 50)
    with pytest.raises(FormatError, match=r"bad\.et") as caught:
        read_inputs([tmp_path])
    assert "\n" not in str(caught.value)


# -- converting ------------------------------------------------------------------------------------------------------


def test_a_timeline_alone(tmp_path: Path) -> None:
    timelines(tmp_path)
    job = foretrace.read(tmp_path)
    made = chakra_traces(job, {})
    assert [one.rank for one in made.traces] == [0, 1] and not made.joins
    assert made.graph is not None and not made.graph.waits.num_rows
    assert made.notes["graph: coupled collectives"] == 2
    assert simulate(to_graph(made.traces)).finish_ns == simulate(link(job)).finish_ns


def test_a_timeline_and_operators(tmp_path: Path) -> None:
    paths = [*timelines(tmp_path), operators(tmp_path, 0), operators(tmp_path, 1)]
    found = read_inputs(paths)
    made = chakra_traces(found.job, found.operators)
    assert {rank: (one.work_node >= 0).all() for rank, one in made.joins.items()} == {0: True, 1: True}
    for one in made.traces:
        names, operator, flops = one.nodes.texts("name"), one.texts("operator"), one.integers("num_ops")
        gemms = [at for at, name in enumerate(names) if name == "ampere_sgemm_128x64_nn"]
        assert [operator[at] for at in gemms] == ["aten::mm"] * 2
        assert flops[gemms].tolist() == [2 * 4 * 8 * 2] * 2
        assert one.nodes.texts("inputs_shapes")[gemms[0]] == "[[4, 8], [8, 2]]"
        calls = one.nodes["type"] == NodeType.COMM_COLL
        assert [one.texts("operator")[at] for at in np.flatnonzero(calls)] == ["record_param_comms"] * 2
    assert simulate(to_graph(made.traces)).finish_ns == simulate(link(found.job)).finish_ns


def test_operators_alone_have_no_times(tmp_path: Path) -> None:
    found = read_inputs([operators(tmp_path)])
    made = chakra_traces(None, found.operators)
    assert made.graph is None and not made.joins
    (one,) = made.traces
    assert one.nodes["id"].tolist() == found.operators[0].nodes["id"].tolist()
    assert not one.nodes["duration_micros"].any()
    assert made.notes["node without a duration: an execution trace has no times"] == 5
    flops = dict(zip(one.nodes.texts("name"), one.integers("num_ops").tolist(), strict=True))
    assert flops["aten::mm"] == 128 and flops["record_param_comms"] == -1


def test_strangers_are_refused_in_one_line(tmp_path: Path) -> None:
    timelines(tmp_path, 1)
    other = write(tmp_path / "other_rank0.json.gz", trace(node(5, "my::operator", 1, [tensor(1, 2)])))
    found = read_inputs([tmp_path / "rank0.json", other])
    with pytest.raises(FormatError, match="none of 1 operators") as caught:
        chakra_traces(found.job, found.operators)
    assert "\n" not in str(caught.value)


def test_operators_of_a_rank_without_a_timeline(tmp_path: Path) -> None:
    paths = [*timelines(tmp_path), operators(tmp_path, 0), operators(tmp_path, 7)]
    found = read_inputs(paths)
    made = chakra_traces(found.job, found.operators)
    assert list(made.joins) == [0]


def with_groups(text: Any) -> ChakraTrace:
    made = chakra_traces(None, {}).traces
    assert made == []
    from foretrace.formats.chakra.columns import Attributes, dependencies
    from foretrace.trace import StringTable, Table

    none = np.empty(0, np.int64)
    strings = StringTable()
    nodes = Table({"id": np.empty(0, np.uint64), "name": np.empty(0, np.int32)}, {"name": strings})
    lists = dependencies(none, none, np.empty(0, np.uint64))
    return ChakraTrace(
        nodes, lists, lists, Attributes(strings).table(strings), strings, metadata={"process_groups": text}
    )


def test_ranks_of_groups() -> None:
    entries = [{"pg_name": "0", "ranks": []}, {"pg_name": 7, "ranks": [2, 3]}]
    assert group_ranks([with_groups(json.dumps(entries))]) == {"7": [2, 3]}
    for odd in (None, 5, "", "{", "[5]", '{"pg_name": "1"}', '[{"pg_name": "1", "ranks": 7}]', '[{"ranks": [1]}]'):
        assert group_ranks([with_groups(odd)]) == {}


# -- the document ----------------------------------------------------------------------------------------------------


def test_the_document_of_chakra_traces_has_the_keys_of_the_other(tmp_path: Path) -> None:
    timelines(tmp_path, 3)
    job = foretrace.read(tmp_path)
    truth, _ = simulation_document(job, FACTORS)
    traces = chakra_traces(job, {}).traces
    got, simulation = chakra_document(traces, FACTORS, warnings={"x": 1})
    assert (
        set(got) == set(truth) | {"dependencies"} and got["dependencies"] == "data+ctrl" and got["warnings"] == {"x": 1}
    )
    assert set(got["summary"]) == set(truth["summary"])
    assert got["summary"]["finish_ns"] == truth["summary"]["finish_ns"] == simulation.finish_ns
    assert got["summary"]["coupled_collectives"] == truth["summary"]["coupled_collectives"] == 2
    assert got["what_if"]["after_ns"] == truth["what_if"]["after_ns"] < truth["what_if"]["before_ns"]
    for one, other in zip(got["ranks"], truth["ranks"], strict=True):
        assert set(one) == set(other)
        assert (one["finish_ns"], one["simulated_ns"]) == (other["finish_ns"], other["simulated_ns"])
        assert one["measured_ns"] is one["error_pct"] is None
        lengths = [step["simulated_ns"] for step in one["steps"]]
        assert lengths == [step["simulated_ns"] for step in other["steps"]] and len(lengths) == 2
        assert all(step["measured_ns"] is step["error_pct"] is None for step in one["steps"])
    for part in got["summary"]["parts"].values():
        assert all(value is None for name, value in part.items() if "measured" in name or "pct" in name)
    json.dumps(got, allow_nan=False, default=lambda value: value.item())


def test_the_document_of_the_real_job(shared: Path) -> None:
    job = foretrace.read(shared / "traces" / "megatron-tp8-a100" / "kineto")
    truth, _ = simulation_document(job)
    got, _ = chakra_document(chakra_traces(job, {}).traces)
    assert [one["finish_ns"] for one in got["ranks"]] == [one["finish_ns"] for one in truth["ranks"]]
    assert [one["simulated_ns"] for one in got["ranks"]] == [one["simulated_ns"] for one in truth["ranks"]]
    assert got["summary"]["coupled_collectives"] == 84


def test_alone_and_data_only(tmp_path: Path) -> None:
    timelines(tmp_path, 3)
    job = foretrace.read(tmp_path)
    traces = chakra_traces(job, {}).traces
    alone, _ = chakra_document(traces, coupled=False)
    truth, _ = simulation_document(job, coupled=False)
    assert alone["summary"]["finish_ns"] == truth["summary"]["finish_ns"]
    assert alone["summary"]["coupled_collectives"] == 0
    data, _ = chakra_document(traces, dependencies="data")
    assert data["dependencies"] == "data"


def test_real_operators_without_a_timeline(shared: Path) -> None:
    path = shared / "traces" / "pytorch-et" / "small-1.0.2.json.gz"
    (one,) = chakra_traces(None, {0: read_operators(path)}).traces
    got, _ = chakra_document([one])
    assert got["summary"]["finish_ns"] == 0 and got["tasks"] == one.num_nodes
