"""How a ratio is measured: both sides in alternating fresh processes, the median of pair ratios with its interval."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PAIRS = 5


@dataclass(frozen=True)
class Ratio:
    """Median of pair ratios and its bootstrap 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return (
            f"{self.median:.1f} ({self.low:.1f} to {self.high:.1f})"
            if self.median >= 2
            else (f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})")
        )


def ratio_of_pairs(numerators: list[float], denominators: list[float], seed: int = 0) -> Ratio:
    """The median of ``numerators[i] / denominators[i]`` and the bootstrap 95 % interval of that median."""
    ratios = np.array(numerators) / np.array(denominators)
    drawn = np.random.default_rng(seed).choice(ratios, (2000, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high))


def run_worker(command: list[str]) -> dict[str, float]:
    """Run a process that prints one JSON object last; adds ``peak_mb`` of it and all its children."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    peak = _Peak(process.pid)
    output, _ = process.communicate()
    peak.stop()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with exit code {process.returncode}")
    result: dict[str, float] = json.loads(output.strip().splitlines()[-1])
    return {**result, "peak_mb": max(peak.bytes / 1e6, result.get("own_peak_mb", 0.0))}


class _Peak:
    """Samples the memory of a process and its children every 10 ms."""

    def __init__(self, pid: int) -> None:
        self.bytes = 0
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.bytes = max(self.bytes, sum(map(_resident_bytes, _tree(self._pid))))


def _tree(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(member for child in children for member in _tree(int(child)))]


def _resident_bytes(pid: int) -> int:
    """Resident memory that is not shared with the parent where the kernel tells (PSS), else all of it."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0


def alternate(sides: dict[str, list[str]], pairs: int = PAIRS) -> dict[str, list[dict[str, float]]]:
    """Run every side once per round, in alternating order, in fresh processes."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for round_number in range(pairs):
        order = list(sides) if round_number % 2 == 0 else list(sides)[::-1]
        for name in order:
            results[name].append(run_worker(sides[name]))
    return results


def machine() -> str:
    """One line on the machine and the day, for the head of a results page."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "unknown CPU",
    )
    load = os.getloadavg()[0]
    return f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores of {cpu}, load average {load:.1f} before the run"
