"""Workloads as Chakra files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from foretrace.formats.chakra import NodeType, Wire
from foretrace.formats.chakra.from_workload import groups_document, to_chakra
from foretrace.formats.chakra.read import read_chakra
from foretrace.formats.chakra.write import write_chakra
from foretrace.generate import ParallelPlan, generate
from foretrace.trace.strings import StringTable
from foretrace.trace.table import Table
from foretrace.trace.workload import WORK_COLUMNS, CommType, Program, WorkGroup, WorkKind, Workload
from tests.generate.cluster import dependencies
from tests.generate.plans import SMALL

PLANS = [
    ParallelPlan(tp=2, pp=2, dp=2, micro_batches=3),
    ParallelPlan(tp=4, pp=2, micro_batches=4, schedule="interleaved", virtual_stages=2, sequence_parallel=True),
    ParallelPlan(dp=3, zero=3, micro_batches=2),
]


@pytest.mark.parametrize("plan", PLANS, ids=("1f1b", "interleaved", "fsdp"))
def test_round_trip(plan: ParallelPlan, tmp_path: Path) -> None:
    workload = generate(SMALL, plan, "layer")
    document = groups_document(workload)
    assert "0" not in document
    for rank in range(workload.num_ranks):
        path = tmp_path / f"job.{rank}.et"
        write_chakra(to_chakra(workload, rank), path)
        trace = read_chakra(path)
        assert trace.rank == rank and trace.version == "v0.0.4"
        number = int(workload.program_of[rank])
        program, nodes = workload.programs[number], workload.programs[number].nodes
        assert trace.nodes.texts("name") == program.strings.lookup(nodes["name"])
        assert trace.nodes["id"].tolist() == nodes["id"].tolist()
        for row in range(program.num_nodes):
            assert sorted(trace.data.of(row).tolist()) == dependencies(program, row)
        is_compute = nodes["kind"] == WorkKind.COMPUTE
        assert trace.integers("num_ops")[is_compute].tolist() == nodes["flops"][is_compute].tolist()
        assert trace.integers("tensor_size")[is_compute].tolist() == nodes["bytes"][is_compute].tolist()
        assert trace.integers("comm_size")[~is_compute].tolist() == nodes["bytes"][~is_compute].tolist()
        assert trace.integers("comm_type").tolist() == nodes["collective"].tolist()
        assert trace.integers("comm_tag").tolist() == nodes["tag"].tolist()
        assert not trace.integers("is_cpu_op").any()
        for name in trace.texts("pg_name"):
            assert not name or rank in document[name]
        for kind, own, other in ((NodeType.COMM_SEND, "comm_src", "comm_dst"), (NodeType.COMM_RECV, "comm_dst",
                                                                              "comm_src")):  # fmt: skip
            rows = trace.nodes["type"] == kind
            assert (trace.integers(own)[rows] == rank).all()
            assert np.isin(trace.integers(other)[rows], workload.peers[number]).all()


def _by_hand() -> Workload:
    rows = [
        {"id": 4, "kind": WorkKind.COMPUTE, "duration_ns": 2600, "on_host": True},
        {"id": 7, "kind": WorkKind.MEMORY, "bytes": 1 << 40},
        {"id": 9, "kind": WorkKind.COLLECTIVE, "collective": CommType.ALL_TO_ALL, "bytes": 8, "slot": 0,
         "priority": 3, "dimensions": 0b10},
        {"id": 10, "kind": WorkKind.COLLECTIVE, "collective": CommType.BARRIER},
        {"id": 11, "kind": WorkKind.NOTHING},
    ]  # fmt: skip
    columns = {
        name: np.array([row.get(name, default) for row in rows], dtype)
        for name, (dtype, default) in WORK_COLUMNS.items()
    }
    strings = StringTable(["load"])
    columns["name"][1] = 0
    table = Table(columns, {"name": strings})
    program = Program(table, np.array([0, 0, 1, 2, 4, 4]), np.array([0, 1, 0, 2], np.int32), strings)
    groups = [WorkGroup(0, np.arange(2)), WorkGroup(17, np.array([1, 0]))]
    return Workload([program], np.zeros(2, np.int32), [np.empty((2, 0), np.int32)], [np.ones((2, 1), np.int32)],
                    groups, Counter())  # fmt: skip


def test_every_kind_of_node(tmp_path: Path) -> None:
    workload = _by_hand()
    write_chakra(to_chakra(workload, 1), tmp_path / "job.1.et")
    trace = read_chakra(tmp_path / "job.1.et")
    kinds = [NodeType.COMP, NodeType.MEM_LOAD, NodeType.COMM_COLL, NodeType.COMM_COLL, NodeType.INVALID]
    assert trace.nodes["type"].tolist() == kinds
    assert trace.nodes["duration_micros"].tolist() == [3, 0, 0, 0, 0]
    assert trace.nodes.texts("name") == ["", "load", "", "", ""]
    assert [trace.data.of(row).tolist() for row in range(5)] == [[], [4], [7], [4, 9], []]
    assert trace.integers("is_cpu_op").tolist() == [1, 0, 0, 0, 0]
    assert trace.integers("tensor_size").tolist() == [-1, 1 << 40, -1, -1, -1]
    assert trace.integers("comm_priority", 0).tolist() == [0, 0, 3, 0, 0]
    assert trace.texts("pg_name") == ["", "", "17", "", ""]
    row = trace.attribute_rows("involved_dim")
    assert [trace.attributes["wire"][at] for at in row] == [Wire.BOOL_LIST]
    assert trace.value(int(row[0])) == [False, True, False, False]
    assert groups_document(workload) == {"17": [1, 0]}
    assert to_chakra(workload, 0).report.warnings
    with pytest.raises(IndexError, match="rank 2: the workload has 2 ranks"):
        to_chakra(workload, 2)
