"""ASTRA-sim's configuration files: network (YAML), system, remote memory and groups (JSON).

Every reader takes ``notes``, which counts what stands in a file and has no effect; what cannot be honored is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from foretrace.machine.config_file import DURATION_NS, RATE, Limits, Notes, Section, note, read_json, read_yaml, shown
from foretrace.machine.custom import prefix_of
from foretrace.machine.limits import MOST_CHUNKS, MOST_RANKS
from foretrace.machine.network import Dimension, Network, Topology
from foretrace.machine.system import Algorithm, MemoryKind, Pattern, Priority, RemoteMemory, System
from foretrace.trace.reading import FormatError
from foretrace.trace.workload import CommType

_Path = str | PathLike[str]

TOPOLOGIES = {"Ring": Topology.RING, "FullyConnected": Topology.FULLY_CONNECTED, "Switch": Topology.SWITCH}
IMPLEMENTATIONS = {
    CommType.ALL_REDUCE: "all-reduce-implementation",
    CommType.ALL_GATHER: "all-gather-implementation",
    CommType.REDUCE_SCATTER: "reduce-scatter-implementation",
    CommType.ALL_TO_ALL: "all-to-all-implementation",
}
_PATTERNS = {
    "ring": Pattern.RING,
    "direct": Pattern.DIRECT,
    "halvingDoubling": Pattern.HALVING_DOUBLING,
    "doubleBinaryTree": Pattern.DOUBLE_BINARY_TREE,
}
_IMPLEMENTATION = re.compile(r"(ring|halvingDoubling|doubleBinaryTree|direct([1-9][0-9]{0,8})?)")
_FLAT_IMPLEMENTATION = re.compile(r"one(Ring|HalvingDoubling|Direct([1-9][0-9]{0,8})?)")
_NAMES = "ring, oneRing, direct[W], oneDirect[W], halvingDoubling, oneHalvingDoubling, doubleBinaryTree"
# Keys of a system file that are known and change no time.
_IDLE_KEYS = (
    *("boost-mode", "comm-scale", "compute-scale", "intra-dimension-scheduling", "inter-dimension-scheduling"),
    *("local-reduction-delay", "L", "o", "g", "G", "trace-enabled", "track-local-mem", "local-mem-trace-filename"),
)
_MEMORY_KINDS = {
    "NO_MEMORY_EXPANSION": MemoryKind.NONE,
    "PER_NPU": MemoryKind.PER_RANK,
    "PER_NPU_MEMORY_EXPANSION": MemoryKind.PER_RANK,
    "PER_NODE": MemoryKind.PER_NODE,
    "PER_NODE_MEMORY_EXPANSION": MemoryKind.PER_NODE,
    "MEMORY_POOL": MemoryKind.POOL,
}
_GIB = 1073741824
_LARGEST = (1 << 31) - 1  # groups: they are 32-bit numbers in traces
_LARGEST_NS = 1 << 53
_DEFAULT_DELAY_NS = 10


def read_network(path: _Path, notes: Notes | None = None) -> Network:
    """ASTRA-sim's network file: lists ``topology``, ``npus_count``, ``bandwidth`` (2^30 bytes/s), ``latency`` (ns).

    Raises:
        FormatError: where something is missing or makes no sense.
    """
    section = read_yaml(path)
    topologies = section.items("topology")
    columns = {key: section.items(key) for key in ("npus_count", "bandwidth", "latency")}
    for key, column in columns.items():
        if len(column) != len(topologies):
            problem = f"has {len(column)} entries, 'topology' has {len(topologies)}"
            section.fail(key, problem, "give every list one entry a dimension")
    rows = zip(topologies, *columns.values(), strict=True)
    dimensions = tuple(_dimension(section, at, row) for at, row in enumerate(rows))
    network = Network(dimensions)
    if network.num_ranks > MOST_RANKS:
        problem = f"makes more than {MOST_RANKS} ranks: {network.num_ranks}"
        section.fail("npus_count", problem, "make the network smaller")
    _note_rest(section, "network", notes)
    return network


def _dimension(section: Section, at: int, row: tuple[object, object, object, object]) -> Dimension:
    topology, size, bandwidth, latency = row
    gib_per_s = section.as_number(f"bandwidth[{at}]", bandwidth, RATE)
    bytes_per_ns = gib_per_s * _GIB / 1e9  # in this order: ASTRA-sim's last bit depends on it
    return Dimension(
        TOPOLOGIES[section.as_choice(f"topology[{at}]", topology, TOPOLOGIES)],
        section.as_integer(f"npus_count[{at}]", size, least=2),
        bytes_per_ns,
        section.as_number(f"latency[{at}]", latency, DURATION_NS),
    )


def read_system(
    path: _Path, num_dimensions: int | None = None, injection_scale: float = 1.0, notes: Notes | None = None
) -> System:
    """ASTRA-sim's system file.

    Args:
        path: the JSON file.
        num_dimensions: of the network; lists of implementations that are longer are refused.
        injection_scale: factor of ``endpoint-delay``, where the file has it (ASTRA-sim's ``--injection-scale``).
        notes: counts keys without effect.

    Raises:
        FormatError: where something is missing, makes no sense or is not supported.
    """
    section = read_json(path)
    _refuse_other_models(section)
    system = System(
        endpoint_delay_ns=_endpoint_delay(section, injection_scale),
        active_chunks=section.integer("active-chunks-per-dimension", 1, least=1),
        splits=section.integer("preferred-dataset-splits", least=1, most=MOST_CHUNKS),
        priority=Priority(section.choice("scheduling-policy", [*Priority], Priority.LIFO)),
        local_bandwidth_aware=section.choice("collective-optimization", _OPTIMIZATIONS, "baseline") == "localBWAware",
        algorithms=_algorithms(section, num_dimensions, notes),
        memory_bytes_per_s=_scaled(section, "local-mem-bw", 1e9),
        peak_flops_per_s=_scaled(section, "peak-perf", 1e12),
        roofline=section.integer("roofline-enabled", 0, most=1) == 1,
        replay_only=section.integer("replay-only", 0, most=1) == 1,
        custom=_custom(section),
        custom_nodes=_custom_nodes(section),
    )
    if system.roofline and (system.memory_bytes_per_s is None or system.peak_flops_per_s is None):
        missing = "local-mem-bw" if system.memory_bytes_per_s is None else "peak-perf"
        section.fail(missing, "is missing, but 'roofline-enabled' is 1", "add it, or write 0 for 'roofline-enabled'")
    _note_rest(section, "system", notes)
    return system


_OPTIMIZATIONS = ("baseline", "localBWAware")


def _refuse_other_models(section: Section) -> None:
    if section.integer("model-shared-bus", 0, most=1) == 1:
        remedy = "write 0; local memory is modeled by 'local-mem-bw'"
        section.fail("model-shared-bus", "is 1, and a shared bus is not supported", remedy)


def _endpoint_delay(section: Section, scale: float) -> int:
    given = section.integer("endpoint-delay", None, most=_LARGEST_NS)
    try:
        scaled = scaled_delay(given or 0, scale)
    except ValueError as error:
        section.fail("endpoint-delay", str(error), "make it or the injection scale smaller")
    return _DEFAULT_DELAY_NS if given is None else scaled


def scaled_delay(delay_ns: int, scale: float) -> int:
    """An endpoint delay times the injection scale.

    Raises:
        ValueError: if the scale is no number from 0, or the delay becomes too long.
    """
    if isinstance(scale, bool) or not math.isfinite(scale) or scale < 0:
        raise ValueError(f"cannot be scaled by {shown(scale)}: give an injection scale from 0")
    scaled = delay_ns * scale
    if scaled > _LARGEST_NS:
        raise ValueError(f"is {scaled:g} ns with the injection scale")
    return int(scaled)


def _scaled(section: Section, key: str, factor: float) -> float | None:
    value: float | None = section.number(key, None, RATE)
    return None if value is None else value * factor


def _algorithms(
    section: Section, num_dimensions: int | None, notes: Notes | None
) -> dict[CommType, tuple[Algorithm, ...]]:
    found = {}
    for kind, key in IMPLEMENTATIONS.items():
        names = section.items(key, None)
        if names is None:
            continue
        algorithms = tuple(_algorithm(section, f"{key}[{at}]", name) for at, name in enumerate(names))
        if num_dimensions is not None and len(algorithms) > num_dimensions:
            section.fail(key, *_too_long(len(algorithms), num_dimensions))
        if any(one.flat for one in algorithms[1:]) and not algorithms[0].flat:
            section.fail(key, "mixes one ring of all ranks with dimensions", "write the one... entry alone")
        if algorithms[0].flat and len(algorithms) > 1:
            note(notes, f"system key {key!r}: entries after {names[0]!r} have no effect on collectives of all ranks")
        found[kind] = algorithms
    return found


def _custom(section: Section) -> dict[CommType, str]:
    """Prefixes of ETs that are the algorithm of a kind of collective: a list of one, as in ASTRA-sim."""
    found = {}
    for kind, implementation in IMPLEMENTATIONS.items():
        key = f"{implementation}-custom"
        prefixes = section.items(key, None)
        if prefixes is None:
            continue
        if len(prefixes) > 1:
            section.fail(key, f"has {len(prefixes)} entries", "write one: its ETs are for all dimensions together")
        found[kind] = prefix_of(section, f"{key}[0]", prefixes[0])
    return found


def _custom_nodes(section: Section) -> dict[int, str]:
    """Prefixes by the ids of nodes, from the YAML file that ``per-node-custom-implementation`` names."""
    key = "per-node-custom-implementation"
    name = section.text(key, None)
    if name is None:
        return {}
    places = [path for path in (Path(name), Path(section.path).parent / name) if path.is_file()]
    if not places:
        section.fail(key, f"is {name!r}: there is no such file", "name a YAML file with lines NODE_ID: PREFIX")
    nodes = read_yaml(places[0], numbers_as_keys=True)
    found = {}
    for text in nodes.rest():
        if not re.fullmatch(r"[0-9]{1,18}", text, re.ASCII):
            nodes.fail(text, "is no id of a node", "write lines NODE_ID: PREFIX")
        found[int(text)] = prefix_of(nodes, text, nodes.take(text))
    return found


def _algorithm(section: Section, key: str, name: object) -> Algorithm:
    flat = isinstance(name, str) and (_FLAT_IMPLEMENTATION.fullmatch(name) is not None)
    plain = name[3].lower() + name[4:] if isinstance(name, str) and flat else name
    match = _IMPLEMENTATION.fullmatch(plain) if isinstance(plain, str) else None
    if match is None:
        section.fail(key, f"is {shown(name)}, which is unknown", f"write one of {_NAMES}")
    window = match[2]
    return Algorithm(_PATTERNS[match[1].removesuffix(window or "")], int(window or 0), flat)


def check(network: Network, system: System, path: _Path) -> None:
    """Refuse a system whose algorithms the network cannot run.

    Args:
        network: what they are to run on.
        system: as read.
        path: the system file, for the message.

    Raises:
        FormatError: a list of implementations is longer than the network, or a tree does not fit its dimension.
    """
    for kind, algorithms in system.algorithms.items():
        misfit = misfit_of(network, algorithms)
        if misfit is not None:
            key = IMPLEMENTATIONS.get(kind, kind.label)
            raise FormatError(str(path), f"key {key!r} {misfit[0]}", misfit[1])


def misfit_of(network: Network, algorithms: Sequence[Algorithm]) -> tuple[str, str] | None:
    """Why a network cannot run these algorithms, and a remedy; None if it can."""
    dimensions = network.dimensions
    if len(algorithms) > len(dimensions):
        return _too_long(len(algorithms), len(dimensions))
    for at, algorithm in enumerate(algorithms):
        if algorithm.pattern != Pattern.DOUBLE_BINARY_TREE or (at and algorithms[0].flat):
            continue
        size = dimensions[at].size
        if size & (size - 1):
            problem = f"has a double binary tree in dimension {at} of {size} ranks, which is no power of two"
            return problem, "name a ring there, or change the size"
        if len(algorithms) < len(dimensions):
            problem = f"has a double binary tree, but {len(algorithms)} entries for {len(dimensions)} dimensions"
            return problem, "name an algorithm for every dimension"
    return None


def _too_long(entries: int, num_dimensions: int) -> tuple[str, str]:
    return f"has {entries} entries, the network {num_dimensions} dimensions", "write at most one entry a dimension"


def read_memory(path: _Path, notes: Notes | None = None) -> RemoteMemory:
    """ASTRA-sim's remote-memory file: ``memory-type``, and latency (ns) and bandwidth (bytes/ns) unless there is none.

    Both are whole numbers in ASTRA-sim; a fraction is dropped, and a note says so.

    Raises:
        FormatError: where something is missing or makes no sense.
    """
    section = read_json(path)
    kind = _MEMORY_KINDS[section.choice("memory-type", _MEMORY_KINDS)]
    if kind == MemoryKind.NONE:
        _note_rest(section, "memory", notes)
        return RemoteMemory()
    memory = RemoteMemory(
        kind,
        _truncated(section, "remote-mem-latency", 0, notes),
        _truncated(section, "remote-mem-bw", 1, notes),
        section.integer("num-npus-per-node", least=1) if kind == MemoryKind.PER_NODE else 1,
    )
    _note_rest(section, "memory", notes)
    return memory


def _truncated(section: Section, key: str, least: int, notes: Notes | None) -> int:
    value = section.number(key, limits=Limits(least=least, most=_LARGEST_NS))
    whole = section.as_integer(key, math.trunc(value), least, _LARGEST_NS)
    if whole != value:
        note(notes, f"memory key {key!r}: {value} is taken as {whole}")
    return whole


def read_groups(path: _Path, num_ranks: int | None = None, notes: Notes | None = None) -> dict[int, list[int]]:
    """ASTRA-sim's group file: ``{"1": [0, 1], "2": [2, 3]}``, the ranks of each group in their order.

    Args:
        path: the JSON file.
        num_ranks: ranks from here on are refused.
        notes: counts a group 0, which traces never mean: their 0 is all ranks.

    Raises:
        FormatError: a group's name is no number, or a rank stands there twice, is none, or does not exist.
    """
    section = read_json(path)
    groups: dict[int, list[int]] = {}
    for name in section.rest():
        number = _group_number(section, name)
        if number in groups:
            section.fail(name, f"is group {number} a second time", "keep one of them")
        groups[number] = _members(section, name, num_ranks)
    if 0 in groups:
        note(notes, "group 0 of the group file has no effect: traces call all ranks so")
    return dict(sorted(groups.items()))


def _group_number(section: Section, name: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", name, re.ASCII) or int(name) > _LARGEST:
        section.fail(name, "is no number of a group", f"write a number from 1 to {_LARGEST}, as 'pg_name' of the trace")
    return int(name)


def _members(section: Section, name: str, num_ranks: int | None) -> list[int]:
    values = section.items(name)
    if num_ranks is not None:
        most, remedy = num_ranks - 1, f"name ranks from 0 to {num_ranks - 1}"
    else:
        most, remedy = _LARGEST, "name ranks by their numbers, from 0"
    seen: dict[int, None] = {}
    for at, rank in enumerate(values):
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank <= most:
            section.fail(f"{name}[{at}]", f"is {shown(rank)}, which is no rank", remedy)
        if rank in seen:
            section.fail(f"{name}[{at}]", f"is rank {rank} a second time", "name every rank of a group once")
        seen[rank] = None
    return list(seen)


def _note_rest(section: Section, what: str, notes: Notes | None) -> None:
    for key in section.rest():
        known = what == "system" and key in _IDLE_KEYS
        note(notes, f"{what} key {key!r} {'has no effect' if known else 'is unknown'}")
