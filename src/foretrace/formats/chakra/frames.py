"""Nodes that many small files have in common, byte for byte: each one once, before anything is decoded. Compiled.

The ranks of a job run the same layers with other partners, so that most of their nodes are equal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from foretrace.formats.chakra.memory import get8, get64, put64

_MULTIPLIER = -0x61C8864680B583EB  # 2^64 over the golden ratio, as signed
_PADDING = 8  # bytes behind a buffer that whole words are loaded from


class Frames(NamedTuple):
    """The distinct frames (a length and a message) of several files.

    Attributes:
        distinct: their bytes, in the order in which they first occur, and 8 bytes more.
        number: of each frame of all files, file by file, its place among the distinct ones.
        per_file: how many frames each file has.
    """

    distinct: NDArray[np.uint8]
    number: NDArray[np.int32]
    per_file: NDArray[np.int64]


def distinct_frames(contents: list[memoryview]) -> Frames | None:
    """The frames of files, each distinct one once; None where a file does not consist of frames."""
    data = np.frombuffer(b"".join([*contents, bytes(_PADDING)]), np.uint8)
    ends = np.cumsum([len(content) for content in contents])
    count = np.zeros(len(contents), np.int64)
    if not _count_frames(data.ctypes.data, ends, count):
        return None
    total = int(count.sum())
    number = np.empty(total, np.int32)
    distinct = np.empty(len(data), np.uint8)
    slots = np.zeros(1 << max(4, (2 * total - 1).bit_length()), np.int64)
    used = _number_frames(data.ctypes.data, distinct.ctypes.data, slots, np.empty(total + 1, np.int64), number)
    return Frames(distinct[: used + _PADDING], number, count)


@njit(cache=True, nogil=True)
def _behind(at: int, end: int) -> int:
    """The address behind the frame at ``at``, -1 if it does not end before ``end`` or is longer than frames are."""
    size, shift = 0, 0
    while at < end and shift < 35:
        byte = get8(at)
        at += 1
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return at + size if size <= end - at else -1
    return -1


@njit(cache=True, nogil=True)
def _count_frames(at: int, ends: NDArray[np.int64], count: NDArray[np.int64]) -> bool:
    """Count the frames of each file; ``ends`` are relative to ``at``."""
    begin = at
    for file in range(len(ends)):
        end = begin + ends[file]
        while at < end:
            at = _behind(at, end)
            if at < 0:
                return False
            count[file] += 1
    return True


@njit(cache=True, nogil=True)
def _hash(at: int, end: int) -> Any:
    mixed = (end - at) * _MULTIPLIER
    while at + 8 <= end:
        mixed = (mixed ^ get64(at)) * _MULTIPLIER
        mixed ^= mixed >> 32
        at += 8
    mixed = (mixed ^ (get64(at) & ((1 << (8 * (end - at))) - 1))) * _MULTIPLIER
    return mixed ^ (mixed >> 29)


@njit(cache=True, nogil=True)
def _are_equal(at: int, end: int, other: int) -> bool:
    while at + 8 <= end:
        if get64(at) != get64(other):
            return False
        at += 8
        other += 8
    return (get64(at) ^ get64(other)) & ((1 << (8 * (end - at))) - 1) == 0


@njit(cache=True, nogil=True)
def _number_frames(
    at: int, distinct: int, slots: NDArray[np.int64], first: NDArray[np.int64], number: NDArray[np.int32]
) -> Any:
    """Number well-formed frames by content and copy each distinct one; how many bytes these have.

    A slot holds the upper half of a hash, and below it a number + 1; 0 is free. ``first`` is where each distinct frame
    begins.
    """
    mask, used = len(slots) - 1, 0
    first[0] = 0
    for frame in range(len(number)):
        end = _behind(at, at + 0x80000000)
        mixed = _hash(at, end)
        slot = mixed & mask
        while slots[slot] != 0:
            known = (slots[slot] & 0xFFFFFFFF) - 1
            is_alike = (slots[slot] ^ mixed) >> 32 == 0 and first[known + 1] - first[known] == end - at
            if is_alike and _are_equal(at, end, distinct + first[known]):
                break
            slot = (slot + 1) & mask
        if slots[slot] == 0:
            slots[slot] = (mixed & -0x100000000) | (used + 1)
            for offset in range(0, end - at, 8):
                put64(distinct + first[used] + offset, get64(at + offset))
            first[used + 1] = first[used] + end - at
            used += 1
        number[frame] = (slots[slot] & 0xFFFFFFFF) - 1
        at = end
    return first[used]
