"""`Replicas`: where training on several replicas that may fail hooks into the loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn


class Replicas(Protocol):
    """Replicas of the whole trainer, each with all weights, of which any may be lost.

    A step asks for its rows, computes gradients, hands them in, and applies them only when it is told how much they
    add up. What was not decided is computed again.
    """

    def rows(self, step: int, rows: range) -> Sequence[int]:
        """The rows of a step that this replica has to compute."""

    def reduce(self, step: int, model: nn.Module, totals: Tensor) -> Tensor | None:
        """Add up gradients over the replicas that contribute to a step, in place.

        Args:
            step: counted from 0.
            model: has the gradients, sums over this replica's targets.
            totals: float64, shape ``(2,)``: targets, and the sum of their losses.

        Returns:
            ``totals`` of all contributors; None if the step has to be done again, from the state that the model,
            the optimizer and the loop have now.
        """


class Alone:
    """There is no other replica."""

    def rows(self, step: int, rows: range) -> Sequence[int]:
        """All of them."""
        return rows

    def reduce(self, step: int, model: nn.Module, totals: Tensor) -> Tensor | None:
        """Nothing to add."""
        return totals
