"""ASTRA-sim's configuration files: what is read, noted and refused."""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.machine.astra import check, read_groups, read_memory, read_network, read_system
from foretrace.machine.network import Dimension, Network, Topology
from foretrace.machine.system import Algorithm, MemoryKind, Pattern, Priority, RemoteMemory
from foretrace.trace.reading import FormatError
from foretrace.trace.workload import CommType

NETWORK = {"topology": ["Ring", "Switch"], "npus_count": [4, 2], "bandwidth": [400.0, 37.5], "latency": [250, 1500.5]}
SYSTEM: dict[str, Any] = {"preferred-dataset-splits": 4, "all-reduce-implementation": ["ring", "direct"]}
MEMORY: dict[str, Any] = {"memory-type": "MEMORY_POOL", "remote-mem-latency": 100, "remote-mem-bw": 32}


def write(folder: Path, content: object, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.fixture
def configs(shared: Path) -> Path:
    return shared / "reference" / "astra-sim" / "configs"


def test_every_reference_config_reads(configs: Path) -> None:
    notes: Counter[str] = Counter()
    networks = [read_network(path, notes) for path in sorted(configs.glob("*.yml"))]
    systems = [path for path in sorted(configs.glob("*.json")) if path.name != "mem.json"]
    for path in systems:
        system = read_system(path, notes=notes)
        assert len(system.algorithms) == 4
        assert system.priority == (Priority.FIFO if "FIFO" in path.name else Priority.LIFO)
    assert len(networks) >= 25
    assert len(systems) >= 25
    assert read_memory(configs / "mem.json", notes) == RemoteMemory()
    assert notes == {"system key 'boost-mode' has no effect": len(systems)}


def test_groups_beside_traces_read(shared: Path, tmp_path: Path) -> None:
    found = 0
    for packed in sorted((shared / "reference" / "astra-sim" / "traces").glob("*.tar.gz")):
        if not packed.name.startswith(("llm", "groups", "rnd")):
            continue
        with tarfile.open(packed) as archive:
            for member in archive:
                if member.name.endswith(".json"):
                    content = archive.extractfile(member)
                    assert content is not None
                    path = write(tmp_path, content.read().decode())
                    assert read_groups(path) == {int(key): ranks for key, ranks in json.loads(path.read_text()).items()}
                    found += 1
    assert found > 3


def test_network(tmp_path: Path) -> None:
    path = write(
        tmp_path, "topology: [ Ring, FullyConnected ]\nnpus_count: [8, 2]\nbandwidth: [50, 5e1]\nlatency: [0, 1]"
    )
    bandwidth = 50.0 * 1073741824 / 1e9
    assert read_network(path) == Network(
        (Dimension(Topology.RING, 8, bandwidth, 0.0), Dimension(Topology.FULLY_CONNECTED, 2, bandwidth, 1.0))
    )


def test_system_defaults(tmp_path: Path) -> None:
    system = read_system(write(tmp_path, {"preferred-dataset-splits": 1}))
    assert (system.endpoint_delay_ns, system.active_chunks, system.splits) == (10, 1, 1)
    assert not system.local_bandwidth_aware
    assert not system.roofline
    assert not system.replay_only
    assert system.algorithms == {}
    assert system.memory_bytes_per_s is None
    assert system.peak_flops_per_s is None


def test_system_units(tmp_path: Path) -> None:
    system = read_system(write(tmp_path, SYSTEM | {"local-mem-bw": 1600, "peak-perf": 0.5, "roofline-enabled": 1}))
    assert system.memory_bytes_per_s == 1.6e12
    assert system.peak_flops_per_s == 5e11
    assert system.roofline


@pytest.mark.parametrize(
    ("given_delay", "scale", "expected"), [(None, 3.0, 10), (7, 1.0, 7), (7, 0.5, 3), (10, 2.55, 25), (0, 9.0, 0)]
)
def test_injection_scale(tmp_path: Path, given_delay: int | None, scale: float, expected: int) -> None:
    delay = {} if given_delay is None else {"endpoint-delay": given_delay}
    assert read_system(write(tmp_path, SYSTEM | delay), injection_scale=scale).endpoint_delay_ns == expected


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf")])
def test_bad_injection_scale(tmp_path: Path, scale: float) -> None:
    with pytest.raises(FormatError, match="injection scale"):
        read_system(write(tmp_path, SYSTEM), injection_scale=scale)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ring", Algorithm(Pattern.RING)),
        ("oneRing", Algorithm(Pattern.RING, flat=True)),
        ("direct", Algorithm(Pattern.DIRECT)),
        ("direct12", Algorithm(Pattern.DIRECT, 12)),
        ("oneDirect", Algorithm(Pattern.DIRECT, flat=True)),
        ("oneDirect4", Algorithm(Pattern.DIRECT, 4, flat=True)),
        ("halvingDoubling", Algorithm(Pattern.HALVING_DOUBLING)),
        ("oneHalvingDoubling", Algorithm(Pattern.HALVING_DOUBLING, flat=True)),
        ("doubleBinaryTree", Algorithm(Pattern.DOUBLE_BINARY_TREE)),
    ],
)
def test_implementations(tmp_path: Path, name: str, expected: Algorithm) -> None:
    system = read_system(write(tmp_path, SYSTEM | {"all-reduce-implementation": [name]}))
    assert system.algorithms == {CommType.ALL_REDUCE: (expected,)}


def test_notes_name_what_has_no_effect(tmp_path: Path) -> None:
    notes: Counter[str] = Counter()
    idle = {"boost-mode": 0, "L": 1, "intra-dimension-scheduling": "FIFO", "prefered-dataset-splits": 3}
    read_system(write(tmp_path, SYSTEM | idle | {"all-reduce-implementation": ["oneRing", "ring"]}), notes=notes)
    read_network(write(tmp_path, NETWORK | {"links_count": [1, 1]}), notes)
    read_memory(write(tmp_path, {"memory-type": "NO_MEMORY_EXPANSION", "remote-mem-bw": 1}), notes)
    read_groups(write(tmp_path, {"0": [0, 1]}), notes=notes)
    assert notes == dict.fromkeys(
        [
            "system key 'boost-mode' has no effect",
            "system key 'L' has no effect",
            "system key 'intra-dimension-scheduling' has no effect",
            "system key 'prefered-dataset-splits' is unknown",
            "system key 'all-reduce-implementation': entries after 'oneRing' have no effect on collectives of all "
            "ranks",
            "network key 'links_count' is unknown",
            "memory key 'remote-mem-bw' is unknown",
            "group 0 of the group file has no effect: traces call all ranks so",
        ],
        1,
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("MEMORY_POOL", MemoryKind.POOL),
        ("PER_NPU", MemoryKind.PER_RANK),
        ("PER_NPU_MEMORY_EXPANSION", MemoryKind.PER_RANK),
        ("PER_NODE", MemoryKind.PER_NODE),
        ("PER_NODE_MEMORY_EXPANSION", MemoryKind.PER_NODE),
    ],
)
def test_memory(tmp_path: Path, name: str, kind: MemoryKind) -> None:
    nodes = {"num-npus-per-node": 8} if kind == MemoryKind.PER_NODE else {}
    notes: Counter[str] = Counter()
    memory = read_memory(write(tmp_path, MEMORY | {"memory-type": name, "remote-mem-bw": 32.7} | nodes), notes)
    assert memory == RemoteMemory(kind, 100, 32, 8 if nodes else 1)
    assert notes == {"memory key 'remote-mem-bw': 32.7 is taken as 32": 1}


BAD_NETWORKS: list[tuple[str, Any, str]] = [
    ("topology", None, "'topology' is missing"),
    ("topology", "Ring", "'topology' is 'Ring', not a list"),
    ("topology", [], "'topology' is an empty list"),
    ("topology", ["Ring", "Torus"], r"'topology\[1\]' is 'Torus'"),
    ("topology", ["ring", "Switch"], r"'topology\[0\]' is 'ring'"),
    ("topology", ["Ring", 3], r"'topology\[1\]' is 3"),
    ("topology", ["Ring"], "'npus_count' has 2 entries, 'topology' has 1"),
    ("npus_count", [4], "'npus_count' has 1 entries"),
    ("npus_count", [4, 1], r"'npus_count\[1\]' is 1"),
    ("npus_count", [0, 2], r"'npus_count\[0\]' is 0"),
    ("npus_count", [4.5, 2], r"'npus_count\[0\]' is 4.5"),
    ("npus_count", [True, 2], r"'npus_count\[0\]' is true"),
    ("npus_count", ["8", 2], r"'npus_count\[0\]' is '8'"),
    ("npus_count", [1 << 30, 1 << 30], "'npus_count' makes more than"),
    ("npus_count", None, "'npus_count' is missing"),
    ("bandwidth", 50, "'bandwidth' is 50, not a list"),
    ("bandwidth", [1, 2, 3], "'bandwidth' has 3 entries"),
    ("bandwidth", [0, 2], r"'bandwidth\[0\]' is 0"),
    ("bandwidth", [1, -2], r"'bandwidth\[1\]' is -2"),
    ("bandwidth", [1, 1e300], r"'bandwidth\[1\]' is 1e\+300"),
    ("bandwidth", [10**400, 1], r"'bandwidth\[0\]'"),
    ("bandwidth", [1, False], r"'bandwidth\[1\]' is false"),
    ("bandwidth", [None, 1], r"'bandwidth\[0\]' is empty"),
    ("latency", [0, -1], r"'latency\[1\]' is -1"),
    ("latency", [[], 1], r"'latency\[0\]' is a list"),
    ("latency", {"a": 1}, "'latency' is a mapping"),
]


@pytest.mark.parametrize(("key", "value", "message"), BAD_NETWORKS)
def test_bad_networks(tmp_path: Path, key: str, value: object, message: str) -> None:
    changed = {name: old for name, old in NETWORK.items() if name != key}
    with pytest.raises(FormatError, match=message) as caught:
        read_network(write(tmp_path, changed if value is None else changed | {key: value}, "bad.yml"))
    assert str(tmp_path / "bad.yml") in str(caught.value)
    assert caught.value.remedy


BAD_SYSTEMS: list[tuple[dict[str, Any], str]] = [
    ({"preferred-dataset-splits": 0}, "'preferred-dataset-splits' is 0"),
    ({"preferred-dataset-splits": True}, "'preferred-dataset-splits' is true"),
    ({"preferred-dataset-splits": None}, "'preferred-dataset-splits' is empty"),
    ({"endpoint-delay": -1}, "'endpoint-delay' is -1"),
    ({"endpoint-delay": 1.5}, "'endpoint-delay' is 1.5"),
    ({"endpoint-delay": None}, "'endpoint-delay' is empty"),
    ({"active-chunks-per-dimension": 0}, "'active-chunks-per-dimension' is 0"),
    ({"scheduling-policy": "fifo"}, "'scheduling-policy' is 'fifo'"),
    ({"collective-optimization": "none"}, "'collective-optimization' is 'none'"),
    ({"local-mem-bw": 0}, "'local-mem-bw' is 0"),
    ({"local-mem-bw": "1600"}, "'local-mem-bw' is '1600'"),
    ({"peak-perf": -900}, "'peak-perf' is -900"),
    ({"peak-perf": 1e300}, r"'peak-perf' is 1e\+300"),
    ({"roofline-enabled": True}, "'roofline-enabled' is true"),
    ({"roofline-enabled": 2}, "'roofline-enabled' is 2"),
    ({"roofline-enabled": 1, "peak-perf": 1}, "'local-mem-bw' is missing"),
    ({"roofline-enabled": 1, "local-mem-bw": 1}, "'peak-perf' is missing"),
    ({"replay-only": "yes"}, "'replay-only' is 'yes'"),
    ({"model-shared-bus": 1}, "'model-shared-bus' is 1, and a shared bus is not supported"),
    ({"all-reduce-implementation": "ring"}, "'all-reduce-implementation' is 'ring', not a list"),
    ({"all-gather-implementation": []}, "'all-gather-implementation' is an empty list"),
    ({"all-to-all-implementation": ["Ring"]}, r"'all-to-all-implementation\[0\]' is 'Ring'"),
    ({"reduce-scatter-implementation": ["ring", "direct0"]}, r"'reduce-scatter-implementation\[1\]' is 'direct0'"),
    ({"all-reduce-implementation": ["oneDoubleBinaryTree"]}, "is 'oneDoubleBinaryTree'"),
    ({"all-reduce-implementation": ["one"]}, "is 'one'"),
    ({"all-reduce-implementation": [7]}, r"'all-reduce-implementation\[0\]' is 7"),
    ({"all-reduce-implementation": ["ring", "oneRing"]}, "'all-reduce-implementation' mixes"),
    ({"all-reduce-implementation": ["ring", "ring", "ring"]}, "has 3 entries, the network 2 dimensions"),
    ({"all-reduce-implementation-custom": ["x"]}, "'all-reduce-implementation-custom.0.' is 'x': there is no x.0.et"),
    ({"all-to-all-implementation-custom": ["x", "y"]}, "'all-to-all-implementation-custom' has 2 entries"),
    ({"all-gather-implementation-custom": [3]}, "'all-gather-implementation-custom.0.' is 3, not the prefix of ETs"),
    ({"per-node-custom-implementation": "x.yaml"}, "'per-node-custom-implementation' is 'x.yaml': there is no such"),
]


@pytest.mark.parametrize(("change", "message"), BAD_SYSTEMS)
def test_bad_systems(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        read_system(write(tmp_path, SYSTEM | change), 2)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.remedy


def test_splits_have_no_default(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="'preferred-dataset-splits' is missing; add it"):
        read_system(write(tmp_path, {}))


BAD_MEMORIES: list[tuple[dict[str, Any], str]] = [
    ({"memory-type": "HBM"}, "'memory-type' is 'HBM'"),
    ({"memory-type": 1}, "'memory-type' is 1"),
    ({"memory-type": "PER_NODE"}, "'num-npus-per-node' is missing"),
    ({"memory-type": "PER_NODE", "num-npus-per-node": 0}, "'num-npus-per-node' is 0"),
    ({"remote-mem-bw": 0}, "'remote-mem-bw' is 0"),
    ({"remote-mem-bw": 0.9}, "'remote-mem-bw' is 0.9"),
    ({"remote-mem-latency": -1}, "'remote-mem-latency' is -1"),
    ({"remote-mem-latency": "1"}, "'remote-mem-latency' is '1'"),
]


@pytest.mark.parametrize(("change", "message"), BAD_MEMORIES)
def test_bad_memories(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read_memory(write(tmp_path, MEMORY | change))


def test_memory_needs_its_figures(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="'remote-mem-latency' is missing"):
        read_memory(write(tmp_path, {"memory-type": "PER_NPU"}))


BAD_GROUPS: list[tuple[object, str]] = [
    ({"1": [0, 1, 0]}, r"'1\[2\]' is rank 0 a second time"),
    ({"1": [0, -1]}, r"'1\[1\]' is -1, which is no rank"),
    ({"1": [0, 1.0]}, r"'1\[1\]' is 1.0"),
    ({"1": [0, True]}, r"'1\[1\]' is true"),
    ({"1": [0, "1"]}, r"'1\[1\]' is '1'"),
    ({"1": [0, 8]}, r"'1\[1\]' is 8"),
    ({"1": 0}, "'1' is 0, not a list"),
    ({"1": []}, "'1' is an empty list"),
    ({"tp": [0, 1]}, "'tp' is no number of a group"),
    ({"-1": [0, 1]}, "'-1' is no number"),
    ({"1.0": [0, 1]}, "'1.0' is no number"),
    ({"9999999999": [0]}, "'9999999999' is no number"),
    ({"²": [0]}, "'²' is no number"),
    ({"1": [0], "01": [1]}, "'1' is group 1 a second time"),
    ('{"1": [0], "1": [1]}', "'1' stands there twice"),
    ([[0, 1]], "holds a list"),
]


@pytest.mark.parametrize(("content", "message"), BAD_GROUPS)
def test_bad_groups(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read_groups(write(tmp_path, content), 8)


def test_groups_keep_the_order_of_members(tmp_path: Path) -> None:
    assert read_groups(write(tmp_path, {"2": [3, 0], "1": [5]})) == {1: [5], 2: [3, 0]}


READERS = [read_network, read_system, read_memory, read_groups]


@pytest.mark.parametrize("reader", READERS)
def test_no_file(tmp_path: Path, reader: Any) -> None:
    for path in (tmp_path, tmp_path / "absent.json", "a\0b"):
        with pytest.raises(FormatError):
            reader(path)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "content", ["", "[", "{", "3", "null", "[1]", '{"a": }', "\t- a", "{1: 2}", "[" * 100_000, "!!int x", "&a [*a]"]
)
def test_no_configuration(tmp_path: Path, reader: Any, content: str) -> None:
    with pytest.raises(FormatError):
        reader(write(tmp_path, content))


@pytest.mark.parametrize("reader", READERS)
def test_no_text(tmp_path: Path, reader: Any) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="not UTF-8"):
        reader(tmp_path / "binary")


def test_byte_order_mark(tmp_path: Path) -> None:
    assert read_groups(write(tmp_path, '\ufeff{"1": [0]}')) == {1: [0]}


@pytest.mark.parametrize("reader", [read_system, read_memory, read_groups])
def test_numbers_that_json_has_not(tmp_path: Path, reader: Any) -> None:
    for text in ("NaN", "Infinity", "-Infinity"):
        with pytest.raises(FormatError, match="no number of JSON"):
            reader(write(tmp_path, f'{{"local-mem-bw": {text}}}'))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bandwidth: [.nan, 1]", r"'bandwidth\[0\]' is nan"),
        ("bandwidth: [.inf, 1]", r"'bandwidth\[0\]' is inf"),
        ("npus_count: [1:30, 2]", r"'npus_count\[0\]' is '1:30'"),  # 90 in YAML 1.1
        ("npus_count: [010, 2]", r"'npus_count\[0\]' is '010'"),  # 8 in YAML 1.1
        ("topology: [yes, Ring]", r"'topology\[0\]' is 'yes'"),  # true in YAML 1.1
        ("latency: [1, 1]\nlatency: [2, 2]", "line 2: key 'latency' stands there a second time"),
        ("latency: [!!python/name:os.system x, 1]", "not YAML"),
    ],
)
def test_yaml(tmp_path: Path, text: str, message: str) -> None:
    key = text.partition(":")[0]
    rest = "\n".join(f"{name}: {json.dumps(value)}" for name, value in NETWORK.items() if name != key)
    with pytest.raises(FormatError, match=message):
        read_network(write(tmp_path, f"{text}\n{rest}\n", "bad.yml"))


def test_duplicate_keys_in_json(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="'endpoint-delay' stands there twice"):
        read_system(write(tmp_path, '{"endpoint-delay": 1, "endpoint-delay": 1}'))


def network_of(*sizes: int) -> Network:
    return Network(tuple(Dimension(Topology.RING, size, 1.0, 1.0) for size in sizes))


@pytest.mark.parametrize(
    ("names", "sizes", "message"),
    [
        (["ring", "ring"], [4], "has 2 entries, the network 1 dimensions"),
        (["doubleBinaryTree"], [12], "dimension 0 of 12 ranks, which is no power of two"),
        (["ring", "doubleBinaryTree"], [4, 6], "dimension 1 of 6 ranks"),
        (["doubleBinaryTree"], [4, 4], "1 entries for 2 dimensions"),
        (["doubleBinaryTree", "ring"], [8, 3], None),
        (["ring"], [4, 4, 4], None),
        (["oneRing"], [3, 5], None),
        (["halvingDoubling"], [12], None),
    ],
)
def test_check(tmp_path: Path, names: list[str], sizes: list[int], message: str | None) -> None:
    path = write(tmp_path, SYSTEM | {"all-reduce-implementation": names})
    system = read_system(path)
    if message is None:
        check(network_of(*sizes), system, path)
        return
    with pytest.raises(FormatError, match=message) as caught:
        check(network_of(*sizes), system, path)
    assert "'all-reduce-implementation'" in str(caught.value)


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 9),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(["Ring", "ring", "direct3", "oneRing", "doubleBinaryTree", "LIFO", "baseline", "MEMORY_POOL"]),
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
KEYS = [
    *NETWORK,
    *MEMORY,
    *("preferred-dataset-splits", "endpoint-delay", "active-chunks-per-dimension", "scheduling-policy"),
    *("collective-optimization", "local-mem-bw", "peak-perf", "roofline-enabled", "replay-only", "model-shared-bus"),
    *("all-reduce-implementation", "all-to-all-implementation", "num-npus-per-node", "1", "2"),
]


@given(
    base=st.sampled_from([NETWORK, SYSTEM, MEMORY, {"1": [0, 1]}]),
    change=st.dictionaries(st.sampled_from(KEYS), VALUES),
)
def test_any_values_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, base: dict[str, Any], change: dict[str, Any]
) -> None:
    path = write(tmp_path_factory.getbasetemp(), base | change)
    for reader in READERS:
        try:
            result: Any = reader(path)  # type: ignore[operator]
        except FormatError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 2000
        else:
            assert result is not None
