"""The engine's rules once more, in plain Python: slow, and simple enough to be believed."""

from __future__ import annotations

import heapq
from collections import defaultdict

from foretrace.trace import ExecutionGraph, LanePolicy


def twin_starts(graph: ExecutionGraph) -> dict[int, int]:
    """Start of each task that ever starts, by task."""
    return _Twin(graph).run()


class _Twin:
    """The state of a run. At any moment tasks become ready first, then lanes pick, then blocking calls look."""

    def __init__(self, graph: ExecutionGraph) -> None:
        self.duration = graph.tasks["duration_ns"].tolist()
        self.priority = graph.tasks["priority"].tolist()
        self.lane = graph.tasks["lane"].tolist()
        self.picks = [lane.policy is LanePolicy.PRIORITY for lane in graph.lanes]
        self.after = defaultdict(list)  # task: (what waits for it, lag)
        self.looks = defaultdict(list)  # issue: (the call's return, stream)
        self.puts = defaultdict(list)  # launch: (stream, position, work)
        self.open = [0] * graph.num_tasks  # what each task still waits for
        for source, target, lag in _rows(graph.edges, "source", "target", "lag_ns"):
            self.after[source].append((target, lag))
            self.open[target] += 1
        for task, issue, lane in _rows(graph.waits, "task", "issue", "lane"):
            self.looks[issue].append((task, lane))
            self.open[task] += 1
        for issue, work, lane, position in _rows(graph.launched, "issue", "work", "lane", "position"):
            self.puts[issue].append((lane, position, work))

        self.now = 0
        self.start: dict[int, int] = {}
        self.earliest = [0] * graph.num_tasks
        self.ready: list[tuple[int, int, int]] = []  # (time, priority, task)
        self.queue: dict[int, list[tuple[int, int]]] = defaultdict(list)  # lane: (priority, task)
        self.busy_until: dict[int, int] = defaultdict(int)
        self.looking: list[tuple[int, int, int]] = []  # (time, priority, issue)
        self.newest: dict[int, tuple[int, int]] = {}  # stream: (position, work)

    def run(self) -> dict[int, int]:
        for task, missing in enumerate(self.open):
            if not missing:
                self.make_ready(task)
        while choices := self.choices():
            self.now, what, lane = min(choices)
            if what == 0:
                self.arrive(heapq.heappop(self.ready)[2])
            elif what == 1:
                self.begin(heapq.heappop(self.queue[lane])[1])
            else:
                self.look(heapq.heappop(self.looking)[2])
        return self.start

    def choices(self) -> list[tuple[int, int, int]]:
        """What could happen next: (time, what, lane)."""
        lanes = [(max(self.now, self.busy_until[lane]), 1, lane) for lane, queue in self.queue.items() if queue]
        return lanes + [(heap[0][0], what, -1) for heap, what in ((self.ready, 0), (self.looking, 2)) if heap]

    def arrive(self, task: int) -> None:
        lane = self.lane[task]
        if lane >= 0 and self.picks[lane]:
            heapq.heappush(self.queue[lane], (self.priority[task], task))
        else:
            self.begin(task)

    def begin(self, task: int) -> None:
        self.start[task] = self.now
        end = self.now + self.duration[task]
        self.busy_until[self.lane[task]] = end
        for lane, position, work in self.puts[task]:
            if lane not in self.newest or position > self.newest[lane][0]:
                self.newest[lane] = position, work
        if self.looks[task]:
            heapq.heappush(self.looking, (self.now, self.priority[task], task))
        for target, lag in self.after[task]:
            self.release(target, end + lag)

    def look(self, issue: int) -> None:
        for task, lane in self.looks[issue]:
            work = self.newest[lane][1] if lane in self.newest else None
            if work is None:
                self.release(task, self.now)
            elif work in self.start:
                self.release(task, max(self.now, self.start[work] + self.duration[work]))
            else:
                self.after[work].append((task, 0))

    def release(self, task: int, time: int) -> None:
        """One of the things that ``task`` waits for is over."""
        self.earliest[task] = max(self.earliest[task], time)
        self.open[task] -= 1
        if not self.open[task]:
            self.make_ready(task)

    def make_ready(self, task: int) -> None:
        heapq.heappush(self.ready, (self.earliest[task], self.priority[task], task))


def _rows(table, *names):
    return zip(*(table[name].tolist() for name in names), strict=True)
