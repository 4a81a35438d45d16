"""Recording real processes: every collective's type, group, size and reduction is what the program did."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

pytest.importorskip("torch")

from foretrace.formats.pytorch_et import read_operators
from tests.capture import recorded

BOTH, PAIR = "[0, 1]", "[0, 1]"
# What `_communicate` does, in order; "" where a rank has no part in it.
OF_BOTH = [
    ("allreduce", "pair", PAIR, 4, 4, "Float", "MAX"),
    ("allreduce", "default_pg", BOTH, 5, 5, "Long", "PRODUCT"),
    ("broadcast", "pair", PAIR, 4, 4, "Float", ""),
    ("all_to_all", "default_pg", BOTH, 6, 6, "Float", ""),
]
LAST = [
    ("all_gather", "default_pg", BOTH, 4, 8, "Float", ""),
    ("allreduce", "pair", PAIR, 4, 4, "Float", "SUM"),
    ("barrier", "default_pg", BOTH, 0, 0, "", ""),
]
MIDDLE = {
    0: [
        ("send", "default_pg", BOTH, 4, 4, "Float", ""),
        ("reduce", "default_pg", BOTH, 4, 4, "Float", "MIN"),
        ("gather", "default_pg", BOTH, 4, 8, "Float", ""),
        ("scatter", "default_pg", BOTH, 0, 4, "Float", ""),
    ],
    1: [
        ("recv", "default_pg", BOTH, 4, 4, "Float", ""),
        ("allreduce", "solo", "[1]", 4, 4, "Float", "SUM"),
        ("reduce", "default_pg", BOTH, 4, 4, "Float", "MIN"),
        ("gather", "default_pg", BOTH, 4, 0, "Float", ""),
        ("scatter", "default_pg", BOTH, 8, 4, "Float", ""),
    ],
}
# Elements of the parameters: embedding, then weight and bias of two layers. Buckets fill from the last layer on.
EMBEDDING, FIRST, SECOND = 50 * 16, 32 * 16 + 32, 50 * 32 + 50


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ddp")
    done = recorded.run_ranks("ddp", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp")
    done = recorded.run_ranks("fsdp", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("rank", [0, 1])
def test_collectives_of_ddp(ddp: Path, rank: int) -> None:
    found = recorded.collectives(ddp, rank)
    gradients = [one for one in found if one not in OF_BOTH + MIDDLE[rank] + LAST]
    assert [one[:3] + one[5:] for one in gradients] == [
        ("allreduce", "default_pg", BOTH, "Float", "SUM") for _ in gradients
    ]
    assert len(gradients) > 1
    assert sum(one[3] for one in gradients) == EMBEDDING + FIRST + SECOND
    assert found[len(gradients) :] == OF_BOTH + MIDDLE[rank] + LAST


def test_peers_splits_and_asynchrony(ddp: Path) -> None:
    found = [recorded.attributes(node) for node in recorded.nodes(ddp, 1)]
    by_name = {(one["collective_name"], one["pg_desc"]): one for one in found if "collective_name" in one}
    received = by_name["recv", "default_pg"]
    assert (received["src_rank"], received["dst_rank"], received["tag"]) == (0, 1, 7)
    assert by_name["broadcast", "pair"]["src_rank"] == 1
    assert by_name["reduce", "default_pg"]["dst_rank"] == 1
    assert by_name["gather", "default_pg"]["dst_rank"] == 0
    assert by_name["scatter", "default_pg"]["src_rank"] == 1
    assert by_name["all_to_all", "default_pg"]["in_split_size"] == "[4, 2]"
    assert (by_name["allreduce", "solo"]["global_rank_start"], by_name["allreduce", "solo"]["pg_size"]) == (1, 1)
    synchronous = {one["is_async"] for one in found if one.get("collective_name") == "barrier"}
    assert synchronous == {False}
    assert by_name["allreduce", "default_pg"]["is_async"] is True


@pytest.mark.parametrize("rank", [0, 1])
def test_collectives_of_fsdp(fsdp: Path, rank: int) -> None:
    gather = [("_allgather_base", "default_pg", BOTH, n // 2, n, "Float", "") for n in (EMBEDDING, FIRST, SECOND)]
    scatter = [
        ("_reduce_scatter_base", "default_pg", BOTH, n, n // 2, "Float", "AVG") for n in (EMBEDDING, FIRST, SECOND)
    ]
    found = recorded.collectives(fsdp, rank)
    step = sorted([*gather, *gather, *scatter])
    half = len(found) // 2
    assert sorted(found[:half]) == sorted(found[half:]) == step
    assert found[:3] == gather


@pytest.mark.parametrize("program", ["ddp", "fsdp"])
@pytest.mark.parametrize("rank", [0, 1])
def test_nodes_are_joined(program: str, rank: int, request: pytest.FixtureRequest) -> None:
    recorded.check_joined(request.getfixturevalue(program), rank)


@pytest.mark.parametrize("program", ["ddp", "fsdp"])
def test_everything_seen_is_matched(program: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(program)
    document = recorded.job(folder)
    assert sorted(document["ranks"]) == ["0", "1"]
    for rank in (0, 1):
        own = document["ranks"][str(rank)]
        counts = own["collectives"]
        assert counts["seen"] == counts["in_trace"] == counts["matched"] == len(recorded.collectives(folder, rank))
        assert own["statistics"]["not_matched"] == own["statistics"]["failures"] == 0
        assert own["statistics"]["matched"] > 0
        assert own["problems"] == []
        assert own["storages"]["tensors_not_joined"] == 0


def test_job_file_knows_the_groups_of_all_ranks(ddp: Path) -> None:
    document = recorded.job(ddp)
    assert (document["world_size"], document["backend"].split(",")[0]) == (2, "cpu:gloo")
    groups = {group["description"]: group["ranks"] for group in document["groups"]}
    assert groups == {"default_pg": [0, 1], "pair": [0, 1], "solo": [1]}


def test_the_reader_understands_it(ddp: Path) -> None:
    trace = read_operators(ddp / "rank1.et.json.gz")
    assert (trace.rank, trace.report.repaired, trace.report.dropped) == (1, {}, {})
    table = trace.collectives
    assert table.num_rows == len(recorded.collectives(ddp, 1))
    assert set(trace.strings.lookup(table["reduction"][table["reduction"] >= 0])) == {"MAX", "MIN", "PRODUCT", "SUM"}
    assert trace.storages.num_rows > 20
    assert {group.description for group in trace.groups.values()} == {"default_pg", "pair", "solo"}


def test_local_tensors_of_fsdp_have_storages(fsdp: Path) -> None:
    """A gathered parameter is resized away after its use and back: one storage, several lives."""
    rows = recorded.read(fsdp / "rank0.et.json.gz")["storages"]
    lives: dict[int, list[tuple[int, int]]] = {}
    for row in rows:
        if row["allocated"] >= 0 and row["freed"] >= 0:
            assert row["freed"] >= row["allocated"]
            lives.setdefault(row["storage_id"], []).append((row["allocated"], row["freed"]))
    assert any(row["size_bytes"] == 4 * EMBEDDING for row in rows)
    several = [spans for storage, spans in lives.items() if storage >= 0 and len(spans) > 1]
    assert several
    for spans in several:
        ordered = sorted(spans)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(ordered))
