"""Which tokens see which: the forms of `model.Attend` that training and scoring use."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Ints = NDArray[np.int64]


def causal(layer: int, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
    """Each token sees itself and those before it in its row."""
    is_grouped = q_BTHD.shape[2] != k_BTKD.shape[2]
    return scaled_dot_product_attention(
        q_BTHD.transpose(1, 2), k_BTKD.transpose(1, 2), v_BTKD.transpose(1, 2), is_causal=True, enable_gqa=is_grouped
    ).transpose(1, 2)


class Documents:
    """Causal attention within each of the documents that lie one behind the other in the rows of a batch.

    No mask of tokens by tokens is made. On a GPU the documents go to one kernel for sequences of any length (never run
    on one); elsewhere those of similar length are padded at their ends and computed together.

    Args:
        lengths: tokens of each document, row by row; together all tokens of the batch.
        device: where the batch lies.
    """

    def __init__(self, lengths: Sequence[int] | Ints, device: torch.device | str = "cpu") -> None:
        self.lengths = np.asarray(lengths, np.int64)
        if not len(self.lengths) or int(self.lengths.min()) < 1:
            raise ValueError("a document has at least one token")
        self._ends = np.cumsum(self.lengths)
        self._device = torch.device(device)
        self._first = torch.tensor([0, *self._ends.tolist()], dtype=torch.int32, device=self._device)
        self._buckets = _Buckets(self.lengths, self._device) if self._device.type != "cuda" else None

    def positions(self) -> Tensor:
        """The place of each token in its document, shape ``(tokens,)``."""
        begin = np.repeat(self._ends - self.lengths, self.lengths)
        return torch.from_numpy(np.arange(self._ends[-1]) - begin).to(self._device)

    def __call__(self, layer: int, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
        """Attention of all tokens of the batch.

        Raises:
            ValueError: if the batch has another number of tokens than the documents together.
        """
        flat = [part.flatten(0, 1) for part in (q_BTHD, k_BTKD, v_BTKD)]
        if len(flat[0]) != self._ends[-1]:
            raise ValueError(f"the batch has {len(flat[0])} tokens, its documents {self._ends[-1]}")
        mixed = self._varlen(*flat) if self._buckets is None else self._buckets(*flat)
        return mixed.view_as(q_BTHD)

    def _varlen(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        longest = int(self.lengths.max())
        is_grouped = q.shape[1] != k.shape[1]
        options = {"window_size": (-1, 0), "enable_gqa": is_grouped}
        return varlen_attn(q, k, v, self._first, self._first, longest, longest, **options)  # type: ignore[arg-type,return-value]


class _Buckets:
    """Documents of similar length side by side, padded at the end: what comes later is not seen by what is before."""

    _GROWTH = 1.15  # the longest of a bucket over its shortest: most of the padding, against calls for each bucket

    def __init__(self, lengths: Ints, device: torch.device) -> None:
        order = np.argsort(lengths, kind="stable")
        cuts = [0]
        for place in range(1, len(order)):
            if lengths[order[place]] > self._GROWTH * lengths[order[cuts[-1]]]:
                cuts.append(place)
        starts = np.cumsum(lengths) - lengths
        self._shapes: list[tuple[int, int]] = []
        source, is_padding = [], []
        for a, b in pairwise([*cuts, len(order)]):
            mine = order[a:b]
            longest = int(lengths[mine].max())
            offset = np.arange(longest)
            outside = offset >= lengths[mine][:, None]
            source.append(np.where(outside, starts[mine][:, None], starts[mine][:, None] + offset).ravel())
            is_padding.append(outside.ravel())
            self._shapes.append((len(mine), longest))
        into, padded = np.concatenate(source), np.concatenate(is_padding)
        back = np.empty(int(lengths.sum()), np.int64)
        back[into[~padded]] = np.flatnonzero(~padded)
        self._into, self._back = (torch.from_numpy(index).to(device) for index in (into, back))
        self._padding = torch.from_numpy(np.flatnonzero(padded)).to(device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(self._shapes) == 1 and not len(self._padding) and self._shapes[0][0] == 1:
            return causal(0, q[None], k[None], v[None])[0]
        parts = [_ToBuckets.apply(part, self._into, self._back) for part in (q, k, v)]
        sizes = [documents * longest for documents, longest in self._shapes]
        mixed = [
            causal(0, *(part.unflatten(0, shape) for part in bucket)).flatten(0, 1)
            for shape, *bucket in zip(self._shapes, *(part.split(sizes) for part in parts), strict=True)
        ]
        return _FromBuckets.apply(torch.cat(mixed), self._into, self._back, self._padding)


class _ToBuckets(torch.autograd.Function):
    """Rows by index, of which each one is used once: its gradient is found again without a sum."""

    @staticmethod
    def forward(context: Any, rows: Tensor, into: Tensor, back: Tensor) -> Tensor:
        context.save_for_backward(back)
        return rows[into]

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (back,) = context.saved_tensors
        return gradient[back], None, None


class _FromBuckets(torch.autograd.Function):
    """The way back; what stands in the padding has no gradient."""

    @staticmethod
    def forward(context: Any, rows: Tensor, into: Tensor, back: Tensor, padding: Tensor) -> Tensor:
        context.save_for_backward(into, padding)
        return rows[back]

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        into, padding = context.saved_tensors
        return gradient[into].index_fill_(0, padding, 0.0), None, None, None
