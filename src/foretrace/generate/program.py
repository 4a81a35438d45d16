"""Blocks put together: the program of a pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foretrace.generate.block import COLUMNS, DATA, STREAM, Block
from foretrace.trace.strings import StringTable
from foretrace.trace.table import Table
from foretrace.trace.workload import WORK_COLUMNS, Program

Ints = NDArray[np.int64]


def assemble(blocks: Sequence[Block], which: Ints, micro_batch: Ints, strings: StringTable) -> Program:
    """One block after the other.

    Args:
        blocks: each one once.
        which: the block at each place, shape ``(places,)``.
        micro_batch: is added to the tags of its sends and receives, same shape.
        strings: of the blocks.
    """
    sizes = np.array([len(block.columns) for block in blocks], np.int64)
    starts = np.concatenate(([0], np.cumsum(sizes[which])))
    nodes = np.concatenate([block.columns for block in blocks])[_ranges(sizes, which)]
    place = np.repeat(np.arange(len(which)), sizes[which])
    columns = {name: np.full(len(nodes), default, dtype) for name, (dtype, default) in WORK_COLUMNS.items()}
    for at, name in enumerate(COLUMNS):
        columns[name] = nodes[:, at].astype(WORK_COLUMNS[name][0])
    columns["tag"] = np.where(columns["tag"] >= 0, columns["tag"] + micro_batch[place], -1)
    columns["id"] = np.arange(len(nodes))
    first, dependency = _dependencies(blocks, which, starts)
    return Program(Table(columns, {"name": strings}), first, dependency, strings)


def _ranges(sizes: Ints, which: Ints) -> Ints:
    """Rows of all blocks in the order of the places, where blocks lie one after the other."""
    first = np.concatenate(([0], np.cumsum(sizes)))[which]
    length = sizes[which]
    before = np.concatenate(([0], np.cumsum(length)))[:-1]
    return np.asarray(np.arange(length.sum()) + np.repeat(first - before, length), np.int64)


def _dependencies(blocks: Sequence[Block], which: Ints, starts: Ints) -> tuple[Ints, NDArray[np.int32]]:
    counts = np.array([len(block.inner) for block in blocks], np.int64)
    inner = np.concatenate([block.inner for block in blocks])[_ranges(counts, which)]
    inner += np.repeat(starts[:-1], counts[which])[:, None]
    pairs = np.concatenate((inner, np.array(_between(blocks, which, starts), np.int64).reshape(-1, 2)))
    total = int(starts[-1])
    key = np.unique(pairs[:, 0] * total + pairs[:, 1])
    first = np.concatenate(([0], np.cumsum(np.bincount(key // total, minlength=total)))).astype(np.int64)
    return first, (key % total).astype(np.int32)


def _between(blocks: Sequence[Block], which: Ints, starts: Ints) -> list[tuple[int, int]]:
    """Pairs of target and source for dependencies on earlier blocks; there are few of them in a block."""
    found: list[tuple[int, int]] = []
    ends: dict[int, list[int]] = {STREAM: [], DATA: []}
    for at, start in zip(which.tolist(), starts.tolist(), strict=False):
        block = blocks[at]
        found += [(start + target, source) for target, outside in block.outer for source in ends[outside]]
        stream = [start + row for row in block.stream if row >= 0]
        if STREAM in block.stream:
            stream += ends[STREAM]
        if DATA in block.stream:
            stream += ends[DATA]
        ends[STREAM] = stream
        if block.last_data != DATA:
            ends[DATA] = [start + block.last_data]
    return found
