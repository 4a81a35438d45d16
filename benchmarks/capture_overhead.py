"""What recording costs: a training step under ``foretrace.capture`` against one under ``torch.profiler`` alone.

Both have the same settings and PyTorch's execution trace observer in the same session; ours adds the watches on
collectives and integer inputs. The step is that of the demo: two ranks, DDP, gloo. Writing files happens between steps
and is not part of the figure. The sides alternate in blocks of `STEPS` steps within each process.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from method import machine, ratio_of_pairs

ROOT = Path(__file__).resolve().parent.parent
STEPS = 6  # of a block, after one that is not measured
ROUNDS = 5
SIDES = ("torch", "foretrace", "torch_again", "kineto", "none")
RATIOS = {
    "foretrace_over_torch": ("foretrace", "torch"),
    "torch_again_over_torch": ("torch_again", "torch"),
    "foretrace_over_none": ("foretrace", "none"),
    "torch_over_none": ("torch", "none"),
    "kineto_over_none": ("kineto", "none"),
}


def measure(processes: int = 5) -> dict[str, Any]:
    """Ratios of step times with their intervals; see the head of this file.

    A ratio of one process is the median over rounds of the ratio of two blocks of the same round; the figure is the
    median over processes. ``torch_again_over_torch`` compares two sides that are the same.
    """
    found: dict[str, Any] = {"machine": machine(), "processes": processes, "rounds": ROUNDS, "steps_of_a_block": STEPS}
    blocks = [_fresh_process() for _ in range(processes)]
    found["step_ms"] = {
        side: round(1e3 * statistics.median(second for one in blocks for second in one[side]), 2) for side in SIDES
    }
    for name, (numerator, denominator) in RATIOS.items():
        medians = [
            statistics.median(a / b for a, b in zip(one[numerator], one[denominator], strict=True)) for one in blocks
        ]
        ratio = ratio_of_pairs(medians, [1.0] * processes)
        found[name] = {"median": round(ratio.median, 4), "low": round(ratio.low, 4), "high": round(ratio.high, 4)}
    return found


def _fresh_process() -> dict[str, list[float]]:
    """Seconds a step of rank 0 by side, the median of each round's block, of a run of two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        blocks: dict[str, list[float]] = json.loads((Path(folder) / "blocks.json").read_text())
    return blocks


def _demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_train", ROOT / "demo" / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _rank(rank: int, folder: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=(Path(folder) / "store").as_uri(), rank=rank, world_size=2)
    demo = _demo()
    model = DistributedDataParallel(demo.Transformer(256, 4, 4, 128), bucket_cap_mb=4.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)

    def step() -> None:
        batch = demo.load_batch(generator, 4, 128, 0.0)
        logits = model(batch[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(ROUNDS):
        for side in SIDES[turn % len(SIDES) :] + SIDES[: turn % len(SIDES)]:
            times[side].append(statistics.median(_block(side, step, Path(folder))))
    if rank == 0:
        (Path(folder) / "blocks.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def _block(side: str, step: Any, folder: Path) -> list[float]:
    """Seconds of each step of a block."""
    from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

    from foretrace.capture.window import Observer

    if side == "none":
        return _timed(step)
    if side == "foretrace":
        observer: Any = Observer(folder, with_statistics=True)
    elif side == "kineto":
        observer = None
    else:
        observer = ExecutionTraceObserver().register_callback(str(folder / f"{time.time_ns()}.json"))
    profiler = profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True, execution_trace_observer=observer
    )
    with profiler:
        return _timed(step)


def _timed(step: Any) -> list[float]:
    times = []
    step()
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        import torch.multiprocessing as mp

        mp.spawn(_rank, args=(arguments.worker,), nprocs=2)
        return
    print(json.dumps(measure(arguments.processes), indent=1))


if __name__ == "__main__":
    main()
