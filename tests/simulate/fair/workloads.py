"""Small workloads and machines for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from foretrace.machine.network import Dimension, Network, Topology
from foretrace.machine.system import Algorithm, Pattern, System
from foretrace.trace.table import Table
from foretrace.trace.workload import WORK_COLUMNS, CommType, Program, WorkGroup, WorkKind, Workload


def network(*dimensions: tuple[str, int, float, float]) -> Network:
    """Dimensions are (topology, size, bytes/ns, latency in ns)."""
    return Network(tuple(Dimension(Topology(kind), *rest) for kind, *rest in dimensions))


def system(*patterns: Pattern | Algorithm, **options: Any) -> System:
    """The same algorithms for all collectives."""
    algorithms = tuple(Algorithm(each) if isinstance(each, Pattern) else each for each in patterns)
    return System(algorithms=dict.fromkeys(CommType, algorithms), **options)


def program(nodes: list[dict[str, Any]]) -> Program:
    """Nodes have the columns of `Program` and ``after``, a list of rows."""
    columns = {
        name: np.array([node.get(name, row if name == "id" else default) for row, node in enumerate(nodes)], dtype)
        for name, (dtype, default) in WORK_COLUMNS.items()
    }
    after = [node.get("after", []) for node in nodes]
    first = np.cumsum([0, *map(len, after)]).astype(np.int64)
    return Program(Table(columns), first, np.array([row for rows in after for row in rows], np.int32))


def workload(
    programs: list[list[dict[str, Any]]],
    program_of: list[int],
    peers: list[list[list[int]]] | None = None,
    groups_of: list[list[list[int]]] | None = None,
    groups: tuple[list[int], ...] = (),
) -> Workload:
    """Programs, who runs which, peers and groups of each program's ranks; group 0 is added."""
    counts = [program_of.count(number) for number in range(len(programs))]
    everybody = list(range(len(program_of)))

    def slots(given: list[list[list[int]]] | None) -> list[np.ndarray]:
        tables = given or [[[] for _ in range(count)] for count in counts]
        return [np.array(rows, np.int32).reshape(count, -1) for rows, count in zip(tables, counts, strict=True)]

    return Workload(
        programs=[program(nodes) for nodes in programs],
        program_of=np.array(program_of, np.int32),
        peers=slots(peers),
        groups_of=slots(groups_of),
        groups=[WorkGroup(at, np.array(ranks, np.int64)) for at, ranks in enumerate([everybody, *groups])],
    )


def collective(kind: CommType, size: int, **more: Any) -> dict[str, Any]:
    return {"kind": WorkKind.COLLECTIVE, "collective": kind, "bytes": size, **more}


def alone(kind: CommType, size: int, ranks: int) -> Workload:
    """One collective of all ranks."""
    return workload([[collective(kind, size)]], [0] * ranks)
