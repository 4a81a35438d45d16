"""Calls that we saw, and the nodes of the execution trace that they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(slots=True)
class Call:
    """One call of an operator: its name, the operating system's id of its thread, elements of its tensors in order."""

    operator: str
    thread: int
    elements: tuple[int, ...]
    details: Any


def elements_of(value: Any) -> tuple[int, ...]:
    """Numbers of elements of all tensors in an argument, lists in lists too; empty ones do not count.

    An execution trace has an empty tensor where an optional one was not given.
    """
    if isinstance(value, torch.Tensor):
        count = value.numel()
        return (count,) if count else ()
    if isinstance(value, list | tuple):
        return tuple([count for part in value for count in elements_of(part)])
    return ()


def match(calls: Sequence[Call], nodes: Sequence[T], keys: Sequence[tuple[int, str, tuple[int, ...]]]) -> dict[int, T]:
    """For each call, by its place, the node that it is. What fits no node, or only out of order, is left out.

    Args:
        calls: in order on each thread.
        nodes: in order of start on each thread.
        keys: of each node: thread, operator and elements, as calls have them.
    """
    ours, theirs = _by_thread(call.thread for call in calls), _by_thread(key[0] for key in keys)
    found: dict[int, T] = {}
    for thread, mine in ours.items():
        candidates = theirs.get(thread, [])
        a = [(calls[at].operator, calls[at].elements) for at in mine]
        b = [keys[at][1:] for at in candidates]
        if a == b:
            pairs: Iterable[tuple[int, int]] = ((at, at) for at in range(len(a)))
        else:
            blocks = SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
            pairs = ((block.a + at, block.b + at) for block in blocks for at in range(block.size))
        found |= {mine[at]: nodes[candidates[other]] for at, other in pairs}
    return found


def _by_thread(threads: Iterable[int]) -> dict[int, list[int]]:
    places: dict[int, list[int]] = defaultdict(list)
    for at, thread in enumerate(threads):
        places[thread].append(at)
    return places
