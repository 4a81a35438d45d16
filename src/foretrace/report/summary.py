"""All that `foretrace analyze` knows of a job as one JSON-ready document, and its findings as sentences."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from foretrace import analyze
from foretrace.trace import Job

if TYPE_CHECKING:
    import pyarrow as pa

PARTS = ("exposed_compute_ns", "exposed_communication_ns", "overlapped_ns", "memory_ns", "idle_ns")
PART_LABELS = {
    "exposed_compute_ns": "compute",
    "overlapped_ns": "compute and communication",
    "exposed_communication_ns": "exposed communication",
    "memory_ns": "memory copies",
    "idle_ns": "idle",
}
CAUSE_LABELS = {
    "host_late": "the host launches late",
    "launch_latency": "launch latency",
    "queued_gap": "gaps between queued kernels",
    "launch_queue_full": "a full launch queue",
    "unexplained": "no recorded cause",
}


def analysis(job: Job, window: str = "all", memsets: str = "memory", top: int = 50) -> dict[str, Any]:
    """The document of ``foretrace analyze --json``; NaN and infinity become null.

    Args:
        window, memsets: see `foretrace.analyze.breakdown`; they apply to the breakdown of whole ranks.
        top: rows kept per rank of kernels and operators.
    """
    idle = _idle_by_rank_and_step(job, window)
    steps: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in analyze.breakdown_by_step(job).to_pylist():
        head = {name: row[name] for name in ("step", "name", "start_ns", "end_ns", "span_ns")}
        parts = {part: row[part] for part in PARTS}
        steps[row["rank"]].append({**head, "breakdown": parts, "idle_causes": idle[row["rank"], row["step"]]})
    ranks = []
    whole = analyze.breakdown(job, window=window, memsets=memsets)  # type: ignore[arg-type]
    for row in whole.to_pylist():
        rank = row["rank"]
        parts = {part: row[part] for part in PARTS}
        entry = {"rank": rank, "span_ns": row["span_ns"], "breakdown": parts}
        ranks.append({**entry, "idle_causes": idle[rank, -1], "steps": steps[rank]})
    stragglers = analyze.stragglers(job).to_pylist()
    named = sorted(row["rank"] for row in stragglers if row["is_straggler"])
    collectives = {**analyze.collective_summary(job), "stragglers": named, "waiting_caused": stragglers}
    collectives["by_size"] = analyze.collectives_by_size(job).to_pylist()
    document = {
        "ranks": ranks,
        "collectives": collectives,
        "warnings": job.all_warnings,
        "window": window,
        "memsets": memsets,
        "world_size": job.world_size,
        "kernel_kinds": analyze.kernel_kinds(job).to_pylist(),
        "kernels": top_per_rank(analyze.kernels(job), top),
        "operators": top_per_rank(analyze.operators(job), top),
        "launches": analyze.launches(job).to_pylist(),
        "overlap": analyze.overlap(job).to_pylist(),
        "clock_offsets": analyze.clock_offsets(job).to_pylist(),
    }
    finite: dict[str, Any] = without_nan(document)
    return finite


def _idle_by_rank_and_step(job: Job, window: str) -> dict[tuple[int, int], dict[str, int]]:
    found: dict[tuple[int, int], dict[str, int]] = defaultdict(dict)
    table = analyze.idle_causes(job, window=window)  # type: ignore[arg-type]
    for row in table.to_pylist():
        found[row["rank"], row["step"]][row["cause"]] = row["idle_ns"]
    return found


def top_per_rank(table: pa.Table, top: int) -> list[dict[str, Any]]:
    """The first ``top`` rows of each rank."""
    seen: dict[int, int] = defaultdict(int)
    kept = []
    for row in table.to_pylist():
        seen[row["rank"]] += 1
        if seen[row["rank"]] <= top:
            kept.append(row)
    return kept


def without_nan(value: Any) -> Any:
    """The value with NaN and infinite floats as None, for strict JSON."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: without_nan(member) for key, member in value.items()}
    if isinstance(value, list):
        return [without_nan(member) for member in value]
    return value


def findings(document: dict[str, Any]) -> list[str]:
    """What a reader should know first, in plain sentences, from the document that `analysis` made."""
    ranks = [rank for rank in document["ranks"] if rank["span_ns"]]
    if not ranks:
        return ["There is no device work and no operator in these traces, so there is no time to break down."]
    sentences = [_where_the_time_goes(ranks)]
    worst = max(ranks, key=lambda rank: rank["breakdown"]["idle_ns"] / rank["span_ns"])
    share = worst["breakdown"]["idle_ns"] / worst["span_ns"]
    if share >= 0.02:
        cause = max(worst["idle_causes"], key=lambda name: worst["idle_causes"][name])
        part = worst["idle_causes"][cause] / max(worst["breakdown"]["idle_ns"], 1)
        reason = f"{part:.0%} of that has this cause: {CAUSE_LABELS[cause]}"
        sentences.append(f"Rank {worst['rank']} is idle for {share:.0%} of its time; {reason}.")
    sentences += _about_waiting(document["collectives"])
    return sentences


def _where_the_time_goes(ranks: list[dict[str, Any]]) -> str:
    total = sum(rank["span_ns"] for rank in ranks)
    shares = {part: sum(rank["breakdown"][part] for rank in ranks) / total for part in PART_LABELS}
    largest = sorted(shares, key=lambda part: -shares[part])
    parts = ", ".join(f"{shares[part]:.0%} {PART_LABELS[part]}" for part in largest if shares[part] >= 0.005)
    who = "The rank spends" if len(ranks) == 1 else f"The {len(ranks)} ranks spend"
    average = " on average" if len(ranks) > 1 else ""
    return f"{who} {milliseconds(total / len(ranks))}{average}: {parts}."


def _about_waiting(collectives: dict[str, Any]) -> list[str]:
    if not collectives["matched"]:
        return [f"Waiting for other ranks cannot be told from transfer: {collectives['reason']}."]
    wait, transfer = collectives["wait_ns"], collectives["transfer_ns"]
    text = f"{collectives['matched']} collectives were matched over their ranks: {milliseconds(transfer)} of transfer"
    sentences = [f"{text}, and {milliseconds(wait)} that ranks spent waiting for the last one to arrive."]
    for row in collectives["waiting_caused"]:
        if row["is_straggler"]:
            doing = f", mostly {row['doing']}" if row["doing"] else ""
            sentences.append(
                f"Rank {row['rank']} is a straggler: it caused {row['share_pct']:.0f} % of the waiting{doing}."
            )
    return sentences


def milliseconds(time_ns: float) -> str:
    """A time for people: ``12.3 ms``."""
    if abs(time_ns) >= 1e9:
        return f"{time_ns / 1e9:.2f} s"
    return f"{time_ns / 1e6:.1f} ms" if abs(time_ns) >= 1e5 else f"{time_ns / 1e3:.1f} us"
