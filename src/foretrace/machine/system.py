"""How the ranks of a machine compute and run collectives: what ASTRA-sim calls the system layer, and remote memory."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from foretrace.trace.workload import CommType

# In this order engines have their tables.
KINDS_WITH_ALGORITHM = (CommType.ALL_REDUCE, CommType.ALL_GATHER, CommType.ALL_TO_ALL, CommType.REDUCE_SCATTER)


class Pattern(enum.IntEnum):
    """Who sends to whom in a phase of a collective. The numbers are stable."""

    RING = 0
    DIRECT = 1
    HALVING_DOUBLING = 2
    DOUBLE_BINARY_TREE = 3


class Priority(enum.StrEnum):
    """Which of several collectives goes first."""

    LIFO = "LIFO"
    FIFO = "FIFO"
    EXPLICIT = "EXPLICIT"


class MemoryKind(enum.StrEnum):
    """Where remote memory is."""

    NONE = "NO_MEMORY_EXPANSION"
    PER_RANK = "PER_NPU"
    PER_NODE = "PER_NODE"
    POOL = "MEMORY_POOL"


@dataclass(frozen=True)
class Algorithm:
    """How one dimension runs a collective.

    Attributes:
        pattern: of the messages.
        window: of `Pattern.DIRECT`, how many messages may be on their way at once; 0 for all.
        flat: one ring of all ranks (ASTRA-sim's ``one...``) instead of one dimension. Only the first algorithm of a
            list may be flat without being alone; those behind it do nothing for collectives of all ranks.
    """

    pattern: Pattern
    window: int = 0
    flat: bool = False


@dataclass(frozen=True)
class System:
    """A rank and its collectives.

    Attributes:
        endpoint_delay_ns: before every message.
        active_chunks: of a collective that may be under way at once in a dimension.
        splits: how many chunks a collective is cut into.
        priority: of collectives.
        local_bandwidth_aware: an all-reduce over several dimensions reduces and scatters first.
        algorithms: one or more a kind of collective, dimension by dimension.
        memory_bytes_per_s: bandwidth of the rank's own memory; None where not given.
        peak_flops_per_s: of the rank; None where not given.
        roofline: durations come from FLOPs and bytes instead of the recording.
        recorded_without_costs: work whose FLOPs or bytes are not known takes its recorded duration; else it is refused.
        replay_only: every node takes its recorded duration, communication too.
        custom: collectives whose algorithm is given as Chakra ETs, by kind: ``PREFIX`` of the files ``PREFIX.0.et``,
            ``PREFIX.1.et``, ..., one for each place in the group.
        custom_nodes: the same for single nodes, by their ids; they go before ``custom``.
    """

    endpoint_delay_ns: int = 10
    active_chunks: int = 1
    splits: int = 1
    priority: Priority = Priority.LIFO
    local_bandwidth_aware: bool = False
    algorithms: Mapping[CommType, tuple[Algorithm, ...]] = field(default_factory=dict)
    memory_bytes_per_s: float | None = None
    peak_flops_per_s: float | None = None
    roofline: bool = False
    recorded_without_costs: bool = False
    replay_only: bool = False
    custom: Mapping[CommType, str] = field(default_factory=dict)
    custom_nodes: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RemoteMemory:
    """Memory that a rank reaches over a link.

    Attributes:
        kind: where it is.
        latency_ns: of a request.
        bandwidth_bytes_per_ns: of a request (equals 10^9 bytes a second).
        ranks_per_node: of `MemoryKind.PER_NODE`.
    """

    kind: MemoryKind = MemoryKind.NONE
    latency_ns: int = 0
    bandwidth_bytes_per_ns: int = 1
    ranks_per_node: int = 1
