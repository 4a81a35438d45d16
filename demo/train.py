"""Train a small transformer with DistributedDataParallel and record three steps of every rank.

Each rank writes ``rank<N>.json.gz``, as ``torch.profiler`` exports it. One rank may be given a slow input
pipeline (``--slow-rank``), so that the others wait for it in every gradient all-reduce.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function, schedule

VOCABULARY = 512


class Block(nn.Module):
    """One pre-norm transformer layer: causal self-attention, then a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """A decoder-only language model."""

    def __init__(self, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.layers = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.tokens(tokens) + self.positions)))


def load_batch(generator: torch.Generator, batch: int, length: int, delay_s: float) -> Tensor:
    """Token ids of a counting sequence from random starts; `delay_s` stands for a slow input pipeline."""
    time.sleep(delay_s)
    start = torch.randint(VOCABULARY, (batch, 1), generator=generator)
    return (start + torch.arange(length + 1)) % VOCABULARY


def train(rank: int, args: argparse.Namespace) -> None:
    """The program of one rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # One GPU for each rank where there are enough of them. This path has never been run on a GPU.
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= args.ranks
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=(args.out / "rendezvous").as_uri(),
        rank=rank,
        world_size=args.ranks,
    )

    model: nn.Module = Transformer(args.width, args.layers, args.heads, args.length).to(device)
    model = DistributedDataParallel(model, bucket_cap_mb=args.bucket_mb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    delay_s = args.delay_ms / 1000 if rank == args.slow_rank else 0.0

    def export(recorded: profile) -> None:
        recorded.export_chrome_trace(str(args.out / f"rank{rank}.json.gz"))

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    plan = schedule(wait=1, warmup=1, active=args.steps, repeat=1)
    with profile(
        activities=activities, schedule=plan, on_trace_ready=export, record_shapes=True, profile_memory=True
    ) as prof:
        for step in range(2 + args.steps):
            with record_function("load_batch"):
                batch = load_batch(generator, args.batch, args.length, delay_s).to(device)
            with record_function("forward"):
                logits = model(batch[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            with record_function("backward"):
                loss.backward()
            with record_function("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            if rank == 0:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
            prof.step()
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out", help="folder for the traces")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="recorded steps, after two that are not recorded")
    parser.add_argument("--slow-rank", type=int, default=-1, help="the rank with a slow input pipeline (default: none)")
    parser.add_argument("--delay-ms", type=float, default=40.0, help="how long each batch of the slow rank takes")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a batch of one rank")
    parser.add_argument("--bucket-mb", type=float, default=4.0, help="size of DDP's gradient buckets")
    return parser.parse_args()


def main() -> None:
    """Start one process for each rank and wait for them."""
    args = parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "rendezvous").unlink(missing_ok=True)
    # The profiler's own notes would drown the losses.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    mp.spawn(train, args=(args,), nprocs=args.ranks)
    (args.out / "rendezvous").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
