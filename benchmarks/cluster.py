"""Simulating ETs on a machine, beside ASTRA-sim's recorded runs. A section of docs/benchmarks.md; alone, printed."""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from method import machine

HERE = Path(__file__).parent
REFERENCE = HERE.parent / ".." / "shared" / "reference" / "astra-sim"
WORKER = str(HERE / "worker_cluster.py")
COMMAND = [sys.executable, "-m", "foretrace", "simulate"]
AGAINST_ASTRA = {
    "ar4096_ring_c1": "all-reduce over 4,096 ranks",
    "llm512": "transformer step, tp 8, pp 4, dp 16",
}
MESSAGES = "ar512_ring_c1"
REPEATS = 7
FRESH = 5


@dataclass(frozen=True)
class Case:
    """A recorded run of ASTRA-sim, and its files."""

    row: dict[str, str]
    paths: list[Path]
    files: dict[str, Path]

    def warm(self, **options: bool) -> dict[str, Any]:
        """Repeated runs in one process."""
        given = json.dumps({**{name: str(path) for name, path in self.files.items()}, **options})
        found = _run("warm", str(REPEATS), given, *map(str, self.paths))
        if found["max_ns"] != int(self.row["max_cycles"]):
            raise RuntimeError(f"{self.row['tag']}: {found['max_ns']} ns, ASTRA-sim {self.row['max_cycles']}")
        return found

    def fresh(self, *words: str) -> list[dict[str, Any]]:
        """Runs of the command, each in a process of its own."""
        names = {"network": "--network", "system": "--system", "memory": "--memory", "groups": "--comm-groups"}
        options = [word for name, path in self.files.items() for word in (names[name], str(path))]
        command = [*COMMAND, *map(str, self.paths), *options, *words, "--json"]
        # As installed: bytecode is there, whatever this shell says of it.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = str(self.paths[0].parent.parent / "bytecode")
        return [_run("fresh", *command, environment=environment) for _ in range(FRESH + 1)][1:]


def _run(*words: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """What the worker prints. Nothing watches it meanwhile: that would cost it time."""
    command = [sys.executable, WORKER, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def read_case(reference: Path, tag: str, unpacked: Path) -> Case:
    """The recorded run of that name, its traces unpacked."""
    with (reference / "results.csv").open(newline="") as file:
        row = next(each for each in csv.DictReader(file) if each["tag"] == tag)
    folder, prefix = row["workload"].split("/")
    if not (unpacked / folder).exists():
        with tarfile.open(reference / "traces" / f"{folder}.tar.gz") as archive:
            archive.extractall(unpacked, filter="data")
    paths = sorted((unpacked / folder).glob(f"{prefix}.*.et"), key=lambda path: int(path.suffixes[-2][1:]))
    configs = reference / "configs"
    files = {
        "network": configs / f"{row['network_config']}.yml",
        "system": configs / f"{row['system_config']}.json",
        "memory": configs / row["memory_config"],
    }
    if row["comm_group"]:
        files["groups"] = unpacked / row["comm_group"]
    return Case(row, paths, files)


def simulation(reference: Path) -> str:
    """CPU and memory of two large runs, and messages a second, beside what ASTRA-sim took."""
    with tempfile.TemporaryDirectory() as name:
        cases = {tag: read_case(reference, tag, Path(name)) for tag in (*AGAINST_ASTRA, MESSAGES)}
        return "\n\n".join(["## ETs on a machine, beside ASTRA-sim", _warm(cases), _fresh(cases), _messages(cases)])


def _warm(cases: dict[str, Case]) -> str:
    lines = [
        "| run | ranks | fold | CPU, median (range) | ASTRA-sim's CPU | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for tag, what in AGAINST_ASTRA.items():
        peer = float(cases[tag].row["peer_cpu_s"])
        for fold in (False, True):
            found = cases[tag].warm(fold=fold)
            ratio = peer / _median(found["cpu_s"])
            cells = [what, f"{found['ranks']:,}", "on" if fold else "off", _seconds(found["cpu_s"]), f"{peer:.2f} s"]
            lines.append("| " + " | ".join([*cells, f"{ratio:.0f}"]) + " |")
            print(lines[-1], file=sys.stderr)
    return "\n".join(
        [
            *lines,
            "",
            f"CPU seconds of reading all ETs and the machine's files and simulating, {REPEATS} times in one process "
            "after a first run, without imports and compilation. ASTRA-sim's figures are those of the recorded runs: "
            "of another session, and of whole processes. The answers are the same to the cycle.",
        ]
    )


def _fresh(cases: dict[str, Case]) -> str:
    lines = [
        "| `foretrace simulate --json`, whole process | fold | CPU, median (range) | ASTRA-sim's CPU | ratio "
        "| wall, median (range) | ASTRA-sim's wall | peak memory | ASTRA-sim's memory | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for tag, what in AGAINST_ASTRA.items():
        row = cases[tag].row
        peer_cpu, peer_wall, peer_kb = (float(row[key]) for key in ("peer_cpu_s", "peer_wall_s", "peer_rss_kb"))
        for fold in (False, True):
            runs = cases[tag].fresh(*(() if fold else ("--no-fold",)))
            cpu, wall, peak = ([run[key] for run in runs] for key in ("cpu_s", "wall_s", "peak_kb"))
            cells = [what, "on" if fold else "off"]
            cells += [_seconds(cpu), f"{peer_cpu:.2f} s", f"{peer_cpu / _median(cpu):.1f}"]
            cells += [_seconds(wall), f"{peer_wall:.2f} s"]
            cells += [f"{_median(peak):,.0f} kB", f"{peer_kb:,.0f} kB", f"{_median(peak) / peer_kb:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], file=sys.stderr)
    return "\n".join(
        [*lines, "", f"{FRESH} fresh processes each, after one that writes bytecode. Memory: ours over ASTRA-sim's."]
    )


def _messages(cases: dict[str, Case]) -> str:
    case = cases[MESSAGES]
    peer = float(case.row["peer_cpu_s"])
    found = case.warm(fold=False, phases_at_once=False)
    count = found["messages"]
    speeds = sorted(count / cpu / 1e6 for cpu in found["cpu_s"])
    text = (
        f"Message by message (`--no-phases-at-once`), an all-reduce over {found['ranks']} ranks is {count:,} messages: "
        f"{_median(speeds):.2f} M messages/s of CPU ({speeds[0]:.2f} to {speeds[-1]:.2f}), reading included, in the "
        f"warm process; ASTRA-sim took {peer:.2f} s, {count / peer / 1e6:.2f} M messages/s: "
        f"{peer / _median(found['cpu_s']):.1f} times."
    )
    print(text, file=sys.stderr)
    return text


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _seconds(values: list[float]) -> str:
    return f"{_median(values):.3f} s ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    """Print the section."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--reference", type=Path, default=REFERENCE)
    print(f"{machine()}\n\n{simulation(arguments.parse_args().reference)}\n\n{machine()}")


if __name__ == "__main__":
    main()
