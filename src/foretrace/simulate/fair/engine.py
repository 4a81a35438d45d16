"""The fluid engine's inner loops, compiled: when each activity of a `FairPlan` starts and ends.

Time goes from moment to moment. At each one: what is due ends, faults strike, what has become ready starts (`_settle`),
and then rates are found anew (`_refresh_ranks`, `_refresh_links`), but only of ranks and of connected components of
links in which something has changed. Times are float64 on a grid (`snap`), so that what is simultaneous is exactly so.

Flows share links with max-min fairness (Bertsekas and Gallager, Data Networks, section 6.5.2): all rates rise together
until a link is full; its flows keep that rate and the others go on rising.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from foretrace.simulate.fair.plan import I32, I64

Records = np.recarray[Any, Any]

_INSTANT, _COMPUTE, _FLOW = 0, 2, 3  # numbers of `Kind`
_LINK_FAULT = 0  # number of `FaultKind`
_WAITING, _RUNNING, _LANDING, _DONE = 0, 1, 2, 3  # a flow that lands has left its links and is still on its way
_COMPUTES, _DELAYS, _HELD = 0, 1, 2  # lists of each rank: what runs, and what waits for the rank to come back
_COUNT, _DONE_COUNT, _EVENTS, _READY, _DIRTY_LINKS, _DIRTY_RANKS, _DIRTY_QUEUES, _MOMENT = 0, 1, 2, 3, 4, 5, 6, 7
COUNTERS = 8

# Records keep what is used together close in memory, and compile much faster than as many arrays.
# Lists are chains of indices that end with -1.

ACTIVITY = np.dtype(
    [
        *((name, np.float64) for name in ("work", "latency", "ready", "start", "end", "left", "rate", "touched")),
        *((name, np.int64) for name in ("first_child", "first_hop", "heap_key", "in_component")),
        *((name, np.int32) for name in ("rank", "peer", "takes", "gives", "missing", "event_at", "before", "after")),
        *((name, np.int32) for name in ("heap_left", "heap_right", "heap_rank")),
        ("kind", np.int8),
        ("stage", np.int8),
    ],
    align=True,
)
"""``latency`` of the whole route; ``left`` of the work at time ``touched``; ``event_at``: place in the heap of events
or -1; ``before`` and ``after``: neighbors in a list of the rank; ``heap_...``: leftist heaps of the queues."""

HOP = np.dtype([("link", np.int32), ("flow", np.int32), ("before", np.int32), ("after", np.int32)])
"""A step of a route; ``before`` and ``after``: neighbors among the flows on the link."""

LINK = np.dtype(
    [
        *((name, np.float64) for name in ("capacity", "factor", "spare", "on_since", "busy")),
        ("visited", np.int64),
        *((name, np.int32) for name in ("owner", "first", "open_flows")),
        ("is_dirty", np.bool_),
    ],
    align=True,
)
"""``first``: of the list of flows on it; ``spare`` and ``open_flows``: while rates are found; ``on_since``: -1 while
nothing flows."""

RANK = np.dtype(
    [
        *((name, np.float64) for name in ("speed", "slowdown", "link_slowdown", "factor")),
        ("first_owned", np.int64),
        ("flows", np.int32),
        ("computes", np.bool_),
        ("is_dirty", np.bool_),
    ],
    align=True,
)
QUEUE = np.dtype([("root", np.int32), ("free", np.int32), ("is_dirty", np.bool_)], align=True)
FAULT = np.dtype([("time", np.float64), ("factor", np.float64), ("target", np.int32), ("kind", np.int8)], align=True)
EVENT = np.dtype([("time", np.float64), ("item", np.int32)], align=True)
SHARE = np.dtype([("share", np.float64), ("link", np.int32)], align=True)


class State(NamedTuple):
    """All of a run. Activities stand in order of (priority, key), with one more row that ends the last one's lists."""

    act: Records
    child: I32
    hop: Records
    link: Records
    ranks: Records  # one more row, too
    owned: I32  # links, by the rank that owns them
    head: I32  # of the lists of each rank, shape (3, ranks)
    queue: Records
    fault: Records  # ascending by time
    event: Records  # a heap
    fill: Records  # a heap
    ready_stack: I32
    granted: I32
    path: I32
    flows: I32
    links: I32
    dirty_links: I32
    dirty_ranks: I32
    dirty_queues: I32
    counter: I64


@njit(cache=True, nogil=True)
def snap(time: float) -> float:
    """The nearest time on the grid: multiples of 2^-20 ns, or 46 significant bits where that is coarser."""
    if time <= 0.0 or time == np.inf:
        return time
    exponent = math.frexp(time)[1]
    grid = math.ldexp(1.0, max(-20, exponent - 46))
    return math.floor(time / grid + 0.5) * grid


# --- the heap of events: each activity is in it at most once ---


@njit(cache=True, nogil=True)
def _is_earlier(time: float, item: int, other_time: float, other: int) -> bool:
    return time < other_time or (time == other_time and item < other)


@njit(cache=True, nogil=True)
def _comes_first(s: State, one: int, other: int) -> bool:
    """Whether one entry of the heap is earlier than another."""
    return _is_earlier(s.event[one].time, s.event[one].item, s.event[other].time, s.event[other].item)


@njit(cache=True, nogil=True)
def _rise(s: State, at: int, time: float, item: int) -> int:
    """Move the hole at ``at`` up until the entry fits; gives its place."""
    while at > 0:
        above = (at - 1) >> 1
        if not _is_earlier(time, item, s.event[above].time, s.event[above].item):
            break
        s.event[at].time, s.event[at].item = s.event[above].time, s.event[above].item
        s.act[s.event[at].item].event_at = at
        at = above
    return at


@njit(cache=True, nogil=True)
def _sink(s: State, at: int, size: int, time: float, item: int) -> int:
    """Move the hole at ``at`` down until the entry fits; gives its place."""
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        other = below + 1
        if other < size and _comes_first(s, other, below):
            below = other
        if not _is_earlier(s.event[below].time, s.event[below].item, time, item):
            break
        s.event[at].time, s.event[at].item = s.event[below].time, s.event[below].item
        s.act[s.event[at].item].event_at = at
        at = below
    return at


@njit(cache=True, nogil=True)
def _place(s: State, at: int, size: int, time: float, item: int) -> None:
    """Put an entry where the hole at ``at`` is."""
    at = _rise(s, at, time, item)
    at = _sink(s, at, size, time, item)
    s.event[at].time, s.event[at].item = time, item
    s.act[item].event_at = at


@njit(cache=True, nogil=True)
def _set_event(s: State, item: int, time: float) -> None:
    """The activity's next event is at ``time``."""
    at = s.act[item].event_at
    if at < 0:
        at = s.counter[_EVENTS]
        s.counter[_EVENTS] += 1
    _place(s, at, s.counter[_EVENTS], time, item)


@njit(cache=True, nogil=True)
def _drop_event(s: State, item: int) -> None:
    """The activity has no next event."""
    at = s.act[item].event_at
    if at < 0:
        return
    s.act[item].event_at = -1
    s.counter[_EVENTS] -= 1
    size = s.counter[_EVENTS]
    if at < size:
        _place(s, at, size, s.event[size].time, s.event[size].item)


# --- queues: leftist heaps by (moment of becoming ready, priority, key) ---


@njit(cache=True, nogil=True)
def _merge(s: State, one: int, other: int) -> int:
    """Merge two leftist heaps (-1 is the empty one); gives the root."""
    depth = 0
    while one >= 0 and other >= 0:
        if s.act[other].heap_key < s.act[one].heap_key:
            one, other = other, one
        s.path[depth] = one
        depth += 1
        one = s.act[one].heap_right
    root = one if one >= 0 else other
    for at in range(depth - 1, -1, -1):
        node = s.path[at]
        s.act[node].heap_right = root
        left = s.act[node].heap_left
        left_rank = s.act[left].heap_rank if left >= 0 else 0
        right_rank = s.act[root].heap_rank if root >= 0 else 0
        if left_rank < right_rank:
            s.act[node].heap_left, s.act[node].heap_right = root, left
            right_rank = left_rank
        s.act[node].heap_rank = right_rank + 1
        root = node
    return root


@njit(cache=True, nogil=True)
def _touch_queue(s: State, queue: int) -> None:
    if not s.queue[queue].is_dirty:
        s.queue[queue].is_dirty = True
        s.dirty_queues[s.counter[_DIRTY_QUEUES]] = queue
        s.counter[_DIRTY_QUEUES] += 1


@njit(cache=True, nogil=True)
def _touch_link(s: State, link: int) -> None:
    if not s.link[link].is_dirty:
        s.link[link].is_dirty = True
        s.dirty_links[s.counter[_DIRTY_LINKS]] = link
        s.counter[_DIRTY_LINKS] += 1


@njit(cache=True, nogil=True)
def _touch_rank(s: State, rank: int) -> None:
    if rank >= 0 and not s.ranks[rank].is_dirty:
        s.ranks[rank].is_dirty = True
        s.dirty_ranks[s.counter[_DIRTY_RANKS]] = rank
        s.counter[_DIRTY_RANKS] += 1


@njit(cache=True, nogil=True)
def _put_first(s: State, which: int, rank: int, item: int) -> None:
    """Put an activity into a list of a rank."""
    old = s.head[which, rank]
    s.act[item].before, s.act[item].after = -1, old
    if old >= 0:
        s.act[old].before = item
    s.head[which, rank] = item


@njit(cache=True, nogil=True)
def _take_out(s: State, which: int, rank: int, item: int) -> None:
    """Take an activity out of a list of a rank."""
    before, after = s.act[item].before, s.act[item].after
    if before >= 0:
        s.act[before].after = after
    else:
        s.head[which, rank] = after
    if after >= 0:
        s.act[after].before = before


# --- beginning and ending ---


@njit(cache=True, nogil=True)
def _give(s: State, item: int) -> None:
    """Hand on the activity's slot."""
    queue = s.act[item].gives
    if queue >= 0:
        s.queue[queue].free += 1
        _touch_queue(s, queue)


@njit(cache=True, nogil=True)
def _finish(s: State, item: int, now: float) -> None:
    """The activity is over: hand on its slot (a flow already has), and see who waited for it."""
    s.act[item].stage = _DONE
    s.act[item].end = now
    s.counter[_DONE_COUNT] += 1
    if s.act[item].kind != _FLOW:
        _give(s, item)
    for edge in range(s.act[item].first_child, s.act[item + 1].first_child):
        after = s.child[edge]
        s.act[after].missing -= 1
        if s.act[after].missing == 0:
            s.ready_stack[s.counter[_READY]] = after
            s.counter[_READY] += 1


@njit(cache=True, nogil=True)
def _count_flow(s: State, item: int, change: int) -> None:
    """One flow more or less for both of its ranks."""
    rank, peer = s.act[item].rank, s.act[item].peer
    if rank >= 0:
        s.ranks[rank].flows += change
        _touch_rank(s, rank)
    if peer >= 0 and peer != rank:
        s.ranks[peer].flows += change
        _touch_rank(s, peer)


@njit(cache=True, nogil=True)
def _land(s: State, item: int, now: float) -> None:
    """The last byte of a flow has left its sender; it arrives after the latency of the route."""
    _give(s, item)
    arrival = snap(now + s.act[item].latency)
    if arrival <= now:
        _finish(s, item, now)
    else:
        s.act[item].stage = _LANDING
        _set_event(s, item, arrival)


@njit(cache=True, nogil=True)
def _begin_flow(s: State, item: int, now: float) -> None:
    first, end = s.act[item].first_hop, s.act[item + 1].first_hop
    if first == end or s.act[item].work <= 0.0:
        _land(s, item, now)
        return
    _count_flow(s, item, 1)
    for entry in range(first, end):
        link = s.hop[entry].link
        old = s.link[link].first
        s.hop[entry].before, s.hop[entry].after = -1, old
        if old >= 0:
            s.hop[old].before = entry
        s.link[link].first = entry
        _touch_link(s, link)


@njit(cache=True, nogil=True)
def _end_flow(s: State, item: int, now: float) -> None:
    _count_flow(s, item, -1)
    for entry in range(s.act[item].first_hop, s.act[item + 1].first_hop):
        link = s.hop[entry].link
        before, after = s.hop[entry].before, s.hop[entry].after
        if before >= 0:
            s.hop[before].after = after
        else:
            s.link[link].first = after
        if after >= 0:
            s.hop[after].before = before
        _touch_link(s, link)
    _land(s, item, now)


@njit(cache=True, nogil=True)
def _begin(s: State, item: int, now: float) -> None:
    """Start an activity that is ready and has its slot; a rank that is down holds it."""
    rank, kind = s.act[item].rank, s.act[item].kind
    if rank >= 0 and s.ranks[rank].factor == 0.0:
        _put_first(s, _HELD, rank, item)
        return
    s.act[item].start = s.act[item].touched = now
    s.act[item].left = s.act[item].work
    s.act[item].stage = _RUNNING
    if kind == _FLOW:
        _begin_flow(s, item, now)
    elif kind == _INSTANT or s.act[item].work <= 0.0:
        _finish(s, item, now)
    elif kind == _COMPUTE and rank >= 0:
        _put_first(s, _COMPUTES, rank, item)
        _touch_rank(s, rank)
    else:
        if rank >= 0:
            _put_first(s, _DELAYS, rank, item)
        s.act[item].rate = 1.0
        _set_event(s, item, snap(now + s.act[item].work))


@njit(cache=True, nogil=True)
def _expire(s: State, item: int, now: float) -> None:
    """The activity's event has come."""
    _drop_event(s, item)
    rank = s.act[item].rank
    if s.act[item].stage == _LANDING:
        _finish(s, item, now)
        return
    s.act[item].left = 0.0
    s.act[item].rate = 0.0
    if s.act[item].kind == _FLOW:
        _end_flow(s, item, now)
        return
    if rank >= 0:
        if s.act[item].kind == _COMPUTE:
            _take_out(s, _COMPUTES, rank, item)
            _touch_rank(s, rank)
        else:
            _take_out(s, _DELAYS, rank, item)
    _finish(s, item, now)


@njit(cache=True, nogil=True)
def _settle(s: State, now: float) -> None:
    """Start all that can start at this moment; slots are given out when nothing else is left to do."""
    while True:
        while s.counter[_READY] > 0:
            s.counter[_READY] -= 1
            item = s.ready_stack[s.counter[_READY]]
            s.act[item].ready = now
            queue = s.act[item].takes
            if queue < 0:
                _begin(s, item, now)
            else:
                s.act[item].heap_key = (s.counter[_MOMENT] << 32) | item
                s.queue[queue].root = _merge(s, s.queue[queue].root, item)
                _touch_queue(s, queue)
        if s.counter[_DIRTY_QUEUES] == 0:
            return
        granted = 0  # all slots of a round are given before any of them is used: queues have no order
        while s.counter[_DIRTY_QUEUES] > 0:
            s.counter[_DIRTY_QUEUES] -= 1
            queue = s.dirty_queues[s.counter[_DIRTY_QUEUES]]
            s.queue[queue].is_dirty = False
            while s.queue[queue].free > 0 and s.queue[queue].root >= 0:
                item = s.queue[queue].root
                s.queue[queue].root = _merge(s, s.act[item].heap_left, s.act[item].heap_right)
                s.queue[queue].free -= 1
                s.granted[granted] = item
                granted += 1
        for at in range(granted):
            _begin(s, s.granted[at], now)


# --- rates ---


@njit(cache=True, nogil=True)
def _set_rate(s: State, item: int, rate: float, now: float) -> None:
    """From now on the activity goes at this rate."""
    if rate == s.act[item].rate:
        return
    s.act[item].left = max(s.act[item].left - s.act[item].rate * (now - s.act[item].touched), 0.0)
    s.act[item].touched = now
    s.act[item].rate = rate
    if rate > 0.0:
        _set_event(s, item, snap(now + s.act[item].left / rate))
    else:
        _drop_event(s, item)


@njit(cache=True, nogil=True)
def _is_down(s: State, rank: int) -> bool:
    return rank >= 0 and bool(s.ranks[rank].factor == 0.0)


@njit(cache=True, nogil=True)
def _is_cut_off(s: State, item: int) -> bool:
    """Whether an end of the flow is down."""
    return _is_down(s, s.act[item].rank) or _is_down(s, s.act[item].peer)


@njit(cache=True, nogil=True)
def _capacity(s: State, link: int) -> float:
    """Of a link at this moment."""
    capacity: float = s.link[link].capacity * s.link[link].factor
    owner = s.link[link].owner
    if owner >= 0 and s.ranks[owner].computes:
        capacity *= 1.0 - s.ranks[owner].link_slowdown
    return capacity


@njit(cache=True, nogil=True)
def _refresh_ranks(s: State, now: float) -> None:
    """New speeds of what ranks compute."""
    while s.counter[_DIRTY_RANKS] > 0:
        s.counter[_DIRTY_RANKS] -= 1
        rank = s.dirty_ranks[s.counter[_DIRTY_RANKS]]
        s.ranks[rank].is_dirty = False
        speed = s.ranks[rank].speed * s.ranks[rank].factor
        if s.ranks[rank].flows > 0:
            speed *= 1.0 - s.ranks[rank].slowdown
        item = s.head[_COMPUTES, rank]
        computes = item >= 0 and s.ranks[rank].factor > 0.0
        while item >= 0:
            _set_rate(s, item, speed, now)
            item = s.act[item].after
        if computes != s.ranks[rank].computes:
            s.ranks[rank].computes = computes
            if s.ranks[rank].link_slowdown > 0.0:
                for at in range(s.ranks[rank].first_owned, s.ranks[rank + 1].first_owned):
                    _touch_link(s, s.owned[at])


@njit(cache=True, nogil=True)
def _collect(s: State, link: int) -> tuple[int, int]:
    """Put all links and flows that hang together with a link into ``links`` and ``flows``; gives how many."""
    moment = s.counter[_MOMENT]
    s.links[0] = link
    s.link[link].visited = moment
    links, flows, done = 1, 0, 0
    while done < links:
        link = s.links[done]
        done += 1
        entry = s.link[link].first
        while entry >= 0:
            item = s.hop[entry].flow
            if s.act[item].in_component != moment:
                s.act[item].in_component = moment
                s.flows[flows] = item
                flows += 1
                for at in range(s.act[item].first_hop, s.act[item + 1].first_hop):
                    other = s.hop[at].link
                    if s.link[other].visited != moment:
                        s.link[other].visited = moment
                        s.links[links] = other
                        links += 1
            entry = s.hop[entry].after
    return links, flows


@njit(cache=True, nogil=True)
def _push_share(s: State, size: int, share: float, link: int) -> None:
    """Put a link into the heap by share."""
    at = size
    while at > 0:
        above = (at - 1) >> 1
        if not _is_earlier(share, link, s.fill[above].share, s.fill[above].link):
            break
        s.fill[at].share, s.fill[at].link = s.fill[above].share, s.fill[above].link
        at = above
    s.fill[at].share, s.fill[at].link = share, link


@njit(cache=True, nogil=True)
def _drop_share(s: State, size: int) -> None:
    """Take the first of ``size`` links out of the heap."""
    size -= 1
    share, link = s.fill[size].share, s.fill[size].link
    at = 0
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        other = below + 1
        if other < size and _is_earlier(
            s.fill[other].share, s.fill[other].link, s.fill[below].share, s.fill[below].link
        ):
            below = other
        if not _is_earlier(s.fill[below].share, s.fill[below].link, share, link):
            break
        s.fill[at].share, s.fill[at].link = s.fill[below].share, s.fill[below].link
        at = below
    s.fill[at].share, s.fill[at].link = share, link


@njit(cache=True, nogil=True)
def _fill(s: State, links: int, flows: int, now: float) -> None:
    """Max-min fair rates of a component: the link with the least share a flow is full first."""
    if flows == 1 and not _is_cut_off(s, s.flows[0]):
        rate = np.inf
        for at in range(links):
            rate = min(rate, _capacity(s, s.links[at]))
        _set_rate(s, s.flows[0], rate, now)
        return
    for at in range(links):
        link = s.links[at]
        s.link[link].spare = _capacity(s, link)
        s.link[link].open_flows = 0
    for at in range(flows):
        item = s.flows[at]
        if _is_cut_off(s, item):
            _set_rate(s, item, 0.0, now)
            s.act[item].in_component = -s.act[item].in_component
            continue
        for entry in range(s.act[item].first_hop, s.act[item + 1].first_hop):
            s.link[s.hop[entry].link].open_flows += 1
    size = 0
    for at in range(links):
        link = s.links[at]
        if s.link[link].open_flows > 0:
            _push_share(s, size, s.link[link].spare / s.link[link].open_flows, link)
            size += 1
    level = 0.0  # shares only grow; this keeps rounding errors from making them shrink
    moment = s.counter[_MOMENT]
    while size > 0:
        share, link = s.fill[0].share, s.fill[0].link
        _drop_share(s, size)
        size -= 1
        if s.link[link].open_flows == 0:
            continue
        new_share = s.link[link].spare / s.link[link].open_flows
        if new_share > share:
            _push_share(s, size, new_share, link)
            size += 1
            continue
        level = max(level, new_share)
        entry = s.link[link].first
        while entry >= 0:
            item = s.hop[entry].flow
            if s.act[item].in_component == moment:
                s.act[item].in_component = -moment
                _set_rate(s, item, level, now)
                for other in range(s.act[item].first_hop, s.act[item + 1].first_hop):
                    s.link[s.hop[other].link].spare -= level
                    s.link[s.hop[other].link].open_flows -= 1
            entry = s.hop[entry].after


@njit(cache=True, nogil=True)
def _note_use(s: State, link: int, now: float) -> None:
    """Note since when or how long something has been flowing over a link."""
    flows = False
    entry = s.link[link].first
    while entry >= 0 and not flows:
        flows = s.act[s.hop[entry].flow].rate > 0.0
        entry = s.hop[entry].after
    since = s.link[link].on_since
    if flows and since < 0.0:
        s.link[link].on_since = now
    elif not flows and since >= 0.0:
        s.link[link].busy += now - since
        s.link[link].on_since = -1.0


@njit(cache=True, nogil=True)
def _refresh_links(s: State, now: float) -> None:
    """New rates of the flows in all components with a link that has changed."""
    for at in range(s.counter[_DIRTY_LINKS]):
        link = s.dirty_links[at]
        s.link[link].is_dirty = False
        if s.link[link].visited == s.counter[_MOMENT]:
            continue
        links, flows = _collect(s, link)
        if flows > 0:
            _fill(s, links, flows, now)
        for place in range(links):
            _note_use(s, s.links[place], now)
    s.counter[_DIRTY_LINKS] = 0


@njit(cache=True, nogil=True)
def _strike_rank(s: State, rank: int, factor: float, now: float) -> None:
    """A rank gets another speed: it goes down, or comes back and begins what it held."""
    was_down = s.ranks[rank].factor == 0.0
    s.ranks[rank].factor = factor
    _touch_rank(s, rank)
    if was_down == (factor == 0.0):
        return
    item = s.head[_DELAYS, rank]
    while item >= 0:
        _set_rate(s, item, 0.0 if factor == 0.0 else 1.0, now)
        item = s.act[item].after
    for flow in range(s.counter[_COUNT]):
        touches = s.act[flow].rank == rank or s.act[flow].peer == rank
        if touches and s.act[flow].kind == _FLOW and s.act[flow].stage == _RUNNING:
            for entry in range(s.act[flow].first_hop, s.act[flow + 1].first_hop):
                _touch_link(s, s.hop[entry].link)
    if factor == 0.0:
        return
    item = s.head[_HELD, rank]
    s.head[_HELD, rank] = -1
    while item >= 0:
        after = s.act[item].after
        _begin(s, item, now)
        item = after


@njit(cache=True, nogil=True)
def run(s: State) -> float:
    """Run the plan; the results are in ``s``. Gives the time of the last moment."""
    now, fault = 0.0, 0
    for item in range(s.counter[_COUNT]):
        if s.act[item].missing == 0:
            s.ready_stack[s.counter[_READY]] = item
            s.counter[_READY] += 1
    while True:
        s.counter[_MOMENT] += 1
        while s.counter[_EVENTS] > 0 and s.event[0].time <= now:
            _expire(s, s.event[0].item, now)
        while fault < len(s.fault) and s.fault[fault].time <= now:
            target, factor = s.fault[fault].target, s.fault[fault].factor
            if s.fault[fault].kind == _LINK_FAULT:
                s.link[target].factor = factor
                _touch_link(s, target)
            else:
                _strike_rank(s, target, factor, now)
            fault += 1
        _settle(s, now)
        _refresh_ranks(s, now)
        _refresh_links(s, now)
        upcoming = s.event[0].time if s.counter[_EVENTS] > 0 else np.inf
        if fault < len(s.fault):
            upcoming = min(upcoming, s.fault[fault].time)
        if upcoming == np.inf or s.counter[_DONE_COUNT] == s.counter[_COUNT]:
            break
        now = upcoming
    for item in range(s.counter[_COUNT]):
        if s.act[item].stage == _RUNNING:
            s.act[item].left = max(s.act[item].left - s.act[item].rate * (now - s.act[item].touched), 0.0)
    for link in range(len(s.link)):
        if s.link[link].on_since >= 0.0:
            s.link[link].busy += now - s.link[link].on_since
    return now
