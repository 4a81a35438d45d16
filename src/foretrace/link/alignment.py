"""Two sequences of names of the same program, of which one may hold more: which entry is which."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_WINDOW = 12  # names that must agree in a row to propose a place
_MOST_PLACES = 64  # a run of names that occurs more often proposes nothing
_MOST_TRIED = 16  # of equally good distances
_LOOKAHEAD = 200  # names that may be missing in one sequence at one place
_SURE = 3  # names that must agree after a gap


def align(short: Ints, long: Ints, prefer: Ints | None = None) -> tuple[Ints, int]:
    """For each entry of ``short`` the place in ``long`` that is the same call, -1 for none.

    Both hold the same names in the same order but for gaps; ``long`` may repeat the whole (several steps of a loop).
    Runs of equal names vote for the distance between the two; from the best one on both are walked together, and
    where they differ the smallest gap is taken after which names agree again. Of several best ones that counts which
    finds the most entries, the first if they are equal.

    Args:
        short, long: names as numbers, shapes ``(n,)`` and ``(m,)``.
        prefer: among equally good distances, for each entry of ``short`` a place that it probably has (-1: unknown).

    Returns:
        places, increasing where not -1; and how many distances were equally good.
    """
    if not len(short) or not len(long):
        return np.full(len(short), -1, np.int64), 0
    distances, votes = _votes(short, long)
    if not len(distances):
        return _walk(short, long, 0, _LOOKAHEAD, _SURE), 1
    best = distances[votes == votes.max()]
    tried = best[:_MOST_TRIED]
    if len(best) > 1 and prefer is not None and (prefer >= 0).any():
        at = np.flatnonzero(prefer >= 0)
        agreeing = [int((prefer[at] - at == one).sum()) for one in best.tolist()]
        tried = best[[int(np.argmax(agreeing))]] if max(agreeing) else tried
    places, most = np.full(len(short), -1, np.int64), 0
    for distance in tried.tolist():
        walked = _walk(short, long, distance, _LOOKAHEAD, _SURE)
        count = int((walked >= 0).sum())
        if count > most:
            places, most = walked, count
        if most == len(short):
            break
    return places, len(best)


def _votes(short: Ints, long: Ints) -> tuple[Ints, Ints]:
    """Distances ``place in long - place in short`` and how many runs of names speak for each."""
    for window in (_WINDOW, 4, 1):
        one, other = _hashes(short, window), _hashes(long, window)
        order = np.argsort(other, kind="stable")
        first = np.searchsorted(other[order], one, side="left")
        count = np.searchsorted(other[order], one, side="right") - first
        count[count > _MOST_PLACES] = 0
        if count.sum():
            at = np.repeat(np.arange(len(one)), count)
            inner = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
            place = order[np.repeat(first, count) + inner]
            return np.unique(place - at, return_counts=True)
    return np.empty(0, np.int64), np.empty(0, np.int64)


def _hashes(names: Ints, window: int) -> NDArray[np.uint64]:
    """A number for each run of ``window`` names."""
    count = len(names) - window + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    mixed = np.zeros(count, np.uint64)
    for at in range(window):
        mixed = (mixed ^ names[at : at + count].astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed


@njit(cache=True, nogil=True)
def _walk(short: Any, long: Any, distance: int, lookahead: int, sure: int) -> Any:
    """Match greedily from the first entry that agrees at the distance, forth and back."""
    n, m = len(short), len(long)
    found = np.full(n, -1, np.int64)
    start = -1
    for i in range(n):
        if 0 <= i + distance < m and short[i] == long[i + distance]:
            start = i
            break
    if start < 0:
        return found
    for step in (1, -1):
        i, j = (start, start + distance) if step == 1 else (start - 1, start + distance - 1)
        while 0 <= i < n and 0 <= j < m:
            if short[i] == long[j]:
                found[i] = j
                i += step
                j += step
                continue
            best_i, best_j = -1, -1
            for gap in range(1, lookahead + 1):
                for skipped in range(gap + 1):
                    a, b = i + step * skipped, j + step * (gap - skipped)
                    agreeing = 0
                    while agreeing < sure and 0 <= a < n and 0 <= b < m and short[a] == long[b]:
                        agreeing += 1
                        a += step
                        b += step
                    if agreeing == sure or (agreeing > 0 and not (0 <= a < n and 0 <= b < m)):
                        best_i, best_j = i + step * skipped, j + step * (gap - skipped)
                        break
                if best_i >= 0 or best_j >= 0:
                    break
            if best_i < 0 or best_j < 0:
                break
            i, j = best_i, best_j
    return found
