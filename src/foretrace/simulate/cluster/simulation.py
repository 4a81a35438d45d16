"""`simulate_workload`: a workload on a machine, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.machine.network import Network
from foretrace.machine.system import RemoteMemory, System
from foretrace.simulate.cluster.deadlock import explain
from foretrace.simulate.cluster.lower import Options, lower
from foretrace.simulate.cluster.plan import Outcome, Plan
from foretrace.simulate.cluster.run import run_plan
from foretrace.simulate.cluster.timelines import timeline
from foretrace.simulate.fair.wiring import Wiring
from foretrace.trace import Job, Timeline
from foretrace.trace.workload import Workload

_MOST_LINKS = 4096  # above this only sums a dimension are told


@dataclass(frozen=True)
class ClusterSimulation:
    """A workload that was simulated on a machine.

    Attributes:
        workload, network, options: what was simulated.
        plan: the same as arrays.
        outcome: as the engine found it.
    """

    workload: Workload
    network: Network
    options: Options
    plan: Plan
    outcome: Outcome

    @property
    def finish_ns(self) -> NDArray[np.int64]:
        """When each rank finishes, -1 for never; shape ``(ranks,)``."""
        return self.outcome.finish

    @cached_property
    def exposed_communication_ns(self) -> NDArray[np.uint64]:
        """Time of each rank that is no computation, as ASTRA-sim reckons it: modulo 2^64, overlap is not considered."""
        return (self.outcome.finish - self.outcome.computed).view(np.uint64)

    @cached_property
    def deadlock(self) -> dict[str, Any] | None:
        """Who waits for whom, if there are ranks that never finish."""
        return explain(self.workload, self.plan, self.outcome)

    def timeline(self, rank: int) -> Timeline:
        """What a rank did when."""
        return timeline(self.workload, self.plan, self.outcome, rank)

    def job(self, most: int = 1024) -> Job:
        """Timelines of the first ranks."""
        ranks = range(min(most, self.workload.num_ranks))
        return Job([self.timeline(rank) for rank in ranks], world_size=self.workload.num_ranks)

    def links(self) -> list[dict[str, Any]]:
        """Bytes and use of every link that carried something; of each dimension if there are very many links.

        Empty without congestion: there messages do not meet.
        """
        if not self.plan.congestion:
            return []
        span = max(int(self.outcome.end.max(initial=0)), 1)
        rows: list[dict[str, Any]] = []
        wiring = Wiring(self.network)
        for dimension, (first, end) in enumerate(pairwise(wiring.first.tolist())):
            size, busy = self.outcome.link_bytes[first:end], self.outcome.link_busy[first:end]
            if len(self.outcome.link_bytes) > _MOST_LINKS:
                share = float(busy.sum()) / span / max(end - first, 1)
                whole = {"bytes": int(size.sum()), "busy_ns": int(busy.sum()), "utilization": share}
                rows.append({"dimension": dimension, "link": "all", "links": end - first, **whole})
                continue
            for link in np.flatnonzero(size).tolist():
                sender, receiver = ("switch" if end is None else end for end in wiring.ends(first + link)[1:])
                use = {"bytes": int(size[link]), "busy_ns": int(busy[link]), "utilization": int(busy[link]) / span}
                rows.append({"dimension": dimension, "link": f"{sender} -> {receiver}", **use})
        return rows


def simulate_workload(
    workload: Workload,
    network: Network,
    system: System,
    memory: RemoteMemory | None = None,
    options: Options | None = None,
) -> ClusterSimulation:
    """Simulate a workload on a machine, by the rules of docs/cluster.md.

    Args:
        workload: what each rank does.
        network: whose ranks they are.
        system: how ranks compute and run collectives.
        memory: remote memory, by default none.
        options: fidelity and shortcuts.

    Raises:
        GraphError: where the workload asks for what the machine does not have.
    """
    options = options or Options()
    plan = lower(workload, network, system, memory or RemoteMemory(), options)
    return ClusterSimulation(workload, network, options, plan, run_plan(plan, options.fold))
