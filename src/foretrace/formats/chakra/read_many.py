"""`read_workload`: the Chakra traces of all ranks of a job -> one `Workload`, thousands of small files at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrace.formats.chakra.read import read_chakra
from foretrace.formats.chakra.to_workload import Batch, from_batches, ranks_of_files
from foretrace.formats.chakra.trace import ChakraTrace
from foretrace.formats.chakra.versions import varint
from foretrace.trace import FormatError, ReadReport
from foretrace.trace.workload import Workload

_LARGE_BYTES = 1 << 22  # files from this size on are read one by one
_BATCH_BYTES = 1 << 26
_MESSAGE = re.compile(rb"comm_(?:src|dst)")  # a send or receive, whose rank may be told by the file alone


def read_workload(
    paths: Sequence[Path],
    num_ranks: int | None = None,
    groups: Mapping[int, Sequence[int]] | None = None,
    groups_path: str = "the groups' file",
    on_bytes: Callable[[int], None] | None = None,
) -> Workload:
    """Read Chakra traces, the first one of rank 0; a single one serves for all ``num_ranks``.

    Args:
        paths, num_ranks, groups, groups_path: see `to_workload`.
        on_bytes: called with the number of bytes read, again and again.

    Raises:
        FormatError: if a file cannot be read, or is no workload.
    """
    num_ranks = len(paths) if num_ranks is None else num_ranks
    ranks = ranks_of_files([str(path) for path in paths], num_ranks)
    return from_batches(_batches(paths, ranks, on_bytes), num_ranks, groups, groups_path)


def _batches(paths: Sequence[Path], ranks: list[list[int]], on_bytes: Callable[[int], None] | None) -> Iterator[Batch]:
    """Files with equal content once, small ones together."""
    index: dict[bytes, int] = {}
    batch: list[_Small] = []
    size = 0
    for path, mine in zip(paths, ranks, strict=True):
        content = _small_content(path)
        nodes_at = _nodes_at(content)
        if not nodes_at:
            yield Batch.of(read_chakra(path, on_bytes), mine)
            continue
        if on_bytes:
            on_bytes(len(content))
        if content in index and not _MESSAGE.search(content):
            batch[index[content]].ranks.extend(mine)
            batch[index[content]].copies.append(path)
            continue
        index[content] = len(batch)
        batch.append(_Small(path, content, nodes_at, list(mine), [path]))
        size += len(content)
        if size > _BATCH_BYTES:
            yield from _together(batch)
            index, batch, size = {}, [], 0
    yield from _together(batch)


class _Small(NamedTuple):
    """A small file that seems to be of v0.0.4, and those with the same content (``copies``, itself among them)."""

    path: Path
    content: bytes
    nodes_at: int
    ranks: list[int]
    copies: list[Path]


def _small_content(path: Path) -> bytes:
    """The bytes of a file, empty for a large one."""
    try:
        file = os.open(path, os.O_RDONLY)  # half the time of a file object, which counts for thousands of files
        try:
            size = os.fstat(file).st_size
            content = os.read(file, size + 1) if size < _LARGE_BYTES else b""
        finally:
            os.close(file)
    except OSError as error:
        raise FormatError(str(path), error.strerror or str(error), "check the path and its permissions") from None
    return content if len(content) == size else b""


def _nodes_at(content: bytes) -> int:
    """Where the nodes of a small file of v0.0.4 begin; 0 for what is read by itself."""
    size, begin = (content[0], 1) if content and content[0] < 0x80 else varint(content, 0, 5)
    is_metadata = begin > 0 and size > 0 and content[begin : begin + 1] == b"\n"
    lists_groups = content.find(b"process_groups", begin, begin + size) >= 0  # which only its own trace can look up
    return begin + size if is_metadata and not lists_groups and begin + size < len(content) else 0


def _together(batch: list[_Small]) -> Iterator[Batch]:
    """One batch of all files where that gives the same as reading each; else one batch a file."""
    if len(batch) > 1 and (found := _decode(batch)) is not None:
        trace, row, count = found
        file = np.repeat(np.arange(len(batch)), count)
        yield Batch(trace, row, file, [str(small.path) for small in batch], [small.ranks for small in batch])
        return
    for small in batch:
        yield Batch.of(read_chakra(small.path), small.ranks, len(small.copies))


def _decode(batch: list[_Small]) -> tuple[ChakraTrace, NDArray[np.int64], NDArray[np.int64]] | None:
    """The distinct nodes of all files in one trace, the row of each node, and how many each file has.

    None where there is anything that has to be told of.
    """
    from foretrace.formats.chakra import decode  # imports Numba, as do the next two
    from foretrace.formats.chakra.decoder import Decoder
    from foretrace.formats.chakra.frames import distinct_frames
    from foretrace.formats.chakra.messages import Texts

    frames = distinct_frames([memoryview(small.content)[small.nodes_at :] for small in batch])
    if frames is None:
        return None
    decoder = Decoder(lambda: 1.0)
    decoder.feed(frames.distinct[:-8])
    if decoder.count(decode.BAD) or decoder.count(decode.EMPTY) or decoder.count(decode.UNKNOWN):
        return None
    report = ReadReport("", "chakra et v0.0.4")
    return decoder.trace(report, Texts(report)), frames.number.astype(np.int64), frames.per_file
