"""Capture without hardware: Llama-2-7B, FSDP 128 x TP 8, rank 0 of 1024, each time in fresh processes.

`measure` returns wall time, processor time and memory of several runs; as a program it prints them as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from method import run_worker

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "fake_llama.py"
TARGET_WALL_S, TARGET_MEMORY_MB = 15.0, 600.0
WORLD_SIZE = 1024
_WORKER = """
import json, resource, sys
from pathlib import Path
from foretrace.capture.fake import main

script, output, world_size, *args = sys.argv[1:]
job = main(Path(script), args, world_size=int(world_size), ranks=[0], output=Path(output))
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps({
    "nodes": job["nodes"]["0"],
    "cpu_s": sum(one.ru_utime + one.ru_stime for one in used),
    "largest_process_mb": max(one.ru_maxrss for one in used) / 1e3,
}))
"""


def measure(runs: int = 3, args: tuple[str, ...] = ()) -> dict[str, Any]:
    """Capture rank 0 several times.

    Args:
        runs: how often.
        args: for the script, by default the sizes of Llama-2-7B.

    Returns:
        ``wall_s``, ``cpu_s`` and ``largest_process_mb`` (as ``ru_maxrss`` has it), one entry a run; their medians;
        ``all_processes_mb`` of one more run (shared pages counted once; looking at them slows it, so it is not
        timed); ``nodes`` and ``trace_bytes`` of the trace; whether the targets hold.
    """
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _WORKER, str(SCRIPT), folder, str(WORLD_SIZE), *args]
        for _ in range(runs):
            start = time.perf_counter()
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            result = {**json.loads(output), "wall_s": time.perf_counter() - start}
            for name, value in result.items():
                found.setdefault(name, []).append(value)
        all_processes_mb = run_worker(command)["peak_mb"]
        trace_bytes = (Path(folder) / "rank0.et.json.gz").stat().st_size
    nodes = int(found.pop("nodes")[0])
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {
        "runs": found,
        "median": medians,
        "all_processes_mb": all_processes_mb,
        "nodes": nodes,
        "trace_bytes": trace_bytes,
        "load_average": os.getloadavg()[0],
        "target": {"wall_s": TARGET_WALL_S, "memory_mb": TARGET_MEMORY_MB},
        "within_target": medians["wall_s"] <= TARGET_WALL_S and all_processes_mb <= TARGET_MEMORY_MB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    told, rest = parser.parse_known_args()
    print(json.dumps(measure(told.runs, tuple(rest)), indent=1))


if __name__ == "__main__":
    main()
