"""The fluid fidelity on workloads: conditions, faults, several jobs, and what the report says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from foretrace.generate import MODELS, ParallelPlan, generate
from foretrace.machine.network import Dimension, Network, Topology
from foretrace.machine.system import Algorithm, Pattern, System
from foretrace.simulate import fair
from foretrace.simulate.cluster import Conditions, simulate_fluid, simulate_workload
from foretrace.simulate.cluster.fluid import fault_of
from foretrace.trace import GraphError
from foretrace.trace.workload import CommType, Workload, merged

MODEL = dataclasses.replace(MODELS["llama-2-7b"], layers=2)
RING = (Algorithm(Pattern.RING),)
KINDS = (CommType.ALL_REDUCE, CommType.ALL_GATHER, CommType.REDUCE_SCATTER, CommType.ALL_TO_ALL)


def network(ranks: int, topology: Topology = Topology.RING) -> Network:
    return Network((Dimension(topology, ranks, 50.0, 500.0),))


def system() -> System:
    algorithms = dict.fromkeys(KINDS, RING)
    return System(algorithms=algorithms, memory_bytes_per_s=2e12, peak_flops_per_s=3e14, roofline=True)


def job(**layout: int) -> Workload:
    return generate(MODEL, ParallelPlan(micro_batches=2, **layout), "layer")


def finish(workload: Workload, conditions: Conditions | None = None, topology: Topology = Topology.RING) -> int:
    found = simulate_fluid(workload, network(workload.num_ranks, topology), system(), None, conditions)
    assert found.deadlock is None
    return int(found.finish_ns.max())


def test_a_straggler_slows_the_job_and_only_computing() -> None:
    workload = job(tp=4)
    usual, slow = finish(workload), finish(workload, Conditions(rank_speed={2: 0.5}))
    computed = simulate_fluid(workload, network(4), system()).outcome.computed[2]
    assert usual < slow <= usual + computed + 1000


def test_jitter_depends_on_the_seed_alone() -> None:
    workload = job(tp=4)
    times = [finish(workload, Conditions(jitter=0.1, seed=seed)) for seed in (0, 0, 1)]
    assert times[0] == times[1] != times[2]


def test_interference_only_costs() -> None:
    workload = job(dp=4)
    assert finish(workload) <= finish(workload, Conditions(slowdown=0.3))
    assert finish(workload) <= finish(workload, Conditions(link_slowdown=0.5))


def test_a_dead_link_stops_the_ring_and_the_report_says_so() -> None:
    workload = job(tp=4)
    found = simulate_fluid(workload, network(4), system(), None, Conditions(faults=("link:0:1@0ns",)))
    assert (found.finish_ns < 0).all()
    assert found.deadlock is not None
    assert "a link or a rank has failed" in found.deadlock["text"]


def test_a_link_that_comes_back_only_delays() -> None:
    workload = job(tp=4)
    usual = finish(workload)
    late = finish(workload, Conditions(faults=("link:0:1@0ns-1ms",)))
    assert usual < late <= usual + 1_000_000 + 1000


def test_a_dead_rank_is_waited_for() -> None:
    workload = job(tp=4)
    found = simulate_fluid(workload, network(4), system(), None, Conditions(faults=("rank:2@0ns",)))
    assert found.deadlock is not None
    assert found.deadlock["unfinished"] == 4
    others = next(row for row in found.deadlock["ranks"] if row["rank"] == 0)
    assert others["waits"][0]["for_ranks"] == [2]


@pytest.mark.parametrize(
    "text",
    [
        "rank:9@1ms",
        "rank:1@1",
        "link:1:0@1ms",
        "link:0:0:2@1ms",
        "link:0:9@1ms",
        "rank:1@2ms-1ms",
        "rank:x@1ms",
        "disk:1@1ms",
    ],
)
def test_faults_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fault_of(text, network(4))
    with pytest.raises(GraphError):
        simulate_fluid(job(tp=4), network(4), system(), None, Conditions(faults=(text,)))


def test_a_fault_is_read_as_it_is_written() -> None:
    found = fault_of("link:0:3:1@1.5us-2ms=0.25", network(4))
    assert found == fair.Fault(fair.FaultKind.LINK, 7, 1500.0, 2e6, 0.25)


def test_jobs_on_links_of_their_own_run_as_alone() -> None:
    small, large = job(tp=4), job(tp=2, dp=2)
    both = merged([small, large])
    assert (both.num_ranks, len(both.groups)) == (8, 1 + len(small.groups) + len(large.groups))
    found = simulate_fluid(both, network(8, Topology.FULLY_CONNECTED), system())
    assert int(found.finish_ns[:4].max()) == finish(small, topology=Topology.FULLY_CONNECTED)
    assert int(found.finish_ns[4:].max()) == finish(large, topology=Topology.FULLY_CONNECTED)


def test_merged_jobs_have_no_rank_in_common() -> None:
    both = merged([job(tp=2, pp=2), job(tp=2, pp=2)])
    for program, (peers, groups) in enumerate(zip(both.peers, both.groups_of, strict=True)):
        first = 4 * (np.flatnonzero(both.program_of == program) // 4)
        assert ((peers // 4 * 4) == first[:, None]).all()
        for row, begin in zip(groups, first, strict=True):
            assert all(set(both.groups[group].ranks) <= set(range(begin, begin + 4)) for group in row)
    found = simulate_workload(both, network(8, Topology.SWITCH), system())
    assert (found.finish_ns[:4] == found.finish_ns[4:]).all()
