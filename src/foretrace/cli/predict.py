"""Commands that predict: simulate, critical-path, validate."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from foretrace import FormatError, Job
from foretrace.cli import show, show_predict, together
from foretrace.cli.files import check_writable, read_job, write_atomically
from foretrace.cli.options import AsJson, Cache, Paths, print_json
from foretrace.trace.graph import GraphError

PANEL = "Predict"
MACHINE = "On a machine"
FAIR = "On a machine, with --fidelity fair"
Html = Annotated[Path | None, typer.Option(help="Write a self-contained page.")]
Perfetto = Annotated[
    Path | None, typer.Option(help="Write measured and simulated timelines for ui.perfetto.dev (.json or .json.gz).")
]


class Fidelity(enum.StrEnum):
    """How a machine is simulated."""

    astra = "astra"
    congestion = "astra-congestion"
    fair = "fair"


class Dependencies(enum.StrEnum):
    """The two meanings of a Chakra ET."""

    both = "data+ctrl"
    data = "data"


_WORLDS = {
    Fidelity.astra: together.World.ASTRA,
    Fidelity.congestion: together.World.CONGESTION,
    Fidelity.fair: together.World.FAIR,
}


def _factors(scale: list[str] | None) -> dict[str, float]:
    """``PATTERN=FACTOR`` options as a mapping."""
    factors = {}
    for text in scale or []:
        pattern, equals, factor = text.rpartition("=")
        try:
            factors[pattern] = float(factor)
        except ValueError:
            equals = ""
        if not equals or not pattern:
            raise FormatError("--scale", f"{text!r} is no PATTERN=FACTOR", "write for example --scale kernel:gemm=2")
    return factors


def simulate(
    context: typer.Context,
    paths: Paths,
    as_json: AsJson = False,
    scale: Annotated[
        list[str] | None,
        typer.Option(
            help="What if: PATTERN=FACTOR makes work FACTOR times faster, as kernel:gemm=2 or gap:=10; repeatable."
        ),
    ] = None,
    alone: Annotated[bool, typer.Option("--alone", help="Simulate each rank by itself.")] = False,
    dependencies: Annotated[
        Dependencies, typer.Option(help="Of a Chakra ET: what a node waits for (data: as mlcommons' feeder).")
    ] = Dependencies.both,
    html: Html = None,
    perfetto: Perfetto = None,
    cache: Cache = False,
    network: Annotated[
        Path | None, typer.Option(rich_help_panel=MACHINE, help="Simulate ETs on a machine: ASTRA-sim's network.yml.")
    ] = None,
    system: Annotated[Path | None, typer.Option(rich_help_panel=MACHINE, help="ASTRA-sim's system.json.")] = None,
    memory: Annotated[Path | None, typer.Option(rich_help_panel=MACHINE, help="Its remote memory file.")] = None,
    comm_groups: Annotated[
        Path | None, typer.Option(rich_help_panel=MACHINE, help="Its communicator groups: {number: [ranks]}.")
    ] = None,
    machine: Annotated[
        Path | None, typer.Option(rich_help_panel=MACHINE, help="Our own machine.yaml, or a preset's name.")
    ] = None,
    dtype: Annotated[str, typer.Option(rich_help_panel=MACHINE, help="Whose peak of a --machine counts.")] = "bfloat16",
    jobs: Annotated[
        list[Path] | None,
        typer.Option("--job", rich_help_panel=MACHINE, help="Another job on it: ETs' folder or a .yaml; repeatable."),
    ] = None,
    fidelity: Annotated[
        Fidelity, typer.Option(rich_help_panel=MACHINE, help="How messages share links.")
    ] = Fidelity.astra,
    queues_per_dim: Annotated[int, typer.Option(rich_help_panel=MACHINE, min=1, help="Queues of a dimension.")] = 1,
    injection_scale: Annotated[
        float, typer.Option(rich_help_panel=MACHINE, min=0, help="Factor of the endpoint delay.")
    ] = 1.0,
    rendezvous: Annotated[
        bool, typer.Option("--rendezvous", rich_help_panel=MACHINE, help="Messages ask before they go.")
    ] = False,
    straggler: Annotated[
        list[str] | None, typer.Option(rich_help_panel=FAIR, help="RANK=SPEED of computing, 1 is normal; repeatable.")
    ] = None,
    jitter: Annotated[
        float, typer.Option(rich_help_panel=FAIR, min=0, help="Sigma of lognormal computation times.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(rich_help_panel=FAIR, min=0, help="Of the jitter.")] = 0,
    slowdown: Annotated[
        float, typer.Option(rich_help_panel=FAIR, min=0, max=1, help="Part of the speed that communication takes.")
    ] = 0.0,
    link_slowdown: Annotated[
        float, typer.Option(rich_help_panel=FAIR, min=0, max=1, help="Part of the bandwidth that computing takes.")
    ] = 0.0,
    communication_slots: Annotated[
        int | None, typer.Option(rich_help_panel=FAIR, min=1, help="Collectives and sends of a rank at once (any).")
    ] = None,
    fail: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=FAIR, help="What fails: rank:3@1ms, or link:0:5@1ms-2ms=0.5; repeatable."),
    ] = None,
    per_rank: Annotated[
        bool, typer.Option("--per-rank", rich_help_panel=MACHINE, help="List the ranks of more than 1,024, too.")
    ] = False,
    fold: Annotated[
        bool, typer.Option(rich_help_panel=MACHINE, help="Simulate ranks that provably do the same once.")
    ] = True,
    phases_at_once: Annotated[
        bool, typer.Option(rich_help_panel=MACHINE, help="Evaluate phases by formula where that is exact.")
    ] = True,
) -> None:
    """Run traces or Chakra ETs again from their dependencies, or ETs on a machine (--network, --system)."""
    options = together.given(context)
    if network is not None or system is not None or machine is not None:
        from foretrace.cli import cluster

        together.check(options, _WORLDS[fidelity])
        cluster.simulate(
            cluster.Files(paths, network, system, memory, comm_groups, machine, dtype, jobs or []),
            cluster.Choices(fidelity.value, queues_per_dim, injection_scale, rendezvous, fold, phases_at_once),
            cluster.FairChoices(
                straggler or [], jitter, seed, slowdown, link_slowdown, communication_slots, fail or []
            ),
            cluster.Outputs(as_json, per_rank, html, perfetto),
            options,
        )
        return
    from foretrace.report.simulation import simulation_document, simulation_findings, simulation_page

    are_chakra = _are_chakra(paths)
    together.check(options, together.World.CHAKRA if are_chakra else together.World.TRACES)
    factors = _factors(scale)
    for target in (html, perfetto):
        check_writable(target)
    if are_chakra:
        document, simulation = _simulate_chakra(paths, factors, dependencies.value, alone)
        job = simulation.job
    else:
        job = read_job(paths, keep_python=True, cache=cache)
        with show.working("simulating"):
            document, simulation = checked(lambda: simulation_document(job, factors, coupled=not alone), paths)
    _write_page(html, lambda: simulation_page(job, document, simulation))
    _write_timelines(job, simulation, perfetto)
    if as_json:
        print_json(document)
    else:
        show_predict.simulation(document, simulation_findings(document))


def _are_chakra(paths: list[Path]) -> bool:
    """Whether the paths are Chakra ETs; anything else is read as traces, whose reader says what is wrong."""
    if not any(path.name.endswith((".et", ".et.gz", ".arrow", ".json", ".json.gz")) for path in paths):
        inside = (one.name for path in paths if path.is_dir() for one in path.iterdir())
        return any(name.endswith((".et", ".et.gz")) for name in inside)
    from foretrace.formats.detect import detect

    files = [path for path in paths if path.is_file()]
    return any(path.name.endswith((".et", ".et.gz", ".arrow")) for path in paths) or bool(
        files and detect(files[0]) == "chakra-json"
    )


def _simulate_chakra(
    paths: list[Path], factors: dict[str, float], dependencies: str, alone: bool
) -> tuple[dict[str, Any], Any]:
    from foretrace.estimate.exchange import read_inputs
    from foretrace.report.simulation import chakra_document

    with show.reading_bar() as progress:
        found = read_inputs(paths, progress)
    if found.job is not None or found.operators or not found.chakra:
        raise FormatError(str(paths[0]), "Chakra ETs and other files together", "simulate them one kind at a time")
    with show.working("simulating"):
        return checked(  # type: ignore[no-any-return]
            lambda: chakra_document(found.chakra, factors, dependencies, coupled=not alone, warnings=found.warnings),
            paths,
        )


def critical_path(
    paths: Paths,
    as_json: AsJson = False,
    rank: Annotated[int | None, typer.Option(help="Whose end the path leads to (the last one).")] = None,
    step: Annotated[int | None, typer.Option(help="Number of the step (all).")] = None,
    top: Annotated[int, typer.Option(min=1, help="Rows of each table.")] = 15,
    html: Html = None,
    perfetto: Perfetto = None,
    cache: Cache = False,
) -> None:
    """What a step's time consists of, across threads, streams and ranks, and what would shorten it."""
    from foretrace.report.simulation import critical_path_document, critical_path_findings, critical_path_page

    job = _read(paths, cache, html, perfetto)
    with show.working("following the critical path"):
        document, simulation = checked(lambda: critical_path_document(job, rank, step, top), paths)
    _write_page(html, lambda: critical_path_page(document))
    _write_timelines(job, simulation, perfetto)
    if as_json:
        print_json(document)
    else:
        show_predict.critical_path(document, critical_path_findings(document))


def validate(
    paths: Paths,
    as_json: AsJson = False,
    html: Html = None,
    perfetto: Perfetto = None,
    cache: Cache = False,
) -> None:
    """How far a simulation of these traces can be trusted: baselines, copied share, held-out steps and ranks."""
    from foretrace import estimate
    from foretrace.report.summary import without_nan
    from foretrace.report.validation import validation_page

    job = _read(paths, cache, html, perfetto)
    with show.steps() as progress:
        document: dict[str, Any] = without_nan(checked(lambda: estimate.validate(job, progress=progress), paths))
    _write_page(html, lambda: validation_page(document))
    if perfetto is not None:
        from foretrace.report.simulation import simulation_document

        _write_timelines(job, simulation_document(job)[1], perfetto)
    if as_json:
        print_json(document)
    else:
        show_predict.validation(document)


def _read(paths: list[Path], cache: bool, *targets: Path | None) -> Job:
    """Read traces, but not before it is clear that the results can be written."""
    for target in targets:
        check_writable(target)
    return read_job(paths, keep_python=True, cache=cache)


def _write_page(path: Path | None, page: Callable[[], str]) -> None:
    if path is not None:
        write_atomically(path, page().encode())
        show.note(f"wrote {path}")


def checked(work: Any, paths: list[Path]) -> Any:
    """What cannot be simulated is an error in the input, told in one line."""
    try:
        return work()
    except GraphError as error:
        raise FormatError(str(paths[0]), str(error), "the trace contradicts itself; please report it") from None
    except ValueError as error:
        raise FormatError(str(paths[0]), str(error), "see --help") from None


def _write_timelines(job: Any, simulation: Any, path: Path | None) -> None:
    if path is None:
        return
    from foretrace.formats.perfetto import write

    write(job, path, simulated=simulation.job)
    show.note(f"wrote {path}; open it in ui.perfetto.dev")
