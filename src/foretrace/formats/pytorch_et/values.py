"""Which tensor is which: ids in the file are used again after a tensor is freed, the values told here are not.

Inputs are looked at when a node begins, outputs when it ends; of two nodes that end together the inner one ends first.
An output that a node's descendant has written is that descendant's; one that was there before and is not written to
(an alias) stays what it was; every other one is new. What a schema marks with ``!`` is written in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_MOST_POSITIONS = 63


def mutated_positions(schema: str) -> int:
    """Bits of the arguments that an operator writes to: those whose type is marked as in ``Tensor(a!)``."""
    begin = schema.find("(")
    if begin < 0 or "!" not in schema:
        return 0
    mask = position = depth = 0
    argument = ""
    for c in schema[begin + 1 :]:
        if depth == 0 and c in ",)":
            if argument.strip() not in ("*", ""):
                mask |= ("!" in argument and position < _MOST_POSITIONS) << position
                position += 1
            argument = ""
            if c == ")":
                break
            continue
        depth += (c in "([") - (c in ")]")
        argument += c
    return mask


def number_tensors(
    parent: NDArray[np.int32], mutated: Ints, first_tensor: Ints, tensors: dict[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """The columns ``value``, ``version`` and ``producer`` of `OperatorTrace.tensors`.

    Args:
        parent: of each node, shape ``(nodes,)``; a parent stands before its children.
        mutated: bits of the input positions that each node writes to, shape ``(nodes,)``.
        first_tensor: where each node's tensors begin and end, shape ``(nodes + 1,)``.
        tensors: columns ``tensor_id``, ``storage_id``, ``elements``, ``element_bytes``, ``is_output``, ``position``.
    """
    tensor, count = _compressed(tensors["tensor_id"])
    storage, storages = _compressed(tensors["storage_id"])
    size = tensors["elements"] * 64 + tensors["element_bytes"]
    is_output = np.ascontiguousarray(tensors["is_output"], np.bool_)
    position = np.ascontiguousarray(tensors["position"], np.int64)
    value, version, producer = _number(
        parent, mutated, first_tensor, tensor, count, storage, storages, size, is_output, position
    )
    return {"value": value, "version": version, "producer": producer}


def _compressed(ids: Ints) -> tuple[Ints, int]:
    """Ids as small numbers, and how many there are at most."""
    if len(ids) and ids.min() >= 0 and ids.max() < 8 * len(ids) + 1024:
        return np.ascontiguousarray(ids), int(ids.max()) + 1
    distinct, small = np.unique(ids, return_inverse=True)
    return small.astype(np.int64), len(distinct)


@njit(cache=True, nogil=True)
def _number(parent, mutated, first_tensor, tensor, tensors, storage, storages, size, is_output, position):  # type: ignore[no-untyped-def]
    nodes, rows = len(parent), len(tensor)
    last = np.arange(nodes)
    for node in range(nodes - 1, -1, -1):  # the last descendant of each node
        up = parent[node]
        if 0 <= up < node and last[node] > last[up]:
            last[up] = last[node]
    # The nodes that end after each row, the innermost (latest begun) first.
    head, following = np.full(nodes, -1, np.int64), np.full(nodes, -1, np.int64)
    for node in range(nodes):
        following[node] = head[last[node]]
        head[last[node]] = node
    value, version = np.full(rows, -1, np.int32), np.zeros(rows, np.int32)
    producer = np.full(rows, -1, np.int32)
    current, current_version = np.full(tensors, -1, np.int32), np.zeros(tensors, np.int32)
    known_storage, known_size = np.full(tensors, -1, np.int64), np.zeros(tensors, np.int64)
    written, seen = np.full(tensors, -1, np.int64), np.full(tensors, -1, np.int64)
    storage_writer = np.full(storages, -1, np.int64)
    values = 0
    for node in range(nodes):
        for row in range(first_tensor[node], first_tensor[node + 1]):
            if is_output[row]:
                continue
            t = tensor[row]
            if current[t] < 0 or known_storage[t] != storage[row] or known_size[t] != size[row]:
                current[t], current_version[t], written[t] = values, 0, -1
                known_storage[t], known_size[t] = storage[row], size[row]
                values += 1
            seen[t] = node
            value[row], version[row], producer[row] = current[t], current_version[t], storage_writer[storage[row]]
        ending = head[node]
        while ending >= 0:
            begin, end = first_tensor[ending], first_tensor[ending + 1]
            if mutated[ending]:
                for row in range(begin, end):
                    if is_output[row] or position[row] >= 63 or not (mutated[ending] >> position[row]) & 1:
                        continue
                    t = tensor[row]
                    if not ending <= written[t] <= last[ending]:
                        current_version[t] += 1
                        written[t] = ending
                        storage_writer[storage[row]] = ending
            for row in range(begin, end):
                if not is_output[row]:
                    continue
                t = tensor[row]
                same = current[t] >= 0 and known_storage[t] == storage[row] and known_size[t] == size[row]
                is_inner = ending <= written[t] <= last[ending]
                is_alias = ending <= seen[t] <= last[ending]
                if not (same and (is_inner or is_alias)):
                    current[t], current_version[t], written[t] = values, 0, ending
                    known_storage[t], known_size[t] = storage[row], size[row]
                    values += 1
                    if not _is_view(row, begin, end, storage, is_output):
                        storage_writer[storage[row]] = ending
                value[row], version[row] = current[t], current_version[t]
                producer[row] = storage_writer[storage[row]]
            ending = following[ending]
    return value, version, producer


@njit(cache=True, nogil=True)
def _is_view(row, begin, end, storage, is_output):  # type: ignore[no-untyped-def]
    """Whether an output lies in the storage of one of the node's inputs: then nothing was written."""
    found = False
    for other in range(begin, end):
        found |= not is_output[other] and storage[other] == storage[row]
    return found
