"""`foretrace convert`, and `simulate` of Chakra ETs: what they write, what they refuse, what they leave behind."""

from __future__ import annotations

import errno
import gzip
import json
import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from foretrace.formats import detect
from foretrace.formats.chakra.read import read_chakra
from tests.cli.command import run
from tests.cli.test_predict import assert_refused, document
from tests.estimate.test_exchange import operators, timelines
from tests.formats.builder import small_trace, write
from tests.formats.chakra_files import SCHEMA, et

KEYS = {"outputs", "format", "ranks", "joined", "notes", "warnings"}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks as timelines, operator traces and Chakra ETs."""
    folder = tmp_path_factory.mktemp("job")
    for name in ("kineto", "et", "chakra"):
        (folder / name).mkdir()
    timelines(folder / "kineto")
    for rank in range(2):
        operators(folder / "et", rank)
    made = document("convert", folder / "kineto", "-o", folder / "chakra" / "job.et")
    assert made["outputs"] == [str(folder / "chakra" / f"job.{rank}.et") for rank in range(2)]
    return folder


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- what is written -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "target", "kind"),
    [
        ("x.et", "chakra", "chakra"),
        ("x.et.gz", "chakra", "chakra"),
        ("x.json", "chakra-json", "chakra-json"),
        ("x.json.gz", "chakra-json", "chakra-json"),
        ("x.arrow", "arrow", "arrow"),
        ("x.feather", "arrow", "arrow"),
    ],
)
def test_one_file_a_rank(job: Path, tmp_path: Path, name: str, target: str, kind: str) -> None:
    made = document("convert", job / "chakra", "-o", tmp_path / name)
    assert set(made) == KEYS and made["format"] == target and made["ranks"] == [0, 1]
    stem, _, suffix = name.partition(".")
    assert made["outputs"] == [str(tmp_path / f"{stem}.{rank}.{suffix}") for rank in range(2)]
    assert files(tmp_path) == [f"{stem}.{rank}.{suffix}" for rank in range(2)]
    assert {detect.detect(path) for path in made["outputs"]} == {kind}
    truth = document("simulate", *sorted((job / "chakra").glob("*.et")))["ranks"]
    again = document("convert", *made["outputs"], "--to", "chakra", "-o", tmp_path / "again.et")
    assert document("simulate", *again["outputs"])["ranks"] == truth


@pytest.mark.parametrize("name", ["x.dot", "x.graphml", "x.svg", "timeline.json"])
def test_one_file_of_all_ranks(job: Path, tmp_path: Path, name: str) -> None:
    to = ["--to", "perfetto"] if name.endswith("json") else []
    made = document("convert", job / "chakra", "-o", tmp_path / name, *to)
    assert made["outputs"] == [str(tmp_path / name)] and files(tmp_path) == [name]
    text = (tmp_path / name).read_text()
    if name.endswith("json"):
        assert {event["pid"] for event in json.loads(text)["traceEvents"]}
    elif not name.endswith("dot"):
        ElementTree.fromstring(text)


def test_a_single_rank_keeps_its_name(job: Path, tmp_path: Path) -> None:
    made = document("convert", job / "kineto" / "rank1.json", "-o", tmp_path / "one.et")
    assert made["outputs"] == [str(tmp_path / "one.et")] and made["ranks"] == [1]


def test_the_joined_pair(job: Path, tmp_path: Path) -> None:
    made = document("convert", "--timeline", job / "kineto", "--operators", job / "et", "-o", tmp_path / "x.et")
    assert made["joined"]["1"]["joined"] == {"name and order": 4}
    assert made["joined"]["1"]["device_work"] == made["joined"]["1"]["device_work_joined"] == 4
    assert sum(read_chakra(made["outputs"][0]).integers("num_ops", 0)) == 256
    assert document("simulate", *made["outputs"])["ranks"] == document("simulate", job / "chakra")["ranks"]


def test_operators_alone(job: Path, tmp_path: Path) -> None:
    made = document("convert", job / "et", "-o", tmp_path / "x.et")
    assert made["joined"] == {} and made["ranks"] == [0, 1] and made["notes"]
    assert read_chakra(made["outputs"][0]).num_nodes == 5


def test_groups_stand_beside_the_ets(tmp_path: Path) -> None:
    made, source = tmp_path / "made", tmp_path / "source"
    made.mkdir()
    source.mkdir()
    for rank in range(4):
        members = [0, 1] if rank < 2 else [2, 3]
        trace = small_trace(members.index(rank), 2)
        trace["distributedInfo"] = {"rank": rank, "world_size": 4}
        for event in trace["traceEvents"]:
            if "Process Group Ranks" in event["args"]:
                event["args"] |= {"Process Group Name": str(5 + rank // 2), "Process Group Ranks": json.dumps(members)}
        write(source / f"rank{rank}.json", trace)
    outputs = document("convert", source, "-o", made / "job.et")["outputs"]
    assert outputs == [*(str(made / f"job.{rank}.et") for rank in range(4)), str(made / "job.groups.json")]
    assert sorted(json.loads((made / "job.groups.json").read_text()).values()) == [[0, 1], [2, 3]]
    assert document("simulate", *outputs[:4])["summary"]["coupled_collectives"] == 4
    assert document("simulate", made)["summary"]["coupled_collectives"] == 4


def test_without_json_the_table_goes_to_people(job: Path, tmp_path: Path) -> None:
    done = run("convert", job / "chakra", "-o", tmp_path / "x.et")
    assert done.returncode == 0 and "x.0.et" in done.stdout + done.stderr


# -- simulating ------------------------------------------------------------------------------------------------------


def test_simulating_a_folder_of_ets(job: Path, tmp_path: Path) -> None:
    truth = document("simulate", job / "kineto")
    assert document("simulate", job / "chakra")["summary"]["finish_ns"] == truth["summary"]["finish_ns"]
    for path in (job / "chakra").iterdir():
        (tmp_path / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert document("simulate", tmp_path)["summary"]["finish_ns"] == truth["summary"]["finish_ns"]
    alone = document("simulate", tmp_path, "--alone")
    assert alone["summary"]["coupled_collectives"] == 0


def test_dependencies_of_either_kind(tmp_path: Path) -> None:
    def cpu(**more: Any) -> Any:
        made = SCHEMA.Node(type=4, duration_micros=10, **more)
        made.attr.add(name="is_cpu_op", bool_val=more["id"] == 2)
        return made

    (tmp_path / "x.0.et").write_bytes(et([cpu(id=1), cpu(id=2, ctrl_deps=[1])]))
    for kind, finish in (("data+ctrl", 20_000), ("data", 10_000)):
        got = document("simulate", tmp_path / "x.0.et", "--dependencies", kind)
        assert (got["summary"]["finish_ns"], got["dependencies"]) == (finish, kind)
    assert run("simulate", tmp_path / "x.0.et", "--dependencies", "both").returncode == 2


def test_a_simulation_of_ets_has_a_page_and_a_timeline(job: Path, tmp_path: Path) -> None:
    done = run("simulate", job / "chakra", "--html", tmp_path / "x.html", "--perfetto", tmp_path / "x.json")
    assert done.returncode == 0 and files(tmp_path) == ["x.html", "x.json"]
    assert json.loads((tmp_path / "x.json").read_text())["traceEvents"]


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_dangling_dependency_is_told_with_file_and_node(shared: Path, tmp_path: Path) -> None:
    path = shared / "traces" / "chakra-et" / "dangling-deps.0.et"
    assert_refused(run("simulate", path), "dangling-deps.0.et", "node 216", "depends on node", "--repair")
    assert_refused(run("convert", path, "--to", "perfetto", "-o", tmp_path / "x.json"), "node 216")
    assert files(tmp_path) == []


def test_nodes_that_wait_for_each_other(tmp_path: Path) -> None:
    cycle = [SCHEMA.Node(id=at, type=4, data_deps=[3 - at]) for at in (1, 2)]
    (tmp_path / "x.0.et").write_bytes(et(cycle))
    assert_refused(run("simulate", tmp_path / "x.0.et"), "x.0.et")
    assert_refused(run("convert", tmp_path / "x.0.et", "-o", tmp_path / "x.svg"), "wait for each other")
    assert files(tmp_path) == ["x.0.et"]


@pytest.mark.parametrize("name", ["x.et", "x.json", "x.arrow", "x.dot", "x.svg", "x.graphml"])
def test_a_missing_folder_is_told_before_the_work(job: Path, tmp_path: Path, name: str) -> None:
    assert_refused(run("convert", job / "chakra", "-o", tmp_path / "no" / name), "its folder does not exist")
    assert files(tmp_path) == []


def test_an_output_that_is_a_folder(job: Path, tmp_path: Path) -> None:
    (tmp_path / "x.dot").mkdir()
    assert_refused(run("convert", job / "chakra", "-o", tmp_path / "x.dot"), "is a folder")


def test_no_inputs_and_no_output(job: Path, tmp_path: Path) -> None:
    assert_refused(run("convert", "-o", tmp_path / "x.et"), "nothing to convert")
    assert_refused(run("convert", job / "chakra"), "no output")
    assert_refused(run("convert", job / "chakra", "-o", tmp_path / "x.txt"), "--to")
    assert run("convert", job / "chakra", "--to", "paper", "-o", tmp_path / "x").returncode == 2


def test_operators_of_another_run(job: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "rank0.json.gz", {"schema": "1.1.1", "nodes": [{"id": 5, "name": "odd", "rf_id": 3}]})
    done = run("convert", job / "kineto" / "rank0.json", "--operators", other, "-o", tmp_path / "x.et")
    assert_refused(done, "none of 1 operators")
    assert files(tmp_path) == ["rank0.json.gz"]


def test_kinds_that_cannot_be_simulated_together(job: Path) -> None:
    assert_refused(run("simulate", job / "chakra" / "job.0.et", job / "kineto" / "rank1.json"), "one kind at a time")


def test_a_drawing_of_too_many_nodes(shared: Path, tmp_path: Path) -> None:
    path = shared / "traces" / "chakra-et" / "dangling-deps.0.et"
    nodes = read_chakra(path).num_nodes
    assert nodes > 2000
    assert_refused(run("convert", path, "-o", tmp_path / "x.svg"), f"{nodes} nodes are too many for a drawing")
    assert files(tmp_path) == []


# -- what is left behind ---------------------------------------------------------------------------------------------

TARGETS = ["x.et", "x.et.gz", "x.json", "x.json.gz", "x.arrow", "x.dot", "x.graphml", "x.svg"]


@pytest.mark.parametrize("name", TARGETS)
def test_a_failing_rename_leaves_nothing_and_an_old_file_as_it_was(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    old = tmp_path / name
    old.write_text("old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert_refused(run("convert", job / "chakra" / "job.0.et", "-o", old), "No space left on device", name)
    assert files(tmp_path) == [name] and old.read_text() == "old"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("name", TARGETS)
def test_a_full_disk_leaves_nothing(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each unfinished file is one that takes no byte."""
    opened, pid = [], os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid)
    for unfinished in (f"{name}.{pid}.part", f".{name}.{pid}.part"):
        (tmp_path / unfinished).symlink_to("/dev/full")
        opened.append(unfinished)
    done = run("convert", job / "chakra" / "job.0.et", "-o", tmp_path / name)
    assert_refused(done, name)
    left = files(tmp_path)
    assert name not in left and len(left) == len(opened) - 1  # the one that was used is gone
