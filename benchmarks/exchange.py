"""Execution traces and Chakra: conversion, reading, capture. A section of docs/benchmarks.md."""

from __future__ import annotations

import sys
from pathlib import Path

from method import alternate

HERE = Path(__file__).parent
# chakra_converter of mlcommons/chakra on the same file, logging off, as measured in December 2026 on a machine of the
# same kind. Its packages are not on PyPI (they are installed from git commits), so it cannot run beside ours here.
CONVERTER_NODES_PER_S = (13_000, 20_000)
EXECUTION_TRACES = ("pytorch-et/resnet-1gpu-1.1.1.json.gz", "pytorch-et/resnet-1gpu-1.0.3.json.gz")


def conversion(traces: Path, pairs: int) -> str:
    """From PyTorch ETs to Chakra, alone and joined with their timelines."""
    worker = [sys.executable, str(HERE / "worker_exchange.py")]
    sides = {case: [*worker, str(traces / case)] for case in EXECUTION_TRACES}
    job = traces / "megatron-tp8-a100"
    sides["megatron-tp8-a100, et + kineto, 8 ranks"] = [*worker, str(job / "et"), str(job / "kineto")]
    results = alternate(sides, pairs)
    lines = [
        "## PyTorch execution traces to Chakra",
        "",
        "| input | nodes read | read | convert | write | all | nodes/s | over chakra_converter's 13 to 20 k/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, runs in results.items():
        times = [
            sorted(run[key] for run in runs)[len(runs) // 2] for key in ("read_s", "convert_s", "write_s", "total_s")
        ]
        nodes = int(runs[0]["nodes"])
        speed = nodes / times[-1]
        low, high = (speed / other for other in reversed(CONVERTER_NODES_PER_S))
        cells = [case, f"{nodes:,}", *(f"{one:.3f} s" for one in times), f"{speed / 1e3:.0f} k"]
        lines.append("| " + " | ".join([*cells, f"{low:.1f} to {high:.1f}"]) + " |")
        print(lines[-1], file=sys.stderr)
    lines += [
        "",
        "Medians over fresh processes of the best of five after compilation. `chakra_converter` is not measured in the "
        "same run, since mlcommons' packages are not on PyPI: its figures are from a run of its own in the same month.",
    ]
    return "\n".join(lines)
