"""Descriptions of machines: what is read and refused, what ASTRA-sim's view keeps, and where messages go."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from foretrace.machine.astra import check
from foretrace.machine.cluster import Cluster, Curve, Device, Layer, Link, Wiring, presets, read_cluster
from foretrace.machine.fabric import Fabric
from foretrace.machine.network import Topology
from foretrace.machine.system import Algorithm, MemoryKind, Pattern, Priority
from foretrace.trace.reading import FormatError
from foretrace.trace.workload import CommType

GPU: dict[str, Any] = {
    "name": "GPU",
    "peak_tflops": {"bfloat16": 100, "float8": 200},
    "memory_bandwidth_gb_per_s": 2000,
    "memory_gb": 80,
}
NVLINK: dict[str, Any] = {
    "name": "NVLink",
    "topology": "switch",
    "size": 8,
    "bandwidth_gb_per_s": 300,
    "latency_ns": 300,
}
FAT_TREE: dict[str, Any] = {
    "name": "InfiniBand",
    "topology": "fat_tree",
    "size": 6,
    "nodes_per_leaf": 2,
    "spines": 4,
    "oversubscription": 2,
    "bandwidth_gb_per_s": 25,
    "latency_ns": 1000,
}
MACHINE: dict[str, Any] = {"device": GPU, "devices_per_node": 8, "dimensions": [NVLINK, FAT_TREE]}


def write(folder: Path, content: object) -> Path:
    path = folder / "machine.yaml"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def read(folder: Path, **changes: Any) -> Cluster:
    return read_cluster(write(folder, MACHINE | changes))


@pytest.mark.parametrize("name", presets())
def test_presets_are_sane(name: str) -> None:
    cluster = read_cluster(name)
    device, network = cluster.device, cluster.network()
    assert cluster.num_devices == network.num_ranks == cluster.devices_per_node * cluster.num_nodes
    assert cluster.devices_per_node == 8
    assert cluster.num_nodes == (16 if name.endswith("-cluster") else 1)
    assert 3e14 < device.peak("bfloat16") < 3e15
    assert device.peak("float16") == device.peak("torch.bfloat16")
    assert device.peak("float32") < device.peak("tfloat32") < device.peak("bfloat16") < device.peak("int8")
    assert 2e12 < device.memory_bytes_per_s < 1e13
    assert 80e9 <= device.memory_bytes <= 200e9
    assert [one.bandwidth_bytes_per_ns for one in network.dimensions][1:] in ([], [25.0], [50.0])
    assert all(100 < one.latency_ns < 5000 for one in network.dimensions)
    check(network, cluster.system("bfloat16"), name)
    assert cluster.fabric().route(0, cluster.num_devices - 1)


def test_presets_by_name() -> None:
    names = ["a100-sxm-80gb", "b200", "h100-sxm", "h200", "mi300x"]
    assert presets() == sorted([*names, *(f"{name}-cluster" for name in names)])
    assert read_cluster("h100-sxm-cluster").device == read_cluster("h100-sxm").device
    with pytest.raises(FormatError, match="no such file; name a YAML file or a preset: a100-sxm-80gb"):
        read_cluster("h100")


def test_every_figure_of_a_preset_has_its_source() -> None:
    folder = Path(read_cluster.__code__.co_filename).with_name("presets")
    for path in folder.glob("*.yaml"):
        lines = path.read_text().splitlines()
        for at, line in enumerate(lines):
            if line.strip().startswith(("bandwidth", "memory_", "peak_tflops")):
                assert "#" in line, f"{path.name}:{at + 1}"
            if line.strip().startswith("latency_ns"):
                assert "#" in lines[at - 1], f"{path.name}:{at + 1}"


def test_a_cluster_by_name_of_a_preset_device(tmp_path: Path) -> None:
    cluster = read(tmp_path, device="h200")
    assert cluster.device == read_cluster("h200").device
    assert cluster.name == "machine"


def test_device() -> None:
    curve = Curve(((1e6, 0.2), (1e8, 0.6)))
    device = Device("GPU", {"bfloat16": 1e14, "float8": 2e14}, 1e12, 10, curve)
    assert [curve.at(size) for size in (0, 1e6, 1e8, 1e12)] == [0.2, 0.2, 0.6, 0.6]
    assert math.isclose(curve.at(1e7), 0.4)
    assert Curve().at(5) == 1.0
    assert device.peak("c10::Float8_e4m3fn") == device.peak("float8_e5m2") == 2e14
    assert math.isclose(device.time_ns(1e8, 0, "bfloat16"), 1e8 / 6e13 * 1e9)
    assert math.isclose(device.time_ns(1e8, 1e9, "bfloat16"), 1e6)
    assert device.time_ns(0, 0, "bfloat16") == 0
    with pytest.raises(ValueError, match="GPU has no peak for 'int8'; name one of bfloat16, float8"):
        device.peak("int8")


def test_efficiency_is_read(tmp_path: Path) -> None:
    efficiency = {"compute": [[1e9, 0.5], [1e12, 0.8]], "memory": 0.9}
    device = read(tmp_path, device=GPU | {"efficiency": efficiency}).device
    assert device.compute_efficiency == Curve(((1e9, 0.5), (1e12, 0.8)))
    assert device.memory_efficiency.at(1e6) == 0.9


def test_the_view_of_astra_sim(tmp_path: Path) -> None:
    torus = {"topology": "torus", "sizes": [4, 3], "bandwidth_gb_per_s": 50, "latency_ns": 5}
    rails = NVLINK | {"topology": "rail_optimized", "name": "rails", "size": 2}
    cluster = read(tmp_path, dimensions=[NVLINK, FAT_TREE, torus, rails], placement="round_robin")
    notes: Counter[str] = Counter()
    network = cluster.network(notes)
    ring, switch = Topology.RING, Topology.SWITCH
    assert [one.topology for one in network.dimensions] == [switch, switch, ring, ring, switch]
    assert [one.size for one in network.dimensions] == [8, 6, 4, 3, 2]
    assert [one.bandwidth_bytes_per_ns for one in network.dimensions] == [300, 12.5, 50, 50, 300]
    assert [one.latency_ns for one in network.dimensions] == [300, 2000, 5, 5, 300]
    assert notes == dict.fromkeys(
        [
            "the placement of ranks has no place in a network of dimensions: rank r is device r",
            "fat_tree 'InfiniBand' is taken as a switch",
            "'InfiniBand': its bandwidth is divided by the oversubscription 2, and its latency is that of four links, "
            "by way of a spine",
            "rail_optimized 'rails' is taken as a switch",
        ],
        1,
    )


def test_the_system_of_a_cluster(tmp_path: Path) -> None:
    algorithms = {
        "all_reduce": [{"up_to_bytes": 1000, "use": ["direct:3", "halving_doubling"]}, {"use": ["ring", "ring"]}],
        "all_gather": ["flat_direct"],
    }
    collectives = {
        "endpoint_delay_ns": 7,
        "chunks": 4,
        "active_chunks": 2,
        "priority": "FIFO",
        "algorithms": algorithms,
    }
    cluster = read(tmp_path, collectives=collectives)
    notes: Counter[str] = Counter()
    large, small = cluster.system("bfloat16", notes=notes), cluster.system("bfloat16", 1000)
    assert (large.endpoint_delay_ns, large.splits, large.active_chunks, large.priority) == (7, 4, 2, Priority.FIFO)
    assert large.local_bandwidth_aware
    assert large.roofline
    assert (large.peak_flops_per_s, large.memory_bytes_per_s) == (1e14, 2e12)
    ring = Algorithm(Pattern.RING)
    assert large.algorithms == {
        CommType.ALL_REDUCE: (ring, ring),
        CommType.ALL_GATHER: (Algorithm(Pattern.DIRECT, flat=True),),
        CommType.REDUCE_SCATTER: (ring, ring),
        CommType.ALL_TO_ALL: (Algorithm(Pattern.DIRECT), Algorithm(Pattern.DIRECT)),
    }
    assert small.algorithms[CommType.ALL_REDUCE] == (
        Algorithm(Pattern.DIRECT, 3),
        Algorithm(Pattern.HALVING_DOUBLING),
    )
    assert cluster.algorithms(CommType.ALL_REDUCE, 1001) == (ring, ring)
    assert notes == {"algorithms of collectives are those of large ones": 1}


def test_a_torus_has_an_algorithm_for_each_direction(tmp_path: Path) -> None:
    torus = {"topology": "torus", "sizes": [4, 4, 2], "bandwidth_gb_per_s": 50, "latency_ns": 5}
    algorithms = {"all_reduce": ["double_binary_tree", "ring"]}
    cluster = read(tmp_path, dimensions=[torus, NVLINK], devices_per_node=32, collectives={"algorithms": algorithms})
    tree = Algorithm(Pattern.DOUBLE_BINARY_TREE)
    assert cluster.algorithms(CommType.ALL_REDUCE) == (tree, tree, tree, Algorithm(Pattern.RING))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", MemoryKind.NONE),
        ("per_rank", MemoryKind.PER_RANK),
        ("per_node", MemoryKind.PER_NODE),
        ("pool", "MEMORY_POOL"),
    ],
)
def test_remote_memory(tmp_path: Path, kind: str, expected: str) -> None:
    figures = {} if kind == "none" else {"latency_ns": 500, "bandwidth_gb_per_s": 64}
    memory = read(tmp_path, remote_memory={"kind": kind} | figures).memory
    assert memory.kind == expected
    assert (memory.latency_ns, memory.bandwidth_bytes_per_ns) == ((500, 64) if figures else (0, 1))
    assert memory.ranks_per_node == (8 if kind == "per_node" else 1)


def test_placement(tmp_path: Path) -> None:
    assert read(tmp_path).positions.tolist() == list(range(48))
    spread = read(tmp_path, placement="round_robin")
    assert spread.positions[:8].tolist() == [0, 8, 16, 24, 32, 40, 1, 9]
    assert sorted(spread.positions) == list(range(48))
    listed = read(tmp_path, placement=[9, 0])
    fabric = listed.fabric()
    assert fabric.num_ranks == 2
    assert fabric.source[fabric.route(0, 1)[0]] == 9
    with pytest.raises(ValueError, match="rank 2: the fabric has ranks 0 to 1"):
        fabric.route(0, 2)


def test_resized() -> None:
    cluster = read_cluster("h100-sxm-cluster")
    assert cluster.resized(4).num_devices == 32
    assert cluster.resized(4).network().dimensions[1].size == 4
    for nodes in (0, 1, -3):
        with pytest.raises(ValueError, match="cannot have"):
            cluster.resized(nodes)
    with pytest.raises(ValueError, match="does not count nodes"):
        read_cluster("h100-sxm").resized(2)


def test_resized_keeps_trees_possible(tmp_path: Path) -> None:
    trees = {"algorithms": {"all_reduce": ["ring", "double_binary_tree"]}}
    cluster = read(tmp_path, dimensions=[NVLINK, NVLINK | {"name": "outer"}], collectives=trees)
    assert cluster.resized(16).num_nodes == 16
    with pytest.raises(ValueError, match="of 12 ranks, which is no power of two"):
        cluster.resized(12)
    with pytest.raises(ValueError, match="places each rank by number"):
        replace(cluster, placement=(0, 1)).resized(4)


BAD: list[tuple[str, Any, str]] = [
    ("device", "h100", "key 'device' is 'h100', which is unknown"),
    ("device", None, "key 'device' is empty"),
    ("device.name", "", "key 'device.name' is ''"),
    ("device.peak_tflops", {}, "'device.peak_tflops' is empty"),
    ("device.peak_tflops", {"fp16": 3}, "'device.peak_tflops.fp16' is no element type"),
    ("device.peak_tflops", {"half": 3, "float16": 3}, "'device.peak_tflops.half' is float16 a second time"),
    ("device.peak_tflops.bfloat16", 0, "'device.peak_tflops.bfloat16' is 0"),
    ("device.peak_tflops.bfloat16", True, "'device.peak_tflops.bfloat16' is true"),
    ("device.memory_gb", -80, "'device.memory_gb' is -80"),
    ("device.memory_bandwidth_gb_per_s", "2 TB/s", "'device.memory_bandwidth_gb_per_s' is '2 TB/s'"),
    ("device.memory_bandwith", 1, "'device.memory_bandwith' is unknown; write 'memory_bandwidth_gb_per_s'"),
    ("device.efficiency", 0.5, "'device.efficiency' is 0.5, not keys"),
    ("device.efficiency", {"compute": 1.5}, "'device.efficiency.compute' is 1.5"),
    ("device.efficiency", {"compute": []}, "'device.efficiency.compute' is an empty list"),
    ("device.efficiency", {"compute": [[1, 0.5, 3]]}, r"'device.efficiency.compute\[0\]' is a list, not a pair"),
    (
        "device.efficiency",
        {"memory": [[2, 0.5], [1, 0.6]]},
        r"'device.efficiency.memory\[1\]' is 1, not a number above 2",
    ),
    ("device.efficiency", {"memory": [[2, 0]]}, r"'device.efficiency.memory\[0\]' is 0"),
    ("device.efficiency", {"network": 1}, "'device.efficiency.network' is unknown"),
    ("devices_per_node", 4, "'devices_per_node' is 4, where no dimension ends; write one of 1, 8, 48"),
    ("dimensions", [], "'dimensions' is an empty list"),
    ("dimensions", {"a": 1}, "'dimensions' is a mapping"),
    ("dimensions", [3], r"'dimensions\[0\]' is 3, not keys"),
    ("dimensions", [NVLINK, NVLINK], r"'dimensions\[1\].name' is 'NVLink' a second time"),
    ("dimensions.0.topology", "mesh", r"'dimensions\[0\].topology' is 'mesh', which is unknown; write one of ring"),
    ("dimensions.0.size", 1, r"'dimensions\[0\].size' is 1"),
    ("dimensions.0.sizes", [2, 2], r"'dimensions\[0\].sizes' is unknown; write 'size'"),
    ("dimensions.0.bandwidth_gb_per_s", 0, r"'dimensions\[0\].bandwidth_gb_per_s' is 0"),
    ("dimensions.0.latency_ns", -1, r"'dimensions\[0\].latency_ns' is -1"),
    ("dimensions.0.oversubscription", 2, r"'dimensions\[0\].oversubscription' is unknown"),
    ("dimensions.1.oversubscription", 0.5, r"'dimensions\[1\].oversubscription' is 0.5"),
    ("dimensions.1.nodes_per_leaf", 7, r"'dimensions\[1\].nodes_per_leaf' is 7"),
    ("dimensions.1.nodes_per_leaf", 6, r"'dimensions\[1\].spines' says how leaves are joined, but there is one leaf"),
    ("dimensions.1.spines", 0, r"'dimensions\[1\].spines' is 0"),
    ("dimensions.1.size", 1 << 30, "'dimensions' make more than"),
    ("placement", "random", "'placement' is 'random'"),
    ("placement", [0, 0], r"'placement\[1\]' is device 0 a second time"),
    ("placement", [48], r"'placement\[0\]' is 48"),
    ("placement", [], "'placement' is an empty list"),
    ("remote_memory", {"kind": "disk"}, "'remote_memory.kind' is 'disk'"),
    ("remote_memory", {"kind": "pool"}, "'remote_memory.latency_ns' is missing"),
    ("remote_memory", {"kind": "none", "latency_ns": 3}, "'remote_memory.latency_ns' is unknown"),
    ("collectives", {"chunks": 0}, "'collectives.chunks' is 0"),
    ("collectives", {"priority": "lifo"}, "'collectives.priority' is 'lifo'"),
    ("collectives", {"hierarchical_all_reduce": 1}, "'collectives.hierarchical_all_reduce' is 1"),
    ("collectives", {"algoritms": {}}, "'collectives.algoritms' is unknown; write 'algorithms'"),
    ("collectives.algorithms", {"broadcast": ["ring"]}, "'collectives.algorithms.broadcast' is unknown"),
    ("collectives.algorithms", {"all_reduce": "ring"}, "'collectives.algorithms.all_reduce' is 'ring', not a list"),
    ("collectives.algorithms", {"all_reduce": ["ring"]}, "'collectives.algorithms.all_reduce' has 1 entries for 2"),
    ("collectives.algorithms", {"all_reduce": ["ring", "tree"]}, r"algorithms.all_reduce\[1\]' is 'tree'"),
    ("collectives.algorithms", {"all_reduce": ["ring:2", "ring"]}, r"algorithms.all_reduce\[0\]' is 'ring:2'"),
    ("collectives.algorithms", {"all_reduce": ["flat_ring", "ring"]}, "has a flat algorithm beside others"),
    ("collectives.algorithms", {"all_reduce": ["ring", "double_binary_tree"]}, "of 6 ranks, which is no power of two"),
    ("collectives.algorithms", {"all_reduce": [{"use": ["ring", "ring"]}, 3]}, "up_to_bytes' must be there"),
    (
        "collectives.algorithms",
        {"all_reduce": [{"up_to_bytes": 9, "use": ["flat_ring"]}]},
        "up_to_bytes' must be there",
    ),
    (
        "collectives.algorithms",
        {"all_reduce": [*({"up_to_bytes": 9, "use": ["flat_ring"]},) * 2, {"use": ["flat_ring"]}]},
        r"all_reduce\[1\].up_to_bytes' is 9, not above the range before",
    ),
    ("nodes", 3, "'nodes' is unknown"),
]


def changed(key: str, value: object) -> dict[str, Any]:
    """The machine with another value at ``a.b.0.c``."""
    result: dict[str, Any] = copy.deepcopy(MACHINE)
    inner: Any = result
    *path, last = key.split(".")
    for step in path:
        inner = inner[int(step)] if step.isdigit() else inner.setdefault(step, {})
    inner[int(last) if last.isdigit() else last] = value
    return result


@pytest.mark.parametrize(("key", "value", "message"), BAD)
def test_bad_descriptions(tmp_path: Path, key: str, value: object, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        read_cluster(write(tmp_path, changed(key, value)))
    assert str(tmp_path) in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize("key", ["device", "dimensions"])
def test_missing_keys(tmp_path: Path, key: str) -> None:
    with pytest.raises(FormatError, match=f"'{key}' is missing"):
        read_cluster(write(tmp_path, {name: value for name, value in MACHINE.items() if name != key}))


@pytest.mark.parametrize("content", ["", "[1]", "a: [", "a: 1\na: 2", "1: 2", "device: !!int x"])
def test_no_description(tmp_path: Path, content: str) -> None:
    with pytest.raises(FormatError):
        read_cluster(write(tmp_path, content))


def test_a_folder_is_no_description(tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        read_cluster(tmp_path)


PLACES = [key for key, _, _ in BAD] + [
    "dimensions.0",
    "dimensions.1",
    "dimensions.0.name",
    "name",
    "dimensions.1.spines",
]
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.integers(1, 9), st.floats(), st.text(max_size=6))
    | st.sampled_from(["torus", "ring", "fat_tree", "rail_optimized", "h100-sxm", "direct:2", "flat_ring", "pool"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["use", "kind", "all_reduce", "size", "sizes", "compute"]), inner, max_size=3)
    ),
)


@given(key=st.sampled_from(PLACES), value=VALUES)
def test_any_values_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, key: str, value: object) -> None:
    path = write(tmp_path_factory.getbasetemp(), yaml.safe_dump(changed(key, value)))
    try:
        cluster = read_cluster(path)
    except FormatError as error:
        assert len(str(error)) < 2000
    else:
        network = cluster.network()
        assert network.num_ranks == cluster.num_devices
        check(network, cluster.system(next(iter(cluster.device.peak_flops_per_s))), path)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Two or three dimensions of any kind, small enough to try every pair of ranks."""
    layers = []
    for at in range(draw(st.integers(1, 3))):
        wiring = draw(st.sampled_from([*Wiring]))
        count = draw(st.integers(1, 2)) if wiring == Wiring.TORUS else 1
        sizes = tuple(draw(st.integers(2, 5)) for _ in range(count))
        leaf = draw(st.none() | st.integers(1, sizes[0]))
        tree = wiring in (Wiring.FAT_TREE, Wiring.RAIL_OPTIMIZED)
        spines = draw(st.none() | st.integers(1, 4))
        oversubscription = draw(st.sampled_from([1.0, 1.5, 4.0]))
        link = Link(float(at + 1), 10.0)
        layer = Layer(f"layer{at}", wiring, sizes, link)
        layers.append(
            replace(layer, nodes_per_leaf=leaf, spines=spines, oversubscription=oversubscription) if tree else layer
        )
    device = Device("GPU", {"bfloat16": 1e14}, 1e12, 1)
    placement = draw(st.sampled_from(["linear", "round_robin"]))
    return Cluster("any", device, tuple(layers), layers[0].size, placement)


def check_route(fabric: Fabric, src: int, dst: int) -> None:
    route = fabric.route(src, dst)
    assert route == fabric.route(src, dst)
    ends = [int(fabric.positions[src]), int(fabric.positions[dst])]
    if src == dst:
        assert route == []
        return
    assert [fabric.source[route[0]], fabric.target[route[-1]]] == ends
    assert all(fabric.target[one] == fabric.source[two] for one, two in pairwise(route))
    passed = [ends[0], *fabric.target[route].tolist()]
    assert len(set(passed)) == len(passed), "no vertex twice"


@given(cluster=clusters(), data=st.data())
def test_routes_lead_from_link_to_link(cluster: Cluster, data: st.DataObject) -> None:
    fabric = cluster.fabric()
    ranks = st.integers(0, cluster.num_devices - 1)
    for src, dst in data.draw(st.lists(st.tuples(ranks, ranks), min_size=1, max_size=20)):
        check_route(fabric, src, dst)


@given(cluster=clusters())
def test_links_are_there_once_and_in_both_directions(cluster: Cluster) -> None:
    fabric = cluster.fabric()
    ends = list(zip(fabric.segment.tolist(), fabric.source.tolist(), fabric.target.tolist(), strict=True))
    assert len(set(ends)) == len(ends) == fabric.num_links == len(fabric.names)
    assert {(at, target, source) for at, source, target in ends} == set(ends)
    assert set(fabric.source.tolist()) == set(range(fabric.num_vertices))
    assert len({fabric.vertex_name(vertex) for vertex in range(fabric.num_vertices)}) == fabric.num_vertices
    assert (fabric.bandwidth_bytes_per_ns > 0).all()


def links(fabric: Fabric, src: int, dst: int) -> list[str]:
    return [fabric.names[link] for link in fabric.route(src, dst)]


def fabric_of(*layers: Layer) -> Fabric:
    return Cluster("any", Device("GPU", {}, 1, 1), layers, layers[0].size).fabric()


def test_a_ring_goes_the_shorter_way() -> None:
    fabric = fabric_of(Layer("r", Wiring.RING, (6,), Link(1, 1)))
    targets = {dst: fabric.target[fabric.route(0, dst)].tolist() for dst in range(1, 6)}
    assert targets == {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [5, 4], 5: [5]}


def test_a_torus_turns_once() -> None:
    fabric = fabric_of(Layer("t", Wiring.TORUS, (4, 4), Link(1, 1)))
    assert fabric.target[fabric.route(0, 10)].tolist() == [1, 2, 6, 10]
    assert fabric.num_links == 64


def test_a_pair_has_one_link_each_way() -> None:
    for wiring in (Wiring.RING, Wiring.FULLY_CONNECTED):
        fabric = fabric_of(Layer("pair", wiring, (2,), Link(3, 1)))
        assert list(zip(fabric.source, fabric.target, strict=True)) == [(0, 1), (1, 0)]
        assert fabric.links_between(1, 0) == [1]
        assert fabric.links_between(0, 0) == []


def test_rails(tmp_path: Path) -> None:
    rails = {
        key: value for key, value in FAT_TREE.items() if key not in ("spines", "nodes_per_leaf", "oversubscription")
    }
    fabric = read(tmp_path, dimensions=[NVLINK, rails | {"topology": "rail_optimized"}]).fabric()
    assert links(fabric, 3, 11) == ["node0/device3 > InfiniBand/switch3", "InfiniBand/switch3 > node1/device3"]
    assert links(fabric, 3, 12) == [
        "node0/device3 > NVLink/switch0",
        "NVLink/switch0 > node0/device4",
        "node0/device4 > InfiniBand/switch4",
        "InfiniBand/switch4 > node1/device4",
    ]


def test_a_fat_tree_goes_from_device_to_device(tmp_path: Path) -> None:
    fabric = read(tmp_path).fabric()
    assert links(fabric, 3, 12) == ["node0/device3 > InfiniBand/leaf0", "InfiniBand/leaf0 > node1/device4"]
    far = fabric.route(3, 20)
    assert [fabric.names[link].partition(" > ")[0].rstrip("0123456789") for link in far] == [
        "node0/device",
        "InfiniBand/leaf",
        "InfiniBand/spine",
        "InfiniBand/leaf",
    ]
    assert links(fabric, 3, 4) == ["node0/device3 > NVLink/switch0", "NVLink/switch0 > node0/device4"]


def test_oversubscription_is_between_leaves_and_spines(tmp_path: Path) -> None:
    fabric = read(tmp_path).fabric()
    leaf, spines = 48 + 6, range(48 + 6 + 3, 48 + 6 + 3 + 4)
    below = sum(fabric.bandwidth_bytes_per_ns[(fabric.target == leaf) & (fabric.source < 48)])
    above = sum(fabric.bandwidth_bytes_per_ns[link] for spine in spines for link in fabric.links_between(leaf, spine))
    assert fabric.vertex_name(leaf) == "InfiniBand/leaf0"
    assert (below, above) == (16 * 25, 200)


def test_messages_spread_over_spines(tmp_path: Path) -> None:
    fabric = read(tmp_path).fabric()
    used = Counter(int(fabric.target[fabric.route(src, dst)[1]]) for src in range(16) for dst in range(16, 48))
    assert len(used) == 4
    assert max(used.values()) < 1.5 * min(used.values())


def test_a_slow_link(tmp_path: Path) -> None:
    fabric = read(tmp_path).fabric()
    link = fabric.route(0, 1)[0]
    slow = fabric.slowed([link], 0.25)
    assert slow.bandwidth_bytes_per_ns[link] == fabric.bandwidth_bytes_per_ns[link] / 4
    assert np.array_equal(np.delete(slow.bandwidth_bytes_per_ns, link), np.delete(fabric.bandwidth_bytes_per_ns, link))
    assert slow.route(0, 47) == fabric.route(0, 47)
    for factor in (0, -1, 2):
        with pytest.raises(ValueError, match="factor"):
            fabric.slowed([link], factor)


def test_the_documented_description_reads(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "machines.md"
    text = page.read_text()
    cluster = read_cluster(write(tmp_path, text.split("```yaml\n")[1].split("```")[0]))
    assert (cluster.name, cluster.num_devices, cluster.num_nodes) == ("my cluster", 256, 32)
    scope: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], scope)
    assert scope["cluster"].num_devices == 32
    assert len(scope["fabric"].route(3, 12)) == 4
