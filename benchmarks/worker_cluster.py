"""Runs of the cluster simulator in one warm process, or one run of the command in a fresh process.

``worker_cluster.py warm REPEATS '{"network": FILE, "system": FILE, ...}' ET...``, or
``worker_cluster.py fresh COMMAND...``.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def warm(repeats: int, case: dict, paths: list[Path]) -> dict:
    """CPU seconds of reading the files and simulating, ``repeats`` times after a first run that compiles."""
    from foretrace.estimate.cluster import read_machine, simulate_files
    from foretrace.simulate.cluster import Options

    files = {name: Path(case[name]) for name in ("network", "system", "memory", "groups") if case.get(name)}
    options = Options(fold=case.get("fold", True), phases_at_once=case.get("phases_at_once", True))
    runs = []
    for _ in range(repeats + 1):
        begin, wall = time.process_time(), time.perf_counter()
        simulation = simulate_files(paths, read_machine(**files), options)
        runs.append((time.process_time() - begin, time.perf_counter() - wall))
    return {
        "cpu_s": [cpu for cpu, _ in runs[1:]],
        "wall_s": [wall for _, wall in runs[1:]],
        "messages": simulation.outcome.messages,
        "max_ns": int(simulation.finish_ns.max()),
        "ranks": len(simulation.finish_ns),
    }


def fresh(command: list[str]) -> dict:
    """CPU, wall and memory of a command. This process stays small: a child's peak begins with its parent's."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begin
    if status:
        raise SystemExit(f"{' '.join(command[:3])} ... failed with status {status}")
    return {"cpu_s": used.ru_utime + used.ru_stime, "wall_s": wall, "peak_kb": used.ru_maxrss}


if __name__ == "__main__":
    way, *words = sys.argv[1:]
    if way == "fresh":
        print(json.dumps(fresh(words)))
    else:
        print(json.dumps(warm(int(words[0]), json.loads(words[1]), [Path(word) for word in words[2:]])))
