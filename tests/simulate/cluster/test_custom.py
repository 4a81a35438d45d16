"""Collectives whose algorithm is given as Chakra ETs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretrace.estimate.cluster import Machine, read_machine, read_own_machine, simulate_files
from foretrace.formats.chakra.builder import Builder
from foretrace.formats.chakra.trace import NodeType, Wire
from foretrace.formats.chakra.write import write_chakra
from foretrace.simulate.cluster import ClusterSimulation, Conditions, Options
from foretrace.simulate.cluster import run as running
from foretrace.simulate.cluster.plain import run as run_plain
from foretrace.trace import FormatError

SEND, RECV, COMP, COLL = NodeType.COMM_SEND, NodeType.COMM_RECV, NodeType.COMP, NodeType.COMM_COLL
RANKS, CHUNK = 4, 1000
NETWORK = "topology: [Ring]\nnpus_count: [4]\nbandwidth: [1.0]\nlatency: [100.0]\n"
HOP = 100 + int(CHUNK / (1073741824 / 1e9))  # ns of a message of a chunk


def write(path: Path, *nodes: tuple[int, NodeType, list[int], dict[str, Any]], micros: int = 0) -> None:
    builder = Builder()
    for number, kind, needs, attributes in nodes:
        duration = micros if kind == COMP else 0
        items = [(k, Wire.STRING if isinstance(v, str) else Wire.INT64, v, "") for k, v in attributes.items()]
        builder.add(number, f"n{number}", kind, data=needs, duration_micros=duration, attributes=items)
    write_chakra(builder.trace(), path)


def write_ring(folder: Path, name: str = "ring", ranks: int = RANKS, size: int = CHUNK) -> Path:
    """All-reduce on a ring: in each round a send and a receive, and what is sent next waits for what has come."""
    for place in range(ranks):
        nodes = []
        for step in range(2 * (ranks - 1)):
            last = [10 * step - 9] if step else []
            to, source = (place + 1) % ranks, (place - 1) % ranks
            nodes.append((10 * step, SEND, last, {"comm_dst": to, "comm_tag": step, "comm_size": size}))
            nodes.append((10 * step + 1, RECV, last, {"comm_src": source, "comm_tag": step, "comm_size": size}))
        write(folder / f"{name}.{place}.et", *nodes)
    return folder / name


def job(folder: Path, count: int = 1, group: str = "", kind: int = 0, ranks: int = RANKS) -> list[Path]:
    for rank in range(ranks):
        extra = {"pg_name": group} if group else {}
        collective = {"comm_type": kind, "comm_size": 4 * CHUNK, **extra}
        nodes: list[Any] = [(0, COMP, [], {})]
        nodes += [(i + 1, COLL, [i], collective) for i in range(count)]
        write(folder / f"job.{rank}.et", *nodes, micros=1)
    return [folder / f"job.{rank}.et" for rank in range(ranks)]


def machine(folder: Path, groups: dict[str, list[int]] | None = None, **system: Any) -> Machine:
    settings = {"preferred-dataset-splits": 1, "local-mem-bw": 1600, **system}
    (folder / "system.json").write_text(json.dumps(settings))
    (folder / "network.yml").write_text(NETWORK)
    if groups:
        (folder / "groups.json").write_text(json.dumps(groups))
    return read_machine(
        folder / "network.yml", folder / "system.json", None, folder / "groups.json" if groups else None
    )


def times(found: ClusterSimulation) -> list[int]:
    return [int(finish) for finish in found.finish_ns]


ALL_REDUCE = "all-reduce-implementation-custom"


def test_a_ring_of_sends_takes_its_messages_time(tmp_path: Path) -> None:
    """Six rounds of a hop each, one after the other; the 1,000 ns before are computation, the rest is exposed."""
    write_ring(tmp_path)
    found = simulate_files(job(tmp_path), machine(tmp_path, **{ALL_REDUCE: ["ring"]}))
    assert times(found) == [1000 + 6 * HOP] * 4
    assert found.exposed_communication_ns.tolist() == [6 * HOP] * 4


def test_it_is_the_built_in_ring_without_delays(tmp_path: Path) -> None:
    """With no delay at endpoints, and memory so fast that reductions take 0 ns, both have the same messages."""
    write_ring(tmp_path)
    system = {"endpoint-delay": 0, "local-mem-bw": 1000000000}
    built_in = simulate_files(job(tmp_path), machine(tmp_path, **{"all-reduce-implementation": ["ring"]}, **system))
    own = simulate_files(job(tmp_path), machine(tmp_path, **{ALL_REDUCE: ["ring"]}, **system))
    assert times(own) == times(built_in)


@pytest.mark.parametrize("splits", [1, 7])
@pytest.mark.parametrize("congestion", [False, True])
def test_several_collectives_follow_each_other(tmp_path: Path, splits: int, congestion: bool) -> None:
    write_ring(tmp_path)
    given = machine(tmp_path, **{ALL_REDUCE: ["ring"], "preferred-dataset-splits": splits})
    found = simulate_files(job(tmp_path, count=3), given, Options(congestion=congestion))
    assert times(found) == [1000 + 18 * HOP] * 4


def test_computation_takes_its_time_or_a_nanosecond_and_starts_at_once(tmp_path: Path) -> None:
    for place in range(RANKS):
        micros = 3 if place == 1 else 0
        write(
            tmp_path / f"own.{place}.et", *((i, COMP, [] if i < 3 else [0, 1, 2], {}) for i in range(4)), micros=micros
        )
    found = simulate_files(job(tmp_path), machine(tmp_path, **{ALL_REDUCE: ["own"]}))
    assert times(found) == [1002, 7000, 1002, 1002]  # three at once, then one
    assert found.exposed_communication_ns.tolist() == [2, 6000, 2, 2]  # it does not count as computation


def test_places_are_those_of_the_group(tmp_path: Path) -> None:
    """Two groups of two, whose second rank is at the first place."""
    write_ring(tmp_path, ranks=2)
    paths = job(tmp_path)
    for rank in range(4):
        collective = {"comm_type": 0, "comm_size": 8, "pg_name": str(1 + rank % 2)}
        write(paths[rank], (0, COMP, [], {}), (1, COLL, [0], collective), micros=1)
    found = simulate_files(paths, machine(tmp_path, {"1": [2, 0], "2": [1, 3]}, **{ALL_REDUCE: ["ring"]}))
    two_hops = 200 + int(CHUNK / (1073741824 / 1e9))  # ranks 0 and 2 are two links apart
    assert times(found) == [1000 + 2 * two_hops] * 4
    sends = found.workload.programs[0].nodes["kind"] == 2
    assert {int(p) for table in found.workload.peers for row in table for p in row} == {0, 1, 2, 3}
    assert sends.sum() == 2


def test_a_node_of_its_own_goes_before_its_kind(tmp_path: Path) -> None:
    write_ring(tmp_path)
    write_ring(tmp_path, "big", size=5 * CHUNK)
    (tmp_path / "nodes.yaml").write_text("2: big\n")
    given = machine(tmp_path, **{ALL_REDUCE: ["ring"], "per-node-custom-implementation": "nodes.yaml"})
    found = simulate_files(job(tmp_path, count=2), given)
    big = 100 + int(5 * CHUNK / (1073741824 / 1e9))
    assert times(found) == [1000 + 6 * HOP + 6 * big] * 4


def test_what_never_arrives_is_told(tmp_path: Path) -> None:
    write_ring(tmp_path)
    message = {"comm_src": 2, "comm_tag": 99, "comm_size": CHUNK}
    write(tmp_path / "ring.3.et", (0, RECV, [], message))
    found = simulate_files(job(tmp_path), machine(tmp_path, **{ALL_REDUCE: ["ring"]}))
    assert found.finish_ns.tolist() == [-1] * 4
    assert found.deadlock is not None
    by_rank = {row["rank"]: row["waits"] for row in found.deadlock["ranks"]}
    (wait,) = by_rank[3]
    assert (wait["kind"], wait["for_ranks"]) == ("receive", [2])
    assert "no send of tag 99" in wait["reason"]


@pytest.mark.parametrize("options", [{}, {"congestion": True}, {"rendezvous": True}, {"phases_at_once": False}])
def test_the_engines_agree(tmp_path: Path, options: dict[str, bool]) -> None:
    """An algorithm that is different at each place, beside built-in collectives and sends of the ranks themselves."""
    rng = np.random.default_rng(5)
    pairs = [(int(a), int(b)) for a, b in rng.integers(0, 4, (30, 2)) if a != b]
    for place in range(RANKS):
        nodes: list[Any] = []
        for tag, (source, target) in enumerate(pairs):
            needs = [nodes[int(rng.integers(len(nodes)))][0]] if len(nodes) > 3 else []
            if place == source:
                nodes.append((2 * tag, SEND, [], {"comm_dst": target, "comm_tag": tag, "comm_size": 100 + 37 * tag}))
            elif place == target:
                nodes.append((2 * tag, RECV, [], {"comm_src": source, "comm_tag": tag, "comm_size": 100 + 37 * tag}))
            else:
                nodes.append((2 * tag + 1, COMP, needs, {}))
        write(tmp_path / f"own.{place}.et", *nodes, micros=1)
    collective = {"comm_size": 4 * CHUNK}
    for rank in range(RANKS):
        to, source = {"comm_dst": (rank + 1) % 4}, {"comm_src": (rank - 1) % 4}
        mail = {"comm_tag": 1000, "comm_size": 333}
        write(
            tmp_path / f"job.{rank}.et",
            (0, COLL, [], {"comm_type": 0, **collective}),
            (1, RECV, [], {**source, **mail}),
            (2, COLL, [0], {"comm_type": 2, **collective}),
            (3, SEND, [0], {**to, **mail}),
            (4, COMP, [], {}),
            (5, COLL, [4], {"comm_type": 0, **collective}),
            micros=rank,
        )
    names = {ALL_REDUCE: ["own"], "all-gather-implementation": ["ring"]}
    found = simulate_files(
        [tmp_path / f"job.{rank}.et" for rank in range(4)], machine(tmp_path, **names), Options(**options)
    )
    if running._engine is None:
        pytest.skip("the engine is not compiled here: no C compiler")
    twin = run_plain(found.plan)
    assert found.deadlock is None
    for name in ("finish", "computed", "start", "end", "link_bytes", "link_busy"):
        np.testing.assert_array_equal(getattr(found.outcome, name), getattr(twin, name), err_msg=name)


def test_the_fluid_fidelity_runs_it_too(tmp_path: Path) -> None:
    write_ring(tmp_path)
    given = machine(tmp_path, **{ALL_REDUCE: ["ring"]})
    found = simulate_files(job(tmp_path, count=2), given, None, Conditions())
    assert found.deadlock is None
    np.testing.assert_allclose(found.finish_ns, 1000 + 12 * (100 + CHUNK / (1073741824 / 1e9)), atol=12)


def test_a_machine_of_our_own_has_it(tmp_path: Path) -> None:
    write_ring(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "device: a100-sxm-80gb\ndevices_per_node: 4\n"
        "dimensions: [{name: x, topology: ring, size: 4, bandwidth_gb_per_s: 1, latency_ns: 100}]\n"
        "collectives: {custom: {all_reduce: ring}}\n"
    )
    found = simulate_files(job(tmp_path), read_own_machine(tmp_path / "mine.yaml", "bfloat16"))
    assert times(found) == [1000 + 6 * (100 + CHUNK)] * 4


def test_timelines_show_the_messages_within(tmp_path: Path) -> None:
    write_ring(tmp_path)
    found = simulate_files(job(tmp_path), machine(tmp_path, **{ALL_REDUCE: ["ring"]}))
    names = found.timeline(0).strings.lookup(found.timeline(0).events["name"])
    assert sum("SendRecv" in name for name in names) == 12
    assert sum("AllReduce" in name for name in names) == 1


def test_replayed_collectives_take_their_recorded_time(tmp_path: Path) -> None:
    write_ring(tmp_path)
    found = simulate_files(job(tmp_path), machine(tmp_path, **{ALL_REDUCE: ["ring"], "replay-only": 1}))
    assert times(found) == [1001] * 4


def test_another_number_of_places_than_of_ranks_is_refused(tmp_path: Path) -> None:
    write_ring(tmp_path, ranks=3)
    with pytest.raises(
        FormatError, match=r"job\.0\.et: node 1 .*: its group has 4 ranks, its algorithm is given for 3"
    ):
        simulate_files(job(tmp_path), machine(tmp_path, **{ALL_REDUCE: ["ring"]}))


@pytest.mark.parametrize(
    ("node", "problem"),
    [
        ((0, COLL, [], {"comm_type": 0, "comm_size": 8}), "only sends, receives and computation"),
        ((0, NodeType.MEM_LOAD, [], {"tensor_size": 8}), "only sends, receives and computation"),
        ((0, SEND, [], {"comm_dst": 4, "comm_tag": 0, "comm_size": 8}), "its peer is rank 4 of 4"),
        ((0, SEND, [], {"comm_dst": 1, "comm_tag": 0, "comm_size": 0}), "comm_size is 0"),
        ((0, SEND, [], {"comm_dst": 1, "comm_size": 8}), "it has no comm_tag"),
    ],
)
def test_what_is_no_algorithm_is_refused(tmp_path: Path, node: Any, problem: str) -> None:
    write_ring(tmp_path)
    write(tmp_path / "ring.2.et", node)
    with pytest.raises(FormatError, match=problem):
        simulate_files(job(tmp_path), machine(tmp_path, **{ALL_REDUCE: ["ring"]}))


def test_an_algorithm_without_a_node_is_refused(tmp_path: Path) -> None:
    write_ring(tmp_path)
    write(tmp_path / "ring.2.et")
    with pytest.raises(FormatError, match=r"ring\.2\.et: .*(no node|empty)"):
        simulate_files(job(tmp_path), machine(tmp_path, **{ALL_REDUCE: ["ring"]}))


def test_lines_of_the_nodes_file_are_checked(tmp_path: Path) -> None:
    write_ring(tmp_path)
    for text, problem in (
        ("x: ring\n", "key 'x' is no id of a node"),
        ("2: rong\n", "key '2' is 'rong': there is no rong.0.et"),
    ):
        (tmp_path / "nodes.yaml").write_text(text)
        with pytest.raises(FormatError, match=problem):
            machine(tmp_path, **{"per-node-custom-implementation": "nodes.yaml"})
