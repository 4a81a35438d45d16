"""``foretrace simulate --network ... --system ...`` as a user meets it."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from foretrace.cli import main
from foretrace.estimate import cluster as estimate
from foretrace.formats.chakra.builder import Builder
from foretrace.formats.chakra.trace import NodeType, Wire
from foretrace.formats.chakra.write import write_chakra
from foretrace.simulate.cluster import run as running
from tests.cli.command import run

pytestmark = pytest.mark.skipif(running._engine is None, reason="the engine is not compiled here: no C compiler")

RANKS = 8
BYTES = 1 << 20
MACHINE = ("--network", "network.yml", "--system", "system.json")
CONGESTED = (*MACHINE, "--fidelity", "astra-congestion")
FAIR = (*MACHINE, "--fidelity", "fair")
SYSTEM = {
    "preferred-dataset-splits": 1,
    "endpoint-delay": 10,
    "all-reduce-implementation": ["ring"],
    "local-mem-bw": 1600,
}
# ASTRA-sim's answer for this all-reduce on this machine (ar8_ring_c1 of the reference), without the computation.
ALL_REDUCE_NS = 43_025


def et(path: Path, *nodes: dict[str, Any]) -> None:
    """Write nodes: id, type, name, dependencies, microseconds and attributes of each."""
    builder = Builder()
    for number, node in enumerate(nodes):
        attributes = [
            (key, Wire.STRING if isinstance(value, str) else Wire.INT64, value, "")
            for key, value in node.get("attributes", {}).items()
        ]
        attributes.append(("is_cpu_op", Wire.BOOL, False, ""))
        builder.add(
            node.get("id", number),
            node.get("name", ""),
            node["type"],
            data=node.get("after", ()),
            duration_micros=node.get("micros", 0),
            attributes=attributes,
        )
    write_chakra(builder.trace(), path)


def compute(micros: int, *after: int) -> dict[str, Any]:
    return {"type": NodeType.COMP, "name": "forward", "micros": micros, "after": after}


def all_reduce(size: int, *after: int, **attributes: Any) -> dict[str, Any]:
    of = {"comm_type": 0, "comm_size": size, **attributes}
    return {"type": NodeType.COMM_COLL, "name": "gradients", "after": after, "attributes": of}


def send(peer: int, *after: int, size: int = 1000) -> dict[str, Any]:
    of = {"comm_dst": peer, "comm_tag": 1, "comm_size": size}
    return {"type": NodeType.COMM_SEND, "name": "send", "after": after, "attributes": of}


def receive(peer: int, *after: int, size: int = 1000) -> dict[str, Any]:
    of = {"comm_src": peer, "comm_tag": 1, "comm_size": size}
    return {"type": NodeType.COMM_RECV, "name": "receive", "after": after, "attributes": of}


def network(path: Path, topology: str = "Ring", ranks: int = RANKS) -> None:
    path.write_text(f"topology: [ {topology} ]\nnpus_count: [ {ranks} ]\nbandwidth: [ 50.0 ]\nlatency: [ 500.0 ]\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A machine, a job whose ranks compute for different times, and one in which each receives before it sends."""
    network(tmp_path / "network.yml")
    network(tmp_path / "switch.yml", "Switch")
    (tmp_path / "system.json").write_text(json.dumps(SYSTEM))
    (tmp_path / "memory.json").write_text('{"memory-type": "NO_MEMORY_EXPANSION"}')
    (tmp_path / "groups.json").write_text('{"1": [0, 1, 2, 3], "2": [4, 5, 6, 7]}')
    for name in ("job", "circle"):
        (tmp_path / name).mkdir()
    for rank in range(RANKS):
        et(tmp_path / "job" / f"job.{rank}.et", compute(10 + rank), all_reduce(BYTES, 0), compute(1 + 10 * rank, 1))
        before, behind = (rank - 1) % RANKS, (rank + 1) % RANKS
        et(tmp_path / "circle" / f"circle.{rank}.et", receive(before), send(behind, 0), compute(5))
    et(tmp_path / "one.et", compute(10), all_reduce(BYTES, 0))
    return tmp_path


def answer(folder: Path, *words: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command, run in this process: a new one takes two seconds to start."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        mock.patch.object(sys, "argv", ["foretrace", "simulate", *map(str, words)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        main()
    assert isinstance(end.value.code, int)
    return end.value.code, out.getvalue(), err.getvalue()


def document(folder: Path, *words: str | Path, code: int = 0) -> Any:
    found, out, err = answer(folder, *words, "--json")
    assert found == code, err
    return json.loads(out)


def finish_of(found: Any) -> list[int | None]:
    assert [row["rank"] for row in found["ranks"]] == list(range(len(found["ranks"])))
    return [row["finish_ns"] for row in found["ranks"]]


def test_json_keeps_the_contract(folder: Path) -> None:
    found = document(folder, "one.et", *MACHINE)
    assert {"summary", "ranks", "deadlock", "links", "fidelity"} <= set(found)
    assert {"mean_abs_error_pct", "tasks", "edges", "task_kinds", "notes", "figures", "warnings"} <= set(found)
    total = 10_000 + ALL_REDUCE_NS
    summary = found["summary"]
    assert (summary["ranks"], summary["finished"]) == (RANKS, RANKS)
    assert summary["finish_ns"] == {"min": total, "max": total, "mean": total}
    assert (found["fidelity"], found["deadlock"], found["links"]) == ("astra", None, [])
    assert [row["rank"] for row in found["ranks"]] == list(range(RANKS))  # a single ET stands for every rank
    for row in found["ranks"]:
        assert (row["finish_ns"], row["exposed_communication_ns"]) == (total, ALL_REDUCE_NS)
    assert found["tasks"] == 2 * RANKS and found["messages"] == RANKS * 2 * (RANKS - 1)


def test_many_ranks_are_listed_on_request(folder: Path) -> None:
    many = 1025
    network(folder / "many.yml", ranks=many)
    words = ("one.et", "--network", "many.yml", "--system", "system.json")
    short, long = document(folder, *words), document(folder, *words, "--per-rank")
    assert short["ranks"] == [] and short["summary"]["ranks"] == short["summary"]["finished"] == many
    assert len(finish_of(long)) == many and short["summary"] == long["summary"]
    network(folder / "many.yml", ranks=many - 1)
    assert len(document(folder, *words)["ranks"]) == many - 1


def test_ranks_are_told_by_name_whatever_the_order(folder: Path) -> None:
    files = sorted(folder.glob("job/*.et"))
    expected = document(folder, *files, *MACHINE)
    assert len(set(finish_of(expected))) == RANKS  # each has its own
    assert document(folder, *reversed(files), *MACHINE) == expected
    assert document(folder, "job", *MACHINE) == expected
    with (folder / "job" / "job.3.et").open("rb") as file, gzip.open(folder / "job" / "job.3.et.gz", "wb") as packed:
        shutil.copyfileobj(file, packed)
    (folder / "job" / "job.3.et").unlink()
    (folder / "job" / "notes.txt").write_text("no trace")
    assert finish_of(document(folder, "job", *MACHINE)) == finish_of(expected)


@pytest.mark.parametrize("words", [MACHINE, CONGESTED, (*MACHINE, "--rendezvous"), (*MACHINE, "--queues-per-dim", "2")])
def test_shortcuts_change_nothing(folder: Path, words: tuple[str, ...]) -> None:
    def found_with(*more: str) -> Any:
        found = document(folder, "job", *words, *more)
        return found["summary"], finish_of(found), found["links"], found["deadlock"], found["messages"]

    expected = found_with()
    assert expected[0]["finished"] == RANKS
    for more in (("--no-fold",), ("--no-phases-at-once",), ("--no-fold", "--no-phases-at-once")):
        assert found_with(*more) == expected


def test_folding_says_how_many_were_simulated(folder: Path) -> None:
    assert document(folder, "one.et", *MACHINE)["figures"] == {"programs": 1, "simulated_ranks": 1}
    assert document(folder, "one.et", *MACHINE, "--no-fold")["figures"] == {"programs": 1, "simulated_ranks": RANKS}


def test_deadlock_is_exit_code_4_with_the_answer(folder: Path) -> None:
    found = document(folder, "circle", *MACHINE, code=4)
    assert (found["summary"]["ranks"], found["summary"]["finished"]) == (RANKS, 0)
    assert found["summary"]["finish_ns"] == {"min": None, "max": None, "mean": None}
    assert finish_of(found) == [None] * RANKS
    assert all(row["exposed_communication_ns"] is None for row in found["ranks"])
    deadlock = found["deadlock"]
    assert deadlock["unfinished"] == RANKS and sorted(deadlock["cycle"]) == list(range(RANKS))
    first = deadlock["ranks"][0]
    assert (first["rank"], first["blocked_nodes"]) == (0, 1)
    (wait,) = first["waits"]
    assert wait.pop("reason") == "the send of tag 1 and 1000 bytes at rank 7 never starts (node 1 (send))"
    assert wait == {"node": 0, "name": "receive", "kind": "receive", "since_ns": 0, "for_ranks": [7]}
    done = run("simulate", "circle", *MACHINE, cwd=folder)
    assert done.returncode == 4 and "never" in done.stdout and "waits for" in done.stdout and done.stderr == ""


def test_some_finish_and_some_do_not(folder: Path) -> None:
    """Ranks 0 to 3 have a collective of their own; of the others rank 7 takes another size, which never matches."""
    for rank in range(RANKS):
        size = 2 * BYTES if rank == 7 else BYTES
        et(folder / "job" / f"job.{rank}.et", all_reduce(size, pg_name="1" if rank < 4 else "2"))
    found = document(folder, "job", *MACHINE, "--comm-groups", "groups.json", code=4)
    assert found["summary"]["finished"] == 4
    assert [finish is None for finish in finish_of(found)] == [rank >= 4 for rank in range(RANKS)]
    assert {row["rank"] for row in found["deadlock"]["ranks"]} == {4, 5, 6, 7}
    page, timeline = folder / "page.html", folder / "timeline.json"
    words = ("job", *MACHINE, "--comm-groups", "groups.json", "--html", page, "--perfetto", timeline)
    assert document(folder, *words, code=4) == found
    assert page.is_file() and json.loads(timeline.read_text())["traceEvents"]


@pytest.mark.parametrize("topology", ["Ring", "FullyConnected", "Switch"])
def test_links_conserve_bytes(folder: Path, topology: str) -> None:
    network(folder / "network.yml", topology)
    assert document(folder, "one.et", *MACHINE)["links"] == []
    links = document(folder, "one.et", *CONGESTED)["links"]
    sent = RANKS * 2 * (RANKS - 1) * (BYTES // RANKS)  # the ring's messages go to the neighbor
    assert sum(link["bytes"] for link in links) == sent * (2 if topology == "Switch" else 1)
    assert len(links) == (2 * RANKS if topology == "Switch" else RANKS)
    assert all(link["dimension"] == 0 and 0 < link["utilization"] <= 1 and link["busy_ns"] > 0 for link in links)
    if topology == "Switch":
        for rank in range(RANKS):
            up, down = (
                next(link for link in links if link["link"] == name)
                for name in (f"{rank} -> switch", f"switch -> {rank}")
            )
            assert up["bytes"] == down["bytes"] == sent // RANKS


def test_congestion_delays_what_shares_a_link(folder: Path) -> None:
    """Seven ranks send to rank 0 at once: through a switch they share its link."""
    et(folder / "job" / "job.0.et", *(receive(peer) for peer in range(1, RANKS)))
    for rank in range(1, RANKS):
        et(folder / "job" / f"job.{rank}.et", send(0))
    words = ("job", "--network", "switch.yml", "--system", "system.json")
    alone = finish_of(document(folder, *words))
    shared = finish_of(document(folder, *words, "--fidelity", "astra-congestion"))
    one_link = 500 + 1000 / (50 * 2**30 / 1e9)
    assert alone == [int(1000 + 1000 / (50 * 2**30 / 1e9))] * RANKS
    assert shared[1] == 2 * int(one_link) and shared[0] == 2 * int(one_link) + 6 * int(one_link - 500)


def test_perfetto_and_page(folder: Path) -> None:
    page, timeline = folder / "page.html", folder / "timeline.json.gz"
    done = run("simulate", "job", *MACHINE, "--html", page, "--perfetto", timeline, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    finish = finish_of(json.loads(done.stdout))
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>") and text.rstrip().endswith("</html>") and "gradients" in text
    with gzip.open(timeline, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    assert len([event for event in events if "gradients" in event["name"]]) == RANKS
    last = max(finish[rank] or 0 for rank in range(RANKS))
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(last / 1000)


def test_table(folder: Path) -> None:
    done = run("simulate", "job", *MACHINE, cwd=folder)
    assert done.returncode == 0 and done.stderr == ""
    assert "8 of 8 ranks finish" in done.stdout and "exposed communication" in done.stdout


def test_memory_nodes_take_their_time(folder: Path) -> None:
    node = {"type": NodeType.MEM_LOAD, "name": "load", "attributes": {"tensor_size": 6400}}
    et(folder / "one.et", node)
    memory = folder / "memory.json"
    memory.write_text('{"memory-type": "PER_NPU", "remote-mem-latency": 500, "remote-mem-bw": 64}')
    assert finish_of(document(folder, "one.et", *MACHINE, "--memory", "memory.json")) == [600] * RANKS
    memory.write_text('{"memory-type": "MEMORY_POOL", "remote-mem-latency": 500, "remote-mem-bw": 64}')
    found = finish_of(document(folder, "one.et", *MACHINE, "--memory", "memory.json"))
    assert found == [600 * (rank + 1) for rank in range(RANKS)]  # one after the other


def test_injection_scale_and_rendezvous(folder: Path) -> None:
    base, scaled, asking = (
        document(folder, "one.et", *MACHINE, *more)["summary"]["finish_ns"]["max"]
        for more in ((), ("--injection-scale", "2.5"), ("--rendezvous",))
    )
    sends = 2 * (RANKS - 1)
    assert scaled == base + 15 * (sends + 1)
    assert asking > base


def write_bad(folder: Path) -> None:
    (folder / "bad.json").write_text("{")
    (folder / "bad.yml").write_text("topology: [ Torus ]\nnpus_count: [ 8 ]\nbandwidth: [ 50.0 ]\nlatency: [ 500.0 ]\n")
    (folder / "short.yml").write_text("topology: [ Ring ]\nnpus_count: [ 8 ]\nbandwidth: [ 50.0 ]\n")
    (folder / "splits.json").write_text(json.dumps({**SYSTEM, "preferred-dataset-splits": 0}))
    (folder / "custom.json").write_text(json.dumps({**SYSTEM, "all-reduce-implementation-custom": ["x.et"]}))
    network(folder / "huge.yml", ranks=10**12)
    network(folder / "many.yml", ranks=10**9)
    (folder / "chunks.json").write_text(json.dumps({**SYSTEM, "preferred-dataset-splits": 10**9}))
    for name, plan in (
        ("huge", "dp: 1000000000"),
        ("long", "micro_batches: 1000000000"),
        ("wide", "micro_batch_size: 1000000000000"),
    ):
        (folder / f"{name}.yaml").write_text(f"model: llama-2-7b\nplan: {{{plan}}}\n")
    (folder / "twice.json").write_text('{"1": [0, 0]}')
    et(folder / "dangling.et", compute(1, 99), compute(1))
    et(folder / "remote.et", {"type": NodeType.MEM_LOAD, "attributes": {"tensor_size": 1}})
    et(folder / "lonely.et", send(1))
    et(folder / "group.et", all_reduce(BYTES, pg_name="5"))
    et(folder / "untagged.et", {"type": NodeType.COMM_COLL, "attributes": {"comm_type": 0}})
    (folder / "empty.et").write_bytes(b"")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("one.et", "--network", "bad.json", "--system", "system.json"), "bad.json"),
        (("one.et", "--network", "bad.yml", "--system", "system.json"), r"bad\.yml: .*topology.*; .*Ring"),
        (("one.et", "--network", "short.yml", "--system", "system.json"), r"short\.yml: .*latency.*; "),
        (("one.et", "--network", "nope.yml", "--system", "system.json"), r"nope\.yml"),
        (("one.et", "--network", "network.yml", "--system", "bad.json"), r"bad\.json"),
        (("one.et", "--network", "network.yml", "--system", "splits.json"), r"splits\.json: .*dataset-splits.*; "),
        (("one.et", "--network", "network.yml", "--system", "custom.json"), r"custom\.json: .*custom.*; write"),
        (("one.et", *MACHINE, "--memory", "bad.json"), r"bad\.json"),
        (("one.et", *MACHINE, "--comm-groups", "twice.json"), r"twice\.json: .*1\[1\].*; "),
        (("dangling.et", *MACHINE), r"dangling\.et: node 0 .*99.*; .*lint"),
        (("remote.et", *MACHINE), r"remote\.et: node 0 .*remote memory.*; "),
        (("lonely.et", *MACHINE), r"lonely\.et: node 0 .*; give one trace a rank"),
        (("group.et", *MACHINE), r"group\.et: .*'5'.*; .*--comm-groups"),
        (("untagged.et", *MACHINE), r"untagged\.et: node 0 .*comm_size; add"),
        (("empty.et", *MACHINE), r"empty\.et: .*; "),
        (("nope.0.et", *MACHINE), r"nope\.0\.et: .*; "),
        (("job/job.0.et", "job/job.1.et", *MACHINE), r"2 traces for 8 ranks; "),
        (("job/job.0.et", "job/job.2.et", *MACHINE), r"rank 1 is missing; "),
        (("job", "circle", *MACHINE), r"rank \d is there twice.*; "),
        (("one.et", "job/job.0.et", *MACHINE), r"one\.et: .*rank; name the files"),
        (("one.et", "--network", "network.yml"), r"--system: .*; give"),
        (("one.et", "--system", "system.json"), r"--network: .*; give"),
        (("one.et", "--memory", "memory.json"), r"--memory: .*; "),
        (("one.et", "--comm-groups", "groups.json"), r"--comm-groups: .*; "),
        (("one.et", "--rendezvous"), r"--rendezvous: .*; "),
        (("one.et", "--per-rank"), r"--per-rank: .*; "),
        (("one.et", *MACHINE, "--scale", "kernel=2"), r"--scale: .*; "),
        (("one.et", *MACHINE, "--alone"), r"--alone: .*; "),
        (("one.et", *MACHINE, "--dependencies", "data"), r"--dependencies: .*; "),
        (("one.et", *MACHINE, "--cache"), r"--cache: .*machine; "),
        (("one.et", *MACHINE, "--dtype", "float32"), r"--dtype: .*--machine; "),
        (
            ("one.et", *MACHINE, "--queues-per-dim", "1000000000"),
            r"--queues-per-dim: it is 1000000000.*; give at most 1024",
        ),
        (("one.et", *FAIR, "--communication-slots", "1000000000"), r"--communication-slots: it is 1000000000.*; give"),
        (("one.et", *FAIR, "--no-fold"), r"--no-fold: --fidelity fair .*; "),
        (("one.et", *FAIR, "--queues-per-dim", "1"), r"--queues-per-dim: --fidelity fair .*; "),
        (("one.et", *FAIR, "--seed", "0"), r"--seed: .*; give --jitter"),
        (("one.et", *FAIR, "--jitter", "inf"), r"--jitter: .*; give"),
        (("one.et", *FAIR, "--straggler", "8=0.5"), r"--straggler: .*no rank 8; ranks are 0 to 7"),
        (("one.et", *FAIR, "--straggler", "1=nan"), r"--straggler: '1=nan'.*; write"),
        (("one.et", *FAIR, "--fail", "rank:9@1ms"), r"--fail: .*no rank 9; "),
        (("one.et", *FAIR, "--fail", f"rank:1@{'9' * 400}s"), r"--fail: .*; "),
        (("one.et", "--network", "huge.yml", "--system", "system.json"), r"huge\.yml: key 'npus_count\[0\]' .*; "),
        (("one.et", "--network", "many.yml", "--system", "system.json"), r"many\.yml: .*more than 4194304 ranks.*; "),
        (("one.et", "--network", "network.yml", "--system", "chunks.json"), r"chunks\.json: .*-splits.*; .*65536"),
        (("huge.yaml", *MACHINE), r"huge\.yaml: .*more than 4194304 ranks: 1000000000; "),
        (("long.yaml", *MACHINE), r"long\.yaml: .*micro_batches .*; "),
        (("wide.yaml", *MACHINE), r"wide\.yaml: .*2\^62 FLOPs or bytes; "),
        (("wide.yaml", *MACHINE, "--comm-groups", "groups.json"), r"--comm-groups: wide\.yaml .*; leave"),
        (("one.et", *MACHINE, "--html", "/dev/null"), r"/dev/null: is no regular file; "),
        (("job/job.0.et", "job/job.4.et", "job/job.3.et", *MACHINE), r"job/job\.1\.et: .* there are ranks 0, 3-4; "),
        (("job/job.7.et", "job/job.6.et", *MACHINE), r"job/job\.0\.et: .* there are ranks 6-7; "),
        (("one.et", *MACHINE, "--fidelity", "packets"), r"--fidelity"),
        (("one.et", *MACHINE, "--queues-per-dim", "0"), r"--queues-per-dim"),
        (("one.et", *MACHINE, "--injection-scale", "-1"), r"--injection-scale"),
        (("one.et", *MACHINE, "--html", "no/page.html"), r"no/page\.html: .*; "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_is_one_line_and_exit_code_2(folder: Path, words: tuple[str, ...], said: str) -> None:
    write_bad(folder)
    code, out, err = answer(folder, *words, "--json")
    assert (code, out) == (2, "")
    assert re.fullmatch(r"foretrace: [^\n]{5,}\n", err), err
    assert re.search(said, err), err


ONLY_ON_A_MACHINE = (
    *("--memory x", "--comm-groups x", "--dtype bfloat16", "--job x", "--fidelity astra", "--queues-per-dim 1"),
    *("--injection-scale 1", "--rendezvous", "--straggler 0=1", "--jitter 0", "--seed 0", "--slowdown 0"),
    *("--link-slowdown 0", "--communication-slots 1", "--fail rank:0@1ms", "--per-rank", "--no-fold", "--fold"),
    *("--no-phases-at-once", "--phases-at-once"),
)
ONLY_FAIR = (
    *("--straggler 0=1", "--jitter 0", "--seed 0", "--slowdown 0", "--link-slowdown 0", "--communication-slots 1"),
    "--fail rank:0@1ms",
)


@pytest.mark.parametrize(
    ("given", "words", "needs"),
    [
        *(
            (given, (), "it belongs to a machine; name one: --network and --system, or --machine")
            for given in ONLY_ON_A_MACHINE
        ),
        *((given, MACHINE, "it needs --fidelity fair; leave it out, or choose that") for given in ONLY_FAIR),
        *((given, CONGESTED, "it needs --fidelity fair; leave it out, or choose that") for given in ONLY_FAIR),
        ("--cache", (), "it belongs to timelines, and these are Chakra ETs; leave it out"),
    ],
)
def test_no_option_is_ignored(folder: Path, given: str, words: tuple[str, ...], needs: str) -> None:
    """Not even one that is given with its default."""
    code, out, err = answer(folder, "one.et", *words, *given.split(), "--json")
    assert (code, out, err) == (2, "", f"foretrace: {given.split()[0]}: {needs}\n")


def test_the_injection_scale_counts_on_our_own_machines(folder: Path) -> None:
    usual, scaled = (
        document(folder, "one.et", "--machine", "h100-sxm", *more)["summary"]["finish_ns"]["max"]
        for more in ((), ("--injection-scale", "3"))
    )
    assert scaled > usual


def test_files_are_looked_for_once(folder: Path) -> None:
    (folder / "job.yaml").write_text("model: llama-2-7b\nplan: {dp: 8}\ngranularity: layer\n")
    with mock.patch.object(estimate, "chakra_files", wraps=estimate.chakra_files) as listing:
        document(folder, "job", "--machine", "h100-sxm")
    assert listing.call_count == 1
    with mock.patch.object(estimate, "read_description", wraps=estimate.read_description) as reading:
        document(folder, "job.yaml", "--machine", "h100-sxm")
    assert reading.call_count == 1


def test_reading_shows_its_progress(folder: Path) -> None:
    seen: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def bar() -> Iterator[Any]:
        yield lambda done, total: seen.append((done, total))

    size = sum(path.stat().st_size for path in folder.glob("job/*.et"))
    for words in (MACHINE, ()):
        seen.clear()
        with mock.patch("foretrace.cli.show.reading_bar", bar):
            document(folder, "job", *words)
        assert seen[-1] == (size, size) and [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_killed_or_full_page_leaves_the_old_one(folder: Path) -> None:
    (folder / "page.html").write_text("old")
    limited = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)); "
    for option, name in (("--html", "page.html"), ("--perfetto", "page.html")):
        words = ["foretrace", "simulate", "job", *MACHINE, option, name, "--json"]
        code = f"{limited}sys.argv = {words!r}; runpy.run_module('foretrace', run_name='__main__')"
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "foretrace: page.html: File too large; free space or choose another place\n"
        assert (folder / "page.html").read_text() == "old" and not list(folder.glob("*.part")) + list(folder.glob(".*"))


def test_folder_without_traces(folder: Path) -> None:
    (folder / "none").mkdir()
    done = run("simulate", "none", *MACHINE, cwd=folder)
    assert done.returncode == 2 and re.fullmatch(r"foretrace: none: [^\n]+; [^\n]+\n", done.stderr)


def _reference(shared: Path, tag: str, unpacked: Path) -> tuple[dict[str, str], list[str | Path]]:
    source = shared / "reference" / "astra-sim"
    with (source / "results.csv").open(newline="") as file:
        row = next(each for each in csv.DictReader(file) if each["tag"] == tag)
    name, prefix = row["workload"].split("/")
    with tarfile.open(source / "traces" / f"{name}.tar.gz") as archive:
        archive.extractall(unpacked, filter="data")
    configs = source / "configs"
    words: list[str | Path] = [*sorted((unpacked / name).glob(f"{prefix}.*.et"))]
    words += ["--network", configs / f"{row['network_config']}.yml", "--system"]
    words += [configs / f"{row['system_config']}.json", "--memory", configs / row["memory_config"]]
    if row["comm_group"]:
        words += ["--comm-groups", unpacked / row["comm_group"]]
    if row["backend"] == "aware":
        words += ["--fidelity", "astra-congestion"]
    return row, words


@pytest.mark.parametrize("tag", ["llm64", "x_p2p16_aware_ring"])
def test_a_recorded_run_of_astra_sim(shared: Path, tmp_path: Path, tag: str) -> None:
    row, words = _reference(shared, tag, tmp_path)
    found = document(tmp_path, *words)
    assert found["summary"]["finished"] == int(row["ranks_finished"])
    with gzip.open(shared / "reference" / "astra-sim" / "cycles" / f"{tag}.cycles.gz", "rt") as file:
        pattern = re.compile(r"sys\[(\d+)\] finished, (\d+) cycles, exposed communication (\d+) cycles")
        expected = {int(one[1]): (int(one[2]), int(one[3])) for one in map(pattern.match, file) if one}
    ranks = {row["rank"]: (row["finish_ns"], row["exposed_communication_ns"]) for row in found["ranks"]}
    assert ranks == expected
