"""`Cluster`: a machine described in our own YAML: devices, how they are wired, and how collectives run on them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.machine.astra import misfit_of
from foretrace.machine.config_file import Notes, Section, note, read_yaml, shown
from foretrace.machine.custom import prefix_of
from foretrace.machine.device import Curve, Device, read_device
from foretrace.machine.fabric import Fabric, Segment, build_fabric
from foretrace.machine.limits import MOST_CHUNKS, MOST_RANKS
from foretrace.machine.network import Network
from foretrace.machine.system import Algorithm, MemoryKind, Pattern, Priority, RemoteMemory, System
from foretrace.machine.wiring import Layer, Link, Wiring, read_layer
from foretrace.trace.reading import FormatError
from foretrace.trace.workload import CommType

__all__ = [
    "Cluster",
    "Collectives",
    "Curve",
    "Device",
    "Layer",
    "Link",
    "SizeRange",
    "Wiring",
    "presets",
    "read_cluster",
]

_PRESETS = Path(__file__).with_name("presets")
_LARGEST_NS = 1 << 53


@dataclass(frozen=True)
class SizeRange:
    """Algorithms of collectives up to a size.

    Attributes:
        up_to_bytes: the largest size; None for all larger ones too.
        algorithms: one a dimension (a torus has one for each direction), or one flat one.
    """

    up_to_bytes: int | None
    algorithms: tuple[Algorithm, ...]


@dataclass(frozen=True)
class Collectives:
    """How collectives run; all as in `System`.

    Attributes:
        ranges: of each kind, sizes ascending, the last one without limit.
        custom: see `System`.
    """

    endpoint_delay_ns: int = 10
    chunks: int = 1
    active_chunks: int = 1
    priority: Priority = Priority.LIFO
    hierarchical_all_reduce: bool = True
    ranges: Mapping[CommType, tuple[SizeRange, ...]] = field(default_factory=dict)
    custom: Mapping[CommType, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cluster:
    """Devices in nodes, nodes in a network.

    Attributes:
        name: of the whole.
        device: all are alike.
        layers: dimensions of the network, the innermost first.
        devices_per_node: product of the sizes of the first dimensions.
        placement: ``linear`` fills one node after the other, ``round_robin`` gives each node one rank in turn; or the
            device of each rank, where devices are numbered with the innermost dimension fastest.
        memory: remote memory.
        collectives: how they run.
    """

    name: str
    device: Device
    layers: tuple[Layer, ...]
    devices_per_node: int
    placement: str | tuple[int, ...] = "linear"
    memory: RemoteMemory = field(default_factory=RemoteMemory)
    collectives: Collectives = field(default_factory=Collectives)

    @property
    def num_devices(self) -> int:
        """In all nodes."""
        return math.prod(layer.size for layer in self.layers)

    @property
    def num_nodes(self) -> int:
        """Nodes."""
        return self.num_devices // self.devices_per_node

    @property
    def positions(self) -> NDArray[np.int64]:
        """The device of each rank."""
        if not isinstance(self.placement, str):
            return np.array(self.placement, np.int64)
        devices = np.arange(self.num_devices, dtype=np.int64)
        if self.placement == "linear":
            return devices
        return devices % self.num_nodes * self.devices_per_node + devices // self.num_nodes

    def network(self, notes: Notes | None = None) -> Network:
        """As ASTRA-sim's analytical networks have it; ``notes`` counts what that leaves out or simplifies."""
        if self.placement != "linear":
            note(notes, "the placement of ranks has no place in a network of dimensions: rank r is device r")
        return Network(tuple(one for layer in self.layers for one in layer.dimensions(notes)))

    def system(self, dtype: str, size_bytes: int | None = None, notes: Notes | None = None) -> System:
        """Collectives and speed of a rank, as ASTRA-sim's system layer has them.

        Args:
            dtype: whose peak counts.
            size_bytes: of the collectives, which chooses their algorithms; None for large ones.
            notes: counts what is left out.

        Raises:
            ValueError: if the device has no peak for the type.
        """
        if self.device.compute_efficiency.points or self.device.memory_efficiency.points:
            note(notes, "efficiency curves have no place in a system: peak rates count")
        kinds = self.collectives.ranges
        if size_bytes is None and any(len(ranges) > 1 for ranges in kinds.values()):
            note(notes, "algorithms of collectives are those of large ones")
        return System(
            endpoint_delay_ns=self.collectives.endpoint_delay_ns,
            active_chunks=self.collectives.active_chunks,
            splits=self.collectives.chunks,
            priority=self.collectives.priority,
            local_bandwidth_aware=self.collectives.hierarchical_all_reduce,
            algorithms={kind: self.algorithms(kind, size_bytes) for kind in kinds},
            memory_bytes_per_s=self.device.memory_bytes_per_s,
            peak_flops_per_s=self.device.peak(dtype),
            roofline=True,
            recorded_without_costs=True,
            custom=self.collectives.custom,
        )

    def algorithms(self, kind: CommType, size_bytes: int | None = None) -> tuple[Algorithm, ...]:
        """Algorithms of a kind of collective at a size, dimension by dimension; None for large ones."""
        ranges = self.collectives.ranges[kind]
        for one in ranges:
            if one.up_to_bytes is None or (size_bytes is not None and size_bytes <= one.up_to_bytes):
                return one.algorithms
        return ranges[-1].algorithms

    def fabric(self) -> Fabric:
        """Every link, with routes between ranks."""
        segments: list[Segment] = []
        stride = 1
        for layer in self.layers:
            segments += layer.segments(stride)
            stride *= layer.size
        return build_fabric(segments, self.positions, self.devices_per_node)

    def resized(self, nodes: int) -> Cluster:
        """The same cluster with another number of nodes, by the size of its outermost dimension.

        Raises:
            ValueError: if that is not possible.
        """
        outer = self.layers[-1]
        inner = self.num_devices // outer.size
        size, left = divmod(nodes * self.devices_per_node, inner)
        if inner < self.devices_per_node or len(outer.sizes) > 1:
            raise ValueError(f"{self.name}: its outermost dimension {outer.name!r} does not count nodes")
        if left or size < 2:
            step = inner // self.devices_per_node
            raise ValueError(f"{self.name} cannot have {nodes} nodes; give a multiple of {step}, at least {2 * step}")
        if not isinstance(self.placement, str):
            raise ValueError(f"{self.name} places each rank by number; give its placement as linear or round_robin")
        larger = replace(self, layers=(*self.layers[:-1], replace(outer, sizes=(size,))))
        for kind, ranges in self.collectives.ranges.items():
            for one in ranges:
                misfit = misfit_of(larger.network(), one.algorithms)
                if misfit is not None:
                    raise ValueError(f"{self.name} with {nodes} nodes: {kind.label} {misfit[0]}; {misfit[1]}")
        return larger


def presets() -> list[str]:
    """Names that `read_cluster` knows without a file."""
    return sorted(path.stem for path in _PRESETS.glob("*.yaml"))


def read_cluster(path: str | PathLike[str]) -> Cluster:
    """A machine's description, by the name of a preset or of a YAML file.

    Raises:
        FormatError: where something is missing, unknown or makes no sense.
    """
    if str(path) in presets():
        return _Reader(read_yaml(_PRESETS / f"{path}.yaml"), str(path)).cluster()
    if not Path(path).exists():
        raise FormatError(str(path), "no such file", f"name a YAML file or a preset: {', '.join(presets())}")
    return _Reader(read_yaml(path), Path(path).stem).cluster()


_KINDS = {
    "all_reduce": CommType.ALL_REDUCE,
    "all_gather": CommType.ALL_GATHER,
    "reduce_scatter": CommType.REDUCE_SCATTER,
    "all_to_all": CommType.ALL_TO_ALL,
}
_ALGORITHM = re.compile(r"(flat_)?(ring|direct|halving_doubling|double_binary_tree)(?::([1-9][0-9]{0,8}))?")
_ALGORITHMS = "ring, direct, direct:WINDOW, halving_doubling, double_binary_tree, or flat_ring, flat_direct, ..."
_MEMORY_KINDS = {
    "none": MemoryKind.NONE,
    "per_rank": MemoryKind.PER_RANK,
    "per_node": MemoryKind.PER_NODE,
    "pool": MemoryKind.POOL,
}


class _Reader:
    """Makes a cluster of the top mapping of a file."""

    _KEYS = ("name", "device", "devices_per_node", "dimensions", "placement", "remote_memory", "collectives")

    def __init__(self, top: Section, default_name: str) -> None:
        self.top = top
        self.name: str = top.text("name", default_name)

    def cluster(self) -> Cluster:
        device = self._device()
        layers = self._layers()
        devices = math.prod(layer.size for layer in layers)
        per_node = self._devices_per_node(layers)
        placement = self._placement(devices)
        memory = self._memory(per_node)
        collectives = _CollectivesReader(self.top.section("collectives", None), self.top, layers).read()
        self.top.end(self._KEYS)
        return Cluster(self.name, device, tuple(layers), per_node, placement, memory, collectives)

    def _device(self) -> Device:
        value = self.top.take("device", remedy="add it: keys of a device, or the name of a preset")
        if isinstance(value, str):
            name = self.top.as_choice("device", value, presets())
            return _Reader(read_yaml(_PRESETS / f"{name}.yaml"), name)._device()
        return read_device(self.top.as_section("device", value))

    def _layers(self) -> list[Layer]:
        layers: list[Layer] = []
        for at, value in enumerate(self.top.items("dimensions")):
            layer = read_layer(self.top.as_section(f"dimensions[{at}]", value), at)
            if any(layer.name == other.name for other in layers):
                self.top.fail(f"dimensions[{at}].name", f"is {layer.name!r} a second time", "give each another name")
            layers.append(layer)
        devices = math.prod(layer.size for layer in layers)
        if devices > MOST_RANKS:
            problem = f"make more than {MOST_RANKS} devices: {devices}"
            self.top.fail("dimensions", problem, "make the network smaller")
        return layers

    def _devices_per_node(self, layers: Sequence[Layer]) -> int:
        given: int = self.top.integer("devices_per_node", layers[0].size, least=1)
        ends = [math.prod(layer.size for layer in layers[:count]) for count in range(len(layers) + 1)]
        if given not in ends:
            remedy = f"write one of {', '.join(map(str, ends))}: sizes of the first dimensions, multiplied"
            self.top.fail("devices_per_node", f"is {given}, where no dimension ends", remedy)
        return given

    def _placement(self, devices: int) -> str | tuple[int, ...]:
        value = self.top.take("placement", "linear")
        if not isinstance(value, list):
            return self.top.as_choice("placement", value, ("linear", "round_robin"))
        seen: dict[int, None] = {}
        for at, one in enumerate(value):
            device = self.top.as_integer(f"placement[{at}]", one, most=devices - 1)
            if device in seen:
                self.top.fail(f"placement[{at}]", f"is device {device} a second time", "place one rank on a device")
            seen[device] = None
        if not seen:
            self.top.fail("placement", "is an empty list", "name the device of each rank, or write linear")
        return tuple(seen)

    def _memory(self, per_node: int) -> RemoteMemory:
        section = self.top.section("remote_memory", None)
        if section is None:
            return RemoteMemory()
        kind = _MEMORY_KINDS[section.choice("kind", _MEMORY_KINDS)]
        keys = ("kind", "latency_ns", "bandwidth_gb_per_s")
        if kind == MemoryKind.NONE:
            section.end(keys[:1])
            return RemoteMemory()
        latency = section.integer("latency_ns", most=_LARGEST_NS)
        bandwidth = section.integer("bandwidth_gb_per_s", least=1)
        section.end(keys)
        return RemoteMemory(kind, latency, bandwidth, per_node if kind == MemoryKind.PER_NODE else 1)


class _CollectivesReader:
    """Reads how collectives run on the dimensions of a cluster."""

    _KEYS = (
        *("endpoint_delay_ns", "chunks", "active_chunks", "priority", "hierarchical_all_reduce"),
        *("algorithms", "custom"),
    )

    def __init__(self, section: Section | None, top: Section, layers: Sequence[Layer]) -> None:
        self.section = section if section is not None else Section(top.path, {}, "collectives")
        self.layers = layers
        self.network = Network(tuple(one for layer in layers for one in layer.dimensions()))

    def read(self) -> Collectives:
        section = self.section
        collectives = Collectives(
            endpoint_delay_ns=section.integer("endpoint_delay_ns", 10, most=_LARGEST_NS),
            chunks=section.integer("chunks", 1, least=1, most=MOST_CHUNKS),
            active_chunks=section.integer("active_chunks", 1, least=1),
            priority=Priority(section.choice("priority", [*Priority], Priority.LIFO)),
            hierarchical_all_reduce=section.flag("hierarchical_all_reduce", True),
            ranges=self._all_ranges(section.section("algorithms", None)),
            custom=self._custom(section.section("custom", None)),
        )
        section.end(self._KEYS)
        return collectives

    def _all_ranges(self, section: Section | None) -> dict[CommType, tuple[SizeRange, ...]]:
        found: dict[CommType, tuple[SizeRange, ...]] = {}
        for kind in _KINDS.values():
            found[kind] = (SizeRange(None, self._default(kind)),)
        if section is None:
            return found
        for key, kind in _KINDS.items():
            values = section.items(key, None)
            if values is not None:
                found[kind] = self._ranges(section, key, values)
        section.end(tuple(_KINDS))
        return found

    def _custom(self, section: Section | None) -> dict[CommType, str]:
        """Prefixes of ETs that are the algorithm of a kind of collective."""
        if section is None:
            return {}
        found = {kind: prefix_of(section, key, section.take(key)) for key, kind in _KINDS.items() if key in section}
        section.end(tuple(_KINDS))
        return found

    def _ranges(self, section: Section, key: str, values: list[Any]) -> tuple[SizeRange, ...]:
        if not any(isinstance(value, dict) for value in values):
            return (SizeRange(None, self._checked(section, key, values)),)
        ranges: list[SizeRange] = []
        for at, value in enumerate(values):
            one = section.as_section(f"{key}[{at}]", value)
            most = one.integer("up_to_bytes", None, least=1, most=_LARGEST_NS)
            if (most is None) != (at == len(values) - 1):
                one.fail("up_to_bytes", "must be there in every range but the last", "add or remove it")
            if most is not None and ranges and most <= (ranges[-1].up_to_bytes or 0):
                one.fail("up_to_bytes", f"is {most}, not above the range before", "write ascending sizes")
            algorithms = self._checked(section, f"{key}[{at}].use", one.items("use"))
            one.end(("up_to_bytes", "use"))
            ranges.append(SizeRange(most, algorithms))
        return tuple(ranges)

    def _checked(self, section: Section, key: str, names: list[Any]) -> tuple[Algorithm, ...]:
        given = [_algorithm(section, f"{key}[{at}]", name) for at, name in enumerate(names)]
        if any(one.flat for one in given):
            if len(given) > 1:
                section.fail(key, "has a flat algorithm beside others", "write the flat one alone")
            return tuple(given)
        if len(given) != len(self.layers):
            problem = f"has {len(given)} entries for {len(self.layers)} dimensions"
            section.fail(key, problem, "write one algorithm a dimension")
        pairs = zip(self.layers, given, strict=True)
        algorithms = tuple(one for layer, one in pairs for _ in layer.sizes)
        misfit = misfit_of(self.network, algorithms)
        if misfit is not None:
            section.fail(key, *misfit)
        return algorithms

    def _default(self, kind: CommType) -> tuple[Algorithm, ...]:
        """Direct where each pair has a link and in all-to-all, else rings."""
        direct = [kind == CommType.ALL_TO_ALL or one.wiring == Wiring.FULLY_CONNECTED for one in self.layers]
        pairs = zip(self.layers, direct, strict=True)
        return tuple(Algorithm(Pattern.DIRECT if one else Pattern.RING) for layer, one in pairs for _ in layer.sizes)


def _algorithm(section: Section, key: str, name: object) -> Algorithm:
    match = _ALGORITHM.fullmatch(name) if isinstance(name, str) else None
    if match is None or (match[3] and match[2] != "direct") or (match[1] and match[2] == "double_binary_tree"):
        section.fail(key, f"is {shown(name)}, which is unknown", f"write one of {_ALGORITHMS}")
    return Algorithm(Pattern[match[2].upper()], int(match[3] or 0), match[1] is not None)
