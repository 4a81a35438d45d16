"""Programs that the tests of the recorder run in processes of their own; ``main`` picks one by name."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

import foretrace.capture


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 32), nn.Linear(32, 50))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = model(torch.randint(0, 50, (8,))).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def ddp(output: str) -> None:
    """DDP with two buckets, each all-reduced from C++, and collectives of every kind on groups of every kind."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pair, solo = dist.new_group([1, 0], group_desc="pair"), dist.new_group([1], group_desc="solo")
    model = nn.parallel.DistributedDataParallel(_model(), bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with foretrace.capture.record(output, steps="3:4") as recorder:
        for _ in range(6):
            _train(model, optimizer)
            _communicate(rank, pair, solo)
            recorder.step()
    dist.destroy_process_group()


def _communicate(rank: int, pair: dist.ProcessGroup, solo: dist.ProcessGroup) -> None:
    splits = [2, 4] if rank == 0 else [4, 2]
    small, whole = torch.ones(4), torch.ones(6)
    dist.all_reduce(small, op=dist.ReduceOp.MAX, group=pair)
    dist.all_reduce(torch.ones(5, dtype=torch.int64), op=dist.ReduceOp.PRODUCT, async_op=True).wait()
    dist.broadcast(small, 1, group=pair)
    dist.all_to_all_single(torch.empty(6), whole, splits, splits)
    if rank == 0:
        dist.send(small, 1, tag=7)
    else:
        dist.recv(small, 0, tag=7)
        dist.all_reduce(small, group=solo)
    dist.reduce(small, 1, op=dist.ReduceOp.MIN)
    dist.gather(small, [torch.empty(4), torch.empty(4)] if rank == 0 else None, dst=0)
    dist.scatter(small, [torch.ones(4), torch.ones(4)] if rank == 1 else None, src=1)
    dist.all_gather([torch.empty(4), torch.empty(4)], small)
    functional.all_reduce(small, "sum", pair) + 1
    dist.barrier()


def fsdp(output: str) -> None:
    """FSDP2: all-gathers of parameters before use, reduce-scatters of gradients."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = _model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with foretrace.capture.record(output, steps="2:4") as recorder:
        for _ in range(5):
            _train(model, optimizer)
            recorder.step()
    dist.destroy_process_group()


def bags(output: str, steps: str, at_end: str = "") -> None:
    """Without torch.distributed: bags of embeddings, whose cost depends on indices and offsets."""
    bag, head = nn.EmbeddingBag(1000, 16), nn.Linear(16, 4)
    optimizer = torch.optim.SGD([*bag.parameters(), *head.parameters()], 0.1)
    with foretrace.capture.record(output, steps=None if steps == "all" else steps) as recorder:
        for step in range(8):
            indices, offsets = torch.arange(0, 1000, 2), torch.tensor([0, 10, 10, 400])
            loss = nn.functional.cross_entropy(head(bag(indices, offsets)), torch.tensor([0, 1, 3, 3]))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 3 and at_end:
                _end(at_end)
            recorder.step()


def _end(how: str) -> None:
    with torch.profiler.record_function('a "quoted" scope that is open'):
        torch.ones(3) + 1
        if how == "raise":
            raise ValueError("as the test wants it")
        os.kill(os.getpid(), signal.SIGTERM)


def whole_block(output: str) -> None:
    """No call of ``step``."""
    with foretrace.capture.record(output):
        torch.ones(3) @ torch.ones(3)


def unchanged(exit_code: str) -> None:
    """A program that knows nothing of Foretrace; run by ``foretrace capture``."""
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    model: nn.Module = nn.Linear(8, 8)
    if distributed:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(7):
        with torch.profiler.record_function("forward"):
            loss = model(torch.ones(4, 8)).sum()
        loss.backward()
        with torch.profiler.record_function("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
    if distributed:
        dist.destroy_process_group()
    sys.exit(int(exit_code))


def no_steps(exit_code: str) -> None:
    """No optimizer."""
    with torch.no_grad():
        for _ in range(3):
            nn.Linear(8, 8)(torch.ones(4, 8))
    sys.exit(int(exit_code))


def _spawned(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()


def spawn(store: str) -> None:
    """Ranks that torch.multiprocessing starts."""
    torch.multiprocessing.spawn(_spawned, args=(store,), nprocs=2)


def own_profiler(wait: str, active: str) -> None:
    """A program that profiles itself; prints how many events it saw."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.profiler.schedule(wait=int(wait), warmup=1, active=int(active), repeat=1)
    with torch.profiler.profile(
        schedule=schedule, on_trace_ready=lambda profiler: print("events", len(profiler.events()))
    ) as profiler:
        for _ in range(10):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            profiler.step()


def own_sitecustomize(output: str) -> None:
    import sitecustomize

    Path(output).write_text(f"{sitecustomize.OF_THE_PROGRAM} {sitecustomize.__file__}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](*sys.argv[2:])
