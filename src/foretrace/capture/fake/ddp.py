"""DistributedDataParallel: its reducer is C++, and reads data in two places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import distributed

from foretrace.capture.fake.devices import FakeMode

Replace = Callable[[Any, str, Any], Any]


def patch(replace: Replace, mode: FakeMode, on_rebuild: Callable[[], None]) -> None:
    """Let the reducer work on tensors without data.

    Args:
        replace: ``replace(owner, name, value)`` sets an attribute and returns what was there.
        mode: makes tensors.
        on_rebuild: called when a reducer has arranged its buckets anew, which it does once, in the second step.
    """

    class Reducer(dist.Reducer):  # type: ignore[misc,name-defined]
        def _rebuild_buckets(self) -> bool:
            # Ranks agree on the order of gradients through a tensor of integers, which are read back.
            with mode.real_integers():
                is_rebuilt: bool = super()._rebuild_buckets()
            if is_rebuilt:
                on_rebuild()
            return is_rebuilt

    replace(dist, "Reducer", Reducer)
    # The ranks compare the shapes of their parameters, in C++ on real data; here all have the same.
    replace(distributed, "_verify_param_shape_across_processes", lambda *_, **__: None)
