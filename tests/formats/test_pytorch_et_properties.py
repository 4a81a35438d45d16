"""Made-up PyTorch execution traces: both scanners, any cut, any order of members, and the numbering of tensors."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from foretrace.formats.pytorch_et import read, read_operators
from foretrace.formats.pytorch_et.values import mutated_positions, number_tensors
from foretrace.trace import FormatError
from foretrace.trace.graph import offsets
from foretrace.trace.operators import OperatorTrace
from tests.formats.execution_traces import node, oldest, tensor, trace
from tests.formats.test_pytorch_et import EXAMPLE, REAL, mutate, scanner, texts_and_numbers, written

__all__ = ["scanner"]  # the fixture
IN_JSON = ("arguments.shape", "arguments.strides", "arguments.value", "tensors.shape", "tensors.strides")


def described(path: Path) -> dict[str, Any]:
    """All that is read of a file, JSON texts as their values."""
    found = texts_and_numbers(read_operators(path))
    for key in IN_JSON:
        found[key] = [repr(json.loads(text)) if text else "None" for text in found[key]]
    return found


def both(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the compiled scanner and its twin read."""
    if read._scanner is None:
        pytest.skip("the scanner is not compiled here")
    compiled, scan = described(path), read._scanner
    try:
        read._scanner = None
        return compiled, described(path)
    finally:
        read._scanner = scan


def assert_alike(path: Path) -> dict[str, Any]:
    compiled, plain = both(path)
    for key, value in compiled.items():
        assert value == plain[key], key
    return compiled


# -- the two scanners ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in REAL if "rank" not in name or name.endswith("rank3")])
def test_both_scanners_read_real_files_alike(shared: Path, name: str) -> None:
    assert_alike(shared / "traces" / f"{name}.json.gz")


TEXT = st.one_of(
    st.text(max_size=6),
    st.sampled_from(
        ['"', "\\", "\\\\", '\\"', "a\tb\n", "\x00\x1f", "日本語", "\ud83d", "</script>", "{", '{"id": 3', "]"]
    ),
)
NUMBER = st.one_of(st.integers(-3, 9), st.sampled_from([-(1 << 63), (1 << 63) - 1, 1 << 63, (1 << 64) - 1]))
TENSOR = st.tuples(NUMBER, NUMBER, st.integers(0, 99), st.integers(0, 9)).map(
    lambda one: tensor(one[0], one[1], elements=one[2], offset=one[3])
)
PLAIN = st.one_of(NUMBER, st.booleans(), TEXT, st.floats(allow_nan=False, allow_infinity=False))


def argument() -> Any:
    """A value with its shape, type and strides."""
    leaf = st.one_of(
        TENSOR.map(lambda one: (one, [one[3]], "Tensor(float)", [1])),
        st.just(([7, 0, 0, 0, 0, ""], [], "Tensor(nullptr (uninitialized))", [])),
        PLAIN.map(lambda one: (one, [], "Scalar", [])),
        st.just(("<None>", [], "None", [])),
        st.just((None, None, "None", None)),
    )

    def together(parts: list[tuple[Any, Any, str, Any]]) -> tuple[Any, Any, str, Any]:
        kind = f"GenericList[{','.join(part[2] for part in parts)}]"
        return [part[0] for part in parts], [part[1] for part in parts], kind, [part[3] for part in parts]

    return st.recursive(leaf, lambda inner: st.lists(inner, max_size=3).map(together), max_leaves=4)


ARGUMENT = argument()


def members_of(side: str, arguments: list[tuple[Any, Any, str, Any]], is_old: bool, lists: list[str]) -> dict[str, Any]:
    """The lists of a side, but for those that the file leaves out."""
    values = {part: [one[at] for one in arguments] for at, part in enumerate(("values", "shapes", "types", "strides"))}
    kept = {part: values[part] for part in ("values", *lists)}
    if not is_old:
        return {f"{side}s": kept}
    return {f"{side}s" if part == "values" else f"{side}_{part}": one for part, one in kept.items()}


UNKNOWN = st.dictionaries(
    st.text("xyz", min_size=1),
    st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner)),
    max_size=2,
)
COLLECTIVE = st.fixed_dictionaries(
    {"collective_name": st.sampled_from(["allreduce", "all_gather", "send", "wait", ""])},
    optional={
        "dtype": st.sampled_from(["Float", "BFloat16", 3]),
        "in_msg_nelems": st.one_of(NUMBER, st.just("12"), st.just(None)),
        "pg_name": st.sampled_from(["0", "7"]),
        "pg_ranks": st.sampled_from(["[0,1]", [2, 3], "", "[0, null]", "{"]),
        "pg_size": st.integers(0, 9),
        "reduce_op": st.sampled_from(["SUM", "AVG"]),
        "in_split_size": st.sampled_from([[], [1, 2], "[]", "[3,4]"]),
        "src_rank": st.one_of(st.integers(-1, 3), st.just([2])),
        "process_group": TEXT,
    },
)


@st.composite
def nodes_of(draw: st.DrawFn, number: int, is_old: bool) -> list[tuple[str, Any]]:
    """The members of one node in any order, with some that nobody knows."""
    told = {
        "rf_id": draw(st.integers(0, (1 << 64) - 1)),
        "fw_parent": draw(st.integers(0, 5)),
        "seq_id": draw(st.integers(-1, 5)),
        "scope": draw(st.integers(0, 10)),
        "tid": draw(st.integers(0, 2)),
        "fw_tid": draw(st.integers(0, 2)),
        "op_schema": draw(st.sampled_from(["", "aten::add_(Tensor(a!) self, Tensor b) -> Tensor(a!)", "bad((("])),
    }
    told |= draw(st.one_of(st.just({}), COLLECTIVE)) | draw(UNKNOWN)
    kept = [entry for entry in draw(st.permutations(list(told.items()))) if draw(st.integers(0, 9))]
    one: dict[str, Any] = {"id": number, "name": draw(TEXT)}
    one["parent" if is_old else "ctrl_deps"] = draw(st.integers(0, number) | st.just([1]) | st.just(None))
    lists = draw(st.permutations(["shapes", "types", "strides"]))[: draw(st.sampled_from([3, 3, 2, 1, 0]))]
    for side in ("input", "output"):
        one |= members_of(side, draw(st.lists(ARGUMENT, max_size=2)), is_old, lists)
    if is_old:
        one |= dict(kept)
    else:
        entries = [{"name": name, "type": "any", "value": value} for name, value in kept]
        one["attrs"] = [dict(draw(st.permutations(list(entry.items())))) for entry in entries]
    one |= draw(UNKNOWN)
    rest = draw(st.permutations(list(one.items())))
    if draw(st.booleans()):  # most files begin a node with its id, or with its name and then its id
        first = ("name", "id") if is_old else ("id", "name")
        rest = [*((name, one[name]) for name in first), *(entry for entry in rest if entry[0] not in first)]
    return rest


@st.composite
def files(draw: st.DrawFn) -> bytes:
    is_old = draw(st.booleans())
    numbers = draw(st.permutations(range(2, 2 + draw(st.integers(1, 3)))))
    nodes = [dict(draw(nodes_of(number, is_old))) for number in numbers]
    document = {"schema": "1.0.1" if is_old else "1.1.1-chakra.0.0.4", "pid": 7, "nodes": nodes, **draw(UNKNOWN)}
    indent, separators = draw(st.sampled_from([(None, None), (None, (",", ":")), (1, None)]))
    text = json.dumps(document, ensure_ascii=draw(st.booleans()), indent=indent, separators=separators)
    return text.encode("utf-8", "replace")


def check(path: Path, text: bytes) -> None:
    got = assert_alike(written(path, text))
    nodes = sorted(json.loads(text)["nodes"], key=lambda one: one["id"])
    assert got["nodes.id"] == [one["id"] for one in nodes]
    assert got["nodes.name"] == [one["name"] for one in nodes]
    arguments = [len(side["values"] if isinstance(side, dict) else side) for one in nodes for side in sides_of(one)]
    assert len(got["arguments.node"]) == sum(arguments)


PHASES = [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]  # explaining takes minutes here


@settings(max_examples=60, phases=PHASES)
@given(files())
def test_both_scanners_agree_on_any_trace(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    check(tmp_path_factory.mktemp("made"), text)


@pytest.mark.slow
@settings(max_examples=1500, phases=PHASES)
@given(files())
def test_both_scanners_agree_on_many_traces(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    check(tmp_path_factory.mktemp("made"), text)


def sides_of(one: dict[str, Any]) -> tuple[Any, Any]:
    return one["inputs"], one["outputs"]


@pytest.mark.parametrize(
    ("member", "kept"),
    [
        ({"rf_id": "text", "scope": 1.5, "tid": None, "seq_id": True, "fw_parent": {"a": 1}}, True),
        ({"ctrl_deps": None}, True),
        ({"ctrl_deps": []}, True),
        ({"rf_id": 10**30}, True),
        ({"name": 5}, False),
        ({"name": None}, False),
        ({"id": -4}, False),
        ({"id": "5"}, False),
        ({"id": 10**30}, False),
        ({"attrs": {}}, True),
        ({"attrs": {"name": "x"}}, True),
        ({"attrs": None}, True),
        ({"attrs": [1]}, False),
        ({"attrs": [{"name": 5, "value": 1}, {"name": "rf_id"}, {"value": 3}, {}]}, True),
        ({"inputs": None, "outputs": 3}, True),
        ({"inputs": {"values": [[True, 1, 0, 4, 4, "cpu"]], "types": ["Tensor(float)"]}}, True),
        ({"inputs": {"values": [[10**30, 1, 0, 4, 4, "cpu"]], "types": ["Tensor(float)"]}}, True),
        ({"inputs": {"values": [[1, 1, 0, 4, 4, "cpu"]], "types": ["Tensor()"]}}, True),
        ({"inputs": {"values": [[1, 1, 0, 4, 4]], "types": ["Tensor(float)"]}}, True),
        ({"inputs": {"values": [5], "shapes": [], "types": ["Tensor(float)", "Int"]}}, True),
        ({"inputs": {"values": 5, "types": ["Int"]}}, True),
    ],
)
def test_members_of_another_kind_stay_unset(tmp_path: Path, member: dict[str, Any], kept: bool) -> None:
    document = trace({**node(20, "odd", 1), **member}, node(30, "good", 1, [tensor(2, 3)]))
    got = assert_alike(written(tmp_path, document))
    assert ("odd" in got["nodes.name"]) == kept and "good" in got["nodes.name"]
    assert len(got["tensors.node"]) == 1


def test_a_lone_surrogate_and_a_wrong_escape(tmp_path: Path, scanner: str) -> None:
    text = json.dumps(trace(node(20, "NAME", 1))).encode()
    got = read_operators(written(tmp_path, text.replace(b"NAME", rb"\ud800 x")))
    assert got.nodes.texts("name")[1] == "\ud800 x"
    assert got.nodes.to_arrow()["name"].to_pylist()[1] == "? x"


def test_where_a_broken_node_is_counts_in_bytes(tmp_path: Path, scanner: str) -> None:
    document = trace(node(10, "ünïcödé", 1), node(20, "BAD", 1), node(30, "good", 1))
    text = json.dumps(document, ensure_ascii=False).encode().replace(b'"BAD",', b'"BAD"')
    got = read_operators(written(tmp_path, text))
    at = text.index(b'{"id": 20')
    assert got.report.examples["node that is cut or no valid JSON"] == f"byte {at}"
    assert got.names(np.arange(3)) == [document["nodes"][-1]["name"], "ünïcödé", "good"]


# -- cut and damaged files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [json.loads(json.dumps(EXAMPLE)), oldest(EXAMPLE)], ids=["today", "oldest"])
def test_cut_at_any_byte(tmp_path: Path, scanner: str, form: dict[str, Any]) -> None:
    """Every node that is whole before the cut is kept, and nothing else."""
    text = json.dumps(form)
    ends, at = [], text.index('"nodes"')
    begin = text.index("[", at) + 1
    for one in form["nodes"]:
        at = text.index(json.dumps(one), at) + len(json.dumps(one))
        ends.append((at, one["id"]))
    for cut in range(0, len(text), 11):
        path = written(tmp_path, text[:cut].encode())
        whole = sorted(number for end, number in ends if end <= cut)
        if cut < begin or (not whole and cut > begin):
            with pytest.raises(FormatError) as caught:
                read_operators(path)
            assert "\n" not in str(caught.value)
            continue
        got = read_operators(path)
        assert got.nodes["id"].tolist() == whole, cut
        assert got.report.warnings, cut


def test_cut_and_damaged_gzip(tmp_path: Path, scanner: str) -> None:
    names = [f"operator {at * 7919 % 104729}" for at in range(2000)]
    data = gzip.compress(json.dumps(trace(*(node(10 + at, name, 1) for at, name in enumerate(names)))).encode())
    path = tmp_path / "rank0.json.gz"
    for part in (
        data[: len(data) // 2],
        data[: len(data) // 2] + b"\xff" * 60 + data[len(data) // 2 + 60 :],
        data[:-3],
    ):
        path.write_bytes(part)
        got = read_operators(path)
        assert got.num_nodes > 500 and got.report.repaired
        kept = [name for name in got.nodes.texts("name") if name.startswith("operator")]
        assert kept == names[: len(kept)]
    path.write_bytes(data[:15])
    with pytest.raises(FormatError, match="holds no list of nodes"):
        read_operators(path)


def test_damaged_gzip_gives_a_result_or_one_line(tmp_path: Path, scanner: str) -> None:
    rng, path = random.Random(5), tmp_path / "x.json.gz"
    sound = gzip.compress(json.dumps(EXAMPLE).encode())
    for _ in range(150):
        path.write_bytes(mutate(sound, rng))
        try:
            assert read_operators(path).num_nodes > 0
        except FormatError as error:
            assert "\n" not in str(error)


def test_damage_to_a_real_file_leaves_the_other_nodes(shared: Path, tmp_path: Path) -> None:
    text = gzip.decompress((shared / "traces" / "pytorch-et" / "small-1.0.2.json.gz").read_bytes())
    whole = read_operators(written(tmp_path, text)).nodes["id"].tolist()
    rng = random.Random(3)
    for _ in range(20):
        at = rng.randrange(text.index(b'"nodes"') + 10, len(text) - 100)
        damaged = text[:at] + b'"' + text[at:]
        got = read_operators(written(tmp_path, damaged)).nodes["id"].tolist()
        assert set(got) <= set(whole)
        assert len(got) >= len(whole) - 2


# -- groups and collectives ------------------------------------------------------------------------------------------


def test_process_groups_of_the_init_node(tmp_path: Path, scanner: str) -> None:
    listed = [
        {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "ranks": [], "group_size": 4},
        {"pg_name": "12", "pg_desc": "tp", "backend_config": "nccl", "ranks": [2, 3], "group_size": 2},
        {"pg_name": "13", "ranks": ["a"], "group_size": "2"},
        {"no": "name"},
        5,
    ]
    got = read_operators(written(tmp_path, trace(node(5, "## process_group:init ##", 1, [json.dumps(listed)]))))
    assert set(got.groups) == {"0", "12", "13"}
    tp = got.groups["12"]
    assert (tp.description, tp.backend, tp.ranks, tp.size) == ("tp", "nccl", (2, 3), 2)
    assert (got.groups["0"].ranks, got.groups["0"].size, got.groups["13"].ranks, got.groups["13"].size) == (
        (),
        4,
        (),
        -1,
    )


def test_an_init_node_of_nonsense(tmp_path: Path, scanner: str) -> None:
    for text in ("", "[", "5", "null", '"x"', "[[[", "[null]"):
        assert read_operators(written(tmp_path, trace(node(5, "## process_group:init ##", 1, [text])))).groups == {}


def test_attributes_of_collectives(tmp_path: Path, scanner: str) -> None:
    nccl = {"collective_name": "all_to_allv", "dtype": "BFloat16", "in_msg_nelems": 12, "out_msg_nelems": 24}
    nccl |= {"in_split_size": "[3, 9]", "out_split_size": "[]", "global_rank_start": 0, "global_rank_stride": 1}
    nccl |= {"pg_name": "7", "pg_desc": "ep", "pg_size": 2}
    ours = {"collective_name": "send", "dtype": "Float", "in_msg_nelems": 5, "src_rank": 1, "dst_rank": 3, "tag": 8}
    ours |= {"pg_name": "9", "pg_ranks": [1, 3], "reduce_op": "", "pg_size": [2]}
    got = read_operators(
        written(tmp_path, trace(node(5, "record_param_comms", 1, **nccl), node(9, "c10d::send", 1, **ours)))
    )
    table = got.collectives
    assert table["node"].tolist() == [1, 2]
    assert table.texts("collective") == ["all_to_allv", "send"]
    assert table.texts("in_split") == ["[3, 9]", ""] and table.texts("out_split") == ["", ""]
    assert table["in_elements"].tolist() == [12, 5] and table["out_elements"].tolist() == [24, -1]
    assert table["source_rank"].tolist() == [-1, 1] and table["target_rank"].tolist() == [-1, 3]
    assert table["tag"].tolist() == [-1, 8] and table["group_size"].tolist() == [2, 2]
    assert table["rank_stride"].tolist() == [1, -1]
    assert got.groups["9"].ranks == (1, 3) and "7" not in got.groups


def test_record_param_comms_without_attributes(tmp_path: Path, scanner: str) -> None:
    inputs = [[tensor(3, 4, 100)], 5, ["7", "tp"], 0, "allreduce", [], [], 0, 1, 2]
    got = read_operators(
        written(
            tmp_path,
            trace(
                node(5, "record_param_comms", 1, inputs, [[tensor(3, 4, 100)]]),
                node(9, "record_param_comms", 1, [1, 2]),
            ),
        )
    )
    table = got.collectives
    assert table["node"].tolist() == [1] and table.texts("collective") == ["allreduce"]
    assert (table.texts("group"), table.texts("group_description")) == (["7"], ["tp"])
    assert table["in_elements"].tolist() == table["out_elements"].tolist() == [100]
    assert [int(table[name][0]) for name in ("rank_start", "rank_stride", "group_size")] == [0, 1, 2]
    assert table.texts("dtype") == ["float"]


def test_storages(tmp_path: Path, scanner: str) -> None:
    entries = [
        {"storage_id": 4, "size_bytes": 16, "device": "cuda:0", "allocated": 3, "freed": 11},
        {"storage_id": 1 << 70, "size_bytes": "x"},
        5,
    ]
    got = read_operators(written(tmp_path, trace(node(5, "a", 1), storages=entries))).storages
    assert got["storage_id"].tolist() == [4, -1] and got["size_bytes"].tolist() == [16, -1]
    assert got["freed"].tolist() == [11, -1] and got.texts("device") == ["cuda:0", ""]
    assert read_operators(written(tmp_path, trace(node(5, "a", 1), storages={"x": 1}))).storages.num_rows == 0


@pytest.mark.parametrize(
    ("name", "members", "rank"),
    [
        ("rank12.json", {}, 12),
        ("et_rank-3_step7.json", {}, 3),
        ("x.5.json.gz", {}, 5),
        ("x.json", {}, -1),
        ("rank3.json", {"rank": 6}, 6),
        ("rank3.json", {"rank": True}, 3),
        (f"rank{1 << 40}.json", {}, -1),
        ("1.0.2.json", {}, -1),
    ],
)
def test_the_rank(tmp_path: Path, name: str, members: dict[str, Any], rank: int) -> None:
    assert read_operators(written(tmp_path, trace(node(5, "a", 1), **members), name)).rank == rank


# -- which tensor is which -------------------------------------------------------------------------------------------


Row = tuple[int, int, int, bool, int]  # id, storage, elements, is output, position


def twin(parent: list[int], mutated: list[int], rows: list[list[Row]]) -> list[tuple[int, int, int]]:
    """The rules of `values` once more, over the moments at which nodes begin and end."""
    last = list(range(len(parent)))
    for at in reversed(range(len(parent))):
        if parent[at] >= 0:
            last[parent[at]] = max(last[parent[at]], last[at])
    moments = [("begin", at, at, 0) for at in range(len(parent))] + [
        ("end", at, last[at], -at) for at in range(len(parent))
    ]
    moments.sort(key=lambda moment: (moment[2], moment[0] == "end", moment[3]))
    first = np.concatenate(([0], np.cumsum([len(one) for one in rows]))).tolist()
    found: list[tuple[int, int, int]] = [(-1, 0, -1)] * first[-1]
    known: dict[int, dict[str, Any]] = {}
    writer: dict[int, int] = {}
    made = 0

    def fresh(row: Row, written_by: int) -> dict[str, Any]:
        nonlocal made
        made += 1
        seen = known.get(row[0], {}).get("seen", -1)
        known[row[0]] = {"value": made - 1, "version": 0, "what": row[1:3], "written": written_by, "seen": seen}
        return known[row[0]]

    for what, at, *_ in moments:
        if what == "begin":
            for place, row in enumerate(rows[at], first[at]):
                if not row[3]:
                    one = known.get(row[0])
                    if one is None or one["what"] != row[1:3]:
                        one = fresh(row, -1)
                    one["seen"] = at
                    found[place] = one["value"], one["version"], writer.get(row[1], -1)
            continue
        within = range(at, last[at] + 1)
        for row in rows[at]:
            if not row[3] and mutated[at] >> row[4] & 1 and known[row[0]]["written"] not in within:
                known[row[0]]["version"] += 1
                known[row[0]]["written"] = writer[row[1]] = at
        for place, row in enumerate(rows[at], first[at]):
            if row[3]:
                one = known.get(row[0])
                is_old = one is not None and one["what"] == row[1:3]
                if one is None or not (is_old and (one["written"] in within or one["seen"] in within)):
                    one = fresh(row, at)
                    if not any(other[1] == row[1] and not other[3] for other in rows[at]):
                        writer[row[1]] = at
                found[place] = one["value"], one["version"], writer.get(row[1], -1)
    return found


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[Row]]]:
    """Trees over few tensors and storages, on threads that go on in between."""
    count = draw(st.integers(1, 8))
    parent = [draw(st.integers(max(-1, at - 4), at - 1)) for at in range(count)]
    storage_of = {number: draw(st.integers(0, 2)) for number in range(4)}
    rows = []
    for _ in range(count):
        mine: list[Row] = []
        for is_output in (False, True):
            for position in range(draw(st.integers(0, 2))):
                number = draw(st.integers(0, 3))
                storage = storage_of[number] if draw(st.integers(0, 4)) else draw(st.integers(0, 2))
                mine.append((number, storage, draw(st.sampled_from([4, 4, 4, 8])), is_output, position))
        rows.append(mine)
    return parent, [draw(st.sampled_from([0, 0, 1, 2, 3])) for _ in range(count)], rows


def numbered(parent: list[int], mutated: list[int], rows: list[list[Row]]) -> list[tuple[int, int, int]]:
    flat = [row for mine in rows for row in mine]
    tensors = {
        name: np.array([row[at] for row in flat], kind)
        for at, (name, kind) in enumerate(
            [
                ("tensor_id", np.int64),
                ("storage_id", np.int64),
                ("elements", np.int64),
                ("is_output", np.bool_),
                ("position", np.int64),
            ]
        )
    }
    tensors["element_bytes"] = np.full(len(flat), 4, np.int64)
    owner = np.repeat(np.arange(len(rows)), [len(mine) for mine in rows])
    got = number_tensors(np.array(parent, np.int32), np.array(mutated, np.int64), offsets(owner, len(rows)), tensors)
    return list(zip(*(got[name].tolist() for name in ("value", "version", "producer")), strict=True))


@settings(max_examples=500)
@given(programs())
@example(([-1, -1, 0], [0, 1, 0], [[(0, 0, 4, True, 0)], [(0, 0, 4, False, 0)], [(0, 0, 4, True, 0)]]))
def test_tensors_are_numbered_as_the_twin_does(program: tuple[list[int], list[int], list[list[Row]]]) -> None:
    assert numbered(*program) == twin(*program)


@given(programs())
def test_numbers_mean_something(program: tuple[list[int], list[int], list[list[Row]]]) -> None:
    got = numbered(*program)
    flat = [row for mine in program[2] for row in mine]
    by_value: dict[int, set[tuple[int, int, int]]] = {}
    for (value, version, producer), row in zip(got, flat, strict=True):
        by_value.setdefault(value, set()).add(row[:3])
        assert value >= 0 and version >= 0 and -1 <= producer < len(program[0])
    assert all(len(what) == 1 for what in by_value.values())  # one tensor has one id, storage and size
    assert sorted(by_value) == list(range(len(by_value)))


def test_ids_of_any_size_are_numbered(tmp_path: Path) -> None:
    big = (1 << 62) + 5
    got = read_operators(
        written(tmp_path, trace(node(10, "a", 1, [], [tensor(big, big)]), node(20, "b", 1, [tensor(big, big)])))
    )
    assert got.tensors["value"].tolist() == [0, 0] and got.tensors["producer"].tolist() == [1, 1]


def producers(got: OperatorTrace) -> list[str]:
    rows = got.tensors["producer"]
    return [got.names(np.array([row]))[0] if row >= 0 else "" for row in rows.tolist()]


def test_out_variants_write_to_their_last_argument(tmp_path: Path) -> None:
    schema = "aten::mm.out(Tensor self, Tensor mat2, *, Tensor(a!) out) -> Tensor(a!)"
    got = read_operators(
        written(
            tmp_path,
            trace(
                node(10, "aten::empty", 1, [], [tensor(6, 7)]),
                node(20, "aten::mm", 1, [tensor(2, 3), tensor(4, 5), tensor(6, 7)], [tensor(6, 7)], op_schema=schema),
                node(30, "aten::relu", 1, [tensor(6, 7), tensor(2, 3)]),
            ),
        )
    )
    assert producers(got) == ["aten::empty", "", "", "aten::empty", "aten::mm", "aten::mm", ""]
    assert got.tensors["version"].tolist() == [0, 0, 0, 0, 1, 1, 0]


def test_a_write_through_a_view_reaches_who_reads_the_base(tmp_path: Path) -> None:
    schema = "aten::zero_(Tensor(a!) self) -> Tensor(a!)"
    got = read_operators(
        written(
            tmp_path,
            trace(
                node(10, "aten::empty", 1, [], [tensor(2, 3, 8)]),
                node(20, "aten::select", 1, [tensor(2, 3, 8)], [tensor(4, 3, 4)]),
                node(30, "aten::zero_", 1, [tensor(4, 3, 4)], [tensor(4, 3, 4)], op_schema=schema),
                node(40, "aten::sum", 1, [tensor(2, 3, 8)]),
            ),
        )
    )
    assert producers(got)[-1] == "aten::zero_"


def test_another_thread_reads_what_this_one_wrote(tmp_path: Path) -> None:
    got = read_operators(
        written(
            tmp_path,
            trace(
                node(10, "forward", 1, [], [tensor(2, 3)]),
                node(20, "backward", 1, [tensor(2, 3)], [tensor(4, 5)], tid=2),
                node(30, "optimizer", 1, [tensor(4, 5)]),
            ),
        )
    )
    assert producers(got) == ["forward", "forward", "backward", "backward"]


def test_an_outer_in_place_operator_writes_once(tmp_path: Path) -> None:
    """The caller's write is that of the operator that it calls."""
    schema = "aten::add_.Tensor(Tensor(a!) self, Tensor other) -> Tensor(a!)"
    inner = node(11, "aten::add_inner_", 10, [tensor(2, 3)], [tensor(2, 3)], op_schema=schema)
    outer = node(10, "aten::add_", 1, [tensor(2, 3)], [tensor(2, 3)], op_schema=schema)
    got = read_operators(written(tmp_path, trace(inner, outer, node(20, "aten::relu", 1, [tensor(2, 3)]))))
    assert got.tensors["version"].tolist() == [0, 1, 0, 1, 1]
    assert producers(got)[-1] == "aten::add_inner_"


@given(st.text("(),!*[]ab Tensor->.=", max_size=60))
def test_any_text_is_a_schema(schema: str) -> None:
    mask = mutated_positions(schema)
    assert 0 <= mask < 1 << 63
    assert (mask == 0) or "!" in schema


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_marks_of_a_schema_are_found(marks: list[bool]) -> None:
    kinds = ["Tensor(a!)[]" if is_written else "int[2]?" for is_written in marks]
    mask = mutated_positions(f"ns::f.overload({', '.join(f'{kind} x{at}' for at, kind in enumerate(kinds))}) -> ()")
    assert [bool(mask >> at & 1) for at in range(min(len(marks), 63))] == marks[:63]
