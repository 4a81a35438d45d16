"""Files of any kind as what a conversion or a simulation needs: timelines, operator traces, Chakra traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foretrace.estimate.meter import Progress, meter
from foretrace.formats import read
from foretrace.formats.chakra import ChakraTrace
from foretrace.formats.chakra.arrow_form import load_arrow
from foretrace.formats.chakra.from_graph import from_graph
from foretrace.formats.chakra.from_operators import from_operators
from foretrace.formats.chakra.groups import groups_of
from foretrace.formats.chakra.read import read_chakra
from foretrace.formats.detect import detect
from foretrace.formats.pytorch_et import read_operators
from foretrace.link import link
from foretrace.link.costs import with_operators
from foretrace.link.operators import Join, JoinError
from foretrace.machine import trace_costs
from foretrace.simulate import simulate
from foretrace.trace import ExecutionGraph, FormatError, Job
from foretrace.trace.operators import OperatorTrace

_SUFFIXES = (".json", ".json.gz", ".et", ".et.gz", ".arrow")


@dataclass
class Inputs:
    """What the given files hold.

    Attributes:
        job: the timelines, None if there are none.
        operators: operator traces by rank.
        chakra: Chakra traces, in order of rank.
        warnings: what reading repaired, dropped, guessed or noted, counted.
    """

    job: Job | None = None
    operators: dict[int, OperatorTrace] = field(default_factory=dict)
    chakra: list[ChakraTrace] = field(default_factory=list)
    warnings: dict[str, int] = field(default_factory=dict)


def read_inputs(paths: Sequence[Path], progress: Progress | None = None) -> Inputs:
    """Read files and folders of any kind that is known, told by their content.

    Raises:
        FormatError: if a path does not exist or is of no known kind, or two operator traces are of one rank.
    """
    by_kind: dict[str, list[Path]] = {}
    for path in files_of(paths):
        by_kind.setdefault(detect(path), []).append(path)
    found = Inputs()
    if kineto := by_kind.get("kineto", []):
        found.job = read([str(path) for path in kineto], progress=progress)
        found.warnings.update(found.job.all_warnings)
    add = meter(progress, [path for kind in ("pytorch-et", "chakra", "chakra-json") for path in by_kind.get(kind, [])])
    operators = [read_operators(path, add) for path in by_kind.get("pytorch-et", [])]
    found.operators = _by_rank(operators, found.job)
    found.chakra = [read_chakra(path, add) for kind in ("chakra", "chakra-json") for path in by_kind.get(kind, [])]
    found.chakra += [load_arrow(path) for path in by_kind.get("arrow", [])]
    found.chakra.sort(key=lambda trace: trace.rank)
    for report in (*(trace.report for trace in operators), *(trace.report for trace in found.chakra)):
        for reason, count in report.warnings.items():
            found.warnings[reason] = found.warnings.get(reason, 0) + count
    return found


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The files that paths stand for; of a folder those with the name of a trace.

    Raises:
        FormatError: if a path does not exist, or a folder holds no trace.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(_SUFFIXES))
            inside = [one for one in inside if one.name != "job.json" and not one.name.endswith(".groups.json")]
            if not inside:
                raise FormatError(str(path), "no trace in this folder", f"name files ({', '.join(_SUFFIXES)})")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            matches = sorted(path.parent.glob(path.name)) if any(c in path.name for c in "*?[") else []
            if not matches:
                raise FormatError(str(path), "no such file or folder", "check the path, or quote the glob pattern")
            found += matches
    return found


def _by_rank(traces: list[OperatorTrace], job: Job | None) -> dict[int, OperatorTrace]:
    """Operator traces by rank; one without a rank belongs to the only timeline, or is rank 0."""
    if len(traces) == 1 and traces[0].rank < 0:
        traces[0].rank = job.ranks[0] if job is not None and len(job) == 1 else 0
    if len(traces) == 1 and job is not None and len(job) == 1:
        traces[0].rank = job.ranks[0]
    found: dict[int, OperatorTrace] = {}
    free = iter(rank for rank in range(2 * len(traces) + 1) if rank not in {trace.rank for trace in traces})
    for trace in traces:
        if trace.rank < 0:
            trace.rank = next(free)
        if trace.rank in found:
            problem = f"rank {trace.rank} as {found[trace.rank].report.path} is"
            raise FormatError(trace.report.path, problem, "give each rank's file a name like rank3.et.json.gz")
        found[trace.rank] = trace
    return found


@dataclass
class Converted:
    """Chakra traces, and how they came about.

    Attributes:
        traces: one a rank.
        joins: by rank, how timeline and operator trace were joined.
        graph: the execution graph that was written, if there was a timeline.
        notes: counts of what was found or left out.
    """

    traces: list[ChakraTrace]
    joins: dict[int, Join] = field(default_factory=dict)
    graph: ExecutionGraph | None = None
    notes: dict[str, int] = field(default_factory=dict)


def chakra_traces(job: Job | None, operators: Mapping[int, OperatorTrace]) -> Converted:
    """Chakra traces of timelines, of operator traces, or of both joined.

    Raises:
        FormatError: if timelines and operator traces of one rank do not belong together.
    """
    if job is None:
        made = [from_operators(trace, trace_costs(trace)) for _, trace in sorted(operators.items())]
        return Converted(made, notes=_notes(made))
    try:
        graph, joins = with_operators(link(job), operators)
    except JoinError as error:
        raise FormatError("--operators", str(error), "see foretrace info for what is in the files") from None
    resolved = simulate(graph).resolved
    made = from_graph(resolved, operators)
    notes = _notes(made) | {f"graph: {reason}": count for reason, count in graph.notes.items()}
    return Converted(made, joins, resolved, notes)


def _notes(traces: list[ChakraTrace]) -> dict[str, int]:
    total: dict[str, int] = {}
    for trace in traces:
        for reason, count in trace.report.warnings.items():
            total[reason] = total.get(reason, 0) + count
    return total


def group_ranks(traces: Sequence[ChakraTrace]) -> dict[str, list[int]]:
    """Ranks of the process groups that are not all ranks, by name, as ASTRA-sim's group configuration lists them."""
    return {name: list(ranks) for trace in traces for name, ranks in groups_of(trace).items() if ranks}
