"""The fluid rules once more, in exact fractions and without any cleverness: every rate anew at every moment."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

from foretrace.simulate.fair import FairPlan, FaultKind, Kind


class Reference:
    """A run of a plan. Afterwards ``start`` and ``end`` hold the times of what started and ended, by activity."""

    def __init__(self, plan: FairPlan) -> None:
        self.plan = plan
        self.rows = range(plan.num_activities)
        self.children = [plan.child[plan.first_child[row] : plan.first_child[row + 1]].tolist() for row in self.rows]
        self.route = [plan.hop[plan.first_hop[row] : plan.first_hop[row + 1]].tolist() for row in self.rows]
        self.missing = [sum(children.count(row) for children in self.children) for row in self.rows]
        self.left = [Fraction(work) for work in plan.work.tolist()]
        self.order = {row: (int(plan.priority[row]), int(plan.key[row])) for row in self.rows}
        self.start: dict[int, Fraction] = {}
        self.end: dict[int, Fraction] = {}
        self.ready: dict[int, Fraction] = {}
        self.lands: dict[int, Fraction] = {}
        self.running: set[int] = set()
        self.held: list[int] = []
        self.free = plan.queue_slots.tolist()
        self.queue: dict[int, list[int]] = defaultdict(list)
        self.link_factor = [Fraction(1)] * plan.num_links
        self.rank_factor = [Fraction(1)] * plan.num_ranks
        self.link_bytes = [Fraction(0)] * plan.num_links
        self.link_busy = [Fraction(0)] * plan.num_links
        faults = zip(plan.fault_time, plan.fault_kind, plan.fault_target, plan.fault_factor, strict=True)
        self.faults = [(Fraction(float(t)), int(k), int(g), Fraction(float(f))) for t, k, g, f in faults]
        self.now = Fraction(0)
        self.waiting = [row for row in self.rows if not self.missing[row]]

    def run(self) -> Reference:
        while True:
            self.finish_what_is_due()
            self.strike()
            self.settle()
            rates = self.rates()
            after = [self.now + self.left[row] / rate for row, rate in rates.items() if rate]
            after += [*self.lands.values(), *(fault[0] for fault in self.faults)]
            if not after or len(self.end) == len(self.rows):
                return self
            self.pass_time(min(after), rates)

    def pass_time(self, until: Fraction, rates: dict[int, Fraction]) -> None:
        span, self.now = until - self.now, until
        for row, rate in rates.items():
            self.left[row] -= rate * span
            for link in self.route[row]:
                self.link_bytes[link] += rate * span
        for link in {link for row, rate in rates.items() if rate for link in self.route[row]}:
            self.link_busy[link] += span

    def finish_what_is_due(self) -> None:
        for row in [row for row in self.running if not self.left[row]]:
            self.running.remove(row)
            if self.plan.kind[row] == Kind.FLOW:
                self.land(row)
            else:
                self.finish(row)
        for row in [row for row, time in self.lands.items() if time <= self.now]:
            del self.lands[row]
            self.finish(row)

    def land(self, row: int) -> None:
        self.give(row)
        latency = sum((Fraction(float(self.plan.link_latency[link])) for link in self.route[row]), Fraction(0))
        if latency:
            self.lands[row] = self.now + latency
        else:
            self.finish(row)

    def finish(self, row: int) -> None:
        self.end[row] = self.now
        if self.plan.kind[row] != Kind.FLOW:
            self.give(row)
        for child in self.children[row]:
            self.missing[child] -= 1
            if not self.missing[child]:
                self.waiting.append(child)

    def give(self, row: int) -> None:
        if self.plan.gives[row] >= 0:
            self.free[self.plan.gives[row]] += 1

    def strike(self) -> None:
        due = [fault for fault in self.faults if fault[0] <= self.now]
        self.faults = [fault for fault in self.faults if fault[0] > self.now]
        for _, kind, target, factor in sorted(due, key=lambda fault: -fault[3]):
            (self.link_factor if kind == FaultKind.LINK else self.rank_factor)[target] = factor
        held, self.held = self.held, []
        for row in held:
            self.begin(row)

    def settle(self) -> None:
        while True:
            while self.waiting:
                row = self.waiting.pop(0)
                self.ready[row] = self.now
                if self.plan.takes[row] >= 0:
                    self.queue[self.plan.takes[row]].append(row)
                else:
                    self.begin(row)
            granted = []
            for queue, rows in self.queue.items():
                rows.sort(key=lambda row: (self.ready[row], self.order[row]))
                while rows and self.free[queue] > 0:
                    self.free[queue] -= 1
                    granted.append(rows.pop(0))
            for row in granted:
                self.begin(row)
            if not granted:
                return

    def begin(self, row: int) -> None:
        if self.is_down(int(self.plan.rank[row])):
            self.held.append(row)
            return
        self.start[row] = self.now
        kind = self.plan.kind[row]
        if kind == Kind.INSTANT or (kind != Kind.FLOW and not self.left[row]):
            self.finish(row)
        elif kind == Kind.FLOW and not (self.left[row] and self.route[row]):
            self.left[row] = Fraction(0)
            self.land(row)
        else:
            self.running.add(row)

    def is_down(self, rank: int) -> bool:
        return rank >= 0 and not self.rank_factor[rank]

    def rates(self) -> dict[int, Fraction]:
        plan = self.plan
        flows = {row for row in self.running if plan.kind[row] == Kind.FLOW}
        sending = {int(rank) for row in flows for rank in (plan.rank[row], plan.peer[row])}
        computing = {int(plan.rank[row]) for row in self.running if plan.kind[row] == Kind.COMPUTE}
        computing = {rank for rank in computing if not self.is_down(rank)}
        rates = {}
        for row in self.running - flows:
            rank = int(plan.rank[row])
            rates[row] = Fraction(not self.is_down(rank))
            if plan.kind[row] == Kind.COMPUTE and rank >= 0:
                rates[row] = Fraction(float(plan.rank_speed[rank])) * self.rank_factor[rank]
                if rank in sending:
                    rates[row] *= 1 - Fraction(float(plan.rank_slowdown[rank]))
        stuck = {row for row in flows if self.is_down(int(plan.rank[row])) or self.is_down(int(plan.peer[row]))}
        capacities = []
        for link in range(plan.num_links):
            capacities.append(Fraction(float(plan.link_capacity[link])) * self.link_factor[link])
            owner = int(plan.link_owner[link])
            if owner in computing and owner >= 0:
                capacities[link] *= 1 - Fraction(float(plan.rank_link_slowdown[owner]))
        rates.update(dict.fromkeys(stuck, Fraction(0)))
        rates.update(fill({row: self.route[row] for row in flows - stuck}, capacities))
        return rates


def fill(routes: dict[int, list[int]], capacities: list[Fraction]) -> dict[int, Fraction]:
    """Progressive filling: all rates rise together; the flows of a link that is full stop rising."""
    rates = dict.fromkeys(routes, Fraction(0))
    rising = set(routes)
    while rising:
        users = {link: [row for row in rising if link in routes[row]] for link in range(len(capacities))}
        used = {link: sum(rates[row] for row in routes if link in routes[row]) for link in users}
        step = min((capacities[link] - used[link]) / len(rows) for link, rows in users.items() if rows)
        for row in rising:
            rates[row] += step
        full = {link for link, rows in users.items() if rows and used[link] + step * len(rows) == capacities[link]}
        rising = {row for row in rising if not full.intersection(routes[row])}
    return rates
