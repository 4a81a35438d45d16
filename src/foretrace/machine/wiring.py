"""`Layer`: one dimension of a cluster's network, as it is wired, and its keys in the description of a machine."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

from foretrace.machine.config_file import DURATION_NS, RATE, Limits, Notes, Section, note
from foretrace.machine.fabric import Segment, Shape
from foretrace.machine.network import Dimension, Topology


class Wiring(enum.StrEnum):
    """How the devices along a dimension are wired."""

    RING = "ring"
    FULLY_CONNECTED = "fully_connected"
    SWITCH = "switch"
    TORUS = "torus"  # a ring in each of several directions
    FAT_TREE = "fat_tree"  # one fabric of leaves and spines for the devices of all nodes
    RAIL_OPTIMIZED = "rail_optimized"  # a fabric for each place in a node


_TREES = (Wiring.SWITCH, Wiring.FAT_TREE, Wiring.RAIL_OPTIMIZED)


@dataclass(frozen=True)
class Link:
    """A link, in one direction.

    Attributes:
        bandwidth_gb_per_s: 10^9 bytes a second, which is as many bytes a nanosecond.
        latency_ns: of one link; a message through a switch crosses two.
    """

    bandwidth_gb_per_s: float
    latency_ns: float


@dataclass(frozen=True)
class Layer:
    """One dimension of a cluster's network.

    Attributes:
        name: such as ``NVLink``.
        wiring: how its devices are wired.
        sizes: devices along it; several for a torus.
        link: of each device (with ``fully_connected``: of each pair).
        nodes_per_leaf: of a tree, how many along this dimension are under one leaf switch; None for all.
        spines: of a tree with several leaves; None for as many as give uplinks the bandwidth of a device's link.
        oversubscription: of a tree with several leaves, bandwidth below the leaves over bandwidth above them.
    """

    name: str
    wiring: Wiring
    sizes: tuple[int, ...]
    link: Link
    nodes_per_leaf: int | None = None
    spines: int | None = None
    oversubscription: float = 1.0

    @property
    def size(self) -> int:
        """Devices along it."""
        return math.prod(self.sizes)

    @property
    def has_spines(self) -> bool:
        """Whether messages may cross spines."""
        return self.nodes_per_leaf is not None and self.nodes_per_leaf < self.size

    def dimensions(self, notes: Notes | None = None) -> list[Dimension]:
        """As ASTRA-sim's analytical networks know dimensions; ``notes`` counts what that leaves out."""
        bandwidth, latency = self.link.bandwidth_gb_per_s, self.link.latency_ns
        if self.wiring in (Wiring.FAT_TREE, Wiring.RAIL_OPTIMIZED):
            note(notes, f"{self.wiring} {self.name!r} is taken as a switch")
        if self.has_spines:
            text = f"its bandwidth is divided by the oversubscription {self.oversubscription:g}"
            note(notes, f"{self.name!r}: {text}, and its latency is that of four links, by way of a spine")
            bandwidth, latency = bandwidth / self.oversubscription, latency * 2
        simple = {Wiring.RING: Topology.RING, Wiring.FULLY_CONNECTED: Topology.FULLY_CONNECTED}
        topology = Topology.RING if self.wiring == Wiring.TORUS else simple.get(self.wiring, Topology.SWITCH)
        return [Dimension(topology, size, bandwidth, latency) for size in self.sizes]

    def segments(self, stride: int) -> list[Segment]:
        """As wired, with the number of devices that the inner dimensions hold."""
        link = (self.link.bandwidth_gb_per_s, self.link.latency_ns)
        if self.wiring in _TREES:
            return [self._tree(stride)]
        shape = Shape.FULLY_CONNECTED if self.wiring == Wiring.FULLY_CONNECTED else Shape.RING
        segments = []
        for at, size in enumerate(self.sizes):
            name = f"{self.name}.{at}" if len(self.sizes) > 1 else self.name
            segments.append(Segment(name, shape, size, stride, *link))
            stride *= size
        return segments

    def _tree(self, stride: int) -> Segment:
        bandwidth, latency = self.link.bandwidth_gb_per_s, self.link.latency_ns
        joins = self.wiring == Wiring.FAT_TREE
        if not self.has_spines:
            return Segment(self.name, Shape.TREE, self.size, stride, bandwidth, latency, self.size, joins_lines=joins)
        leaf = self.nodes_per_leaf or self.size
        ports = leaf * (stride if joins else 1)
        spines = self.spines or max(1, round(ports / self.oversubscription))
        uplink = ports * bandwidth / (self.oversubscription * spines)
        return Segment(
            self.name, Shape.TREE, self.size, stride, bandwidth, latency, leaf, spines, uplink, joins_lines=joins
        )


def read_layer(section: Section, at: int) -> Layer:
    """The keys of dimension number ``at``."""
    wiring = Wiring(section.choice("topology", [*Wiring]))
    name: str = section.text("name", f"{wiring}{at}")
    if wiring == Wiring.TORUS:
        sizes = tuple(section.as_integer(f"sizes[{i}]", one, 2) for i, one in enumerate(section.items("sizes")))
    else:
        sizes = (section.integer("size", least=2),)
    link = Link(section.number("bandwidth_gb_per_s", limits=RATE), section.number("latency_ns", limits=DURATION_NS))
    layer = Layer(name, wiring, sizes, link)
    keys = ["name", "topology", "sizes" if wiring == Wiring.TORUS else "size", "bandwidth_gb_per_s", "latency_ns"]
    if wiring in (Wiring.FAT_TREE, Wiring.RAIL_OPTIMIZED):
        layer = _with_spines(section, layer)
        keys += ["nodes_per_leaf", "spines", "oversubscription"]
    section.end(keys)
    return layer


def _with_spines(section: Section, layer: Layer) -> Layer:
    per_leaf = section.integer("nodes_per_leaf", None, least=1, most=layer.size)
    spines = section.integer("spines", None, least=1)
    oversubscription = section.number("oversubscription", 1.0, Limits(least=1, most=1e6))
    full = replace(layer, nodes_per_leaf=per_leaf, spines=spines, oversubscription=oversubscription)
    for key, given in (("spines", spines is not None), ("oversubscription", oversubscription > 1)):
        if given and not full.has_spines:
            remedy = f"add 'nodes_per_leaf' below {layer.size} (how many share a leaf switch)"
            section.fail(key, "says how leaves are joined, but there is one leaf", remedy)
    return full
