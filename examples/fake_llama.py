"""Train a Llama-shaped transformer with FSDP2 and tensor parallelism: a script to capture without hardware.

    foretrace capture --fake --world-size 1024 --rank 0 examples/fake_llama.py --tensor-parallel 8

The model is plain ``torch.nn``; sizes default to those of Llama-2-7B. Under ``torchrun`` on real devices the same
script trains on random tokens.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Shapes: ``x`` (batch, length, width), the tables (length, head width / 2)."""
        batch, length, _ = x.shape
        # With tensor parallelism each rank holds some of the heads: their number follows from the local width.
        query, key, value = (
            project(x).view(batch, length, -1, self.head_width).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, -1))


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions on ``x`` of shape (batch, heads, length, head width)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class FeedForward(nn.Module):
    """The gated feed-forward network (SwiGLU)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shape of ``x``: (batch, length, width)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One pre-norm layer."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.feed_forward_norm = nn.RMSNorm(width)
        self.feed_forward = FeedForward(width, hidden)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Shape of ``x``: (batch, length, width)."""
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """A decoder-only language model of Llama's shape."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(args.vocabulary, args.width)
        self.layers = nn.ModuleList(Block(args.width, args.hidden, args.heads) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)
        half = args.width // args.heads // 2
        angles = torch.outer(torch.arange(args.length), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cosine", angles.cos().to(torch.bfloat16), persistent=False)
        self.register_buffer("sine", angles.sin().to(torch.bfloat16), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids (batch, length) to logits (batch, length, vocabulary)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        return self.head(self.norm(x))


def parallelize(model: Transformer, mesh: DeviceMesh) -> None:
    """Split each layer over the tensor-parallel ranks, then shard everything over the data-parallel ones."""
    plan = {
        **dict.fromkeys(("attention.query", "attention.key", "attention.value"), ColwiseParallel()),
        **dict.fromkeys(("feed_forward.gate", "feed_forward.up"), ColwiseParallel()),
        **dict.fromkeys(("attention.output", "feed_forward.down"), RowwiseParallel()),
    }
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in model.layers:
        if mesh["tp"].size() > 1:
            parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"], mp_policy=precision)
    fully_shard(model, mesh=mesh["dp"], mp_policy=precision)


def train(args: argparse.Namespace) -> None:
    """The program of one rank."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device_type, int(os.environ["LOCAL_RANK"]) if device_type == "cuda" else None)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    data_parallel = dist.get_world_size() // args.tensor_parallel
    mesh = init_device_mesh(device_type, (data_parallel, args.tensor_parallel), mesh_dim_names=("dp", "tp"))
    with device:
        model = Transformer(args)
    model.to(torch.bfloat16)
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=True)
    for step in range(args.steps):
        tokens = torch.randint(args.vocabulary, (args.batch, args.length + 1), device=device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            sys.stdout.write(f"step {step}: loss {loss.item():.3f}\n")
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=11008, help="width of the feed-forward network")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--length", type=int, default=4096, help="tokens in a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences in a batch of one data-parallel rank")
    parser.add_argument("--tensor-parallel", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_args())
