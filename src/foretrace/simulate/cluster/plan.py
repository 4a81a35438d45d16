"""`Plan`: a workload on a machine as plain arrays, which the engines run."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
I8 = NDArray[np.int8]


class Resource(enum.IntEnum):
    """What a node occupies while it runs; of the first three a rank has one each."""

    HOST = 0
    COMPUTE = 1
    COMMUNICATION = 2
    NONE = 3  # receives


class Action(enum.IntEnum):
    """What running a node means."""

    WAIT = 0  # it takes ``node_time``
    NOTHING = 1  # it takes no time, and what it frees is not looked at before the next scan
    COLLECTIVE = 2
    SEND = 3
    RECEIVE = 4
    MEMORY = 5  # a request to remote memory that takes ``node_time`` once it is served
    ENCLOSE = 6  # a collective by an algorithm of its own: it ends when the nodes within it have ended


@dataclass
class Plan:
    """Nodes of all programs one after the other, ranks, groups, network and system.

    Nodes of a program stand in ascending order of their ids. Every array is contiguous.

    Attributes:
        node_resource, node_action: `Resource` and `Action`, shape ``(nodes,)``.
        node_time: ns, of `Action.WAIT` and `Action.MEMORY`.
        node_counts: 1 where the time counts as computation.
        node_kind: `CommType` number (0 all-reduce, 2 all-gather, 6 all-to-all, 7 reduce-scatter).
        node_size: bytes. node_tag: of a send or receive (already modulo 5e8). node_priority: see `priority`.
        node_slot: column of the rank's peers or groups, -1 for a collective of all. node_dimensions: bit i: dimension i
            is involved (groups involve all).
        node_missing: dependencies of a node, each once.
        node_within: the row of the `Action.ENCLOSE` that a node is a part of, -1 elsewhere. first_within, num_within:
            of such an action, where its nodes begin, and how many there are.
        first_child, child: CSR over nodes: who waits for it (rows over all programs).
        first_node: where each program's nodes begin and end, shape ``(programs + 1,)``.
        program_of: of each rank.
        first_peer, peer: the peers of rank r are ``peer[first_peer[r]:]``, by slot. first_group, group_of: the same
            for groups; group -1 is all ranks.
        first_member, member: ranks of each group in order. group_number: stream ids of a group begin at
            number x 1,000,000.
        topology: of each dimension 0 ring, 1 fully connected, 2 switch. size, bandwidth (bytes/ns), latency (ns).
        algorithm: shape ``(4, most dimensions, 2)``: pattern and window of kind 0, 2, 6, 7 (in this order) for each
            logical dimension; algorithms: how many logical dimensions each of the four has; flat: whether that one
            dimension is a ring of all ranks.
    """

    node_resource: I8
    node_action: I8
    node_time: I64
    node_counts: I8
    node_kind: I8
    node_size: I64
    node_tag: I64
    node_priority: I32
    node_slot: I32
    node_dimensions: I64
    node_missing: I32
    node_within: I32
    first_within: I32
    num_within: I32
    first_child: I64
    child: I32
    first_node: I64
    program_of: I32
    first_peer: I64
    peer: I32
    first_group: I64
    group_of: I32
    first_member: I64
    member: I32
    group_number: I64
    topology: I8
    size: I64
    bandwidth: F64
    latency: F64
    algorithm: I32
    algorithms: I32
    flat: I8
    endpoint_delay: int = 10
    local_delay: int = 10  # before every message of a group's ring
    splits: int = 1
    active_chunks: int = 1
    queues: int = 1  # per dimension
    priority: int = 0  # 0 LIFO, 1 FIFO, 2 explicit
    local_bandwidth_aware: bool = False
    memory_bandwidth: float = 0.0  # bytes/s of the rank's own memory, for reductions
    memory_pool: bool = False  # one request to remote memory at a time
    rendezvous: bool = False
    congestion: bool = False
    phases_at_once: bool = True

    @property
    def num_ranks(self) -> int:
        """Ranks, from 0."""
        return len(self.program_of)

    @cached_property
    def first_state(self) -> I64:
        """Where the nodes of each rank begin among those of all ranks, shape ``(ranks + 1,)``.

        A rank that another one stands for (program -1) has none.
        """
        sizes = np.append(np.diff(self.first_node), 0)[self.program_of]
        return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)


@dataclass
class Outcome:
    """What an engine found.

    Attributes:
        finish: ns, shape ``(ranks,)``; -1 for a rank that never finishes.
        computed: ns that count as computation, shape ``(ranks,)``, whatever became of the rank.
        start, end: ns of every node of every rank, shape ``(nodes of rank 0 + nodes of rank 1 + ...,)``; -1 where it
            did not start or end. A rank that another one stands for has none here; see `nodes_of`.
        waiting: streams that are under way at the end (only after a deadlock): columns rank, node (row of the rank's
            program), stream (number), dimension, phase, received, posted from (rank or -1).
        link_bytes, link_busy: bytes and ns of transmission of each link, with congestion only (else empty).
        messages: how many were sent (phases at once: how many they stand for).
    """

    finish: I64
    computed: I64
    start: I64
    end: I64
    waiting: dict[str, Any]
    link_bytes: I64
    link_busy: I64
    messages: int = 0
    represent: I32 | None = None  # the rank that stands for each rank, None where each was simulated
    first_state: I64 | None = None  # of the plan that was run in a fold, None where each rank was simulated

    def nodes_of(self, plan: Plan, rank: int) -> slice:
        """Where the nodes of a rank stand in ``start`` and ``end``."""
        first = plan.first_state if self.first_state is None else self.first_state
        own = rank if self.represent is None else int(self.represent[rank])
        return slice(int(first[own]), int(first[own + 1]))
