"""`ParallelPlan`: how a training step is spread over ranks and cut into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from foretrace.generate.model import Transformer
from foretrace.machine.limits import MOST_LAYERS, MOST_RANKS

Order = Literal["tp-pp-dp", "tp-dp-pp"]
_CHOICES = {
    "schedule": ("1f1b", "gpipe", "interleaved"),
    "recompute": ("none", "selective", "full"),
    "order": ("tp-pp-dp", "tp-dp-pp"),
    "zero": (0, 1, 2, 3),
}
_COUNTS = ("tp", "pp", "dp", "micro_batches", "micro_batch_size", "virtual_stages", "bucket_bytes")


class PlanError(ValueError):
    """A plan that contradicts itself or does not fit a model."""


@dataclass(frozen=True)
class ParallelPlan:
    """A parallel plan.

    Attributes:
        tp, pp, dp: ranks of a tensor-, pipeline- and data-parallel group.
        micro_batches: of one pipeline in one step.
        micro_batch_size: sequences of a micro-batch.
        schedule: ``"1f1b"`` (Narayanan et al. 2019, arXiv 1806.03377), ``"gpipe"`` (all forward passes, then all
            backward passes; Huang et al. 2018, arXiv 1811.06965) or ``"interleaved"`` (1F1B with several virtual stages
            a rank; Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
        virtual_stages: chunks of layers of a rank; more than 1 with ``"interleaved"``, and only there.
        sequence_parallel: norms and residuals are split along the sequence within a tensor-parallel group
            (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2).
        zero: what data-parallel ranks share out (Rajbhandari et al. 2019, arXiv 1910.02054): 0 nothing; 1 the state
            of the optimizer (Megatron's distributed optimizer); 2 gradients too: they are reduced after every
            micro-batch; 3 weights too (FSDP): gathered layer by layer, forward and backward.
        recompute: ``"selective"`` repeats the attention in the backward pass, ``"full"`` every layer.
        flash_attention: attention in one kernel that keeps scores on the chip; else products and softmax one by one.
        bucket_bytes: gradients are reduced as soon as this many bytes are there; default as in PyTorch's
            ``DistributedDataParallel``.
        gradient_dtype_bytes: of an element of reduced gradients; None: as the model's.
        order: which coordinate of a rank varies fastest.

    Raises:
        PlanError: if the plan contradicts itself.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batches: int = 1
    micro_batch_size: int = 1
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    virtual_stages: int = 1
    sequence_parallel: bool = False
    zero: Literal[0, 1, 2, 3] = 0
    recompute: Literal["none", "selective", "full"] = "none"
    flash_attention: bool = True
    bucket_bytes: int = 25 << 20
    gradient_dtype_bytes: int | None = None
    order: Order = "tp-pp-dp"

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}: at least 1 is needed")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise PlanError(f"{name} {getattr(self, name)!r} is none of {', '.join(map(str, allowed))}")
        if self.gradient_dtype_bytes not in (None, 1, 2, 4):
            raise PlanError(f"gradient_dtype_bytes {self.gradient_dtype_bytes} is none of 1, 2, 4")
        self._check_schedule()

    def _check_schedule(self) -> None:
        if self.schedule != "interleaved":
            if self.virtual_stages != 1:
                raise PlanError(f"{self.virtual_stages} virtual stages need the schedule 'interleaved'")
            return
        if self.pp < 2 or self.virtual_stages < 2:
            raise PlanError("an interleaved schedule needs pp and virtual_stages of at least 2")
        if self.micro_batches % self.pp:
            raise PlanError(f"an interleaved schedule needs micro_batches ({self.micro_batches}) in multiples of pp "
                            f"({self.pp})")  # fmt: skip

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.tp * self.pp * self.dp

    @property
    def sequences(self) -> int:
        """Sequences of a step: the global batch."""
        return self.dp * self.micro_batches * self.micro_batch_size

    @property
    def chunks(self) -> int:
        """Parts into which the layers are cut."""
        return self.pp * self.virtual_stages

    def gradient_bytes(self, model: Transformer) -> int:
        """Bytes of an element of reduced gradients."""
        return self.gradient_dtype_bytes or model.dtype_bytes

    def check(self, model: Transformer) -> None:
        """Raise `PlanError` if the plan does not fit the model, or makes more than can be simulated."""
        if self.world_size > MOST_RANKS:
            raise PlanError(f"tp {self.tp} x pp {self.pp} x dp {self.dp} make more than {MOST_RANKS} ranks: "
                            f"{self.world_size}")  # fmt: skip
        if model.layers * self.micro_batches > MOST_LAYERS:
            raise PlanError(f"{model.layers} layers x {self.micro_batches} micro_batches make more than {MOST_LAYERS} "
                            f"passes of a layer: {model.layers * self.micro_batches}")  # fmt: skip
        if model.layers % self.chunks:
            raise PlanError(f"{model.layers} layers cannot be spread evenly over {self.chunks} pipeline stages (pp "
                            f"{self.pp} x virtual_stages {self.virtual_stages})")  # fmt: skip
        for name in ("heads", "kv_heads", "ffn_hidden", "vocabulary"):
            if getattr(model, name) % self.tp:
                raise PlanError(f"{name} {getattr(model, name)} is no multiple of tp {self.tp}")
        if self.sequence_parallel and model.sequence % self.tp:
            raise PlanError(f"sequence_parallel: sequence {model.sequence} is no multiple of tp {self.tp}")

    @property
    def strides(self) -> tuple[int, int, int]:
        """By how much a rank's number grows with its coordinates tp, pp and dp."""
        return (1, self.tp, self.tp * self.pp) if self.order == "tp-pp-dp" else (1, self.tp * self.dp, self.tp)

    def coordinates(self, ranks: NDArray[np.integer]) -> NDArray[np.int64]:
        """Coordinates tp, pp and dp of ranks, shape ``(len(ranks), 3)``."""
        sizes = np.array((self.tp, self.pp, self.dp), np.int64)
        return np.asarray(ranks, np.int64)[:, None] // np.array(self.strides, np.int64) % sizes

    def ranks(self) -> NDArray[np.int64]:
        """The rank at each place, shape ``(tp, pp, dp)``."""
        tp, pp, dp = np.ogrid[: self.tp, : self.pp, : self.dp]
        first, second, third = self.strides
        return np.asarray(tp * first + pp * second + dp * third, np.int64)
