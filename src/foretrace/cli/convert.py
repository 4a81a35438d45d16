"""``foretrace convert``: traces from one format into another."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from foretrace import FormatError
from foretrace.cli import show
from foretrace.cli.files import check_writable, write_atomically
from foretrace.cli.options import AsJson, print_json

PANEL = "Make and exchange"


class Target(enum.StrEnum):
    """What a conversion can write."""

    chakra = "chakra"
    chakra_json = "chakra-json"
    perfetto = "perfetto"
    arrow = "arrow"
    dot = "dot"
    graphml = "graphml"
    svg = "svg"


_BY_SUFFIX = {
    ".et": Target.chakra,
    ".et.gz": Target.chakra,
    ".arrow": Target.arrow,
    ".feather": Target.arrow,
    ".dot": Target.dot,
    ".graphml": Target.graphml,
    ".svg": Target.svg,
}
_PER_RANK = (Target.chakra, Target.chakra_json, Target.arrow)


def convert(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Kineto, PyTorch ET, Chakra ET (binary or JSON) or Arrow files, or folders of them."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write; of several ranks each gets its number: x.0.et.")
    ] = Path(),
    operators: Annotated[
        list[Path] | None, typer.Option(help="PyTorch execution traces (files or folders), one a rank.")
    ] = None,
    timeline: Annotated[list[Path] | None, typer.Option(help="Kineto traces of the same run.")] = None,
    to: Annotated[Target | None, typer.Option(help="What to write (told by the output's name).")] = None,
    as_json: AsJson = False,
) -> None:
    """Turn traces into another format: Chakra ETs, Chakra JSON, Perfetto, Arrow, or pictures of the graph."""
    from foretrace.estimate.exchange import read_inputs

    inputs = [*(paths or []), *(operators or []), *(timeline or [])]
    if not inputs:
        raise FormatError("convert", "nothing to convert", "name files, or use --operators and --timeline")
    if output == Path():
        raise FormatError("convert", "no output", "name the file to write with -o, for example -o job.et")
    with show.reading_bar() as progress:
        found = read_inputs(inputs, progress)
    target = to or _target(output, found)
    ranks = _ranks(found)
    targets = _outputs(output, ranks if target in _PER_RANK else [])
    for one in targets:
        check_writable(one)
    with show.working("converting"):
        notes, joins = _write(found, target, targets)
    document = {
        "outputs": [str(one) for one in targets],
        "format": target.value,
        "ranks": ranks,
        "joined": joins,
        "notes": notes,
        "warnings": found.warnings,
    }
    if as_json:
        print_json(document)
    else:
        show.conversion(document)


def _target(output: Path, found: Any) -> Target:
    name = output.name.lower()
    for suffix, target in _BY_SUFFIX.items():
        if name.endswith(suffix):
            return target
    if name.endswith((".json", ".json.gz")):
        return Target.chakra_json if found.chakra or not found.job else Target.perfetto
    known = ", ".join([*_BY_SUFFIX, ".json"])
    raise FormatError(str(output), "the name does not say what to write", f"end it with {known}, or use --to")


def _ranks(found: Any) -> list[int]:
    if found.chakra:
        return [trace.rank if trace.rank >= 0 else at for at, trace in enumerate(found.chakra)]
    return list(found.job.ranks if found.job else sorted(found.operators))


def _outputs(output: Path, ranks: list[int]) -> list[Path]:
    """One file a rank: as it is named for one rank, with its number before the suffix for several."""
    if len(ranks) <= 1:
        return [output]
    suffixes = [*_BY_SUFFIX, ".json.gz", ".json"]
    suffix = max((s for s in suffixes if output.name.lower().endswith(s)), key=len, default=output.suffix)
    stem = output.name[: len(output.name) - len(suffix)] if suffix else output.name
    return [output.with_name(f"{stem}.{rank}{suffix}") for rank in ranks]


def _write(found: Any, target: Target, targets: list[Path]) -> tuple[dict[str, int], dict[str, Any]]:
    """Write all files; what was left out or guessed, and how operators were joined with timelines, by rank."""
    if target is Target.perfetto:
        return _write_perfetto(found, targets[0]), {}
    if target is Target.arrow and found.job is not None and not found.operators:
        from foretrace.formats import arrow

        _each(targets, found.job, lambda timeline, path: arrow.save(timeline, path))
        return {}, {}
    traces, notes, joins = _chakra(found)
    if target in (Target.dot, Target.graphml, Target.svg):
        from foretrace.formats import pictures

        drawn = {
            Target.dot: lambda: pictures.dot(traces),
            Target.graphml: lambda: pictures.graphml(traces),
            Target.svg: lambda: pictures.svg(traces, str(targets[0])),
        }[target]()
        write_atomically(targets[0], drawn.encode("utf-8", "replace"))
        return notes, joins
    from foretrace.estimate.exchange import group_ranks
    from foretrace.formats.chakra.arrow_form import save_arrow
    from foretrace.formats.chakra.write import write_chakra, write_json

    def as_json(trace: Any, path: Path) -> None:
        for reason, count in write_json(trace, path).items():
            notes[f"not in Chakra's JSON form: {reason}"] = notes.get(f"not in Chakra's JSON form: {reason}", 0) + count

    write = {Target.chakra: write_chakra, Target.chakra_json: as_json, Target.arrow: save_arrow}[target]
    _each(targets, traces, write)
    if target is Target.chakra and (groups := group_ranks(traces)):
        path = _group_file(targets[0], len(targets))
        write_atomically(path, json.dumps(groups).encode())
        targets.append(path)
    return notes, joins


def _group_file(first: Path, count: int) -> Path:
    """Where the ranks of process groups go: ``x.groups.json`` beside ``x.0.et``."""
    stem = first.name.removesuffix(".gz").removesuffix(".et")
    return first.with_name(f"{stem.rpartition('.')[0] if count > 1 else stem}.groups.json")


def _chakra(found: Any) -> tuple[list[Any], dict[str, int], dict[str, Any]]:
    """Chakra traces of the inputs."""
    if found.chakra:
        return found.chakra, {}, {}
    from foretrace.estimate.exchange import chakra_traces

    made = chakra_traces(found.job, found.operators)
    joins = {
        str(rank): {
            "joined": dict(one.joined),
            "not_joined": dict(one.missing),
            "device_work": len(one.work_node),
            "device_work_joined": int((one.work_node >= 0).sum()),
            "device_work_not_joined": dict(one.missing_work),
            "guessed": dict(one.guessed),
        }
        for rank, one in made.joins.items()
    }
    return made.traces, made.notes, joins


def _write_perfetto(found: Any, path: Path) -> dict[str, int]:
    from foretrace.formats.perfetto import write

    if found.job is not None:
        write(found.job, path)
        return {}
    from foretrace.cli.predict import checked
    from foretrace.estimate.exchange import chakra_traces
    from foretrace.formats.chakra.to_graph import to_graph
    from foretrace.simulate import simulate

    traces = found.chakra or chakra_traces(None, found.operators).traces
    simulation = checked(lambda: simulate(to_graph(traces)), [path])
    write(simulation.job, path)
    return {"timeline that was simulated from the graph": len(traces)}


def _each(paths: list[Path], items: Any, write: Callable[[Any, Path], Any]) -> None:
    """Write each item, and tell a disk that is full in one line."""
    for item, path in zip(items, paths, strict=True):
        try:
            write(item, path)
        except OSError as error:
            remedy = "free space or choose another place"
            raise FormatError(str(path), error.strerror or str(error), remedy) from None
