"""`lint` over files: every kind, jobs of several ranks, repairs, damage, and the command."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretrace import FormatError
from foretrace.cli.lint import lint as command
from foretrace.formats.chakra import job_rules, rules
from foretrace.formats.chakra.arrow_form import save_arrow
from foretrace.formats.chakra.read import read_chakra
from foretrace.formats.chakra.write import write_chakra, write_json
from foretrace.formats.lint import lint
from foretrace.trace import checks, findings, operator_checks
from tests.formats.builder import small_trace
from tests.formats.builder import write as write_kineto
from tests.lint.builders import Node, build, chain, collective, message, sound_nodes

ALL_RULES = {
    **rules.RULES, **job_rules.RULES, **checks.RULES, **operator_checks.RULES, findings.DAMAGED.name: findings.DAMAGED,
}  # fmt: skip
BROKEN = [*chain(3), Node(7, data=[100]), Node(8, control=[8, 101])]


def named(result: Any) -> dict[str, int]:
    return {one.rule.name: one.count for one in result.findings}


# -- files -------------------------------------------------------------------------------------------------------------


def test_every_form_of_a_chakra_trace(tmp_path: Path) -> None:
    trace = build(BROKEN)
    write_chakra(trace, tmp_path / "a.0.et")
    write_chakra(trace, tmp_path / "b.0.et.gz")
    write_json(trace, tmp_path / "c.0.json")
    save_arrow(trace, tmp_path / "d.0.arrow")
    results, _ = lint(sorted(tmp_path.iterdir()), repair=True)
    assert [one.kind for one in results] == ["chakra", "chakra", "chakra-json", "arrow"]
    for result in results:
        assert named(result) == {"dangling-dependency": 2, "self-dependency": 1}
        assert result.repaired == {"dangling-dependency": 2, "self-dependency": 1} and result.remaining == []
        assert result.output == tmp_path / f"{result.path.name[0]}.0.repaired.et"
        assert result.output is not None and read_chakra(result.output).num_nodes == 5


def test_ranks_of_a_job_by_their_names(tmp_path: Path) -> None:
    for job in ("x", "y"):
        for rank in range(2):
            nodes = [collective(Node(0)), *(collective(Node(1)) for _ in range(rank if job == "y" else 0))]
            write_chakra(build(nodes), tmp_path / f"{job}.{rank}.et")
    results, _ = lint(sorted(tmp_path.iterdir()))
    assert [named(one) for one in results] == [{}, {}, {"collective-count-differs": 1}, {}]


def test_repaired_files_are_ranks_of_a_job_too(tmp_path: Path) -> None:
    for rank in range(2):
        nodes = [message(Node(0), 0, 1, sends=rank == 0), Node(1, data=[55])]
        write_chakra(build(nodes), tmp_path / f"x.{rank}.et")
    lint(sorted(tmp_path.iterdir()), repair=True)
    for rank in range(2):
        (tmp_path / f"x.{rank}.et").unlink()
    results, notes = lint(sorted(tmp_path.iterdir()))
    assert [named(one) for one in results] == [{}, {}] and notes == {}
    assert lint([tmp_path / "x.0.repaired.et"])[1] == {"send to a rank whose file is not given": 1}


def test_what_is_left_after_a_repair(tmp_path: Path) -> None:
    path = tmp_path / "x.0.et"
    write_chakra(build([Node(0), Node(1, data=[9]), collective(Node(2)).without("comm_size")]), path)
    ((result,), _) = lint([path], repair=True)
    assert named(result) == {"dangling-dependency": 1, "missing-size": 1}
    assert [one.rule.name for one in result.remaining] == ["missing-size"]


def test_outputs(tmp_path: Path) -> None:
    paths = []
    for name in ("a.0.et", "b.0.json"):
        paths.append(tmp_path / name)
        (write_json if name.endswith("json") else write_chakra)(build(chain(2)), paths[-1])
    assert lint(paths, repair=True)[0][0].output is None  # nothing to repair
    folder = tmp_path / "out"
    assert [one.output for one in lint(paths, repair=True, output=folder)[0]] == [folder / "a.0.et", folder / "b.0.et"]
    ((result,), _) = lint(paths[:1], repair=True, output=tmp_path / "c.json")
    assert result.output is not None and json.loads(result.output.read_text())["workload_graph"]
    with pytest.raises(FormatError, match="replace an input"):
        lint(paths, repair=True, output=tmp_path)
    (folder / "a.0.json").write_bytes(b"")
    with pytest.raises(FormatError, match="two repaired files"):
        lint([paths[0], folder / "a.0.json"], repair=True, output=tmp_path / "other")


def test_in_place(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.0.et", tmp_path / "bad.0.et"
    write_chakra(build(chain(2)), good)
    write_chakra(build(BROKEN), bad)
    before = good.stat().st_mtime_ns, bad.read_bytes()
    results, _ = lint([good, bad], repair=True, in_place=True)
    assert [one.output for one in results] == [None, bad]
    assert good.stat().st_mtime_ns == before[0] and bad.read_bytes() != before[1]
    assert [named(one) for one in lint([good, bad])[0]] == [{}, {}]


def test_a_cut_file_is_damaged_and_a_repair_makes_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.0.et"
    write_chakra(build(chain(9)), path)
    path.write_bytes(path.read_bytes()[:-5])
    ((result,), _) = lint([path], repair=True)
    assert named(result) == {"damaged-file": 1} and result.remaining == []
    assert result.output is not None and read_chakra(result.output).num_nodes == 8


def test_timelines(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json.gz"
    document = small_trace(0, 2)
    write_kineto(path, document)
    ((result,), _) = lint([path])
    assert (result.kind, result.findings) == ("kineto", [])
    events = document["traceEvents"]
    kernel = next(event for event in events if event.get("cat") == "kernel")
    late = next(event for event in events if event.get("cat") == "cpu_op")
    events.append({**kernel, "ts": kernel["ts"] + kernel["dur"] / 2, "args": {**kernel["args"], "correlation": -1}})
    events.append({**late, "ts": late["ts"] + late["dur"] / 2})
    write_kineto(path, document)
    ((result,), _) = lint([path])
    assert named(result) == {"overlap-on-stream": 1, "child-outlasts-parent": 1}
    assert all(re.search(r"event \d+ '.*' at \d+ ns on ", one.example) for one in result.findings)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(nodes=sound_nodes(high=8), data=st.data(), packed=st.booleans())
def test_damage_never_raises(tmp_path: Path, nodes: list[Node], data: st.DataObject, packed: bool) -> None:
    path = tmp_path / ("x.0.et.gz" if packed else "x.0.et")
    write_chakra(build(nodes), path)
    content = bytearray(path.read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
        content[at] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    ((result,), _) = lint([path], repair=True)
    if result.error:
        assert "\n" not in result.error
        return
    assert not any(one.repairable for one in result.remaining)
    if result.output is not None:
        ((again,), _) = lint([result.output], repair=True)
        assert again.repaired == {} and again.output is None
        result.output.unlink()


# -- the command -------------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    """Exit code, output and error output of ``foretrace lint WORDS``."""
    app = typer.Typer()
    app.command()(command)
    capsys.readouterr()
    code = app([str(word) for word in words], standalone_mode=False)
    output = capsys.readouterr()
    return code or 0, output.out, output.err


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    path = tmp_path / "x.0.et"
    write_chakra(build(BROKEN), path)
    return path


def test_json(capsys: pytest.CaptureFixture[str], broken: Path) -> None:
    code, out, err = run(capsys, broken, "--json")
    (entry,) = json.loads(out)["files"]
    assert code == 1 and err == "" and entry["path"] == str(broken) and entry["output"] is None
    first = entry["findings"][0]
    assert {name: first[name] for name in ("rule", "count", "repairable")} == {
        "rule": "dangling-dependency", "count": 2, "repairable": True,
    }  # fmt: skip
    assert first["example"] == f"{broken}: node 7 'op': data_deps names 100"


def test_exit_codes(capsys: pytest.CaptureFixture[str], broken: Path) -> None:
    code, out, _ = run(capsys, broken, "--repair", "--json")
    assert code == 0
    assert json.loads(out)["files"][0]["repaired"] == {"dangling-dependency": 2, "self-dependency": 1}
    code, out, _ = run(capsys, json.loads(out)["files"][0]["output"], "--json")
    assert code == 0 and json.loads(out)["files"][0]["findings"] == []
    write_chakra(build([Node(0), Node(1, data=[9]), collective(Node(2)).without("comm_size")]), broken)
    assert run(capsys, broken, "--repair")[0] == 1


def test_other_files_are_reported_beside_one_that_cannot_be_read(
    capsys: pytest.CaptureFixture[str], broken: Path
) -> None:
    junk, absent = broken.with_name("junk.et"), broken.with_name("absent.et")
    junk.write_bytes(b"\xff" * 40)
    code, out, err = run(capsys, absent, broken, junk, "--json")
    told = json.loads(out)
    assert code == 2 and [one["path"] for one in told["files"]] == [str(broken)]
    assert [one["path"] for one in told["errors"]] == [str(absent), str(junk)]
    first, second = err.splitlines()
    assert "absent.et: no such file" in first and "junk.et: is no trace" in second


def test_tables(capsys: pytest.CaptureFixture[str], broken: Path) -> None:
    code, out, _ = run(capsys, broken, "--repair")
    assert code == 0 and "dangling-dependency" in out and "self-dependency" in out
    text = " ".join(out.split())
    assert "(dangling-dependency: 2, self-dependency: 1); still found: nothing" in text
    code, out, _ = run(capsys, broken.with_name("x.0.repaired.et"))
    assert code == 0 and "nothing found" in " ".join(out.split())


def test_as_a_process(broken: Path) -> None:
    for words, code in (((broken,), 1), ((broken, "--repair"), 0), ((broken.with_name("none.et"),), 2)):
        command = [sys.executable, "-m", "foretrace", "lint", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == code and len(done.stderr.splitlines()) == (code == 2), done.stderr


@pytest.mark.parametrize("words", [("-o", "y.et"), ("--in-place",), ("--repair", "--in-place", "-o", "y.et")])
def test_options_that_make_no_sense(capsys: pytest.CaptureFixture[str], broken: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(FormatError):
        run(capsys, broken, *words)


def test_the_recorded_file(capsys: pytest.CaptureFixture[str], shared: Path, tmp_path: Path) -> None:
    path = shared / "traces/chakra-et/dangling-deps.0.et"
    code, out, _ = run(capsys, path, "--repair", "-o", tmp_path / "fixed.0.et", "--json")
    (entry,) = json.loads(out)["files"]
    assert code == 0 and entry["remaining"] == []
    assert entry["findings"][0]["rule"] == "dangling-dependency" and entry["findings"][0]["count"] == 1277
    assert run(capsys, tmp_path / "fixed.0.et")[0] == 0


# -- words -------------------------------------------------------------------------------------------------------------


def test_every_rule_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "lint.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (yes|no) \|", page, re.MULTILINE)
    assert dict(rows) == {rule.name: "yes" if rule.is_repairable else "no" for rule in ALL_RULES.values()}
    for rule in ALL_RULES.values():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.name) and rule.reason and rule.remedy


def test_packed_json(tmp_path: Path) -> None:
    path = tmp_path / "x.0.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"workload_graph": [{"Id": 0, "NodeType": 4, "runtime": 1}]}).encode()))
    ((result,), _) = lint([path])
    assert (result.kind, result.findings) == ("chakra-json", [])
