"""``foretrace simulate`` on a machine: Chakra ETs on a network, with ASTRA-sim's answers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from foretrace import FormatError
from foretrace.cli import show
from foretrace.cli.files import check_writable, write_atomically
from foretrace.cli.options import print_json
from foretrace.generate.description import is_description
from foretrace.machine import limits
from foretrace.report.summary import milliseconds

DEADLOCK = 4  # exit code
FAIR = "fair"
_MOST_ROWS = 16
_MOST_JITTER = 10.0  # a factor of e^10 for every standard deviation
_STRAGGLER = re.compile(r"([0-9]{1,10})=([0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?)")


@dataclass(frozen=True)
class Files:
    """What is simulated, and the machine's files."""

    paths: list[Path]
    network: Path | None
    system: Path | None
    memory: Path | None
    groups: Path | None
    machine: Path | None
    dtype: str
    others: list[Path]


@dataclass(frozen=True)
class Choices:
    """How it is simulated."""

    fidelity: str
    queues: int
    injection_scale: float
    rendezvous: bool
    fold: bool
    phases_at_once: bool


@dataclass(frozen=True)
class FairChoices:
    """What only the fluid fidelity knows."""

    stragglers: list[str]
    jitter: float
    seed: int
    slowdown: float
    link_slowdown: float
    slots: int | None
    faults: list[str]

    def conditions(self, network: Any) -> Any:
        """As the simulation takes them.

        Raises:
            FormatError: naming the option, if a number makes no sense, or the network has no such rank or link.
        """
        from foretrace.simulate.cluster import Conditions
        from foretrace.simulate.cluster.fluid import fault_of

        for text in self.faults:
            try:
                fault_of(text, network)
            except ValueError as error:
                raise FormatError("--fail", str(error), "name a rank or link of the network, and times") from None
        for option, value in (("--slowdown", self.slowdown), ("--link-slowdown", self.link_slowdown)):
            if math.isnan(value):
                raise FormatError(option, "it is no number", "give one from 0 to 1")
        if not self.jitter <= _MOST_JITTER:
            raise FormatError("--jitter", f"it is {self.jitter:g}", f"give a number from 0 to {_MOST_JITTER}")
        parts = self.jitter, self.seed, self.slowdown, self.link_slowdown, self.slots, tuple(self.faults)
        return Conditions(self._speeds(network.num_ranks), *parts)

    def _speeds(self, num_ranks: int) -> dict[int, float]:
        """Of stragglers, by rank."""
        speed: dict[int, float] = {}
        for text in self.stragglers:
            found = _STRAGGLER.fullmatch(text)
            if found is None:
                raise FormatError("--straggler", f"{text!r} is no RANK=SPEED", "write for example 3=0.8")
            rank, factor = int(found[1]), float(found[2])
            if not 1e-6 <= factor <= 1e6:
                raise FormatError("--straggler", f"speed {found[2]} of rank {rank}", "give one from 1e-6 to 1e6")
            if rank >= num_ranks:
                raise FormatError(
                    "--straggler", f"{text!r}: there is no rank {rank}", f"ranks are 0 to {num_ranks - 1}"
                )
            if rank in speed:
                raise FormatError("--straggler", f"{text!r}: rank {rank} has a speed already", "give it one")
            speed[rank] = factor
        return speed


@dataclass(frozen=True)
class Outputs:
    """Where the answer goes."""

    as_json: bool
    per_rank: bool
    html: Path | None
    perfetto: Path | None


def simulate(
    files: Files, choices: Choices, fair: FairChoices, outputs: Outputs, options: Collection[str] = ()
) -> None:
    """Simulate ETs on a machine; exit code 4 on a deadlock.

    Args:
        files, choices, fair, outputs: the options.
        options: names of those that stand on the command line.
    """
    from foretrace.report.cluster import cluster_document, cluster_findings, jobs_of

    _check_files(files, options)
    _check_numbers(files, choices, fair, options)
    for target in (outputs.html, outputs.perfetto):
        check_writable(target)
    simulation, warnings = _simulated(files, choices, fair)
    with show.working("writing the answer"):
        document = cluster_document(simulation, choices.fidelity, outputs.per_rank, warnings)
        if files.others:
            document["jobs"] = jobs_of(simulation, [files.paths[0], *files.others])
        _write(simulation, outputs)
    if outputs.as_json:
        print_json(document)
    else:
        _show(document, cluster_findings(document))
    if document["deadlock"]:
        raise typer.Exit(DEADLOCK)


def _check_files(files: Files, options: Collection[str]) -> None:
    """Refuse files and options that do not make one machine."""
    if files.machine is not None:
        if files.network or files.system or files.memory:
            raise FormatError("--machine", "it has a network, a system and memory of its own", "leave those out")
    elif files.network is None or files.system is None:
        missing = "--system" if files.system is None else "--network"
        raise FormatError(missing, "a machine needs both a network and a system", f"give {missing} FILE, too")
    elif "dtype" in options:
        remedy = "leave it out, or give --machine; 'peak-perf' of the system's file counts"
        raise FormatError("--dtype", "it belongs to --machine", remedy)
    if files.groups is not None and len(files.paths) == 1 and is_description(files.paths[0]):
        raise FormatError("--comm-groups", f"{files.paths[0]} is a description, which makes its own", "leave it out")


def _check_numbers(files: Files, choices: Choices, fair: FairChoices, options: Collection[str]) -> None:
    """Refuse numbers that are beyond what is simulated, or without effect."""
    for option, number, most in (
        ("--queues-per-dim", choices.queues, limits.MOST_QUEUES),
        ("--communication-slots", fair.slots or 0, limits.MOST_SLOTS),
        ("--seed", fair.seed, limits.MOST_SEED),
        ("--job", len(files.others), limits.MOST_JOBS),
    ):
        if number > most:
            given = f"it is given {number} times" if option == "--job" else f"it is {number}"
            raise FormatError(option, f"{given}, more than {most}", f"give at most {most}")
    if "seed" in options and not fair.jitter:
        raise FormatError("--seed", "it is that of the jitter, and there is none", "give --jitter, or leave it out")


def _simulated(files: Files, choices: Choices, fair: FairChoices) -> tuple[Any, dict[str, int]]:
    from foretrace.estimate.cluster import find_jobs, read_cluster_workload, simulate_on
    from foretrace.simulate.cluster import Options

    jobs = find_jobs(files.paths, files.others)
    machine = _machine(files, choices, jobs)
    conditions = fair.conditions(machine.network) if choices.fidelity == FAIR else None
    options = Options(
        queues=choices.queues,
        rendezvous=choices.rendezvous,
        congestion=choices.fidelity == "astra-congestion",
        phases_at_once=choices.phases_at_once,
        fold=choices.fold,
    )
    with show.reading_bar() as progress:
        workload = read_cluster_workload(jobs, machine, progress)
    with show.working("simulating"):
        return simulate_on(machine, workload, files.paths, options, conditions), dict(machine.notes)


def _machine(files: Files, choices: Choices, jobs: Any) -> Any:
    from foretrace.estimate.cluster import count_ranks, read_machine, read_own_machine

    if files.machine is not None:
        ranks = count_ranks(jobs)
        return read_own_machine(files.machine, files.dtype, ranks, files.groups, choices.injection_scale)
    assert files.network is not None and files.system is not None
    return read_machine(files.network, files.system, files.memory, files.groups, choices.injection_scale)


def _write(simulation: Any, outputs: Outputs) -> None:
    if outputs.perfetto is None and outputs.html is None:
        return
    job = simulation.job()
    if outputs.perfetto is not None:
        from foretrace.formats.perfetto import write

        write(job, outputs.perfetto)
        show.note(f"wrote {outputs.perfetto}; open it in ui.perfetto.dev")
    if outputs.html is not None:
        from foretrace.report.page import analysis_page
        from foretrace.report.summary import analysis

        write_atomically(outputs.html, analysis_page(job, analysis(job)).encode())
        show.note(f"wrote {outputs.html}")


def _show(document: dict[str, Any], findings: list[str]) -> None:
    for finding in findings:
        show.out.print(f"- {escape(finding)}", highlight=False)
    table = show.new_table("Ranks", "rank", "finish", "exposed communication")
    for row in document["ranks"][:_MOST_ROWS]:
        is_done = row["finish_ns"] is not None
        exposed = row["exposed_communication_ns"]
        # ASTRA-sim's figure wraps around where computation overlaps.
        text = "" if exposed is None else milliseconds(exposed if exposed < 1 << 63 else exposed - (1 << 64))
        table.add_row(str(row["rank"]), milliseconds(row["finish_ns"]) if is_done else "never", text)
    if document["ranks"]:
        show.out.print(table)
    for job in document.get("jobs", []):
        times = "never" if job["finish_ns"] is None else milliseconds(job["finish_ns"])
        text = f"  ranks {job['first_rank']} to {job['first_rank'] + job['ranks'] - 1}: {job['name']} finishes: {times}"
        show.out.print(escape(text), highlight=False)
    rest = document["summary"]["ranks"] - min(len(document["ranks"]), _MOST_ROWS)
    if rest:
        show.out.print(f"  {rest:,} more ranks (--json --per-rank lists all)", highlight=False)
    for kind, notes in (("note", document["notes"]), ("the machine's files", document["warnings"])):
        for text, count in notes.items():
            show.out.print(f"  {kind}: {escape(str(text))}: {json.dumps(count)}", highlight=False)
