"""All benchmarks; writes docs/benchmarks.md. Run on an idle machine: `make bench`."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import accuracy
import cluster
import exchange
import llama
from method import PAIRS, alternate, machine, ratio_of_pairs, run_worker

HERE = Path(__file__).parent
ROOT = HERE.parent
CASES = ("train-a100-8gpu-6steps", "train-v100-2gpu-6steps", "megatron-tp8-a100/kineto")
GIGABYTE = 1_000_000_000


def main() -> None:
    """Measure and write the page."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--traces", type=Path, default=ROOT / ".." / "shared" / "traces")
    arguments.add_argument("--reference", type=Path, default=cluster.REFERENCE)
    arguments.add_argument("--pairs", type=int, default=PAIRS)
    options = arguments.parse_args()
    if not options.traces.is_dir():
        sys.exit(f"{options.traces}: no such folder; name the folder of recorded traces with --traces")
    if not options.reference.is_dir():
        sys.exit(f"{options.reference}: no such folder; name that of ASTRA-sim's recorded runs with --reference")
    head = machine()
    sections = [
        against_hta(options.traces, options.pairs),
        arrow_cache(options.traces, options.pairs),
        gigabyte(options.traces),
        engine(),
        linking(options.traces, options.pairs),
        exchange.conversion(options.traces, options.pairs),
        exchange.chakra(options.traces),
        exchange.capture(options.pairs),
        cluster.simulation(options.reference),
        llama.section(options.pairs),
    ]
    page = ROOT / "docs" / "benchmarks.md"
    text = (HERE / "page.md").read_text().replace("{machine}", head).replace("{sections}", "\n\n".join(sections))
    page.write_text(text + "\n")
    print(text)
    accuracy.write(options.traces)


def hta_python() -> str:
    """The interpreter of an environment that holds HTA 0.5.0, made on first use."""
    python = ROOT / ".benchmarks" / "hta" / "bin" / "python"
    if not python.exists():
        print("installing HolisticTraceAnalysis 0.5.0 into .benchmarks/hta", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
        packages = ["HolisticTraceAnalysis==0.5.0", "pandas<3"]
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
    return str(python)


def against_hta(traces: Path, pairs: int) -> str:
    """Load, and load with breakdown and overlap, against HTA in alternating fresh processes."""
    lines = [
        "## Reading and breakdown against HTA 0.5.0",
        "",
        "| trace | HTA load | ours | ratio (95 % interval) | HTA load + breakdown + overlap | ours | ratio "
        "| HTA peak MB | ours | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        folder = str(traces / case)
        ours = [sys.executable, str(HERE / "worker_foretrace.py"), folder]
        sides = {"hta": [hta_python(), str(HERE / "worker_hta.py"), folder], "ours": ours, "ours again": ours}
        results = alternate(sides, pairs)
        cells = [case]
        for key, unit in (("load_s", "s"), ("total_s", "s"), ("peak_mb", "")):
            hta, mine = ([result[key] for result in results[side]] for side in ("hta", "ours"))
            ratio = ratio_of_pairs(hta, mine) if unit else ratio_of_pairs(mine, hta)
            digits = 3 if unit else 0
            cells += [f"{_median(hta):.{digits}f}", f"{_median(mine):.{digits}f}", str(ratio)]
        again = ratio_of_pairs(*([r["load_s"] for r in results[side]] for side in ("ours", "ours again")))
        lines.append("| " + " | ".join(cells) + " |")
        print(f"{case}: {lines[-1]}\n  ours against ours: {again}", file=sys.stderr)
        lines_again = f"`{case}`: our load against itself {again}"
        results_again.append(lines_again)
    lines += [
        "",
        "Seconds of the first load in a fresh process, after imports. Ratios of time are HTA over ours, of memory ours "
        "over HTA. Memory is the peak over the process and its children.",
        "",
        "The same program against itself, in the same rounds: " + "; ".join(results_again) + ".",
    ]
    return "\n".join(lines)


results_again: list[str] = []


def arrow_cache(traces: Path, pairs: int) -> str:
    """A first load, and the second one from the Arrow cache."""
    lines = ["## Second load, from the Arrow cache", "", "| trace | first | second | ratio |", "|---|---|---|---|"]
    for case in CASES:
        with tempfile.TemporaryDirectory() as cache:
            worker = [sys.executable, str(HERE / "worker_foretrace.py"), str(traces / case)]
            run_worker([*worker, cache])
            results = alternate({"first": worker, "second": [*worker, cache]}, pairs)
        first, second = ([result["load_s"] for result in results[side]] for side in ("first", "second"))
        ratio = ratio_of_pairs(first, second)
        lines.append(f"| {case} | {_median(first):.3f} s | {_median(second):.4f} s | {ratio} |")
        print(lines[-1], file=sys.stderr)
    return "\n".join(lines)


def gigabyte(traces: Path) -> str:
    """Peak memory while a 1 GB file loads, made by repeating the events of a real one."""
    from foretrace.formats.sources import Source, blocks
    from foretrace.trace import ReadReport

    source = Source.of(next((traces / CASES[0]).glob("*.json.gz")))
    text = b"".join(blocks(source, ReadReport("")))
    start = text.index(b"[", text.index(b'"traceEvents"')) + 1
    end = text.rindex(b"}", 0, text.rindex(b"]")) + 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "big.json"
        with path.open("wb") as file:
            file.write(text[:end])
            while file.tell() < GIGABYTE:
                file.write(b"," + text[start:end])
            file.write(text[end:])
        size = path.stat().st_size
        result = run_worker([sys.executable, str(HERE / "worker_foretrace.py"), str(path)])
    peak = result["peak_mb"]
    row = f"| {size / 1e9:.2f} GB | {result['load_s']:.1f} s | {peak:.0f} MB | {peak * 1e6 / size:.2f} |"
    title = ["## A 1 GB file", "", "| raw size | load | peak memory | over raw size |", "|---|---|---|---|"]
    return "\n".join([*title, row])


def engine() -> str:
    """The event engine on made-up graphs; three runs in a process, after compilation."""
    lines = ["## The event engine", "", "| graph | tasks | edges | best | worst of 3 | peak memory |"]
    lines.append("|---|---|---|---|---|---|")
    cases = {
        "two edges a task, no blocking calls": ["tasks", "10000000"],
        "1,000 coupled ranks, blocking calls resolved while simulating": ["ranks", "1000", "10000"],
    }
    for name, arguments in cases.items():
        found = run_worker([sys.executable, str(HERE / "worker_engine.py"), *arguments])
        times = f"{found['best_s']:.2f} s | {found['worst_s']:.2f} s"
        memory = f"{found['peak_mb'] / 1e3:.1f} GB"
        lines.append(f"| {name} | {found['tasks']:,} | {found['edges']:,} | {times} | {memory} |")
        print(lines[-1], file=sys.stderr)
    return "\n".join(lines)


LINKED = ("train-v100-ns-timestamps", "train-a100-2gpu-nccl-metadata", "resnet50-v100-2021-categories")


def linking(traces: Path, pairs: int) -> str:
    """From a loaded timeline to the graph, and HTA's critical path of one step against ours of all steps."""
    lines = ["## From a loaded timeline to graph, simulation and critical path", ""]
    lines += [
        "| trace | events | tasks | graph | events/s | simulation | path of all steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in (*CASES, *LINKED):
        ours = [sys.executable, str(HERE / "worker_link.py"), str(traces / case)]
        results = alternate({"ours": ours}, pairs)["ours"]
        link, simulate, path = (_median([r[key] for r in results]) for key in ("link_s", "simulate_s", "path_s"))
        events, tasks = int(results[0]["events"]), int(results[0]["tasks"])
        times = f"{link:.3f} s | {events / link / 1e6:.2f} M | {simulate:.4f} s | {path:.3f} s"
        lines.append(f"| {case} | {events:,} | {tasks:,} | {times} |")
        print(lines[-1], file=sys.stderr)
    folder = str(traces / CASES[0])
    sides = {
        "hta": [hta_python(), str(HERE / "worker_hta_path.py"), folder],
        "ours": [sys.executable, str(HERE / "worker_link.py"), folder],
    }
    results = alternate(sides, pairs)
    hta, mine = ([result["total_s"] for result in results[side]] for side in ("hta", "ours"))
    lines += [
        "",
        f"`{CASES[0]}`: HTA 0.5.0 takes {_median(hta):.2f} s for the critical path of one step "
        f"({int(results['hta'][0]['nodes']):,} nodes), we {_median(mine):.2f} s for graph, simulation and path of all "
        f"six ({int(results['ours'][0]['tasks']):,} tasks): {ratio_of_pairs(hta, mine)} times.",
    ]
    return "\n".join(lines)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    main()
