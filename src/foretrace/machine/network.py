"""The network of a machine: dimensions of links, innermost first, as ASTRA-sim's analytical networks have them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class Topology(enum.StrEnum):
    """How the ranks along one dimension are wired."""

    RING = "ring"
    FULLY_CONNECTED = "fully_connected"
    SWITCH = "switch"


@dataclass(frozen=True)
class Dimension:
    """One dimension of a network.

    Attributes:
        topology: how its ranks are wired.
        size: ranks along it, at least 2.
        bandwidth_bytes_per_ns: of one link in one direction (equals 10^9 bytes a second).
        latency_ns: of one link.
    """

    topology: Topology
    size: int
    bandwidth_bytes_per_ns: float
    latency_ns: float


@dataclass(frozen=True)
class Network:
    """Dimensions, the first one varying fastest with the rank's number."""

    dimensions: tuple[Dimension, ...]

    @property
    def num_ranks(self) -> int:
        """Product of the sizes."""
        product = 1
        for dimension in self.dimensions:
            product *= dimension.size
        return product

    @property
    def strides(self) -> list[int]:
        """How much the rank's number grows by one step along each dimension."""
        strides = [1]
        for dimension in self.dimensions:
            strides.append(strides[-1] * dimension.size)
        return strides[:-1]

    def coordinates(self, ranks: NDArray[np.integer]) -> NDArray[np.int64]:
        """Coordinates of ranks, shape ``(len(ranks), dimensions)``."""
        sizes = np.array([dimension.size for dimension in self.dimensions], np.int64)
        return np.asarray(ranks, np.int64)[:, None] // np.array(self.strides, np.int64) % sizes
