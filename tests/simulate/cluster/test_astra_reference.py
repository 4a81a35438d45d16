"""The cluster simulator against ASTRA-sim: every recorded run, every rank, to the cycle.

Each row of the reference is a workload on a machine. Its ranks must finish in the cycle in which they finished there,
with the same exposed communication, and those that never finished there must never finish here.
"""

from __future__ import annotations

import csv
import gzip
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from foretrace.formats.chakra.read_many import read_workload
from foretrace.machine import astra
from foretrace.simulate.cluster import run as running
from foretrace.simulate.cluster.lower import Options, lower
from foretrace.simulate.cluster.plain import run as run_plain
from foretrace.simulate.cluster.plan import Outcome, Plan
from foretrace.simulate.cluster.run import run_plan
from foretrace.trace.workload import Workload
from tests.conftest import REPOSITORY

Row = dict[str, str]
FOLDER = Path("reference") / "astra-sim"
_SHARED = Path(os.environ.get("FORETRACE_SHARED") or REPOSITORY.parent / "shared")
_FINISHED = re.compile(r"sys\[(\d+)\] finished, (\d+) cycles, exposed communication (\d+) cycles")
_QUICK_RANKS = 64
# What takes the plain twin more than a moment although the job is small.
_LONG_FOR_PLAIN = ("real8fix", "llm", "rt/")
# One row of each kind for the plain twin: patterns, networks, groups, sends, rendezvous, queues, deadlocks, stalls.
_SELECTION = (
    *("ar8_ring_c1", "ar8_ring_c4_aware", "ar8_hd_c1_switch", "ar8_dbt_c1_switch_aware", "x_ar12_hd", "x_rs12_hd"),
    *("x_groups16_2d", "x_groups16_2d_d0", "x_groups16_2d_inj", "x_p2p16_2d", "x_p2p16_aware_ring"),
    *("x_mingroup16_2d", "x_stall8", "x_zero8", "x_zero8_aware", "x_rnd16_1_0", "x_rnd16_2_1", "x_rnd16_109_0"),
)


def _rows() -> list[Row]:
    path = _SHARED / FOLDER / "results.csv"
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _ranks(row: Row) -> int:
    network = (_SHARED / FOLDER / "configs" / f"{row['network_config']}.yml").read_text()
    found = re.search(r"npus_count:\s*\[([^\]]*)\]", network)
    product = 1
    for size in found[1].split(",") if found else []:
        product *= int(size)
    return product


ROWS = _rows()
SMALL = [row for row in ROWS if _ranks(row) <= _QUICK_RANKS]
LARGE = [row for row in ROWS if _ranks(row) > _QUICK_RANKS]


def _tags(rows: list[Row], is_slow: Callable[[Row], bool] = lambda row: False) -> pytest.MarkDecorator:
    marks = {True: [pytest.mark.slow], False: []}
    return pytest.mark.parametrize("row", [pytest.param(r, id=r["tag"], marks=marks[is_slow(r)]) for r in rows])


@dataclass
class Reference:
    """The recorded runs: archives are unpacked, and workloads read, once."""

    folder: Path
    unpacked: Path
    _workloads: dict[tuple[str, str, int], Workload] = field(default_factory=dict)

    def plan(self, row: Row, *, phases_at_once: bool = True) -> Plan:
        configs = self.folder / "configs"
        network = astra.read_network(configs / f"{row['network_config']}.yml")
        scale = float(row["injection_scale"])
        system = astra.read_system(configs / f"{row['system_config']}.json", len(network.dimensions), scale)
        options = Options(
            queues=int(row["queues_per_dim"]),
            rendezvous=row["rendezvous"] == "true",
            congestion=row["backend"] == "aware",
            phases_at_once=phases_at_once,
        )
        memory = astra.read_memory(configs / row["memory_config"])
        return lower(self._workload(row, network.num_ranks), network, system, memory, options)

    def cycles(self, row: Row) -> dict[int, tuple[int, int]]:
        """Finish and exposed communication of every rank that finished."""
        with gzip.open(self.folder / "cycles" / f"{row['tag']}.cycles.gz", "rt") as file:
            found = filter(None, map(_FINISHED.match, file))
            return {int(each[1]): (int(each[2]), int(each[3])) for each in found}

    def _workload(self, row: Row, num_ranks: int) -> Workload:
        key = row["workload"], row["comm_group"], num_ranks
        if key not in self._workloads:
            folder, prefix = row["workload"].split("/")
            if not (self.unpacked / folder).exists():
                with tarfile.open(self.folder / "traces" / f"{folder}.tar.gz") as archive:
                    archive.extractall(self.unpacked, filter="data")
            paths = sorted((self.unpacked / folder).glob(f"{prefix}.*.et"), key=lambda path: int(path.suffixes[-2][1:]))
            groups = astra.read_groups(self.unpacked / row["comm_group"]) if row["comm_group"] else None
            self._workloads[key] = read_workload(paths, num_ranks, groups)
        return self._workloads[key]


@pytest.fixture(scope="session")
def reference(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    yield Reference(shared / FOLDER, tmp_path_factory.mktemp("astra-sim"))


@pytest.fixture(scope="module", autouse=True)
def _compiled(request: pytest.FixtureRequest) -> None:
    if running._engine is None:
        pytest.skip("the engine is not compiled here: no C compiler where it was installed")


def found_cycles(outcome: Outcome) -> dict[int, tuple[int, int]]:
    """Finish and exposed communication (unsigned, 64 bits) of every rank that finishes."""
    pairs = zip(outcome.finish.tolist(), outcome.computed.tolist(), strict=True)
    return {rank: (end, (end - work) % (1 << 64)) for rank, (end, work) in enumerate(pairs) if end >= 0}


def test_all_rows_are_here(shared: Path) -> None:
    """176 runs, in 39 of which nobody finishes: those only show who must never finish."""
    assert shared == _SHARED
    assert len(ROWS) == len({row["tag"] for row in ROWS}) == 176
    assert sum(row["ranks_finished"] == "0" for row in ROWS) == 39
    assert len(SMALL) == 169
    assert {row["tag"] for row in SMALL} >= set(_SELECTION)


@_tags(ROWS)
def test_phases_at_once(reference: Reference, row: Row) -> None:
    expected, plan = reference.cycles(row), reference.plan(row)
    assert len(expected) == int(row["ranks_finished"])
    assert found_cycles(run_plan(plan)) == expected


@_tags(SMALL)
def test_every_rank_by_itself(reference: Reference, row: Row) -> None:
    """Nobody stands for anybody else."""
    assert found_cycles(run_plan(reference.plan(row), can_fold=False)) == reference.cycles(row)


@_tags(ROWS, lambda row: row in LARGE)
def test_message_by_message(reference: Reference, row: Row) -> None:
    plan = reference.plan(row, phases_at_once=False)
    assert found_cycles(run_plan(plan)) == reference.cycles(row)


@_tags(SMALL, lambda row: row["tag"] not in _SELECTION)
def test_plain_twin(reference: Reference, row: Row) -> None:
    assert found_cycles(run_plain(reference.plan(row))) == reference.cycles(row)
