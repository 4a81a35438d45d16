"""`lint`: trace files of any kind, one by one and against each other -> what is wrong with them, and repaired files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretrace.formats.chakra.job_rules import Communication, check_job
from foretrace.formats.chakra.trace import ChakraTrace, NodeType
from foretrace.formats.detect import detect
from foretrace.trace import FormatError
from foretrace.trace.findings import Finding
from foretrace.trace.operators import OperatorTrace

_CHAKRA = ("chakra", "chakra-json", "arrow")
_SUFFIX = r"(?:\.(?:et|eg|json|pb|chakra|arrow))?(?:\.gz)?"
# prefix.RANK.et, also after a repair.
_NAME = re.compile(rf"(?P<prefix>.*)\.(?P<rank>\d{{1,9}})(?P<suffix>(?:\.repaired)?{_SUFFIX})", re.IGNORECASE)
_ENDING = re.compile(rf"{_SUFFIX}$", re.IGNORECASE)
_NO_SPACE = "free space or choose another place"


@dataclass
class FileResult:
    """What came out for one file.

    Attributes:
        kind: what `detect` told, ``""`` if it could not.
        findings: rules that the file breaks, those between ranks at the file that they were seen in.
        notes: what is odd and no fault, counted.
        repaired: repairs that were made, by rule.
        remaining: findings of the repaired file, or all where nothing was repaired.
        output: the repaired file, if one was written.
        error: why the file could not be read or written, one line; ``""`` otherwise.
    """

    path: Path
    kind: str = ""
    findings: list[Finding] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)
    remaining: list[Finding] = field(default_factory=list)
    output: Path | None = None
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "path": str(self.path),
            "kind": self.kind,
            "findings": [one.to_dict() for one in self.findings],
            "notes": dict(self.notes),
            "repaired": dict(self.repaired),
            "remaining": [one.to_dict() for one in self.remaining],
            "output": None if self.output is None else str(self.output),
        }


@dataclass
class _Job:
    """Communication of the files that belong together, as they are and as repaired, by path."""

    before: dict[str, Communication] = field(default_factory=dict)
    after: dict[str, Communication] = field(default_factory=dict)

    def add(self, path: Path, before: Communication, after: Communication) -> None:
        for one in (before, after):
            one.path = str(path)  # findings are told of the file that was given
        self.before[str(path)], self.after[str(path)] = before, after

    def has_rank(self, rank: int) -> bool:
        return rank >= 0 and any(one.rank == rank for one in self.before.values())


def lint(
    paths: Sequence[Path],
    *,
    repair: bool = False,
    output: Path | None = None,
    in_place: bool = False,
    on_file: Callable[[Path], None] | None = None,
) -> tuple[list[FileResult], Counter[str]]:
    """Check files, and the ranks of each job against each other; mend Chakra traces.

    Files ``x.0.et``, ``x.1.et``, ... of one folder are the ranks of one job, as are execution traces whose names differ
    in numbers only.

    Args:
        paths: files of any kind that `detect` knows.
        repair: write Chakra traces anew without what can be mended.
        output: a folder, which then gets every Chakra trace, or with one path a file; else each file that needs
            repair gets a neighbor ``NAME.repaired.et``.
        in_place: replace the files that need repair.
        on_file: called with each path before it is read.

    Returns:
        One result a file, in order, and notes on the jobs. A file that cannot be read has an ``error``.

    Raises:
        FormatError: if outputs collide, or would replace an input without ``in_place``.
    """
    results = [FileResult(path) for path in paths]
    targets = _targets(paths, output, in_place) if repair else {}
    jobs: dict[Any, _Job] = {}
    for result in results:
        if on_file:
            on_file(result.path)
        try:
            _lint_file(result, jobs, targets.get(result.path), always=output is not None)
        except FormatError as error:
            result.error = str(error)
    return results, _lint_jobs(results, jobs.values())


def _lint_file(result: FileResult, jobs: dict[Any, _Job], target: Path | None, always: bool) -> None:
    result.kind = detect(result.path)
    if result.kind in _CHAKRA:
        trace = _read_chakra(result.path, result.kind)
        _lint_chakra(result, trace, jobs, target, always)
        return
    if result.kind == "pytorch-et":
        _lint_operators(result, jobs)
    else:
        _lint_timeline(result)
    result.remaining = result.findings


def _lint_chakra(
    result: FileResult, trace: ChakraTrace, jobs: dict[Any, _Job], target: Path | None, always: bool
) -> None:
    from foretrace.formats.chakra.repair import repair
    from foretrace.formats.chakra.rules import check

    result.findings, result.notes = check(trace)
    result.remaining = result.findings
    before = after = Communication.of(trace)
    if target is not None:
        mended, result.repaired = repair(trace)
        if result.repaired or always:
            _write(mended, target, result)
            result.output = target
            written = _read_chakra(target, "chakra-json" if _is_json(target) else "chakra")
            written.rank = trace.rank
            result.remaining = check(written)[0]
            after = Communication.of(written)
    found = _NAME.fullmatch(result.path.name)
    key: Any = (result.path.parent, found["prefix"], found["suffix"]) if found else result.path
    _job_of(jobs, key, trace.rank, result).add(result.path, before, after)


def _lint_operators(result: FileResult, jobs: dict[Any, _Job]) -> None:
    from foretrace.formats.chakra.from_operators import from_operators
    from foretrace.formats.pytorch_et import read_operators
    from foretrace.formats.pytorch_et.stated import stated_parents
    from foretrace.trace.operator_checks import check_operators

    trace = read_operators(result.path)
    stated = stated_parents(result.path) if _is_tree_mended(trace) else (trace.nodes["id"], _parent_ids(trace))
    result.findings, result.notes = check_operators(trace, stated)
    if not trace.collectives.num_rows:
        return
    told = Communication.of(from_operators(trace))
    # Peers of sends and receives are recorded in too many ways.
    kept = [at for at, kind in enumerate(told.columns["type"].tolist()) if kind == NodeType.COMM_COLL]
    told.columns = {name: column[kept] for name, column in told.columns.items()}
    told.names = [told.names[at] for at in kept]
    key = (result.path.parent, re.sub(r"\d+", "#", result.path.name))
    _job_of(jobs, key, trace.rank, result).add(result.path, told, told)


def _is_tree_mended(trace: OperatorTrace) -> bool:
    """Whether reading may have mended the tree: then there are several roots, or nodes of one id."""
    ids = trace.nodes["id"]
    return int((trace.nodes["parent"] < 0).sum()) > 1 or bool((ids[1:] == ids[:-1]).any())


def _parent_ids(trace: OperatorTrace) -> Any:
    return trace.nodes["id"][trace.nodes["parent"]] * (trace.nodes["parent"] >= 0)


def _lint_timeline(result: FileResult) -> None:
    from foretrace.formats.read import read
    from foretrace.trace.checks import check_timeline

    job = read([result.path])
    result.notes.update(job.warnings)
    for timeline in job:
        findings, notes = check_timeline(timeline)
        result.findings += findings
        result.notes.update(notes)


def _job_of(jobs: dict[Any, _Job], key: Any, rank: int, result: FileResult) -> _Job:
    """The job that a file belongs to; a file without a rank, or of one that is there already, stands alone."""
    job = jobs.setdefault(key if rank >= 0 else result.path, _Job())
    if not job.has_rank(rank):
        return job
    result.notes["another file of the same rank was given: not compared with other ranks"] += 1
    return jobs.setdefault(result.path, _Job())


def _lint_jobs(results: list[FileResult], jobs: Any) -> Counter[str]:
    notes: Counter[str] = Counter()
    by_path = {str(result.path): result for result in results}
    for job in jobs:
        found, told = check_job(list(job.before.values()))
        notes.update(told)
        left = found if job.after == job.before else check_job(list(job.after.values()))[0]
        for path, findings in found.items():
            by_path[path].findings = [*by_path[path].findings, *findings]
        for path, findings in left.items():
            by_path[path].remaining = [*by_path[path].remaining, *findings]
    return notes


def _read_chakra(path: Path, kind: str) -> ChakraTrace:
    if kind == "arrow":
        from foretrace.formats.chakra.arrow_form import load_arrow

        trace = load_arrow(path)
        trace.report.path = str(path)
    else:
        from foretrace.formats.chakra.read import read_chakra

        trace = read_chakra(path)
    found = _NAME.fullmatch(path.name)
    if trace.rank < 0 and found:
        trace.rank = int(found["rank"])
    return trace


# -- what is written ---------------------------------------------------------------------------------------------------


def _targets(paths: Sequence[Path], output: Path | None, in_place: bool) -> dict[Path, Path]:
    """Where each repaired file goes."""
    if in_place:
        return {path: path for path in paths}
    if output is None:
        targets = {path: path.with_name(f"{_ENDING.sub('', path.name)}.repaired.et") for path in paths}
    elif output.is_dir() or len(paths) > 1 or str(output).endswith("/"):
        targets = {path: output / _name_of_copy(path) for path in paths}
    else:
        targets = dict.fromkeys(paths, output)
    inputs = {path.resolve() for path in paths}
    taken: set[Path] = set()
    for path, target in targets.items():
        if target.resolve() in inputs:
            raise FormatError(str(target), "a repair would replace an input", "choose another place, or use --in-place")
        if target.resolve() in taken:
            raise FormatError(str(path), f"two repaired files would be {target}", "repair them one by one")
        taken.add(target.resolve())
    return targets


def _name_of_copy(path: Path) -> str:
    is_binary = path.name.lower().endswith((".et", ".et.gz"))
    return path.name if is_binary else f"{_ENDING.sub('', path.name)}.et"


def _is_json(path: Path) -> bool:
    return path.name.lower().endswith((".json", ".json.gz"))


def _write(trace: ChakraTrace, path: Path, result: FileResult) -> None:
    from foretrace.formats.chakra.write import write_chakra, write_json

    try:
        path.parent.mkdir(exist_ok=True)
        if _is_json(path):
            for reason, count in write_json(trace, path).items():
                result.notes[f"not in Chakra's JSON form: {reason}"] += count
        else:
            write_chakra(trace, path)
    except OSError as error:
        raise FormatError(str(path), error.strerror or str(error), _NO_SPACE) from None
    except ValueError as error:
        raise FormatError(str(path), str(error), "the file cannot be written as it is; nothing was changed") from None
