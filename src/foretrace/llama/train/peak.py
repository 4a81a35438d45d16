"""What a device could compute at most, for model FLOPs utilization (MFU; Chowdhery et al. 2022, arXiv 2204.02311)."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from foretrace.llama.attention import Ints
from foretrace.llama.config import LlamaConfig
from foretrace.llama.train.settings import Dtype
from foretrace.machine.cluster import read_cluster

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Parts of the name that a driver gives a GPU, and the preset that has its figures.
_PRESETS = (
    ("A100", "a100-sxm-80gb"), ("H100", "h100-sxm"), ("H200", "h200"), ("B200", "b200"), ("MI300X", "mi300x"),
)  # fmt: skip
_SIZE = 1024  # of the square matrices: far above the caches' influence, milliseconds each
_SECONDS = 0.3


def peak_flops_per_s(device: torch.device, dtype: Dtype) -> float | None:
    """FLOPs a second that one device could reach with products in this type; None if unknown.

    Of a GPU the vendor's figure, from the machine's preset; of a CPU the best of repeated products of large matrices
    with as many threads as PyTorch uses now.
    """
    if device.type == "cpu":
        return _measured(TORCH_DTYPES[dtype])
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for part, preset in _PRESETS:
        if part in name and "PCIe" not in name:  # cards for PCIe are slower than the presets' modules
            single = "tfloat32" if torch.backends.cuda.matmul.allow_tf32 else "float32"
            return read_cluster(preset).device.peak({"fp32": single, "bf16": "bfloat16"}[dtype])
    return None


@torch.no_grad()
def _measured(dtype: torch.dtype) -> float:
    a, b = (torch.ones(_SIZE, _SIZE, dtype=dtype) for _ in range(2))
    torch.mm(a, b)
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < _SECONDS:
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * _SIZE**3 / best


def training_flops(config: LlamaConfig, lengths: Iterable[int] | Ints) -> int:
    """FLOPs of the forward and backward pass over documents of these lengths, in products alone.

    Three times the forward pass; attention by the pairs that causal attention needs within each document. What
    recomputation adds does not count.
    """
    sizes = config.sizes
    tokens = sum(int(length) for length in lengths)
    pairs = sum(int(length) * (int(length) + 1) // 2 for length in lengths)
    return 3 * (tokens * sizes.matrix_flops_per_token() + 4 * sizes.layers * sizes.hidden * pairs)
