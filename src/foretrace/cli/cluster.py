"""``foretrace simulate`` on a machine: Chakra ETs on a network, with ASTRA-sim's answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from foretrace import FormatError
from foretrace.cli import show
from foretrace.cli.files import check_writable, write_atomically
from foretrace.cli.options import print_json
from foretrace.report.summary import milliseconds

DEADLOCK = 4  # exit code
FAIR = "fair"
_MOST_ROWS = 16


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

    def given(self) -> list[str]:
        """Options that were given."""
        options = {
            "--straggler": self.stragglers,
            "--jitter": self.jitter,
            "--seed": self.seed,
            "--slowdown": self.slowdown,
            "--link-slowdown": self.link_slowdown,
            "--communication-slots": self.slots,
            "--fail": self.faults,
        }
        return [option for option, value in options.items() if value]

    def conditions(self) -> Any:
        """As the simulation takes them."""
        from foretrace.simulate.cluster import Conditions

        speed: dict[int, float] = {}
        for text in self.stragglers:
            rank, _, factor = text.partition("=")
            try:
                speed[int(rank)] = float(factor)
            except ValueError:
                raise FormatError("--straggler", f"{text!r} is no RANK=SPEED", "write for example 3=0.8") from None
            if not 0 < speed[int(rank)] < 1e6:
                raise FormatError("--straggler", f"speed {factor} of rank {rank}", "give a number above 0, 1 is normal")
        parts = self.jitter, self.seed, self.slowdown, self.link_slowdown, self.slots, tuple(self.faults)
        return Conditions(speed, *parts)


@dataclass(frozen=True)
class Outputs:
    """Where the answer goes."""

    as_json: bool
    per_rank: bool
    html: Path | None
    perfetto: Path | None


def simulate(files: Files, choices: Choices, fair: FairChoices, outputs: Outputs, others: dict[str, bool]) -> None:
    """Simulate ETs on a machine; exit code 4 on a deadlock.

    Args:
        files, choices, fair, outputs: the options.
        others: options that have no meaning on a machine, and whether they were given.
    """
    from foretrace.report.cluster import cluster_document, cluster_findings, jobs_of

    for option, is_given in others.items():
        if is_given:
            raise FormatError(option, "it has no meaning on a machine", "leave it out, or leave out --network")
    if files.machine is not None:
        if files.network or files.system or files.memory:
            raise FormatError("--machine", "it has a network, a system and memory of its own", "leave those out")
    elif files.network is None or files.system is None:
        missing = "--system" if files.system is None else "--network"
        raise FormatError(missing, "a machine needs both a network and a system", f"give {missing} FILE, too")
    for target in (outputs.html, outputs.perfetto):
        check_writable(target)
    if choices.fidelity != FAIR and fair.given():
        raise FormatError(fair.given()[0], f"it needs --fidelity {FAIR}", "leave it out, or choose that")
    if choices.fidelity == FAIR and choices.rendezvous:
        raise FormatError("--rendezvous", f"--fidelity {FAIR} has no rendezvous", "choose astra or astra-congestion")
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


def _simulated(files: Files, choices: Choices, fair: FairChoices) -> tuple[Any, dict[str, int]]:
    from foretrace.estimate.cluster import simulate_files
    from foretrace.simulate.cluster import Options

    machine = _machine(files, choices)
    options = Options(
        queues=choices.queues,
        rendezvous=choices.rendezvous,
        congestion=choices.fidelity == "astra-congestion",
        phases_at_once=choices.phases_at_once,
        fold=choices.fold,
    )
    with show.working("simulating"):
        conditions = fair.conditions() if choices.fidelity == FAIR else None
        return simulate_files(files.paths, machine, options, conditions, files.others), dict(machine.notes)


def _machine(files: Files, choices: Choices) -> Any:
    from foretrace.estimate.cluster import count_ranks, read_machine, read_own_machine

    if files.machine is not None:
        return read_own_machine(files.machine, files.dtype, count_ranks(files.paths, files.others), files.groups)
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
