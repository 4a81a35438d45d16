"""Edges in order of their source."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray


def by_source(edges: dict[str, NDArray[Any]], tasks: int) -> dict[str, NDArray[Any]]:
    """The columns of edges sorted by ``source``, equal ones as they were; several times faster than `np.argsort`."""
    order = source_order(edges["source"], tasks)
    return {name: column[order] for name, column in edges.items()}


@njit(cache=True, nogil=True)
def source_order(source: NDArray[Any], tasks: int) -> NDArray[np.int64]:
    """Counting sort: the rows of ``source`` in order of their value, which is below ``tasks``."""
    place = np.zeros(tasks + 1, np.int64)
    for row in range(len(source)):
        place[source[row] + 1] += 1
    for task in range(tasks):
        place[task + 1] += place[task]
    order = np.empty(len(source), np.int64)
    for row in range(len(source)):
        order[place[source[row]]] = row
        place[source[row]] += 1
    return order
