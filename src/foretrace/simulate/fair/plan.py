"""`FairPlan`: activities, links, queues and faults as plain arrays, which the fluid engine runs."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

I8 = NDArray[np.int8]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]


class Kind(enum.IntEnum):
    """What an activity is. The numbers are stable."""

    INSTANT = 0  # takes no time: a barrier, or the beginning or end of something
    DELAY = 1  # takes ``work`` ns whatever else happens
    COMPUTE = 2  # takes ``work`` ns at speed 1; the rank's speed and its flows change the speed
    FLOW = 3  # ``work`` bytes over a route


class FaultKind(enum.IntEnum):
    """What a fault strikes. The numbers are stable."""

    LINK = 0  # from then on the link has ``factor`` of its capacity
    RANK = 1  # from then on the rank computes at ``factor`` of its speed; 0: it is down


class Distribution(enum.StrEnum):
    """Shape of the factors by which durations scatter."""

    LOGNORMAL = "lognormal"  # exp(sigma z - sigma^2 / 2): mean 1
    NORMAL = "normal"  # 1 + sigma z with z cut off at 3 on both sides, and at least 0


def _no_i64() -> I64:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class FairPlan:
    """A graph of activities over links, queues and ranks. Times are ns, sizes bytes, capacities bytes/ns.

    Attributes:
        kind: `Kind`, shape ``(activities,)``; so are the following down to ``gives``.
        key: distinct numbers. What happens at one moment goes by (``priority``, ``key``); rows have no order.
        priority: the lower goes first among what became ready at one moment.
        rank: whose activity it is (of a flow the sender); -1: nobody's.
        peer: of a flow the receiver; -1 otherwise.
        work: ns of a delay, ns at speed 1 of a computation, bytes of a flow; 0 of an instant.
        takes: queue of which the activity needs a slot to start; -1: none.
        gives: queue to which it hands a slot when it ends, a flow when its last byte has left; -1: none. A slot may be
            taken by one activity and given by another one.
        first_child, child: CSR over activities: who waits for it, shape ``(activities + 1,)`` and ``(edges,)``. An
            activity that waits for itself never starts.
        first_hop, hop: CSR over activities: the links of a flow's route, no link twice.
        queue_slots: how many activities may hold a slot of each queue.
        link_capacity, link_latency: of the links, one direction each.
        link_owner: the rank whose computing takes from the link's capacity; -1: none.
        rank_speed: of computing, shape ``(ranks,)``; so are the next two. Below 1: a straggler.
        rank_slowdown: part of the speed that is lost while the rank sends or receives, 0 to 1.
        rank_link_slowdown: part of the capacity of the links it owns that is lost while the rank computes, 0 to 1.
        fault_time, fault_kind, fault_target, fault_factor: at that time the link or rank gets that factor, which
            replaces the one before; shape ``(faults,)``. A restoration is a fault of factor 1.
        first_node: of a lowered workload: where each rank's nodes begin and end, shape ``(ranks + 1,)``; else empty.
        node_begin, node_end: the activities that begin and end each node, shape ``(nodes of all ranks,)``.
        notes: what was guessed or cannot run, counted.
    """

    kind: I8
    key: I64
    priority: I32
    rank: I32
    peer: I32
    work: F64
    takes: I32
    gives: I32
    first_child: I64
    child: I32
    first_hop: I64
    hop: I32
    queue_slots: I32
    link_capacity: F64
    link_latency: F64
    link_owner: I32
    rank_speed: F64
    rank_slowdown: F64
    rank_link_slowdown: F64
    fault_time: F64 = field(default_factory=lambda: np.empty(0, np.float64))
    fault_kind: I8 = field(default_factory=lambda: np.empty(0, np.int8))
    fault_target: I32 = field(default_factory=lambda: np.empty(0, np.int32))
    fault_factor: F64 = field(default_factory=lambda: np.empty(0, np.float64))
    first_node: I64 = field(default_factory=_no_i64)
    node_begin: I64 = field(default_factory=_no_i64)
    node_end: I64 = field(default_factory=_no_i64)
    notes: Counter[str] = field(default_factory=Counter)

    def __repr__(self) -> str:
        flows = int(np.count_nonzero(self.kind == Kind.FLOW))
        return f"FairPlan({self.num_activities} activities, {flows} of them flows, {self.num_links} links)"

    @property
    def num_activities(self) -> int:
        """Rows of ``kind``."""
        return len(self.kind)

    @property
    def num_links(self) -> int:
        """Rows of ``link_capacity``."""
        return len(self.link_capacity)

    @property
    def num_ranks(self) -> int:
        """Rows of ``rank_speed``."""
        return len(self.rank_speed)

    def check(self) -> None:
        """See that the arrays fit together.

        Raises:
            ValueError: says what is wrong.
        """
        for problem in self._problems():
            raise ValueError(problem)

    def _problems(self) -> list[str]:
        """What is wrong, in words; empty if nothing is."""
        found = self._problems_of_shape()
        return found or [*self._problems_of_range(), *self._problems_of_value()]

    def _problems_of_shape(self) -> list[str]:
        found = []
        groups = (
            (self.num_activities, ("kind", "key", "priority", "rank", "peer", "work", "takes", "gives")),
            (self.num_links, ("link_capacity", "link_latency", "link_owner")),
            (self.num_ranks, ("rank_speed", "rank_slowdown", "rank_link_slowdown")),
            (len(self.fault_time), ("fault_time", "fault_kind", "fault_target", "fault_factor")),
        )
        for length, names in groups:
            found += [f"{name} must have length {length}" for name in names if len(getattr(self, name)) != length]
        for first_name, name in (("first_child", "child"), ("first_hop", "hop")):
            first: I64 = getattr(self, first_name)
            sound = len(first) == self.num_activities + 1 and first[0] == 0 and first[-1] == len(getattr(self, name))
            if not sound or (np.diff(first) < 0).any():
                found.append(f"{first_name} does not divide {name} among the activities")
        return found

    def _problems_of_range(self) -> list[str]:
        ranges = (
            ("kind", 0, len(Kind)),
            ("rank", -1, self.num_ranks),
            ("peer", -1, self.num_ranks),
            ("takes", -1, len(self.queue_slots)),
            ("gives", -1, len(self.queue_slots)),
            ("child", 0, self.num_activities),
            ("hop", 0, self.num_links),
            ("link_owner", -1, self.num_ranks),
            ("fault_kind", 0, len(FaultKind)),
        )
        found = []
        for name, low, end in ranges:
            column: NDArray[np.int64] = getattr(self, name)
            if len(column) and (column.min() < low or column.max() >= end):
                found.append(f"{name} must lie in [{low}, {end})")
        limit = np.where(self.fault_kind == FaultKind.LINK, self.num_links, self.num_ranks)
        if ((self.fault_target < 0) | (self.fault_target >= limit)).any():
            found.append("a fault strikes a link or rank that is not there")
        return found

    def _problems_of_value(self) -> list[str]:
        found = []
        for name in ("work", "link_capacity", "link_latency", "rank_speed", "fault_time", "fault_factor"):
            column: F64 = getattr(self, name)
            if not (np.isfinite(column) & (column >= 0)).all():
                found.append(f"{name} must be finite and not negative")
        for name in ("rank_slowdown", "rank_link_slowdown"):
            column = getattr(self, name)
            if not ((column >= 0) & (column <= 1)).all():
                found.append(f"{name} must lie between 0 and 1")
        if len(np.unique(self.key)) != self.num_activities:
            found.append("keys must be distinct")
        if (self.queue_slots < 1).any():
            found.append("a queue needs a slot")
        owner = np.repeat(np.arange(self.num_activities), np.diff(self.first_hop))
        if (self.kind[owner] != Kind.FLOW).any():
            found.append("only flows have routes")
        if len(np.unique(owner * max(self.num_links, 1) + self.hop)) != len(self.hop):
            found.append("a route uses a link twice")
        return found


def csr(count: int, source: NDArray[np.integer], target: NDArray[np.integer]) -> tuple[I64, I32]:
    """Edges grouped by source: offsets of shape ``(count + 1,)``, and the targets."""
    first = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(source, minlength=count), out=first[1:])
    return first, np.asarray(target)[np.argsort(source, kind="stable")].astype(np.int32)


def _mix(number: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finisher of SplitMix64 (Steele, Lea and Flood 2014): 64 well-mixed bits of each number."""
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = number ^ (number >> np.uint64(31))
    return mixed


def standard_normal(key: I64, seed: int) -> F64:
    """One standard normal number a key: the same whatever the order of the keys (Box-Muller over hashed keys)."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    start = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64) + golden)
    number = key.astype(np.uint64) * np.uint64(2)
    one, other = (_mix(start + (number + np.uint64(at)) * golden) >> np.uint64(11) for at in (1, 2))
    radius = np.sqrt(-2 * np.log((one + 1.0) * 2.0**-53))
    value: F64 = radius * np.cos(2 * np.pi * other * 2.0**-53)
    return value


def jitter(
    plan: FairPlan,
    sigma: float,
    seed: int = 0,
    distribution: Distribution = Distribution.LOGNORMAL,
    kinds: tuple[Kind, ...] = (Kind.COMPUTE,),
) -> FairPlan:
    """The plan with each duration multiplied by a random factor that depends on the seed and the activity's key.

    Args:
        plan: what is to scatter.
        sigma: of the logarithm, or of the factor for `Distribution.NORMAL`.
        seed: of the random numbers.
        distribution: shape of the factors.
        kinds: of activities that scatter.
    """
    if sigma < 0:
        raise ValueError(f"sigma must not be negative, got {sigma}")
    normal = standard_normal(plan.key, seed)
    if distribution is Distribution.LOGNORMAL:
        factor = np.exp(sigma * normal - sigma * sigma / 2)
    else:
        factor = np.maximum(1 + sigma * np.clip(normal, -3, 3), 0)
    return replace(plan, work=np.where(np.isin(plan.kind, kinds), plan.work * factor, plan.work))


@dataclass(frozen=True)
class Fault:
    """From ``start_ns`` to ``end_ns`` (None: for good) a link or rank has ``factor`` of what it had.

    Attributes:
        kind: link or rank.
        target: its number.
        start_ns, end_ns: when.
        factor: of the link's capacity or the rank's speed; 0 is a failure.
    """

    kind: FaultKind
    target: int
    start_ns: float
    end_ns: float | None = None
    factor: float = 0.0


def with_faults(plan: FairPlan, faults: list[Fault]) -> FairPlan:
    """The plan with these faults as its only ones."""
    rows = [(fault.start_ns, fault.kind, fault.target, fault.factor) for fault in faults]
    rows += [(fault.end_ns, fault.kind, fault.target, 1.0) for fault in faults if fault.end_ns is not None]
    return replace(
        plan,
        fault_time=np.array([row[0] for row in rows], np.float64),
        fault_kind=np.array([row[1] for row in rows], np.int8),
        fault_target=np.array([row[2] for row in rows], np.int32),
        fault_factor=np.array([row[3] for row in rows], np.float64),
    )
