"""Pipeline schedules: in which order a stage runs the passes of its micro-batches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foretrace.generate.plan import ParallelPlan

FORWARD, BACKWARD = 0, 1


def schedule(plan: ParallelPlan, stage: int) -> NDArray[np.int64]:
    """The passes of a stage in their order: direction, virtual stage and micro-batch, shape ``(passes, 3)``.

    1F1B runs as many forward passes first as there are stages behind this one, then forward and backward by turns.
    The interleaved schedule is that of Megatron-LM (arXiv 2104.04473, section 2.2): micro-batches pass a virtual stage
    in rounds of ``pp``, and ``2 (pp - stage - 1) + (virtual_stages - 1) pp`` forward passes come first.
    """
    count = plan.micro_batches * plan.virtual_stages
    at = np.arange(count)
    chunk = at // plan.pp % plan.virtual_stages if plan.virtual_stages > 1 else np.zeros(count, np.int64)
    micro = at // plan.chunks * plan.pp + at % plan.pp if plan.virtual_stages > 1 else at
    forward = np.stack((np.full(count, FORWARD), chunk, micro), axis=1)
    backward = np.stack((np.full(count, BACKWARD), plan.virtual_stages - 1 - chunk, micro), axis=1)
    ahead = min(_warm_up(plan, stage), count)
    steady = np.stack((forward[ahead:], backward[: count - ahead]), axis=1).reshape(-1, 3)
    return np.concatenate((forward[:ahead], steady, backward[count - ahead :]))


def _warm_up(plan: ParallelPlan, stage: int) -> int:
    behind = plan.pp - stage - 1
    if plan.schedule == "gpipe":
        return plan.micro_batches
    if plan.schedule == "interleaved":
        return 2 * behind + (plan.virtual_stages - 1) * plan.pp
    return behind
