"""What the commands print: rich tables on stdout, progress and notes on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from foretrace import Job
from foretrace.report.summary import CAUSE_LABELS, PART_LABELS, findings, milliseconds

out = Console()
_err = Console(stderr=True)


@contextmanager
def reading_bar(what: str = "reading") -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar over the bytes of all files; nothing where stderr is no terminal."""
    if not _err.is_terminal:
        yield None
        return
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_err, transient=True) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on stderr while something runs."""
    if not _err.is_terminal:
        yield
        return
    with _err.status(what):
        yield


@contextmanager
def steps() -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is being done, where stderr is a terminal."""
    if not _err.is_terminal:
        yield lambda line: None
        return
    with _err.status("validating") as status:
        yield lambda line: status.update(f"validating: {escape(line)}")


def note(text: str) -> None:
    """A line on stderr."""
    _err.print(escape(text), highlight=False)


def conversion(document: dict[str, Any]) -> None:
    """What was written, how operators were joined, and what could not be carried over."""
    for path in document["outputs"]:
        note(f"wrote {path}")
    if document["joined"]:
        table = new_table(
            "Operators joined with the timeline", "rank", "how", "nodes", "not joined", "device work", "not joined"
        )
        for rank, one in document["joined"].items():
            how = ", ".join(f"{name}: {count:,}" for name, count in one["joined"].items())
            left, work = (
                ", ".join(f"{n} {reason}" for reason, n in one[key].items())
                for key in ("not_joined", "device_work_not_joined")
            )
            count = sum(one["joined"].values())
            table.add_row(
                rank, how, f"{count:,}", left, f"{one['device_work_joined']:,} of {one['device_work']:,}", work
            )
        out.print(table)
    for title, counts in (("Noted", document["notes"]), ("In the input", document["warnings"])):
        if counts:
            out.print(f"{title}:")
            for reason, count in counts.items():
                out.print(f"  {escape(reason)}: {count:,}", highlight=False)


def info_document(job: Job) -> dict[str, Any]:
    """The document of ``foretrace info --json``."""
    files = []
    for timeline in job:
        devices = timeline.metadata.get("deviceProperties") or []
        names = [device.get("name") for device in devices if isinstance(device, dict)]
        lanes = [lane.label for lane in timeline.lanes]
        entry = {**timeline.report.to_dict(), "rank": timeline.rank, "kept_events": timeline.num_events}
        files.append({**entry, "devices": names, "lanes": lanes, "strings": len(timeline.strings)})
    groups = [{"name": g.name, "description": g.description, "ranks": list(g.ranks)} for g in job.groups.values()]
    summary = {"ranks": job.ranks, "world_size": job.world_size, "groups": groups, "warnings": job.all_warnings}
    return {"files": files, "job": summary}


def info(job: Job) -> None:
    """Files, their events, and what reading them took."""
    for timeline in job:
        report = timeline.report
        table = new_table(f"{report.path}: {report.kind}, rank {timeline.rank}", "category", "events")
        for category, count in sorted(report.events.items(), key=lambda item: -item[1]):
            table.add_row(escape(category or "(none)"), f"{count:,}")
        others = {phase: count for phase, count in report.phases.items() if phase != "X"}
        for phase, count in sorted(others.items(), key=lambda item: -item[1]):
            table.add_row(f"(phase {escape(phase) or 'missing'})", f"{count:,}")
        out.print(table)
        for what in ("repaired", "dropped", "guessed", "noted"):
            for reason, count in getattr(report, what).items():
                place = f" (first: {report.examples[reason]})" if reason in report.examples else ""
                out.print(f"  {what}: {escape(reason)}: {count:,}{escape(place)}", highlight=False)
    for warning, count in job.warnings.items():
        out.print(f"  job: {escape(warning)}: {count:,}", highlight=False)


def analysis(document: dict[str, Any], top: int) -> None:
    """Findings, then the tables behind them."""
    for sentence in findings(document):
        out.print(f"• {escape(sentence)}", highlight=False)
    _breakdown(document)
    _idle(document)
    _collectives(document["collectives"])
    _top("Device work by kind", document["kernel_kinds"], ("rank", "kind", "count", "total_ns", "share_pct"), top)
    kernel_columns = ("rank", "name", "kind", "count", "total_ns", "share_pct")
    _top("Kernels", document["kernels"], kernel_columns, top)
    _top("Operators by self time", document["operators"], ("rank", "name", "count", "self_ns", "device_ns"), top)
    if document["warnings"]:
        out.print("Repaired, dropped, guessed or odd (details: foretrace info):", highlight=False)
        for warning, count in document["warnings"].items():
            out.print(f"  {escape(warning)}: {count:,}", highlight=False)


def _breakdown(document: dict[str, Any]) -> None:
    table = new_table("Breakdown", "rank", "step", "span", *PART_LABELS.values())
    for rank in document["ranks"]:
        _breakdown_row(table, str(rank["rank"]), "all", rank)
        for step in rank["steps"] if len(document["ranks"]) <= 2 else ():
            _breakdown_row(table, "", str(step["step"]), step)
    out.print(table)


def _breakdown_row(table: Table, rank: str, step: str, entry: dict[str, Any]) -> None:
    span = max(entry["span_ns"], 1)
    parts = (f"{entry['breakdown'][part] / span:.1%}" for part in PART_LABELS)
    table.add_row(rank, step, milliseconds(entry["span_ns"]), *parts)


def _idle(document: dict[str, Any]) -> None:
    table = new_table("Idle time by cause", "rank", "idle", *CAUSE_LABELS.values())
    for rank in document["ranks"]:
        causes = (milliseconds(rank["idle_causes"].get(cause, 0)) for cause in CAUSE_LABELS)
        table.add_row(str(rank["rank"]), milliseconds(rank["breakdown"]["idle_ns"]), *causes)
    out.print(table)


def _collectives(collectives: dict[str, Any]) -> None:
    rows = collectives["waiting_caused"]
    if rows:
        table = new_table("Who the others waited for", "rank", "waiting caused", "share", "last to arrive", "meanwhile")
        for row in rows:
            name = f"{row['rank']} (straggler)" if row["is_straggler"] else str(row["rank"])
            waiting = milliseconds(row["waiting_caused_ns"])
            table.add_row(name, waiting, f"{row['share_pct']:.1f} %", str(row["last_arrivals"]), row["doing"] or "")
        out.print(table)
    if collectives["by_size"]:
        columns = ("group", "kind", "bytes", "count", "duration_mean_ns", "transfer_mean_ns", "bus_gb_per_s")
        _top("Collectives by size", collectives["by_size"], columns, 10)


def diff(rows: list[dict[str, Any]], top: int) -> None:
    """Changes, the largest of each kind first."""
    for kind, title in (("phase", "Phases"), ("kernel", "Kernels"), ("operator", "Operators by self time")):
        mine = [row for row in rows if row["kind"] == kind and row["change"] != "same"]
        unit = f" ({rows[0]['unit']}, mean over ranks)" if rows else ""
        table = new_table(f"{title}{unit}", "name", "before", "after", "change", "")
        for row in mine[:top]:
            delta = f"{'+' if row['delta_ns'] > 0 else ''}{milliseconds(row['delta_ns'])}"
            values = (milliseconds(row["before_ns"]), milliseconds(row["after_ns"]), delta, row["change"])
            table.add_row(escape(short(row["name"])), *values)
        if mine:
            out.print(table)
    if all(row["change"] == "same" for row in rows):
        out.print("Nothing changed by more than 1 %.", highlight=False)


def _top(title: str, rows: list[dict[str, Any]], columns: tuple[str, ...], top: int) -> None:
    if not rows:
        return
    first = rows[0].get("rank")
    kept = [row for row in rows if row.get("rank") == first][:top]
    many = first is not None and any(row["rank"] != first for row in rows)
    table = new_table(f"{title}{f' (rank {first}; others: --json)' if many else ''}", *(_heading(c) for c in columns))
    for row in kept:
        table.add_row(*(_cell(column, row[column]) for column in columns))
    out.print(table)


def _heading(column: str) -> str:
    return column.removesuffix("_ns").removesuffix("_pct").replace("_gb_per_s", " GB/s").replace("_", " ")


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "?"
    if column.endswith("_ns"):
        return milliseconds(value)
    if column.endswith("_pct"):
        return f"{value:.1f} %"
    if isinstance(value, float):
        return f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else escape(short(str(value)))


def short(name: str) -> str:
    """A name that fits a line."""
    return name if len(name) <= 80 else f"{name[:77]}..."


def new_table(title: str, *columns: str) -> Table:
    """An empty table; names are to the left, numbers to the right."""
    table = Table(title=escape(title), title_justify="left")
    for at, column in enumerate(columns):
        table.add_column(
            escape(column), justify="left" if at == 0 or column in ("name", "kind", "meanwhile", "what") else "right"
        )
    return table
