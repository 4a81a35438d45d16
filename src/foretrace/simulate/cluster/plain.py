"""The cluster simulator in plain Python: every message is an event.

It follows ASTRA-sim's analytical back ends to the nanosecond: which rank sends what to whom, in which order events of
the same moment happen, and where a division drops its fraction. It is slow, and there to be read: it checks the
compiled engine, and stands in for it where there is no C compiler.

From the bottom up: a clock runs events; a network carries messages; a mailbox matches them with receives; a system
(one a rank) cuts collectives into streams and lets an algorithm run each of their phases; a program (one a rank)
issues nodes.
"""

from __future__ import annotations

import enum
import heapq
import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from foretrace.machine.limits import MOST_NS
from foretrace.machine.system import KINDS_WITH_ALGORITHM, Pattern
from foretrace.simulate.cluster.plan import I64, Action, Outcome, Plan, Resource
from foretrace.trace.graph import GraphError
from foretrace.trace.workload import CommType

Event = Callable[[], None]

_EVERYBODY = -1  # the group of all ranks
_COLLECTIVE_TAG = 500_000_000  # tags of collectives begin here, those of sends and receives end here
_RENDEZVOUS_TAG = 1_000_000_000  # on top of the tag of the message that it announces
_RENDEZVOUS_BYTES = 8192
_STREAMS_OF_GROUP = 1_000_000


def run(plan: Plan) -> Outcome:
    """Run the programs of all ranks message by message until nothing happens any more."""
    cluster = _Cluster(plan)
    workers = [_Program(cluster, rank) for rank in range(plan.num_ranks)]
    for worker in workers:
        worker.proceed()
    cluster.clock.run()
    return _outcome(cluster, workers)


# Time


class _Clock:
    """Events by time; those of one moment happen in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0
        self._times: list[int] = []
        self._due: dict[int, list[Event]] = {}

    def at(self, time: int, event: Event) -> None:
        if time >= MOST_NS:
            raise GraphError("ranks are busy for longer than 64 bits hold in ns (2^62 ns: 146 years)")
        due = self._due.get(time)
        if due is None:
            self._due[time] = [event]
            heapq.heappush(self._times, time)
        else:
            due.append(event)

    def run(self) -> None:
        while self._times:
            self.now = heapq.heappop(self._times)
            for event in self._due[self.now]:  # what is asked for meanwhile for this moment joins the list
                event()
            del self._due[self.now]


class _Timers:
    """One rank's timers: all that end together go off in one go, in the place of the one that was set first."""

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock
        self._due: dict[int, list[Event]] = {}

    def after(self, delay: int, event: Event) -> None:
        time = self._clock.now + delay
        due = self._due.get(time)
        if due is None:
            self._due[time] = [event]
            self._clock.at(time, partial(self._expire, time))
        else:
            due.append(event)

    def _expire(self, time: int) -> None:
        for event in self._due[time]:
            event()
        del self._due[time]


# Network


class _Topology(enum.IntEnum):
    RING = 0
    FULLY_CONNECTED = 1
    SWITCH = 2


class _Hop(NamedTuple):
    """A link that a message crosses: its number and the dimension that it belongs to."""

    link: int
    dimension: _Dimension


@dataclass(frozen=True)
class _Dimension:
    """The wires between ranks that differ only in one coordinate.

    Links are numbered dimension by dimension. Within a dimension: ring: rank x 2 + (0 clockwise, 1 anticlockwise);
    fully connected: rank x size + coordinate of the target; switch: rank x 2 + (0 up, 1 down).
    """

    topology: _Topology
    size: int
    stride: int  # between ids of neighbors
    bandwidth: float
    latency: float
    first_link: int

    def links(self, num_ranks: int) -> int:
        return num_ranks * (self.size if self.topology == _Topology.FULLY_CONNECTED else 2)

    def coordinate(self, rank: int) -> int:
        return rank // self.stride % self.size

    def moved(self, rank: int, coordinate: int) -> int:
        """The rank that has another coordinate here and is the same otherwise."""
        return rank + (coordinate - self.coordinate(rank)) * self.stride

    def hops(self, source: int, target: int) -> int:
        """How many latencies a message pays that crosses this dimension, without congestion."""
        if self.topology == _Topology.RING:
            clockwise = (self.coordinate(target) - self.coordinate(source)) % self.size
            return min(clockwise, self.size - clockwise)
        return 2 if self.topology == _Topology.SWITCH else 1

    def route(self, source: int, coordinate: int) -> Iterator[_Hop]:
        """The links from a rank to the one with that coordinate."""
        if self.topology == _Topology.FULLY_CONNECTED:
            yield self._hop(source * self.size + coordinate)
        elif self.topology == _Topology.SWITCH:
            yield self._hop(source * 2)
            yield self._hop(self.moved(source, coordinate) * 2 + 1)
        else:
            clockwise = (coordinate - self.coordinate(source)) % self.size
            forward = clockwise <= self.size - clockwise
            for _ in range(self.hops(source, self.moved(source, coordinate))):
                yield self._hop(source * 2 + (0 if forward else 1))
                source = self.moved(source, (self.coordinate(source) + (1 if forward else -1)) % self.size)

    def _hop(self, link: int) -> _Hop:
        return _Hop(self.first_link + link, self)


def _dimensions(plan: Plan) -> list[_Dimension]:
    found: list[_Dimension] = []
    stride, first_link = 1, 0
    columns = (plan.topology.tolist(), plan.size.tolist(), plan.bandwidth.tolist(), plan.latency.tolist())
    for topology, size, bandwidth, latency in zip(*columns, strict=True):
        found.append(_Dimension(_Topology(topology), size, stride, bandwidth, latency, first_link))
        stride *= size
        first_link += found[-1].links(plan.num_ranks)
    return found


class _Network(ABC):
    """What carries messages."""

    def __init__(self, clock: _Clock, dimensions: list[_Dimension]) -> None:
        self.clock = clock
        self.dimensions = dimensions

    @abstractmethod
    def carry(self, source: int, target: int, size: int, arrive: Event) -> None:
        """Start a message at once, and run ``arrive`` when it is there."""

    def crossed(self, source: int, target: int) -> list[_Dimension]:
        """Dimensions in which two ranks differ."""
        crossed = [each for each in self.dimensions if each.coordinate(source) != each.coordinate(target)]
        if not crossed:
            raise ValueError(f"rank {source} sends a message to itself")
        return crossed


class _IdealNetwork(_Network):
    """Messages do not disturb each other."""

    def __init__(self, clock: _Clock, dimensions: list[_Dimension]) -> None:
        super().__init__(clock, dimensions)
        self._price: dict[tuple[int, int], tuple[float, float]] = {}  # latency and bandwidth from rank to rank

    def carry(self, source: int, target: int, size: int, arrive: Event) -> None:
        price = self._price.get((source, target))
        if price is None:
            dimension = self.crossed(source, target)[0]  # the others are free of charge
            price = dimension.hops(source, target) * dimension.latency, dimension.bandwidth
            self._price[source, target] = price
        latency, bandwidth = price
        self.clock.at(self.clock.now + int(latency + size / bandwidth), arrive)


class _CongestedNetwork(_Network):
    """Messages wait for each other at links, and are stored and forwarded as a whole."""

    def __init__(self, clock: _Clock, dimensions: list[_Dimension]) -> None:
        super().__init__(clock, dimensions)
        self.links: dict[int, _Link] = {}  # those that were used
        self._routes: dict[tuple[int, int], list[_Link]] = {}

    def carry(self, source: int, target: int, size: int, arrive: Event) -> None:
        route = self._routes.get((source, target))
        if route is None:
            route = self._routes[source, target] = [self._link(hop) for hop in self._hops(source, target)]
        _Traveler(size, route, arrive).move()

    def _hops(self, source: int, target: int) -> Iterator[_Hop]:
        at = source
        for dimension in self.crossed(source, target):
            coordinate = dimension.coordinate(target)
            yield from dimension.route(at, coordinate)
            at = dimension.moved(at, coordinate)

    def _link(self, hop: _Hop) -> _Link:
        if hop.link not in self.links:
            self.links[hop.link] = _Link(self.clock, hop.dimension.bandwidth, hop.dimension.latency)
        return self.links[hop.link]


@dataclass(slots=True)
class _Traveler:
    """A message on its way through the links of a route."""

    size: int
    route: list[_Link]
    arrive: Event
    crossed: int = 0  # links

    def move(self) -> None:
        if self.crossed == len(self.route):
            self.arrive()
            return
        self.crossed += 1
        self.route[self.crossed - 1].put(self)


@dataclass(slots=True)
class _Link:
    """A wire in one direction, with the messages that wait for it."""

    clock: _Clock
    bandwidth: float
    latency: float
    free: bool = True
    waiting: deque[_Traveler] = field(default_factory=deque)
    carried: int = 0  # bytes
    busy: int = 0  # ns

    def put(self, message: _Traveler) -> None:
        if self.free:
            self._transmit(message)
        else:
            self.waiting.append(message)

    def _transmit(self, message: _Traveler) -> None:
        self.free = False
        transmission = message.size / self.bandwidth
        self.clock.at(self.clock.now + int(self.latency + transmission), message.move)
        self.clock.at(self.clock.now + int(transmission), self._release)
        self.carried += message.size
        self.busy += int(transmission)

    def _release(self) -> None:
        self.free = True
        if self.waiting:
            self._transmit(self.waiting.popleft())


# Messages


class _Envelope(NamedTuple):
    """What a send and a receive must agree on."""

    source: int
    target: int
    size: int
    tag: int

    def announcement(self) -> _Envelope:
        """The message by which, with rendezvous, a receiver says that it is ready."""
        return _Envelope(self.target, self.source, _RENDEZVOUS_BYTES, self.tag + _RENDEZVOUS_TAG)


class _Mail:
    """Sends and receives find each other: the first with the first, the second with the second, and so on."""

    def __init__(self, clock: _Clock, network: _Network, rendezvous: bool) -> None:
        self.messages = 0
        self._clock, self._network, self._rendezvous = clock, network, rendezvous
        self._arrived: Counter[_Envelope] = Counter()  # and not received yet
        self._posted: dict[_Envelope, deque[Event]] = {}

    def send(self, envelope: _Envelope, sent: Event | None = None) -> None:
        """Start a message; ``sent`` runs when it has arrived."""
        if self._rendezvous:
            self._post(envelope.announcement(), partial(self._start, envelope, sent))
        else:
            self._start(envelope, sent)

    def receive(self, envelope: _Envelope, received: Event) -> None:
        """Run ``received`` when the message is there, or soon if it is there already."""
        if self._rendezvous:
            self._start(envelope.announcement(), partial(self._post, envelope, received))
        else:
            self._post(envelope, received)

    def _start(self, envelope: _Envelope, sent: Event | None) -> None:
        self.messages += 1
        self._network.carry(envelope.source, envelope.target, envelope.size, partial(self._arrive, envelope, sent))

    def _post(self, envelope: _Envelope, received: Event) -> None:
        if envelope not in self._arrived:
            self._posted.setdefault(envelope, deque()).append(received)
            return
        self._clock.at(self._clock.now, received)
        self._arrived[envelope] -= 1
        if not self._arrived[envelope]:
            del self._arrived[envelope]

    def _arrive(self, envelope: _Envelope, sent: Event | None) -> None:
        received = self._take(envelope)
        if sent:
            sent()
        if received:
            received()

    def _take(self, envelope: _Envelope) -> Event | None:
        """The handler of the receive that a message belongs to; if there is none yet the message waits."""
        posted = self._posted.get(envelope)
        if posted is None:
            self._arrived[envelope] += 1
            return None
        received = posted.popleft()
        if not posted:
            del self._posted[envelope]
        return received


class _Memory:
    """Remote memory: each rank's own, or a pool that serves one request at a time."""

    def __init__(self, pool: bool) -> None:
        self._pool, self._idle = pool, True
        self._waiting: deque[tuple[_Timers, int, Event]] = deque()

    def request(self, timers: _Timers, duration: int, served: Event) -> None:
        if not self._pool:
            timers.after(duration, served)
        elif self._idle:
            self._serve(timers, duration, served)
        else:
            self._waiting.append((timers, duration, served))

    def _serve(self, timers: _Timers, duration: int, served: Event) -> None:
        self._idle = False
        timers.after(duration, served)
        timers.after(duration, self._next)

    def _next(self) -> None:
        self._idle = True
        if self._waiting:
            self._serve(*self._waiting.popleft())


# Who takes part in a collective


@dataclass(frozen=True)
class _Ring:
    """Ranks in a circle, and where one of them sits.

    Attributes:
        local: it belongs to a group that is not all ranks, which has a delay of its own.
    """

    members: Sequence[int]
    position: int
    local: bool = False

    def at(self, offset: int) -> int:
        """The rank so many places on, clockwise."""
        return self.members[(self.position + offset) % len(self.members)]


class _Choice(NamedTuple):
    """The algorithm of a kind of collective in one dimension."""

    pattern: Pattern
    window: int


class _Cluster:
    """What all ranks share."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.clock = _Clock()
        self.dimensions = _dimensions(plan)
        network = _CongestedNetwork if plan.congestion else _IdealNetwork
        self.network = network(self.clock, self.dimensions)
        self.mail = _Mail(self.clock, self.network, plan.rendezvous)
        self.memory = _Memory(plan.memory_pool)
        self.nodes = _Nodes(plan)
        self._choices = _choices(plan)
        self._lines: dict[tuple[int, int], range] = {}

    def rings(self, rank: int, kind: CommType, group: int) -> list[tuple[_Ring, _Choice]]:
        """The logical dimensions of a kind of collective as a rank sees them, each with its algorithm."""
        choices = self._choices[kind]
        if group != _EVERYBODY and self._size(group) != self.plan.num_ranks:
            # The peer keeps a group's algorithm only where a kind has a single one.
            choice = choices[0] if len(choices) == 1 else _Choice(Pattern.RING, 0)
            return [(self._local_ring(rank, group), choice)]
        if self.plan.flat[KINDS_WITH_ALGORITHM.index(kind)]:
            return [(_Ring(range(self.plan.num_ranks), rank), choices[0])]
        return [(self._line(rank, index), choice) for index, choice in enumerate(choices)]

    def reduction(self, size: int) -> int:
        """How long a rank's memory takes to reduce two buffers: to read both and to write one."""
        if not self.plan.memory_bandwidth:
            raise ValueError("reductions need the bandwidth of the ranks' memory")
        return 3 * int(size / self.plan.memory_bandwidth * 1e9)

    def _size(self, group: int) -> int:
        return int(self.plan.first_member[group + 1] - self.plan.first_member[group])

    def _local_ring(self, rank: int, group: int) -> _Ring:
        first, last = self.plan.first_member[group : group + 2].tolist()
        members = self.plan.member[first:last].tolist()
        if rank not in members:
            raise ValueError(f"rank {rank} runs a collective of a group that it does not belong to")
        return _Ring(members, members.index(rank), local=True)

    def _line(self, rank: int, index: int) -> _Ring:
        dimension = self.dimensions[index]
        first = dimension.moved(rank, 0)
        if (index, first) not in self._lines:
            self._lines[index, first] = range(first, first + dimension.size * dimension.stride, dimension.stride)
        return _Ring(self._lines[index, first], dimension.coordinate(rank))


def _choices(plan: Plan) -> dict[CommType, list[_Choice]]:
    found = {}
    for kind, count, rows in zip(KINDS_WITH_ALGORITHM, plan.algorithms.tolist(), plan.algorithm.tolist(), strict=True):
        found[kind] = [_Choice(Pattern(pattern), window) for pattern, window in rows[:count]]
    return found


# Streams: the chunks of collectives


class _Rule(enum.Enum):
    """Which of a dimension's queues a phase takes."""

    ANY = enum.auto()
    FIRST_HALF = enum.auto()
    SECOND_HALF = enum.auto()


class _Cursor:
    """One rank's next queue in one dimension, by rule; remembered from collective to collective."""

    def __init__(self, queues: int) -> None:
        half = queues // 2
        self._half = half
        self._range = {_Rule.ANY: (0, queues), _Rule.FIRST_HALF: (0, half), _Rule.SECOND_HALF: (half, queues)}
        self._next = {rule: begin for rule, (begin, _) in self._range.items()}

    def take(self, rule: _Rule) -> tuple[int, int]:
        """A queue's number within the dimension, and its direction (1 clockwise, -1 anticlockwise)."""
        queue = self._next[rule]
        begin, end = self._range[rule]
        self._next[rule] = queue + 1 if queue + 1 < end else begin
        if rule == _Rule.ANY:
            return queue, -1 if self._half and queue >= self._half else 1
        return queue, 1 if rule == _Rule.FIRST_HALF else -1


@dataclass(frozen=True)
class _Phase:
    """What a stream does in one dimension.

    Attributes:
        size: bytes at its start.
        queue: the rank's number of it.
        direction: 1 clockwise, -1 anticlockwise.
        tree: which of the two trees it takes: 0 or 1.
    """

    kind: CommType
    choice: _Choice
    ring: _Ring
    dimension: int
    size: int
    queue: int
    direction: int
    tree: int

    @property
    def result(self) -> int:
        """Bytes at its end."""
        if self.choice.pattern == Pattern.DOUBLE_BINARY_TREE:  # always an all-reduce, whatever it stands for
            return self.size
        if self.kind == CommType.REDUCE_SCATTER:
            return self.size // len(self.ring.members)
        return self.size * len(self.ring.members) if self.kind == CommType.ALL_GATHER else self.size


@dataclass(slots=True)
class _Collective:
    """A collective of one rank that is under way."""

    node: int
    unfinished: int  # streams


@dataclass(slots=True, eq=False)
class _Stream:
    """A chunk of a collective on its way through its phases."""

    number: int
    priority: int
    collective: _Collective
    phases: list[_Phase]
    phase: int = -1  # the current one
    started: bool = False  # the current phase
    algorithm: _Algorithm | None = None  # of the current phase


class _Queue:
    """Streams that share a part of a dimension: the first few run, the others wait."""

    def __init__(self, limit: int, begin: Callable[[_Stream], None]) -> None:
        self.streams: list[_Stream] = []
        self._running, self._limit, self._begin = 0, limit, begin

    def enter(self, stream: _Stream) -> None:
        stream.started = False
        for place, other in enumerate(self.streams):
            if not other.started and other.priority < stream.priority:
                self.streams.insert(place, stream)
                return
        self.streams.append(stream)

    def start(self) -> None:
        while self._running < min(self._limit, len(self.streams)):
            stream = self.streams[self._running]
            stream.started = True
            self._begin(stream)
            self._running += 1

    def leave(self) -> None:
        """One that ran, and has been removed from ``streams``, makes room."""
        self._running -= 1
        self.start()


class _System:
    """What runs a rank's collectives.

    Attributes:
        finished: is called with the node of a collective that has ended.
    """

    def __init__(self, cluster: _Cluster, rank: int, timers: _Timers, finished: Callable[[int], None]) -> None:
        plan = cluster.plan
        self.cluster, self.rank, self.timers, self._finished = cluster, rank, timers, finished
        limit = -(-plan.active_chunks // plan.queues)
        self.queues = [_Queue(limit, self._begin) for _ in range(plan.queues * len(cluster.dimensions))]
        self._cursors = [_Cursor(plan.queues) for _ in cluster.dimensions]
        self._collectives = 0
        self._streams: Counter[int] = Counter()  # by group
        self._trees: Counter[tuple[CommType, int]] = Counter()  # phases, by kind of collective and dimension

    def collective(self, node: int, group: int) -> None:
        """Begin the collective of a node."""
        nodes, kind = self.cluster.nodes, CommType(self.cluster.nodes.kind[node])
        chunk, count = self._cut(kind, nodes.size[node])
        involved = nodes.dimensions[node] if group == _EVERYBODY else -1
        rings = self.cluster.rings(self.rank, kind, group)
        active = [index for index, (ring, _) in enumerate(rings) if len(ring.members) > 1 and involved >> index & 1]
        collective, priority = _Collective(node, count), self._priority(node)
        for _ in range(count):
            phases = self._phases(kind, rings, active, chunk)
            stream = _Stream(self._number(group), priority, collective, phases)
            if phases:  # else it waits forever
                self._advance(stream)

    def _cut(self, kind: CommType, size: int) -> tuple[int, int]:
        """The size of chunks and their number; the last one is not smaller, even if less is left."""
        chunk, ranks = size // self.cluster.plan.splits, self.cluster.plan.num_ranks
        if kind != CommType.ALL_GATHER and chunk < ranks:
            chunk, size = ranks, self.cluster.plan.splits * ranks
        if size and not chunk:
            raise ValueError(f"an all-gather of {size} bytes cannot be split into {self.cluster.plan.splits} chunks")
        return chunk, -(-size // chunk) if chunk else 0

    def _priority(self, node: int) -> int:
        begun, self._collectives = self._collectives, self._collectives + 1
        return (begun, -begun, self.cluster.nodes.priority[node])[self.cluster.plan.priority]

    def _number(self, group: int) -> int:
        """The number of the next stream.

        Streams of a group count for all ranks too, which is how ranks of different histories miss each other.
        """
        if group == _EVERYBODY:
            number = self._streams[_EVERYBODY]
        else:
            number = int(self.cluster.plan.group_number[group]) * _STREAMS_OF_GROUP + self._streams[group]
            self._streams[group] += 1
        self._streams[_EVERYBODY] += 1
        return number

    def _phases(self, kind: CommType, rings: list[tuple[_Ring, _Choice]], active: list[int], size: int) -> list[_Phase]:
        phases = []
        for dimension, part, rule in _parts(kind, active, self.cluster.plan.local_bandwidth_aware):
            ring, choice = rings[dimension]
            queue, direction = self._cursors[dimension].take(rule)
            queue += dimension * self.cluster.plan.queues
            tree = 0
            if choice.pattern == Pattern.DOUBLE_BINARY_TREE:
                tree = self._trees[kind, dimension] % 2
                self._trees[kind, dimension] += 1
            phases.append(_Phase(part, choice, ring, dimension, size, queue, direction, tree))
            size = phases[-1].result
        return phases

    def _begin(self, stream: _Stream) -> None:
        stream.algorithm = _algorithm(self, stream)
        stream.algorithm.start()

    def _advance(self, stream: _Stream) -> None:
        """Take a stream into its next phase, or to its end. The order of the steps is the peer's."""
        last = stream.phase == len(stream.phases) - 1
        if last:
            stream.collective.unfinished -= 1
            if not stream.collective.unfinished:
                self._finished(stream.collective.node)
        old = self.queues[stream.phases[stream.phase].queue] if stream.phase >= 0 else None
        if old:
            old.streams.remove(stream)
        if not last:
            stream.phase += 1
            self.queues[stream.phases[stream.phase].queue].enter(stream)
        if old:
            old.leave()
        if not last:
            self.queues[stream.phases[stream.phase].queue].start()

    def ended(self, stream: _Stream) -> None:
        """The algorithm of a stream's phase has ended."""
        stream.algorithm = None
        self._advance(stream)


def _parts(kind: CommType, active: list[int], local_bandwidth_aware: bool) -> list[tuple[int, CommType, _Rule]]:
    """The phases of a collective over some dimensions: dimension, kind, and the queue's rule."""
    if not active:
        return []
    if kind == CommType.ALL_REDUCE and local_bandwidth_aware:
        *lower, top = active
        return [
            *((each, CommType.REDUCE_SCATTER, _Rule.FIRST_HALF) for each in lower),
            (top, CommType.ALL_REDUCE, _Rule.FIRST_HALF),
            *((each, CommType.ALL_GATHER, _Rule.SECOND_HALF) for each in reversed(lower)),
        ]
    order = reversed(active) if kind == CommType.ALL_GATHER else active
    return [(each, kind, _Rule.ANY) for each in order]


# Algorithms of phases


def _algorithm(system: _System, stream: _Stream) -> _Algorithm:
    """What runs a stream's current phase."""
    phase = stream.phases[stream.phase]
    match phase.choice.pattern:
        case Pattern.RING:
            return _RingExchange(system, stream)
        case Pattern.DIRECT:
            return _DirectExchange(system, stream)
        case Pattern.HALVING_DOUBLING:
            return _HalvingExchange(system, stream)
        case Pattern.DOUBLE_BINARY_TREE:
            parent, children = _family(phase)
            role = _Root if parent < 0 else _Inner if children else _Leaf
            return role(system, stream, parent, children)


class _Algorithm(ABC):
    """One rank's part in one phase of a stream.

    Attributes:
        received: messages so far.
        expected: ranks from which a receive is posted, the oldest first.
    """

    def __init__(self, system: _System, stream: _Stream) -> None:
        self.phase = stream.phases[stream.phase]
        self.received = 0
        self.expected: list[int] = []
        self._system, self._stream = system, stream
        plan = system.cluster.plan
        self._delay = plan.local_delay if self.phase.ring.local else plan.endpoint_delay
        self._tag = stream.number % _COLLECTIVE_TAG + _COLLECTIVE_TAG

    @abstractmethod
    def start(self) -> None:
        """The stream's turn has come."""

    @abstractmethod
    def on_message(self) -> None:
        """A message has been received."""

    @abstractmethod
    def on_ready(self) -> None:
        """A step is over."""

    def _step(self, size: int, reduce: bool) -> None:
        """Pass the endpoint, and reduce what came if it is to be reduced."""
        ready: Event = self.on_ready
        if reduce:
            ready = partial(self._system.timers.after, self._system.cluster.reduction(size), self.on_ready)
        self._system.timers.after(self._delay, ready)

    def _send(self, target: int, size: int) -> None:
        self._system.cluster.mail.send(_Envelope(self._system.rank, target, size, self._tag))

    def _receive(self, source: int, size: int) -> None:
        self.expected.append(source)
        envelope = _Envelope(source, self._system.rank, size, self._tag)
        self._system.cluster.mail.receive(envelope, partial(self._on_arrival, source))

    def _on_arrival(self, source: int) -> None:
        self.expected.remove(source)
        self.received += 1
        self.on_message()

    def _end(self) -> None:
        self._system.ended(self._stream)


class _Packet(NamedTuple):
    """A message to be sent, and one of the same size to be received."""

    target: int
    source: int
    size: int


class _Exchange(_Algorithm):
    """Rounds in which each rank sends a message and receives one.

    Every start and every message received prepares a packet and begins a step; the end of a step is a credit, with
    which the oldest packet leaves. Credits and packets do not belong to each other.

    Attributes:
        window: how many steps may be under way.
        sends: how many messages are still to be sent.
        mixing: how many steps, of a cycle, follow the first few: one for each message with data to be mixed in.
    """

    def __init__(self, system: _System, stream: _Stream, window: int, sends: int, mixing: int) -> None:
        super().__init__(system, stream)
        self.sends = sends
        self._window, self._cycle = window, window + mixing
        self._prepared = self._credits = 0
        self._packets: deque[_Packet] = deque()

    @abstractmethod
    def _next_packet(self) -> _Packet:
        """The packet of the next round."""

    def start(self) -> None:
        for _ in range(self._window):
            self._prepare()

    def on_message(self) -> None:
        self._prepare()

    def on_ready(self) -> None:
        self._credits += 1
        self._try_to_send()
        self._try_to_end()

    def _prepare(self) -> None:
        packet, reduce = self._next_packet(), self._reduces()
        self._prepared += 1
        self._packets.append(packet)
        self._step(packet.size, reduce)

    def _reduces(self) -> bool:
        """Whether the next step reduces: the first steps of a cycle only send; an all-reduce gathers in even cycles."""
        cycle, place = divmod(self._prepared, self._cycle)
        kind = self.phase.kind
        reduces = kind == CommType.REDUCE_SCATTER or (kind == CommType.ALL_REDUCE and cycle % 2 == 0)
        return reduces and place >= self._window

    def _try_to_send(self) -> None:
        if self._packets and self.sends and self._credits:
            target, source, size = self._packets.popleft()
            self._send(target, size)
            self._receive(source, size)
            self.sends -= 1
            self._credits -= 1

    def _try_to_end(self) -> None:
        if not self.sends and self._credits == self._window:
            self._end()


def _share(phase: _Phase) -> int:
    """Bytes of a message where every one has the same size."""
    gathers = phase.kind == CommType.ALL_GATHER
    return phase.size if gathers else phase.size // len(phase.ring.members)


class _RingExchange(_Exchange):
    """Each rank sends to its next neighbor and receives from the one before."""

    def __init__(self, system: _System, stream: _Stream) -> None:
        phase = stream.phases[stream.phase]
        others = len(phase.ring.members) - 1
        sends = others
        if phase.kind == CommType.ALL_REDUCE:
            sends = 2 * others
        elif phase.kind == CommType.ALL_TO_ALL:
            sends = (others + 1) * others // 2
        super().__init__(system, stream, window=1, sends=sends, mixing=others)
        target, source = phase.ring.at(phase.direction), phase.ring.at(-phase.direction)
        self._packet = _Packet(target, source, _share(phase))

    def _next_packet(self) -> _Packet:
        return self._packet


class _DirectExchange(_Exchange):
    """Each rank sends to all others, with a window of messages under way."""

    def __init__(self, system: _System, stream: _Stream) -> None:
        phase = stream.phases[stream.phase]
        others = len(phase.ring.members) - 1
        window = min(phase.choice.window or others, others)
        sends = 2 * others if phase.kind == CommType.ALL_REDUCE else others
        mixing = others * window if phase.ring.local else window
        super().__init__(system, stream, window, sends, mixing)
        self._others, self._turn, self._size = others, 0, _share(phase)

    def _next_packet(self) -> _Packet:
        distance = (1 + self._turn) * self.phase.direction
        self._turn = (self._turn + 1) % self._others
        return _Packet(self.phase.ring.at(distance), self.phase.ring.at(-distance), self._size)

    def on_ready(self) -> None:
        if self.phase.kind != CommType.ALL_REDUCE or self.sends > self._others:
            super().on_ready()
            return
        self._credits += 1
        if self.received >= self._others:  # the second half begins when the first is complete
            for _ in range(self._window):
                self._try_to_send()
            self._try_to_end()


class _HalvingExchange(_Exchange):
    """Partners exchange ever smaller messages at ever larger distances, and the other way round."""

    def __init__(self, system: _System, stream: _Stream) -> None:
        phase = stream.phases[stream.phase]
        if phase.kind == CommType.ALL_TO_ALL:
            raise ValueError("halving and doubling cannot run an all-to-all")
        count = len(phase.ring.members)
        rounds = math.log2(count)
        sends = int(2 * rounds) if phase.kind == CommType.ALL_REDUCE else int(rounds)
        super().__init__(system, stream, window=1, sends=sends, mixing=int(rounds - 1))
        self._growing = phase.kind != CommType.ALL_GATHER
        self._distance, self._size = (1, phase.size // 2) if self._growing else (count // 2, phase.size)

    def _next_packet(self) -> _Packet:
        partner = self._partner()
        packet = _Packet(partner, partner, self._size)
        self._move_on()
        if self._distance == len(self.phase.ring.members) and self.phase.kind == CommType.ALL_REDUCE:
            self._growing = False
            self._move_on()
        return packet

    def _partner(self) -> int:
        """Of the next packet; a last one, which is never sent, may lie beyond the ring or at no distance."""
        ring, distance = self.phase.ring, self._distance
        ahead = distance == 0 or ring.position // distance % 2 == 0
        return ring.at(distance if ahead else -distance)

    def _move_on(self) -> None:
        if self._growing:
            self._distance, self._size = 2 * self._distance, self._size // 2
        else:
            self._distance, self._size = self._distance // 2, 2 * self._size


def _family(phase: _Phase) -> tuple[int, list[int]]:
    """A rank's parent (-1 for the root) and children in the tree of a phase.

    The root has one child, the top of a complete binary tree of all other ranks; ids in order, the root is the last
    one in one tree and the first in the other.
    """
    ring = phase.ring
    count = len(ring.members)
    if ring.local or count & (count - 1):
        raise ValueError(f"a tree needs a power of two ranks that are no group, not {count}")
    root, low, high = (0, 1, count) if phase.tree else (count - 1, 0, count - 1)
    parent, top = root, (low + high) // 2
    if ring.position == root:
        return -1, [ring.members[top]]
    while top != ring.position:
        parent = top
        low, high = (low, top) if ring.position < top else (top + 1, high)
        top = (low + high) // 2
    children = [(low + top) // 2, (top + 1 + high) // 2] if high - low > 1 else []
    return ring.members[parent], [ring.members[child] for child in children]


class _TreeRole(_Algorithm):
    """A place in a tree, through which the whole buffer goes up to be reduced and down to be spread."""

    def __init__(self, system: _System, stream: _Stream, parent: int, children: list[int]) -> None:
        super().__init__(system, stream)
        self._parent, self._children, self._size = parent, children, self.phase.size
        self._delay = system.cluster.plan.endpoint_delay

    def _pass_up(self) -> None:
        self._send(self._parent, self._size)
        self._receive(self._parent, self._size)

    def _pass_down(self) -> None:
        """Send to the children; nobody waits for the messages to arrive."""
        for child in self._children:
            self._send(child, self._size)
        self._end()


class _Leaf(_TreeRole):
    """A rank without children."""

    def start(self) -> None:
        self._step(self._size, reduce=False)

    def on_message(self) -> None:
        self._step(self._size, reduce=False)

    def on_ready(self) -> None:
        if self.received:
            self._end()
        else:
            self._pass_up()


class _Inner(_TreeRole):
    """A rank with a parent and two children."""

    _steps = 0  # that are over

    def start(self) -> None:
        for child in self._children:
            self._receive(child, self._size)

    def on_message(self) -> None:
        self._step(self._size, reduce=True)

    def on_ready(self) -> None:
        self._steps += 1
        if self._steps == 2:
            self._pass_up()
        elif self._steps == 3:
            self._pass_down()


class _Root(_TreeRole):
    """The rank at the top."""

    def start(self) -> None:
        self._receive(self._children[0], self._size)

    def on_message(self) -> None:
        self._step(self._size, reduce=True)

    def on_ready(self) -> None:
        self._pass_down()


# Programs


class _Nodes:
    """A plan's nodes as lists, whose elements are quicker to reach than those of arrays."""

    def __init__(self, plan: Plan) -> None:
        self.resource: list[int] = plan.node_resource.tolist()
        self.action: list[int] = plan.node_action.tolist()
        self.time: list[int] = plan.node_time.tolist()
        self.counts: list[int] = plan.node_counts.tolist()
        self.kind: list[int] = plan.node_kind.tolist()
        self.size: list[int] = plan.node_size.tolist()
        self.tag: list[int] = plan.node_tag.tolist()
        self.priority: list[int] = plan.node_priority.tolist()
        self.slot: list[int] = plan.node_slot.tolist()
        self.dimensions: list[int] = plan.node_dimensions.tolist()
        self.within: list[int] = plan.node_within.tolist()
        self.inner: list[tuple[int, int]] = list(zip(plan.first_within.tolist(), plan.num_within.tolist(), strict=True))
        self._first_child: list[int] = plan.first_child.tolist()
        self._child: list[int] = plan.child.tolist()

    def children(self, node: int) -> list[int]:
        return self._child[self._first_child[node] : self._first_child[node + 1]]


class _Program:
    """One rank's nodes: issues each when its dependencies have finished and its resource is free.

    Attributes:
        first: the plan's row of the first node; ``start`` and ``end`` of the nodes begin there.
        system: which runs its collectives.
        finish: when all was done, -1 before.
        computed: ns that count as computation, of finished nodes.
    """

    def __init__(self, cluster: _Cluster, rank: int) -> None:
        plan = cluster.plan
        program = int(plan.program_of[rank])
        self.first, last = plan.first_node[program : program + 2].tolist()
        self.start, self.end = [-1] * (last - self.first), [-1] * (last - self.first)
        self.finish, self.computed = -1, 0
        self._cluster, self._rank, self._nodes = cluster, rank, cluster.nodes
        self._timers = _Timers(cluster.clock)
        self.system = _System(cluster, rank, self._timers, self._finish)
        self._missing: list[int] = plan.node_missing[self.first : last].tolist()
        nodes = cluster.nodes
        self._free = [
            node for node in range(self.first, last) if not self._missing[node - self.first] and nodes.within[node] < 0
        ]
        self._occupied = [False] * len(Resource)
        self._issued = 0  # and unfinished

    def proceed(self) -> None:
        """Issue what can be issued, and see whether all is done."""
        for node in tuple(self._free):  # what becomes free meanwhile is not looked at
            if not self._occupied[self._nodes.resource[node]]:
                self._issue(node)
        if not self._free and not self._issued:
            self.finish = self._cluster.clock.now

    def _issue(self, node: int) -> None:
        nodes = self._nodes
        if nodes.within[node] < 0:
            del self._free[bisect_left(self._free, node)]
        self._occupied[nodes.resource[node]] = nodes.resource[node] != Resource.NONE
        self._issued += 1
        self.start[node - self.first] = self._cluster.clock.now
        match nodes.action[node]:
            case Action.WAIT:
                self._timers.after(nodes.time[node], partial(self._finish, node))
            case Action.NOTHING:
                self._complete(node)
            case Action.COLLECTIVE:
                self.system.collective(node, self._group(node))
            case Action.SEND:
                envelope = _Envelope(self._rank, self._peer(node), nodes.size[node], nodes.tag[node])
                self._cluster.mail.send(envelope, partial(self._finish, node))
            case Action.RECEIVE:
                envelope = _Envelope(self._peer(node), self._rank, nodes.size[node], nodes.tag[node])
                self._cluster.mail.receive(envelope, partial(self._finish, node))
            case Action.MEMORY:
                self._cluster.memory.request(self._timers, nodes.time[node], partial(self._finish, node))
            case Action.ENCLOSE:
                self._enter(node)

    def _peer(self, node: int) -> int:
        plan = self._cluster.plan
        return int(plan.peer[plan.first_peer[self._rank] + self._nodes.slot[node]])

    def _group(self, node: int) -> int:
        plan, slot = self._cluster.plan, self._nodes.slot[node]
        return -1 if slot < 0 else int(plan.group_of[plan.first_group[self._rank] + slot])

    def _enter(self, node: int) -> None:
        """Start the nodes within a collective that wait for none of each other."""
        first, count = self._nodes.inner[node]
        self._missing[node - self.first] = count
        for inner in [i for i in range(first, first + count) if not self._missing[i - self.first]]:
            self._issue(inner)

    def _finish(self, node: int) -> None:
        if self._nodes.within[node] >= 0:
            self._finish_inner(node, self._nodes.within[node])
            return
        self._complete(node)
        self.proceed()

    def _finish_inner(self, node: int, enclosing: int) -> None:
        """A node within a collective is over: those behind it start at once, and the last one ends the collective."""
        self._issued -= 1
        self.end[node - self.first] = self._cluster.clock.now
        for child in self._nodes.children(node):
            self._missing[child - self.first] -= 1
            if not self._missing[child - self.first]:
                self._issue(child)
        self._missing[enclosing - self.first] -= 1
        if not self._missing[enclosing - self.first]:
            self._finish(enclosing)

    def _complete(self, node: int) -> None:
        """A node is over: make room and free those that waited for it."""
        nodes = self._nodes
        self._occupied[nodes.resource[node]] = False
        self._issued -= 1
        self.end[node - self.first] = self._cluster.clock.now
        if nodes.counts[node] == 1:
            self.computed += nodes.time[node]
        for child in nodes.children(node):
            self._missing[child - self.first] -= 1
            if not self._missing[child - self.first]:
                insort(self._free, child)


# What came out


def _outcome(cluster: _Cluster, workers: list[_Program]) -> Outcome:
    link_bytes, link_busy = _traffic(cluster)
    return Outcome(
        finish=np.array([each.finish for each in workers], np.int64),
        computed=np.array([each.computed for each in workers], np.int64),
        start=np.fromiter(chain.from_iterable(each.start for each in workers), np.int64),
        end=np.fromiter(chain.from_iterable(each.end for each in workers), np.int64),
        waiting=_waiting(workers),
        link_bytes=link_bytes,
        link_busy=link_busy,
        messages=cluster.mail.messages,
    )


def _waiting(workers: list[_Program]) -> dict[str, Any]:
    """Streams whose current phase has started, and from whom each has expected a message for the longest time."""
    columns = ("rank", "node", "stream", "dimension", "phase", "received", "posted_from")
    rows = []
    for rank, worker in enumerate(workers):
        for stream in chain.from_iterable(queue.streams for queue in worker.system.queues):
            if algorithm := stream.algorithm:
                node, dimension = stream.collective.node - worker.first, algorithm.phase.dimension
                expected = algorithm.expected[0] if algorithm.expected else -1
                rows.append((rank, node, stream.number, dimension, stream.phase, algorithm.received, expected))
    table = np.array(rows, np.int64).reshape(-1, len(columns))
    return {name: np.ascontiguousarray(table[:, index]) for index, name in enumerate(columns)}


def _traffic(cluster: _Cluster) -> tuple[I64, I64]:
    """Bytes and busy ns of every link."""
    network = cluster.network
    if not isinstance(network, _CongestedNetwork):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    count = sum(dimension.links(cluster.plan.num_ranks) for dimension in cluster.dimensions)
    link_bytes, link_busy = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for index, link in network.links.items():
        link_bytes[index], link_busy[index] = link.carried, link.busy
    return link_bytes, link_busy
