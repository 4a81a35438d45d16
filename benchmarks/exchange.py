"""Execution traces and Chakra: conversion, reading, capture. A section of docs/benchmarks.md."""

from __future__ import annotations

import sys
from pathlib import Path

import capture_overhead
import chakra_read
import fake_capture
from method import alternate

HERE = Path(__file__).parent
# chakra_converter of mlcommons/chakra on the same file, logging off, as measured in December 2026 on a machine of the
# same kind. Its packages are not on PyPI (they are installed from git commits), so it cannot run beside ours here.
CONVERTER_NODES_PER_S = (13_000, 20_000)
WAYS = ("read", "write")
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


def chakra(traces: Path) -> str:
    """Reading and writing Chakra ETs against protobuf."""
    found = chakra_read.measure(recorded=traces / "chakra-et" / "dangling-deps.0.et")
    feeder = found.pop("feeder")
    lines = [
        "## Chakra ETs against protobuf (upb)",
        "",
        "| file | nodes | B a node in the file | read, nodes/s (best) | over upb | write, nodes/s (best) | over upb "
        "| columns, B a node | texts, B a node |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        speeds = [f"{one[f'{way}_nodes_per_s']['best'] / 1e6:.2f} M | {one[f'{way}_over_protobuf']}" for way in WAYS]
        sizes = f"{one['column_bytes_per_node']} | {one['text_bytes_per_node']}"
        cells = [name, f"{one['nodes']:,}", str(one["file_bytes_per_node"]), *speeds, sizes]
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], file=sys.stderr)
    lines += [
        "",
        "upb's side parses each message and takes its fields and attributes, in the same rounds. The recorded file has "
        f"51 dependencies a node. The Python feeder hands out {feeder['nodes']:,} nodes in {feeder['feed_s']} s, after "
        f"{feeder['make_s']} s of preparation.",
    ]
    return "\n".join(lines)


def capture(processes: int) -> str:
    """What recording costs, and capture without hardware."""
    real, fake = capture_overhead.measure(processes), fake_capture.measure()
    lines = ["## Capture", "", "| step time of the demo | over | ratio (95 % interval) |", "|---|---|---|"]
    rows = {
        "foretrace_over_torch": ("foretrace.capture", "torch.profiler with execution traces, same settings"),
        "torch_again_over_torch": ("torch.profiler with execution traces", "itself again"),
        "foretrace_over_none": ("foretrace.capture", "no profiler"),
        "torch_over_none": ("torch.profiler with execution traces", "no profiler"),
    }
    for name, (one, other) in rows.items():
        ratio = real[name]
        lines.append(f"| {one} | {other} | {ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}) |")
    walls = ", ".join(f"{wall:.1f}" for wall in fake["runs"]["wall_s"])
    lines += [
        "",
        f"Without hardware, Llama-2-7B (32 layers, FSDP2 128 x TP 8, rank 0 of 1,024): {walls} s in "
        f"{fake['all_processes_mb']:.0f} MB over all processes; {fake['nodes']:,} nodes.",
    ]
    return "\n".join(lines)
