"""Values of integer tensors, of operators whose cost (or success) depends on them: looked up rows, offsets, masks.

The values are copied while the program runs and summed up after the recorded steps.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foretrace.capture.kernels import Watch, overloads
from foretrace.capture.matching import Call, elements_of

OPERATORS = {
    f"aten::{name}{suffix}"
    for name in (
        *("embedding", "embedding_dense_backward", "embedding_sparse_backward"),
        *("_embedding_bag", "_embedding_bag_forward_only", "_embedding_bag_dense_backward"),
        *("_embedding_bag_per_sample_weights_backward", "embedding_renorm"),
        *("index", "_unsafe_index", "index_put", "_index_put_impl", "_unsafe_index_put", "index_select"),
        *("index_add", "index_copy", "index_fill", "index_reduce", "take", "put", "take_along_dim"),
        *("gather", "scatter", "scatter_add", "scatter_reduce", "masked_select", "masked_scatter", "nonzero"),
        *("bucketize", "searchsorted", "bincount", "repeat_interleave", "segment_reduce", "histc", "unique_dim"),
        *("_unique2", "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward"),
        *("_ctc_loss", "_nested_tensor_from_tensor_list", "_grouped_mm"),
    )
    for suffix in ("", "_")
}
_INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
# Inputs that are offsets into another input: where each bag begins.
_OFFSETS = {
    "aten::_embedding_bag": 2,
    "aten::_embedding_bag_forward_only": 2,
}
_MOST_ELEMENTS = 1 << 20  # of one tensor; of longer ones, equally spaced elements
_MOST_BYTES = 256 << 20  # of all copies of one window
_BINS = 16
_TOP_SHARES = (0.01, 0.1)


class _Kept:
    """A copy of (some of) a tensor's values, until they are summed up."""

    __slots__ = ("elements", "every", "values")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.elements = tensor.numel()
        self.every = -(-self.elements // _MOST_ELEMENTS) if self.elements else 1
        flat = tensor.detach().reshape(-1)[:: self.every] if self.every > 1 else tensor.detach()
        self.values: Any = flat.numpy().copy() if tensor.device.type == "cpu" else flat.clone()

    def array(self) -> NDArray[Any]:
        values = self.values if isinstance(self.values, np.ndarray) else self.values.cpu().numpy()
        return np.asarray(values).reshape(-1)


class StatisticsWatch:
    """Copies the integer inputs of `OPERATORS` from `install` to `remove`.

    Attributes:
        calls: in order on each thread; details are copies by input position (those in a list: a list), None for a
            call within another one of these operators, which sees the same values.
        left_out: calls whose values were not copied, for there were too many.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.left_out = 0
        self._watch = Watch(overloads(OPERATORS), self._look)
        self._within = threading.local()
        self._bytes = 0
        self.install, self.remove = self._watch.install, self._watch.remove

    @property
    def failures(self) -> int:
        """Calls that could not be looked at."""
        return self._watch.failures

    def _look(self, operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call(operator, threading.get_native_id(), elements_of((*args, *kwargs.values())), None)
        self.calls.append(call)
        if getattr(self._within, "depth", 0):
            return None
        call.details = self._copies(args)
        self._within.depth = 1
        return self._leave

    def _leave(self) -> None:
        self._within.depth = 0

    def _copies(self, args: tuple[Any, ...]) -> dict[int, Any]:
        torch.autograd._enable_record_function(False)  # type: ignore[attr-defined]  # the copies are ours
        try:
            found = {at: self._copy(value) for at, value in enumerate(args) if _has_integers(value)}
        finally:
            torch.autograd._enable_record_function(True)  # type: ignore[attr-defined]
        return found

    def _copy(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self._copy(part) if _has_integers(part) else None for part in value]
        size = min(value.numel(), _MOST_ELEMENTS) * value.element_size()
        if self._bytes + size > _MOST_BYTES:
            self.left_out += 1
            return None
        self._bytes += size
        return _Kept(value)


def _has_integers(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        has_values = type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta  # fake ones have none
        return has_values and value.dtype in _INTEGERS and value.layout == torch.strided
    return isinstance(value, list | tuple) and any(_has_integers(part) for part in value)


def document(call: Call) -> dict[str, Any]:
    """What is known of the integer inputs of a call, by position."""
    found = {}
    for at, kept in (call.details or {}).items():
        is_offsets = _OFFSETS.get(call.operator) == at
        total = call.details[at - 1].elements if is_offsets and isinstance(call.details.get(at - 1), _Kept) else -1
        one = _of(kept, total) if not isinstance(kept, list) else [_of(part, -1) for part in kept]
        if one is not None:
            found[str(at)] = one
    return found


def _of(kept: _Kept | None, offsets_into: int) -> dict[str, Any] | None:
    if kept is None:
        return None
    values = kept.array()
    found: dict[str, Any] = {"dtype": str(values.dtype), "elements": kept.elements}
    if kept.every > 1:
        found["every"] = kept.every
    found |= summary(values)
    if offsets_into >= 0:
        found |= offsets_summary(values, offsets_into)
    return found


def summary(values: NDArray[Any]) -> dict[str, Any]:
    """Range, distinct values, histogram of 16 equal bins, and how uneven the values are used.

    ``zipf_exponent`` is the exponent s under which counts proportional to rank^-s are likeliest; noise alone makes it a
    little larger than 0 for values that are drawn evenly. ``top_shares`` are the shares of the elements that the most
    used 1 % and 10 % of the distinct values take.
    """
    if not len(values):
        return {"distinct": 0}
    if values.dtype == np.bool_:
        return {"true": int(np.count_nonzero(values))}
    low, high = int(values.min()), int(values.max())
    counts = _counts(values, low, high)
    ordered = np.sort(counts)[::-1]
    reached = np.cumsum(ordered) / len(values)
    shares = {f"{part:g}": round(float(reached[max(round(part * len(counts)), 1) - 1]), 6) for part in _TOP_SHARES}
    bins = np.histogram(values, _BINS, (low, max(high, low + 1)))[0]
    return {
        "min": low,
        "max": high,
        "distinct": len(counts),
        "histogram": bins.tolist(),
        "zipf_exponent": round(zipf_exponent(ordered), 4),
        "top_shares": shares,
    }


def _counts(values: NDArray[Any], low: int, high: int) -> NDArray[np.int64]:
    """How often each value occurs, of those that do."""
    if high - low <= 8 * len(values):
        counts = np.bincount(values.astype(np.int64) - low)
        return counts[counts > 0]
    return np.unique(values, return_counts=True)[1]


def zipf_exponent(counts: NDArray[np.int64]) -> float:
    """The likeliest exponent for counts in falling order, from 0 to 8 (by bisection); 0 for fewer than two values."""
    if len(counts) < 2:
        return 0.0
    logarithms = np.log(np.arange(1, len(counts) + 1))
    wanted = float(logarithms @ counts) / float(counts.sum())
    low, high = 0.0, 8.0
    for _ in range(30):
        middle = (low + high) / 2
        weights = np.exp(-middle * logarithms)
        if float(logarithms @ weights) / float(weights.sum()) > wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def offsets_summary(offsets: NDArray[Any], total: int) -> dict[str, Any]:
    """Of the beginnings of bags: whether they are in order, and how large the bags are.

    Args:
        offsets: where each bag begins; the last one may be the end of all.
        total: number of elements that the bags share.
    """
    steps = np.diff(np.append(offsets.astype(np.int64), total))
    if len(offsets) and int(offsets[-1]) == total:
        steps = steps[:-1]
    return {
        "first": int(offsets[0]) if len(offsets) else -1,
        "monotone": bool((np.diff(offsets) >= 0).all()),
        "pooling_mean": round(float(steps.mean()), 6) if len(steps) else 0.0,
        "pooling_std": round(float(steps.std()), 6) if len(steps) else 0.0,
    }
