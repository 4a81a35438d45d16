"""How true simulations are on recorded traces; writes docs/accuracy.md: `make bench`, or this file alone."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from method import machine

HERE = Path(__file__).parent
ROOT = HERE.parent
TRACES = (
    "train-a100-8gpu-6steps",
    "train-v100-2gpu-6steps",
    "train-v100-ns-timestamps",
    "train-a100-2gpu-nccl-metadata",
    "resnet50-v100-2021-categories",
    "megatron-tp8-a100/kineto",
    "amd-mi300-resnet-8gpu",
    "linear-rtx2080ti",
    "b200-eager",
    "vllm-decode-graph",
    "h100-mi300-pairs/h100-Qwen_Qwen1.5-0.5B-Chat.json.gz",
    "h100-mi300-pairs/mi300-Qwen_Qwen1.5-0.5B-Chat.json.gz",
    "mtia-inference",
    "cuda-sync-alexnet",
    "cuda-sync-multi-stream",
)


def main() -> None:
    """Validate every trace and write the page."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--traces", type=Path, default=ROOT / ".." / "shared" / "traces")
    options = arguments.parse_args()
    if not options.traces.is_dir():
        sys.exit(f"{options.traces}: no such folder; name the folder of recorded traces with --traces")
    write(options.traces)


def write(traces: Path) -> None:
    """Write docs/accuracy.md."""
    found = {name: validated(traces / name) for name in TRACES}
    sections = [reproduction(found), cross_step(found), ranks(found), waits(found), stragglers(traces)]
    text = (HERE / "accuracy.md").read_text().replace("{machine}", machine())
    text = text.replace("{sections}", "\n\n".join(sections))
    (ROOT / "docs" / "accuracy.md").write_text(text + "\n")
    print(text)


def validated(path: Path) -> dict[str, Any]:
    print(f"validating {path.name}", file=sys.stderr)
    command = [sys.executable, "-m", "foretrace", "validate", str(path), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def short(name: str) -> str:
    return name.split("/")[-1].removesuffix(".json.gz") if not name.endswith("kineto") else name.split("/")[0]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def pct(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def reproduction(found: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, document in found.items():
        ranks = document["reproduction"]["ranks"]
        worst = max((abs(step["error_pct"]) for rank in ranks for step in rank["steps"]), default=None)
        shares = [100 * rank["copied_share"] for rank in ranks if rank["copied_share"] is not None]
        measured = sum(rank["measured_ns"] for rank in ranks)
        unexplained = 100 * sum(rank["unexplained_ns"] for rank in ranks) / measured if measured else None
        base = document["baselines"]
        rows.append(
            [
                short(name),
                pct(document["reproduction"]["mean_abs_error_pct"]),
                pct(worst),
                pct(max(shares, default=None), 0),
                pct(unexplained),
                pct(base["no_inter_stream_edges"]),
                pct(base["longest_stream"], 1),
                pct(base["sum_of_kernels"], 1),
                pct(base["copy_everything"]),
            ]
        )
    head = ["trace", "mean error %", "worst step %", "copied share % (largest)", "unexplained % of the time"]
    head += ["no inter-stream edges", "longest stream", "sum of kernels", "copying everything"]
    return "## Reproduction\n\n" + table(head, rows)


def cross_step(found: dict[str, dict[str, Any]]) -> str:
    rows, names = [], ("edges_only_pct", "full_pct", "mean_of_others_pct")
    kept = {name: d["cross_step"] for name, d in found.items() if d["cross_step"]["edges_only_pct"] is not None}
    for name, cross in kept.items():
        rows.append([short(name), *(pct(cross[key]) for key in names), pct(cross["interval_covers_pct"], 0)])
    rows.append(["**mean**", *(pct(sum(c[key] for c in kept.values()) / len(kept)) for key in names), ""])
    head = ["trace", "edges of the others, durations of the step", "edges and durations of the others"]
    head += ["mean of the others", "steps inside the 95 % interval, %"]
    return "## A step from the other steps\n\nMean absolute error in percent.\n\n" + table(head, rows)


def ranks(found: dict[str, dict[str, Any]]) -> str:
    rows = [
        [short(name), str(row["rank"]), pct(row["error_pct"]), pct(row["mean_of_others_pct"])]
        for name, document in found.items()
        for row in document["leave_one_rank_out"]["ranks"] or []
    ]
    title = "## A rank from the other ranks, coupled\n\nMean absolute error of the rank's step in percent.\n\n"
    return title + table(["trace", "rank", "from the durations of the others", "mean of the others' steps"], rows)


def waits(found: dict[str, dict[str, Any]]) -> str:
    rows = []
    lines = []
    for name, document in found.items():
        one = document["event_waits"]
        if one["inferred"] or one["recorded"]:
            contradicted = pct(one["contradicted_pct"], 1)
            rows.append([short(name), str(one["recorded"]), str(one["inferred"]), contradicted])
        for edge in one["recorded_edges"]:
            found_it = "found" if edge["found"] else "missed"
            lines.append(f"- {short(name)}: `{edge['source'][:60]}` -> `{edge['target'][:60]}`: {found_it}")
    head = ["trace", "recorded", "inferred", "contradicted by held-out steps, %"]
    text = "## Event waits\n\n" + table(head, rows)
    return text + "\n\nRecorded waits, and whether inference without the record finds them:\n\n" + "\n".join(lines)


def stragglers(traces: Path) -> str:
    command = [
        sys.executable,
        "-m",
        "foretrace",
        "critical-path",
        str(traces / "megatron-tp8-a100" / "kineto"),
        "--json",
    ]
    document = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    rows = [[row["what"], f"{row['change_pct']:+.1f} %"] for row in document["stragglers"]]
    title = "## What the stragglers of the Megatron job cost\n\n"
    return title + table(["what if", "job's time"], rows)


if __name__ == "__main__":
    main()
