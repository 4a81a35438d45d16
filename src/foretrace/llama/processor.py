"""The processor that a command computes on: how many threads it takes, and what it has no instructions for."""

from __future__ import annotations

import torch


def limit_threads(threads: int | None) -> None:
    """Compute with so many threads; with PyTorch's own number if None."""
    if threads:
        torch.set_num_threads(threads)


def is_bf16_emulated() -> bool:
    """Whether products in bf16 are computed without instructions for them, several times slower than in fp32."""
    return not torch.cuda.is_available() and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
