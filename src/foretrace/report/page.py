"""One self-contained HTML page: findings in words, pictures, sortable tables. Readable offline."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from string import Template
from typing import Any

from foretrace import analyze
from foretrace.report.summary import CAUSE_LABELS, PART_LABELS, findings, milliseconds
from foretrace.trace import Job

Figure = tuple[list[dict[str, Any]], dict[str, Any]]  # Plotly's data and layout

COLORS = {
    "exposed_compute_ns": "#3b78b5",
    "overlapped_ns": "#6bb08c",
    "exposed_communication_ns": "#e08e45",
    "memory_ns": "#9a77b8",
    "idle_ns": "#d3d9df",
}
_CAUSE_COLORS = ("#c2504e", "#e3a857", "#8fa3b5", "#7d5ba6", "#c9cfd6")
_MAX_RANKS_PER_STEP = 16
_MAX_POINTS = 2_000
_LONGEST_TEXT = 200
_LABELS = ("rank", "step")  # numbers that name something
_DEFINITIONS = """Compute, communication, copies and idle add up to the span of each rank, which runs from its first
to its last device event (over host operators where there is no device work). Exposed communication is communication
that no compute hides; memory is copies and sets hidden by neither. Steps are device periods: from the last end of work
launched before the step to the last end of work launched in it. Transfer is the shortest member's duration of a
collective; what the other members spend beyond it is waiting. For broadcasts and sends this split is only a bound. A
straggler caused, as the last to arrive, more than 2/n of all waiting (with two ranks, three quarters)."""


def analysis_page(job: Job, document: dict[str, Any]) -> str:
    """The page of ``foretrace analyze --html``.

    Args:
        document: what `foretrace.report.summary.analysis` made of the job.
    """
    page = Page()
    page.findings(findings(document))
    ranks = [rank for rank in document["ranks"] if rank["span_ns"]]
    if ranks:
        page.plot("Where each rank spends its time", _breakdown_bars(ranks), note="Share of the rank's span.")
        _add_steps(page, ranks)
        page.plot("Why devices are idle", _idle_bars(ranks))
    _add_waiting(page, job, document["collectives"])
    _add_kernels(page, document)
    _add_over_time(page, job)
    _add_warnings(page, document)
    page.add("Definitions", f"<p>{_DEFINITIONS}</p>")
    names = [timeline.report.path for timeline in job]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return page.render("Where the time goes", f"{len(names)} rank(s): {', '.join(names[:3])}{more}")


def diff_page(document: dict[str, Any]) -> str:
    """The page of ``foretrace diff --html``."""
    page = Page()
    rows = document["changes"]
    unit = f"Mean over ranks, {rows[0]['unit']}." if rows else "Nothing to compare."
    for kind, title in (("phase", "Phases"), ("kernel", "Kernels"), ("operator", "Operators by self time")):
        mine = [row for row in rows if row["kind"] == kind and row["change"] != "same"]
        if kind != "phase" and mine:
            page.plot(f"{title}: largest changes", _change_bars(mine[:20]), note=unit)
        columns = ("name", "before_count", "after_count", "before_ns", "after_ns", "delta_ns", "change")
        page.table(title, mine[:500], columns, note=unit)
    return page.render("What changed", f"{document['before']} against {document['after']}")


class Page:
    """Sections of a page, put together in `render`."""

    def __init__(self) -> None:
        self._sections: list[str] = []
        self._figures: dict[str, Any] = {}

    def add(self, title: str, body: str, kind: str = "") -> None:
        """A section of HTML."""
        self._sections.append(f'<section class="{kind}"><h2>{_text(title)}</h2>{body}</section>')

    def findings(self, sentences: Sequence[str]) -> None:
        """The section that a reader should see first."""
        self.add("What to know", f"<ul>{''.join(f'<li>{_text(line)}</li>' for line in sentences)}</ul>", "findings")

    def plot(self, title: str, figure: Figure, note: str = "") -> None:
        """A section with a Plotly figure."""
        data, layout = figure
        name = f"figure{len(self._figures)}"
        self._figures[name] = {"data": data, "layout": layout}
        height = layout.get("height", 320)
        extra = f'<p class="note">{_text(note)}</p>' if note else ""
        self.add(title, f'<div class="plot" id="{name}" style="min-height:{height}px"></div>{extra}')

    def table(self, title: str, rows: Sequence[dict[str, Any]], columns: Sequence[str], note: str = "") -> None:
        """A section with a sortable table; nothing where there are no rows."""
        if not rows:
            return
        head = "".join(f'<th class="{_align(rows, c)}">{_text(_heading(c))}</th>' for c in columns)
        body = "".join(f"<tr>{''.join(_cell(rows, c, row[c]) for c in columns)}</tr>" for row in rows)
        extra = f'<p class="note">{_text(note)}</p>' if note else ""
        table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        self.add(title, table + extra)

    def render(self, title: str, subtitle: str) -> str:
        """The whole page."""
        from plotly.offline import get_plotlyjs

        template = Template(resources.files("foretrace.report").joinpath("page.html").read_text(encoding="utf-8"))
        # "<" is the only character that could end the script element early.
        figures = json.dumps(self._figures, allow_nan=False).replace("<", "\\u003c")
        return template.substitute(
            title=f"Foretrace: {_text(title)}",
            subtitle=_text(subtitle),
            plotly=get_plotlyjs(),
            sections="\n".join(self._sections),
            figures=figures,
        )


def _text(value: str) -> str:
    return html.escape(value, quote=True)


def _heading(column: str) -> str:
    return column.removesuffix("_ns").removesuffix("_pct").replace("_gb_per_s", " GB/s").replace("_", " ")


def _align(rows: Sequence[dict[str, Any]], column: str) -> str:
    return "text" if any(isinstance(row[column], str) for row in rows) else ""


def _cell(rows: Sequence[dict[str, Any]], column: str, value: Any) -> str:
    if value is None:
        return '<td data-value=""></td>'
    if isinstance(value, str):
        shown = value if len(value) <= _LONGEST_TEXT else f"{value[: _LONGEST_TEXT - 3]}..."
        more = f' title="{_text(value)}"' if shown != value else ""
        return f'<td class="text"{more}>{_text(shown)}</td>'
    if column.endswith("_ns"):
        shown = milliseconds(value)
    elif column.endswith("_pct"):
        shown = f"{value:.1f} %"
    else:
        shown = f"{value:,.2f}" if isinstance(value, float) else str(value) if column in _LABELS else f"{value:,}"
    return f'<td data-value="{value}">{shown}</td>'


def _bars(
    entries: list[tuple[str, dict[str, float]]], labels: dict[str, str], colors: Sequence[str], title: str
) -> Figure:
    """Horizontal stacked bars, one per entry; values are per part."""
    names = [name for name, _ in entries]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": label,
            "y": names,
            "x": [values[part] for _, values in entries],
            "marker": {"color": color},
            "hovertemplate": f"%{{y}}: {label} %{{x:.2f}}<extra></extra>",
        }
        for (part, label), color in zip(labels.items(), colors, strict=True)
    ]
    height = max(220, 90 + min(26 * len(entries), 1400))
    axis = {"autorange": "reversed", "type": "category", "automargin": True}
    return data, {"barmode": "stack", "height": height, "yaxis": axis, "xaxis": {"title": {"text": title}}}


def _breakdown_bars(ranks: list[dict[str, Any]]) -> Figure:
    entries = [
        (f"rank {rank['rank']}", {part: 100 * rank["breakdown"][part] / rank["span_ns"] for part in PART_LABELS})
        for rank in ranks
    ]
    return _bars(entries, PART_LABELS, [COLORS[part] for part in PART_LABELS], "% of the span")


def _idle_bars(ranks: list[dict[str, Any]]) -> Figure:
    entries = [
        (f"rank {rank['rank']}", {c: rank["idle_causes"].get(c, 0) / 1e6 for c in CAUSE_LABELS}) for rank in ranks
    ]
    return _bars(entries, CAUSE_LABELS, _CAUSE_COLORS, "ms")


def _add_steps(page: Page, ranks: list[dict[str, Any]]) -> None:
    entries = [
        (f"rank {rank['rank']} step {step['step']}", {part: step["breakdown"][part] / 1e6 for part in PART_LABELS})
        for rank in ranks[:_MAX_RANKS_PER_STEP]
        for step in rank["steps"]
    ]
    if len(entries) > min(len(ranks), _MAX_RANKS_PER_STEP):
        note = f"The first {_MAX_RANKS_PER_STEP} ranks." if len(ranks) > _MAX_RANKS_PER_STEP else ""
        page.plot("Step by step", _bars(entries, PART_LABELS, [COLORS[p] for p in PART_LABELS], "ms"), note=note)


def _add_waiting(page: Page, job: Job, collectives: dict[str, Any]) -> None:
    if not collectives["matched"]:
        return
    members = [row for row in analyze.collective_members(job).to_pylist() if row["wait_ns"] is not None]
    order = {key: at for at, key in enumerate(dict.fromkeys((row["group"], row["index"]) for row in members))}
    ranks = sorted({row["rank"] for row in members})
    step = max(1, len(order) * len(ranks) // 200_000)
    kept = {key: at // step for key, at in order.items() if at % step == 0}
    waits: list[list[float | None]] = [[None] * len(kept) for _ in ranks]
    row_of = {rank: at for at, rank in enumerate(ranks)}
    for row in members:
        if (row["group"], row["index"]) in kept:
            waits[row_of[row["rank"]]][kept[row["group"], row["index"]]] = row["wait_ns"] / 1e6
    heat = {
        "type": "heatmap",
        "z": waits,
        "y": [f"rank {rank}" for rank in ranks],
        "colorscale": [[0, "#f3f6f9"], [0.15, "#f3d9ad"], [0.5, "#e08e45"], [1, "#8c2d19"]],
        "colorbar": {"title": {"text": "ms"}},
        "hovertemplate": "%{y}, collective %{x}: waited %{z:.3f} ms<extra></extra>",
    }
    axis = {"autorange": "reversed", "type": "category", "automargin": True}
    layout = {"height": max(240, 100 + min(22 * len(ranks), 900)), "yaxis": axis}
    layout["xaxis"] = {"title": {"text": "collective, in order within its group"}}
    note = "Light rows are the ranks that the others wait for."
    page.plot("Who waits, collective by collective", ([heat], layout), note=note)
    columns = ("rank", "waiting_caused_ns", "share_pct", "last_arrivals", "late_ns", "doing", "doing_pct")
    page.table("Who the others waited for", collectives["waiting_caused"], columns)
    sizes = (
        "group",
        "kind",
        "bytes",
        "dtype",
        "count",
        "duration_mean_ns",
        "transfer_mean_ns",
        "wait_ns",
        "algorithm_gb_per_s",
        "bus_gb_per_s",
    )
    page.table("Collectives by size", collectives["by_size"], sizes, note="GB are 10^9 bytes; bus as in nccl-tests.")


def _add_kernels(page: Page, document: dict[str, Any]) -> None:
    kinds: dict[str, float] = {}
    for row in document["kernel_kinds"]:
        kinds[row["kind"]] = kinds.get(row["kind"], 0) + row["total_ns"] / 1e6
    if kinds:
        names = sorted(kinds, key=lambda kind: kinds[kind])
        bar = {
            "type": "bar",
            "orientation": "h",
            "y": names,
            "x": [kinds[n] for n in names],
            "marker": {"color": "#3b78b5"},
        }
        layout = {"height": max(220, 70 + 24 * len(names)), "yaxis": {"automargin": True}}
        layout["xaxis"] = {"title": {"text": "ms over all ranks"}}
        page.plot("Device work by kind", ([bar], layout))
    columns = ("rank", "name", "kind", "count", "total_ns", "mean_ns", "min_ns", "max_ns", "share_pct")
    page.table("Kernels", document["kernels"][:500], columns)
    of_operators = ("rank", "name", "count", "total_ns", "self_ns", "device_ns")
    page.table("Operators by self time", document["operators"][:500], of_operators)


def _add_over_time(page: Page, job: Job) -> None:
    busy, memory = [], []
    origin = min((int(t.start_ns.min()) for t in job if t.num_events), default=0)
    for timeline in job.timelines[:_MAX_RANKS_PER_STEP]:
        if len(timeline.device_rows):
            span = int(timeline.end_ns[timeline.device_rows].max() - timeline.start_ns[timeline.device_rows].min())
            table = analyze.utilization(timeline, bucket_ns=max(1_000_000, span // _MAX_POINTS + 1)).to_pydict()
            busy.append(_line(f"rank {timeline.rank}", table["time_ns"], table["busy_pct"], origin))
        table = analyze.memory(timeline).to_pydict()
        for device in sorted(set(zip(table["device_type"], table["device"], strict=True))):
            at = [i for i, d in enumerate(zip(table["device_type"], table["device"], strict=True)) if d == device]
            at = at[:: max(1, len(at) // _MAX_POINTS)]
            values = [table["allocated_bytes"][i] / 2**20 for i in at]
            name = f"rank {timeline.rank} {'CPU' if device[0] == 0 else f'device {device[1]}'}"
            memory.append(_line(name, [table["time_ns"][i] for i in at], values, origin))
    axes = {"height": 300, "xaxis": {"title": {"text": "ms"}}}
    if busy:
        layout = {**axes, "yaxis": {"title": {"text": "busy %"}, "range": [0, 105]}}
        page.plot("Device utilization", (busy, layout), note="At least one stream runs; not occupancy.")
    if memory:
        page.plot("Allocated memory", (memory, {**axes, "yaxis": {"title": {"text": "MiB"}}}))


def _line(name: str, time_ns: list[int], values: list[float], origin: int) -> dict[str, Any]:
    x = [round((t - origin) / 1e6, 3) for t in time_ns]
    return {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": values, "line": {"width": 1.2}}


def _add_warnings(page: Page, document: dict[str, Any]) -> None:
    notes = {**document["warnings"], **document["collectives"].get("notes", {})}
    rows = [{"what": what, "count": count} for what, count in notes.items()]
    page.table("Repaired, dropped, guessed or odd", rows, ("what", "count"), note="Details: foretrace info.")


def _change_bars(rows: list[dict[str, Any]]) -> Figure:
    names = [row["name"] if len(row["name"]) <= 60 else f"{row['name'][:57]}..." for row in rows]
    # Plotly draws labels as HTML: a name is text.
    labels = [_text(f"{at + 1}. {name}") for at, name in enumerate(names)]
    delta = [row["delta_ns"] / 1e6 for row in rows]
    colors = ["#c2504e" if value > 0 else "#6bb08c" for value in delta]
    bar = {"type": "bar", "orientation": "h", "y": labels, "x": delta, "marker": {"color": colors}}
    axis = {"autorange": "reversed", "automargin": True}
    return [bar], {"height": 90 + 24 * len(rows), "yaxis": axis, "xaxis": {"title": {"text": "change in ms"}}}
