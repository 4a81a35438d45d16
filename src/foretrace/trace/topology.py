"""The order that edges allow, compiled. Imported where it is used: loading a trace does not need Numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray


@njit(cache=True, nogil=True)
def topological_order(
    first_edge: NDArray[np.int64], target: NDArray[Any], missing: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Tasks with every source before its targets; those that wait for each other, and all behind them, are left out.

    Args:
        first_edge: offsets into ``target`` of each source, shape ``(tasks + 1,)``.
        target: of the edges, sorted by source.
        missing: number of edges that lead to each task; used up.
    """
    count = len(missing)
    order = np.empty(count, np.int64)
    size, done = 0, 0
    for task in range(count):
        if missing[task] == 0:
            order[size] = task
            size += 1
    while done < size:
        task = order[done]
        done += 1
        for edge in range(first_edge[task], first_edge[task + 1]):
            missing[target[edge]] -= 1
            if missing[target[edge]] == 0:
                order[size] = target[edge]
                size += 1
    return order[:size]
