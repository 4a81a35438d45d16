"""PyTorch execution traces: real files against plain JSON, both scanners, faults, and which tensor is which."""

from __future__ import annotations

import gzip
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.formats.pytorch_et import read, read_operators
from foretrace.formats.pytorch_et.values import mutated_positions
from foretrace.trace import FormatError
from foretrace.trace.operators import OperatorTrace
from tests.formats.execution_traces import node, oldest, tensor, trace

REAL = (
    *("pytorch-et/resnet-1gpu-1.0.3", "pytorch-et/resnet-1gpu-1.1.1", "pytorch-et/small-1.0.2"),
    *("pytorch-et/torch-compile-1.1.1", "linear-rtx2080ti/et", "simple-add-et-kineto/et"),
    *(f"megatron-tp8-a100/et/rank{rank}" for rank in range(8)),
)


@pytest.fixture(params=["compiled", "python"])
def scanner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(read, "_scanner", None)
    elif read._scanner is None:
        pytest.skip("the scanner is not compiled here")
    return str(request.param)


def written(folder: Path, document: Any, name: str = "rank3.et.json") -> Path:
    path = folder / name
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path


def tensors_in(value: Any, kind: str) -> list[list[Any]]:
    """The tensors of one argument, found without our code."""
    if "Tensor(" not in kind or not isinstance(value, list):
        return []
    if len(value) == 6 and isinstance(value[5], str) and all(isinstance(one, int) for one in value[:5]):
        return [value]
    return [found for one in value for found in tensors_in(one, kind)]


def arguments_of(one: dict[str, Any]) -> list[tuple[bool, Any, Any, str]]:
    found = []
    for is_output, side in ((False, "input"), (True, "output")):
        lists = one[f"{side}s"]
        if isinstance(lists, dict):
            parts = (lists["values"], lists["shapes"], lists["types"])
        else:
            parts = (lists, one[f"{side}_shapes"], one[f"{side}_types"])
        found += [(is_output, *three) for three in zip(*parts, strict=True)]
    return found


@pytest.mark.parametrize("name", REAL)
def test_real_files_equal_plain_json(shared: Path, name: str, scanner: str) -> None:
    path = shared / "traces" / f"{name}.json.gz"
    document, _ = json.JSONDecoder().raw_decode(gzip.decompress(path.read_bytes()).decode())
    nodes = sorted(document["nodes"], key=lambda one: one["id"])
    got = read_operators(path)
    assert got.schema == document["schema"] and got.metadata["pid"] == document["pid"]
    assert got.nodes["id"].tolist() == [one["id"] for one in nodes]
    assert got.nodes.texts("name") == [one["name"] for one in nodes]
    parents = [one.get("ctrl_deps", one.get("parent")) for one in nodes]
    present = {one["id"] for one in nodes}
    known = got.nodes["parent"] >= 0
    assert got.nodes["id"][got.nodes["parent"][known]].tolist() == [p for p, k in zip(parents, known, strict=True) if k]
    assert [one["id"] for one, k in zip(nodes, known, strict=True) if not k] == [
        one["id"] for one, p in zip(nodes, parents, strict=True) if p == one["id"] or p not in present
    ]
    want = [(at, *argument) for at, one in enumerate(nodes) for argument in arguments_of(one)]
    assert got.arguments["node"].tolist() == [row[0] for row in want]
    assert got.arguments["is_output"].tolist() == [row[1] for row in want]
    assert [json.loads(text) for text in got.arguments.texts("shape")] == [row[3] for row in want]
    assert got.arguments.texts("type") == [row[4] for row in want]
    flat = [(at, found) for at, _, value, _, kind in want for found in tensors_in(value, kind)]
    assert got.tensors["node"].tolist() == [at for at, _ in flat]
    columns = ("tensor_id", "storage_id", "offset", "elements", "element_bytes")
    numbers = zip(*(got.tensors[column].tolist() for column in columns), strict=True)
    assert [list(row) for row in numbers] == [found[:5] for _, found in flat]
    assert got.tensors.texts("device") == [found[5] for _, found in flat]
    plain = [json.loads(text) for text, row in zip(got.arguments.texts("value"), want, strict=True) if text]
    assert plain == [row[2] for row, text in zip(want, got.arguments.texts("value"), strict=True) if text]


def test_megatron_collectives(shared: Path) -> None:
    got = read_operators(shared / "traces" / "megatron-tp8-a100" / "et" / "rank5.json.gz")
    names = got.collectives.texts("collective")
    assert got.rank == 5 and names.count("allreduce") == 85  # 84 of them run on the device
    rows = [at for at, name in enumerate(names) if name == "allreduce"]
    assert got.collectives["group_size"][rows].tolist().count(8) >= 84
    assert got.collectives["in_elements"][rows].max() == 33_554_432


EXAMPLE = trace(
    node(2, "[pytorch|profiler|execution_trace|thread]", 1, rf_id=0, scope=7),
    node(
        5, "aten::add", 2, [tensor(3, 4), tensor(6, 7), 1], [tensor(8, 9)], op_schema="aten::add.Tensor(...) -> Tensor"
    ),
    node(11, "aten::cat", 2, [[tensor(3, 4), tensor(8, 9)], 0], [tensor(12, 13)]),
    node(14, 'quotes "and" \\ and ünïcödé', 2, ['text with "quotes"', 1.5, True], kernel_backend="triton"),
    node(
        *(20, "c10d::allreduce_", 2, [[tensor(12, 13)]], [[tensor(12, 13)]]),
        collective_name="allreduce",
        dtype="Float",
        in_msg_nelems=4,
        out_msg_nelems=4,
        pg_name="3",
        pg_ranks="[0, 2]",
        reduce_op="SUM",
        pg_size=2,
        src_rank=-1,
    ),
    storages=[{"storage_id": 4, "size_bytes": 16, "device": "cpu", "allocated": -1, "freed": 11}],
)


def texts_and_numbers(got: OperatorTrace) -> dict[str, Any]:
    found: dict[str, Any] = {"groups": got.groups, "metadata": got.metadata, "warnings": got.report.warnings}
    for name in ("nodes", "arguments", "tensors", "collectives", "storages"):
        table = getattr(got, name)
        for column in table:
            key = f"{name}.{column}"
            found[key] = table.texts(column) if column in table.strings else table[column].tolist()
    return found


@pytest.mark.parametrize("form", [lambda document: document, oldest], ids=["today", "oldest"])
def test_an_example(tmp_path: Path, scanner: str, form: Callable[[Any], Any]) -> None:
    got = read_operators(written(tmp_path, form(EXAMPLE)))
    assert got.rank == 3 and got.report.guessed == {"rank from the file's name": 1}
    assert got.names(np.arange(4)) == [EXAMPLE["nodes"][-1]["name"], *(n["name"] for n in EXAMPLE["nodes"][:3])]
    assert got.nodes.texts("name")[4] == 'quotes "and" \\ and ünïcödé'
    assert got.nodes["parent"].tolist() == [-1, 0, 1, 1, 1, 1]
    assert got.tensors["element"].tolist() == [-1, -1, -1, 0, 1, -1, 0, 0]
    assert got.nodes.texts("kernel_backend")[4] == "triton"
    assert got.is_operator.tolist() == [False, False, True, False, True, False]
    assert got.storages["freed"].tolist() == [11]
    if form is not oldest:
        assert got.collectives.texts("reduction") == ["SUM"] and got.groups["3"].ranks == (0, 2)


def test_both_scanners_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for document in (EXAMPLE, oldest(EXAMPLE)):
        path = written(tmp_path, document)
        compiled = texts_and_numbers(read_operators(path))
        monkeypatch.setattr(read, "_scanner", None)
        plain = texts_and_numbers(read_operators(path))
        monkeypatch.undo()
        spaced = {"arguments.shape", "arguments.strides", "arguments.value", "tensors.shape", "tensors.strides"}
        for key, value in compiled.items():
            if key in spaced:
                assert [json.loads(t or "null") for t in value] == [json.loads(t or "null") for t in plain[key]], key
            else:
                assert value == plain[key], key


def test_parts_scanned_apart_are_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [
        node(10 * at, f"op{at % 7}", 1, [tensor(10 * at + 1, at), at], [tensor(10 * at + 2, at)])
        for at in range(1, 300)
    ]
    path = written(tmp_path, trace(*many))
    whole = texts_and_numbers(read_operators(path))
    monkeypatch.setattr(read, "_SHARE_BYTES", 1000)
    monkeypatch.setattr(read.os, "cpu_count", lambda: 64)
    assert texts_and_numbers(read_operators(path)) == whole


@pytest.mark.parametrize("cut", [0.2, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("name", ["rank0.et.json", "rank0.et.json.gz"])
def test_a_cut_file_gives_its_whole_nodes(tmp_path: Path, scanner: str, cut: float, name: str) -> None:
    many = [node(10 * at, "op", 1, [tensor(10 * at + 1, at)]) for at in range(1, 200)]
    text = written(tmp_path, trace(*many), name).read_bytes()
    path = tmp_path / f"cut-{name}"
    path.write_bytes(text[: int(len(text) * cut)])
    got = read_operators(path)
    assert 0 < got.num_nodes <= 200
    assert got.report.repaired and got.nodes["id"].tolist() == [10 * at for at in range(1, got.num_nodes + 1)]


def test_a_broken_node_is_left_out_and_counted(tmp_path: Path, scanner: str) -> None:
    text = json.dumps(EXAMPLE).encode().replace(b'"aten::cat", "ctrl_deps": 2', b'"aten::cat" "ctrl_deps": 2')
    got = read_operators(written(tmp_path, text))
    assert got.num_nodes == 5 and 11 not in got.nodes["id"].tolist()
    assert got.report.dropped == {"node that is cut or no valid JSON": 1}
    assert got.report.examples["node that is cut or no valid JSON"].startswith("byte ")


def test_text_after_the_end_is_noted(tmp_path: Path, scanner: str) -> None:
    got = read_operators(written(tmp_path, json.dumps(EXAMPLE).encode() + b"\nimport torch\n"))
    assert got.num_nodes == 6 and got.report.noted["text after the end of the trace"] == 1


@pytest.mark.parametrize(
    "text", [b"", b"{}", b'{"traceEvents": []}', b"\x1f\x8b\x08", b'{"nodes": [{"id": }]}', b"[1, 2]"]
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, scanner: str, text: bytes) -> None:
    with pytest.raises(FormatError) as caught:
        read_operators(written(tmp_path, text))
    assert "\n" not in str(caught.value) and "rank3.et.json" in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="No such file"):
        read_operators(tmp_path / "absent.json")


# -- which tensor is which -------------------------------------------------------------------------------------------


def values(tmp_path: Path, *nodes: dict[str, Any]) -> list[tuple[int, int, int]]:
    got = read_operators(written(tmp_path, trace(*nodes)))
    return list(zip(*(got.tensors[name].tolist() for name in ("value", "version", "producer")), strict=True))


def test_what_a_schema_writes_to() -> None:
    assert mutated_positions("aten::add(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor") == 0
    assert mutated_positions("aten::add_.Tensor(Tensor(a!) self, Tensor other) -> Tensor(a!)") == 0b1
    assert mutated_positions("aten::mm.out(Tensor self, Tensor mat2, *, Tensor(a!) out) -> Tensor(a!)") == 0b100
    assert mutated_positions("aten::_foreach_add_(Tensor(a!)[] self, Tensor[] other) -> ()") == 0b1
    assert mutated_positions("aten::x(int[2] size, Tensor(a!)? y) -> ()") == 0b10


def test_an_id_used_again_is_another_tensor(tmp_path: Path) -> None:
    rows = values(
        tmp_path,
        node(10, "aten::relu", 1, [tensor(2, 3)], [tensor(4, 5)]),
        node(20, "aten::relu", 1, [tensor(4, 5)], [tensor(6, 7)]),
        node(30, "aten::relu", 1, [tensor(2, 3)], [tensor(4, 8)]),
    )
    assert [row[0] for row in rows] == [0, 1, 1, 2, 0, 3]
    assert [row[2] for row in rows] == [-1, 1, 1, 2, -1, 3]


def test_writing_in_place_makes_a_version(tmp_path: Path) -> None:
    schema = "aten::add_.Tensor(Tensor(a!) self, Tensor other) -> Tensor(a!)"
    rows = values(
        tmp_path,
        node(10, "aten::add_", 1, [tensor(2, 3), tensor(4, 5)], [tensor(2, 3)], op_schema=schema),
        node(20, "aten::relu", 1, [tensor(2, 3)], [tensor(6, 7)]),
        node(30, "aten::_foreach_add_", 1, [[tensor(2, 3)]], [], op_schema="f(Tensor(a!)[] self) -> ()"),
        node(40, "aten::relu", 1, [tensor(2, 3)], []),
    )
    assert rows[0] == (0, 0, -1) and rows[2] == (0, 1, 1)  # before and after
    assert rows[3] == (0, 1, 1)
    assert rows[5] == (0, 1, 1) and rows[6] == (0, 2, 3)


def test_an_alias_is_the_same_tensor(tmp_path: Path) -> None:
    rows = values(
        tmp_path, node(10, "aten::to", 1, [tensor(2, 3)], [tensor(2, 3)], op_schema="to(Tensor(a) self) -> Tensor(a)")
    )
    assert rows == [(0, 0, -1), (0, 0, -1)]


def test_a_view_is_a_tensor_that_nobody_wrote(tmp_path: Path) -> None:
    rows = values(
        tmp_path,
        node(10, "aten::relu", 1, [], [tensor(2, 3)]),
        node(20, "aten::view", 1, [tensor(2, 3)], [tensor(4, 3)]),
        node(30, "aten::relu", 1, [tensor(4, 3)], []),
    )
    assert [row[0] for row in rows] == [0, 0, 1, 1] and [row[2] for row in rows] == [1, 1, 1, 1]


def test_the_output_of_a_caller_is_that_of_the_called(tmp_path: Path) -> None:
    rows = values(
        tmp_path,
        node(11, "aten::addmm", 10, [tensor(2, 3)], [tensor(4, 5)]),
        node(10, "aten::linear", 1, [tensor(2, 3)], [tensor(4, 5)]),
        node(20, "aten::relu", 1, [tensor(4, 5)], []),
    )
    assert [row[0] for row in rows] == [0, 1, 0, 1, 1] and rows[-1][2] == 2


def test_work_on_tensor_subclasses_is_told_from_the_local_work(tmp_path: Path) -> None:
    got = read_operators(
        written(
            tmp_path,
            trace(
                node(10, "aten::add_", 1, [tensor(2, 3)], op_schema="aten::add_(Tensor(a!) self) -> Tensor(a!)"),
                node(11, "PythonSubclass", 10),
                node(12, "aten::add_", 11, [tensor(4, 5)], op_schema="aten::add_(Tensor(a!) self) -> Tensor(a!)"),
                node(20, "aten::linear", 1, op_schema="aten::linear(Tensor a) -> Tensor"),
                node(21, "aten::t", 20, op_schema="aten::t(Tensor(a) self) -> Tensor(a)"),
            ),
        )
    )
    assert got.nodes["id"][got.is_wrapper].tolist() == [10]
    assert got.nodes["id"][got.is_outermost].tolist() == [12, 20]


# -- damage -----------------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.data())
def test_made_up_traces_read_alike_in_both_ways(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    plain = st.one_of(st.integers(-5, 1 << 63), st.booleans(), st.text(max_size=6))
    one_tensor = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 99)).map(lambda t: tensor(*t))
    values_of = st.lists(st.one_of(plain, one_tensor, st.lists(one_tensor, min_size=1, max_size=3)), max_size=3)
    nodes = [
        node(2 + at, data.draw(st.text(min_size=1, max_size=8)), data.draw(st.integers(1, 2 + at)),
             data.draw(values_of), data.draw(values_of), rf_id=data.draw(st.integers(0, (1 << 64) - 1)))
        for at in range(data.draw(st.integers(0, 6)))
    ]  # fmt: skip
    document = trace(*nodes) if data.draw(st.booleans()) else oldest(trace(*nodes))
    path = written(tmp_path_factory.mktemp("made"), document)
    first = texts_and_numbers(read_operators(path))
    compiled, read._scanner = read._scanner, None
    try:
        second = texts_and_numbers(read_operators(path))
    finally:
        read._scanner = compiled
    for key in first:
        if key not in ("arguments.shape", "arguments.strides", "arguments.value", "tensors.shape", "tensors.strides"):
            assert first[key] == second[key], key


def mutate(text: bytes, rng: random.Random) -> bytes:
    """One to four damages: flipped, cut, doubled, inserted or replaced bytes."""
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(text) + 1), rng.choice((1, 1, 2, 8, 60))
        kind = rng.randrange(5)
        if kind == 0 and text:
            at = rng.randrange(len(text))
            text = text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :]
        elif kind == 1:
            text = text[:at] + text[at + length :]
        elif kind == 2:
            text = text[:at] + text[at : at + length] * 2 + text[at + length :]
        elif kind == 3:
            text = (
                text[:at]
                + rng.choice((b'"', b"{", b"}", b"[", b"]", b",", b"\\", b"-", b"null", b"1e9", b"\xff"))
                + text[at:]
            )
        elif rng.random() < 0.2:
            text = text[:at]
    return text


def survive(path: Path, count: int, seed: int, budget_s: float) -> int:
    rng, sound = random.Random(seed), [json.dumps(EXAMPLE).encode(), json.dumps(oldest(EXAMPLE), indent=1).encode()]
    begin, read_whole = time.monotonic(), 0
    for at in range(count):
        path.write_bytes(mutate(sound[at % 2], rng))
        try:
            read_whole += read_operators(path).num_nodes > 0
        except FormatError as error:
            assert "\n" not in str(error)
        if time.monotonic() - begin > budget_s:
            return at
    assert read_whole > count // 4
    return count


def test_damaged_files_give_a_result_or_one_line(tmp_path: Path, scanner: str) -> None:
    survive(tmp_path / "x.json", 1000, 1, 60)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_100_000_damaged_files(tmp_path: Path, scanner: str) -> None:
    assert survive(tmp_path / "x.json", 50_000, 2, 100) > 2_000
