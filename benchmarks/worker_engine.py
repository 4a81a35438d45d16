"""The engine alone: many tasks with two edges each, or many coupled ranks."""

import json
import resource
import sys
import time

import numpy as np

from foretrace.simulate import simulate
from foretrace.trace import EdgeKind, ExecutionGraph, GraphLane, Lane, LaneKind, LanePolicy, TaskKind


def two_edges_each(count: int) -> ExecutionGraph:
    """Every task waits for one just before it and for one up to a thousand before it."""
    generator = np.random.default_rng(0)
    task = np.arange(count)
    source = np.concatenate((task - 1, task - 1 - generator.integers(0, 1000, count)))
    target = np.concatenate((task, task))
    keep = source >= 0
    edges = {"source": source[keep].astype(np.int32), "target": target[keep].astype(np.int32)}
    return ExecutionGraph.from_columns({"duration_ns": generator.integers(1, 1000, count)}, edges)


def coupled_ranks(ranks: int, tasks: int, collectives: int) -> ExecutionGraph:
    """Each rank: a thread that launches work on a stream, every so often a collective of all ranks.

    A quarter of the tasks are launches with their work, the rest host work; one blocking call before each collective
    is resolved while simulating.
    """
    generator = np.random.default_rng(0)
    pairs, host = tasks // 4, tasks - tasks // 4  # device tasks, host tasks
    lanes = [
        GraphLane(rank, Lane(kind, str(rank), name, device, stream), LanePolicy.IN_ORDER)
        for rank in range(ranks)
        for kind, name, device, stream in (
            (LaneKind.HOST_THREAD, "main", -1, -1),
            (LaneKind.DEVICE_STREAM, "stream 7", 0, 7),
        )
    ]
    first = np.arange(ranks)[:, None] * tasks
    thread, stream = first + np.arange(host), first + host + np.arange(pairs)
    launch = thread[:, np.arange(pairs) * (host // pairs)]
    every = pairs // collectives
    member = stream[:, every - 1 :: every][:, :collectives]
    hub = ranks * tasks + np.arange(collectives)
    count = ranks * tasks + collectives
    blocking = thread[:, np.arange(pairs) * (host // pairs) + 1][:, every - 1 :: every][:, :collectives]
    parts = [
        (thread[:, :-1], thread[:, 1:], 0, EdgeKind.ORDER),
        (stream[:, :-1], stream[:, 1:], 1_000, EdgeKind.ORDER),
        (launch, stream, 5_000, EdgeKind.LAUNCH),
        (member - 1, np.broadcast_to(hub, member.shape), 0, EdgeKind.COLLECTIVE),
        (np.broadcast_to(hub, member.shape), member, 0, EdgeKind.COLLECTIVE),
    ]
    sizes = [source.size for source, *_ in parts]
    edges = {
        "source": np.concatenate([source.ravel() for source, *_ in parts]).astype(np.int32),
        "target": np.concatenate([target.ravel() for _, target, *_ in parts]).astype(np.int32),
        "lag_ns": np.repeat([lag for *_, lag, _ in parts], sizes),
        "kind": np.repeat([kind for *_, kind in parts], sizes).astype(np.int8),
    }
    lane = np.full(count, -1, np.int32)
    lane[: ranks * tasks] = np.repeat(np.arange(2 * ranks), np.tile([host, pairs], ranks))
    kind = np.full(count, TaskKind.RENDEZVOUS, np.int8)
    kind[: ranks * tasks] = np.repeat(
        np.tile([TaskKind.OPERATOR, TaskKind.KERNEL], ranks), np.tile([host, pairs], ranks)
    )
    duration = generator.integers(1_000, 20_000, count)
    duration[hub] = 0
    graph = ExecutionGraph.from_columns({"duration_ns": duration, "lane": lane, "kind": kind}, edges, lanes)
    streams = np.repeat(np.arange(ranks) * 2 + 1, collectives).astype(np.int32)
    graph.waits = type(graph.tasks)(
        {"task": blocking.ravel().astype(np.int32), "issue": (blocking - 1).ravel().astype(np.int32), "lane": streams}
    )
    graph.launched = type(graph.tasks)(
        {
            "issue": launch.ravel().astype(np.int32),
            "work": stream.ravel().astype(np.int32),
            "lane": np.repeat(np.arange(ranks) * 2 + 1, pairs).astype(np.int32),
            "position": np.tile(np.arange(pairs), ranks).astype(np.int32),
        }
    )
    graph.check()
    return graph


def main() -> None:
    """Compile on a small graph, then time three runs of the large one."""
    if sys.argv[1] == "tasks":
        simulate(two_edges_each(1000))
        graph = two_edges_each(int(sys.argv[2]))
    else:
        simulate(coupled_ranks(2, 1000, 10))
        graph = coupled_ranks(int(sys.argv[2]), int(sys.argv[3]), 100)
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        finish = simulate(graph).finish_ns
        times.append(time.perf_counter() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    result = {"best_s": min(times), "worst_s": max(times), "tasks": graph.num_tasks, "edges": graph.num_edges}
    print(json.dumps({**result, "own_peak_mb": peak, "finish_ns": finish}))


main()
