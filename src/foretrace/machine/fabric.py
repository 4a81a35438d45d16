"""`Fabric`: every link of a cluster, and which of them a message crosses."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
_MASK = (1 << 64) - 1


class Shape(enum.Enum):
    """How the links of a segment run."""

    RING = enum.auto()
    FULLY_CONNECTED = enum.auto()
    TREE = enum.auto()  # leaf switches, and spines above them where there are several leaves


@dataclass(frozen=True)
class Segment:
    """One dimension of a cluster, as wired. Positions along it are coordinates 0 to ``size - 1``.

    Attributes:
        name: what the description calls the dimension.
        shape: how its links run.
        size: devices along it.
        stride: how much a device's number grows by one step along it.
        bandwidth_bytes_per_ns: of a device's link, in one direction.
        latency_ns: of every link.
        leaf_size: of a tree: coordinates under one leaf.
        spines: of a tree: spines above its leaves.
        uplink_bytes_per_ns: of a tree: bandwidth from a leaf to a spine, in one direction.
        joins_lines: one tree for all devices with the same outer coordinates (a fat tree), instead of one for each
            line along the dimension (a rail).
    """

    name: str
    shape: Shape
    size: int
    stride: int
    bandwidth_bytes_per_ns: float
    latency_ns: float
    leaf_size: int = 1
    spines: int = 0
    uplink_bytes_per_ns: float = 0.0
    joins_lines: bool = False

    @property
    def leaves(self) -> int:
        """Leaf switches of one tree."""
        return -(-self.size // self.leaf_size)

    def domains(self, devices: int) -> int:
        """How many trees there are."""
        return devices // (self.size * self.stride if self.joins_lines else self.size)

    def coordinate(self, device: int) -> int:
        """Where a device is along this dimension."""
        return device // self.stride % self.size

    def leaf(self, device: int) -> int:
        """The leaf switch of a device, counted over all trees."""
        block = device // (self.stride * self.size)
        domain = block if self.joins_lines else block * self.stride + device % self.stride
        return domain * self.leaves + self.coordinate(device) // self.leaf_size


@dataclass(frozen=True)
class Fabric:
    """A directed graph of links. Vertices are devices, then switches.

    A message goes along one dimension after the other, the innermost first: with rails it reaches the device of its own
    node that is on the rail of the target, then crosses the rail switch. A fat tree takes it from device to device at
    once, whatever inner dimensions there are. Between leaves the spine is chosen by a hash of source and target (ECMP).

    Attributes:
        segments: dimensions, innermost first.
        num_devices: vertices before the switches.
        devices_per_node: for names.
        positions: device of each rank.
        source, target: vertices of each link.
        bandwidth_bytes_per_ns, latency_ns: of each link.
        segment: dimension of each link.
    """

    segments: tuple[Segment, ...]
    num_devices: int
    devices_per_node: int
    positions: I64
    source: I32
    target: I32
    bandwidth_bytes_per_ns: F64
    latency_ns: F64
    segment: NDArray[np.int8]

    @property
    def num_links(self) -> int:
        """Directed links."""
        return len(self.source)

    @property
    def num_ranks(self) -> int:
        """Ranks that are placed on devices."""
        return len(self.positions)

    @cached_property
    def num_vertices(self) -> int:
        """Devices and switches."""
        return self._first_switch[-1]

    @cached_property
    def names(self) -> list[str]:
        """What each link is called, such as ``node0/device3 > NVLink/switch0``."""
        vertices = [self.vertex_name(vertex) for vertex in range(self.num_vertices)]
        ends = zip(self.source.tolist(), self.target.tolist(), strict=True)
        return [f"{vertices[source]} > {vertices[target]}" for source, target in ends]

    def vertex_name(self, vertex: int) -> str:
        """What a device or switch is called."""
        if not 0 <= vertex < self.num_vertices:
            raise ValueError(f"vertex {vertex}: the fabric has 0 to {self.num_vertices - 1}")
        if vertex < self.num_devices:
            return f"node{vertex // self.devices_per_node}/device{vertex % self.devices_per_node}"
        at = int(np.searchsorted(self._first_switch, vertex, "right")) - 1
        segment, number = self.segments[at], vertex - self._first_switch[at]
        leaves = segment.domains(self.num_devices) * segment.leaves
        kind = "spine" if number >= leaves else "leaf" if segment.leaves > 1 else "switch"
        return f"{segment.name}/{kind}{number - leaves if kind == 'spine' else number}"

    def device(self, rank: int) -> int:
        """The device of a rank."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank}: the fabric has ranks 0 to {self.num_ranks - 1}")
        return int(self.positions[rank])

    def route(self, src_rank: int, dst_rank: int) -> list[int]:
        """The links from one rank to another, in order; none if they are the same."""
        here, goal = self.device(src_rank), self.device(dst_rank)
        links: list[int] = []
        for at in self._steps(here, goal):
            segment = self.segments[at]
            scope = segment.stride * segment.size
            if segment.joins_lines:
                there = here - here % scope + goal % scope
            else:
                there = here + (segment.coordinate(goal) - segment.coordinate(here)) * segment.stride
            links += self._cross(at, here, there)
            here = there
        return links

    def links_between(self, source: int, target: int) -> list[int]:
        """Links from one vertex straight to another."""
        found: list[int] = np.flatnonzero((self.source == source) & (self.target == target)).tolist()
        return found

    def slowed(self, links: Iterable[int], factor: float) -> Fabric:
        """The same fabric with some links at a fraction of their bandwidth. Routes stay as they are."""
        if not 0 < factor <= 1:
            raise ValueError(f"factor {factor}: give a fraction above 0, at most 1")
        bandwidth = self.bandwidth_bytes_per_ns.copy()
        bandwidth[list(links)] *= factor
        return replace(self, bandwidth_bytes_per_ns=bandwidth)

    def _steps(self, here: int, goal: int) -> list[int]:
        """Dimensions that a message crosses, in order."""
        differ = [at for at, one in enumerate(self.segments) if one.coordinate(here) != one.coordinate(goal)]
        joining = [at for at in differ if self.segments[at].joins_lines]
        return [at for at in differ if not joining or at >= joining[-1]]

    def _cross(self, at: int, here: int, there: int) -> list[int]:
        """Links of one dimension from a device to another."""
        segment, first, devices = self.segments[at], self._first_link[at], self.num_devices
        if segment.shape == Shape.TREE:
            return self._climb(at, here, there)
        ahead = (segment.coordinate(there) - segment.coordinate(here)) % segment.size
        if segment.shape == Shape.FULLY_CONNECTED:
            return [first + (ahead - 1) * devices + here]
        forward = ahead <= segment.size - ahead  # the shorter way; a tie goes forward
        line = here - segment.coordinate(here) * segment.stride
        links = []
        for step in range(ahead if forward else segment.size - ahead):
            coordinate = (segment.coordinate(here) + (step if forward else -step)) % segment.size
            links.append(first + (0 if forward else devices) + line + coordinate * segment.stride)
        return links

    def _climb(self, at: int, here: int, there: int) -> list[int]:
        segment, first, devices = self.segments[at], self._first_link[at], self.num_devices
        up, down = segment.leaf(here), segment.leaf(there)
        if up == down:
            return [first + here, first + devices + there]
        spine = _spread(here, there, segment.spines)
        inner = first + 2 * devices  # links from leaves to spines; those back come after them
        back = inner + segment.domains(devices) * segment.leaves * segment.spines
        return [
            first + here,
            inner + up * segment.spines + spine,
            back + down * segment.spines + spine,
            first + devices + there,
        ]

    @cached_property
    def _first_link(self) -> list[int]:
        counts = np.bincount(self.segment, minlength=len(self.segments))
        return [0, *np.cumsum(counts).tolist()]

    @cached_property
    def _first_switch(self) -> list[int]:
        return _first_switches(self.segments, self.num_devices)


def build_fabric(segments: Sequence[Segment], positions: I64, devices_per_node: int) -> Fabric:
    """All links of dimensions, the innermost first.

    Args:
        segments: dimensions.
        positions: device of each rank.
        devices_per_node: for names.
    """
    devices = int(np.prod([segment.size for segment in segments], dtype=np.int64))
    first = _first_switches(segments, devices)
    parts = [_wire(segment, devices, first[at]) for at, segment in enumerate(segments)]
    source, target, bandwidth = (np.concatenate(column) for column in zip(*parts, strict=True))
    counts = [len(part[0]) for part in parts]
    return Fabric(
        segments=tuple(segments),
        num_devices=devices,
        devices_per_node=devices_per_node,
        positions=positions,
        source=source.astype(np.int32),
        target=target.astype(np.int32),
        bandwidth_bytes_per_ns=bandwidth,
        latency_ns=np.repeat([segment.latency_ns for segment in segments], counts).astype(np.float64),
        segment=np.repeat(np.arange(len(segments)), counts).astype(np.int8),
    )


def _first_switches(segments: Sequence[Segment], devices: int) -> list[int]:
    """Number of each dimension's first switch, and of vertices in all."""
    first = [devices]
    for segment in segments:
        switches = segment.leaves + (segment.spines if segment.leaves > 1 else 0)
        first.append(first[-1] + (segment.domains(devices) * switches if segment.shape == Shape.TREE else 0))
    return first


def _wire(segment: Segment, devices: int, first_switch: int) -> tuple[I64, I64, F64]:
    """Sources, targets and bandwidths of a dimension's links, in the order that `Fabric` counts on."""
    device = np.arange(devices, dtype=np.int64)
    if segment.shape == Shape.TREE:
        return _wire_tree(segment, device, first_switch)
    coordinate = device // segment.stride % segment.size
    if segment.shape == Shape.FULLY_CONNECTED:
        steps = list(range(1, segment.size))
    else:
        steps = [1, -1] if segment.size > 2 else [1]
    shifts = [((coordinate + step) % segment.size - coordinate) * segment.stride for step in steps]
    source = np.tile(device, len(steps))
    target = np.concatenate([device + shift for shift in shifts])
    return source, target, np.full(len(source), segment.bandwidth_bytes_per_ns)


def _wire_tree(segment: Segment, device: I64, first_leaf: int) -> tuple[I64, I64, F64]:
    block = device // (segment.stride * segment.size)
    domain = block if segment.joins_lines else block * segment.stride + device % segment.stride
    leaf = domain * segment.leaves + device // segment.stride % segment.size // segment.leaf_size + first_leaf
    ends = [(device, leaf), (leaf, device)]
    if segment.leaves > 1:
        domains = segment.domains(len(device))
        first_spine = first_leaf + domains * segment.leaves
        low = np.repeat(np.arange(domains * segment.leaves, dtype=np.int64), segment.spines)
        spine = low // segment.leaves * segment.spines + np.tile(np.arange(segment.spines), domains * segment.leaves)
        ends += [(low + first_leaf, spine + first_spine), (spine + first_spine, low + first_leaf)]
    source, target = (np.concatenate(column) for column in zip(*ends, strict=True))
    bandwidth = np.full(len(source), segment.uplink_bytes_per_ns)
    bandwidth[: 2 * len(device)] = segment.bandwidth_bytes_per_ns
    return source, target, bandwidth


def _spread(source: int, target: int, count: int) -> int:
    """One of ``count`` ways, by a hash of both ends (the finalizer of SplitMix64)."""
    mixed = (source * 0x9E3779B97F4A7C15 + target + 1) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return (mixed ^ mixed >> 31) % count
