"""Llama: training, packing and decoding, beside transformers. A section of docs/benchmarks.md; alone, printed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from method import PAIRS, machine, ratio_of_pairs, run_worker

WORKER = str(Path(__file__).parent / "worker_llama.py")
TRAINED = 8 * 256  # tokens of a step
ANSWER = 128  # tokens
# Case, model, what is compared: above and below the line of the ratio, its name and the aim.
CASES = (
    ("train", "llama-1m", "theirs", "ours", "training in fp32, over transformers", "0.97"),
    ("train", "llama-1m", "again", "ours", "the same program against itself", ""),
    ("train", "llama-10m", "theirs", "ours", "training in fp32, over transformers", "0.97"),
    ("bf16", "llama-1m", "fp32", "bf16", "bf16 autocast, over our fp32", "1.5"),
    ("bf16", "llama-1m", "theirs", "bf16", "bf16 autocast, over transformers' bf16", "0.97"),
    ("packing", "llama-1m", "padded", "packed", "packed rows, over padded batches", "1.3"),
    ("decode", "llama-1m", "theirs", "ours", "decoding, batch 1, over generate", "1.4"),
    ("decode", "llama-10m", "theirs", "ours", "decoding, batch 1, over generate", "1.15"),
    ("decode", "llama-10m", "theirs", "int8", "decoding with int8 weights, over generate in fp32", "1.8"),
)


def section(pairs: int = PAIRS) -> str:
    """Measure every case and write the table."""
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    lines = ["## Llama, beside transformers", "", "| what | model | ratio (95 % interval) | aim |", "|---|---|---|---|"]
    for case, model, over, under, what, aim in CASES:
        if case == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            lines.append(f"| {what} | {model} | not measured: no bf16 instructions here | {aim} |")
            continue
        key = (case, model)
        if key not in runs:
            print(f"{case} {model}", file=sys.stderr)
            runs[key] = [run_worker([sys.executable, WORKER, case, model]) for _ in range(pairs)]
        ratio = ratio_of_pairs([run[over] for run in runs[key]], [run[under] for run in runs[key]])
        lines.append(f"| {what} | {model} | {ratio} | {aim} |")
    note = "Each process alternates the sides in blocks of a few steps; the interval is over processes."
    return "\n".join([*lines, "", _speeds(runs), "", note])


def _speeds(runs: dict[tuple[str, str], list[dict[str, float]]]) -> str:
    """What the ratios are of, in tokens a second."""
    parts = []
    for (case, model), found in runs.items():
        if case in ("train", "decode"):
            count = {"train": TRAINED * 4 * 3, "decode": ANSWER * 4}[case]
            best = count / min(run["ours"] for run in found)
            parts.append(f"{model} {'trains' if case == 'train' else 'decodes'} {best:,.0f}")
    return f"Tokens a second, best of the processes: {', '.join(parts)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    print(machine())
    print(section(parser.parse_args().pairs))


if __name__ == "__main__":
    main()
