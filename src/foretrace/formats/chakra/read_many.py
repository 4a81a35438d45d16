"""`read_workload`: the Chakra traces of all ranks of a job -> one `Workload`, thousands of small files at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from foretrace.formats.chakra.read import read_chakra
from foretrace.formats.chakra.to_workload import Batch, from_batches, ranks_of_files
from foretrace.formats.chakra.trace import ChakraTrace
from foretrace.formats.chakra.versions import varint
from foretrace.trace import FormatError, ReadReport
from foretrace.trace.workload import Workload

_LARGE_BYTES = 1 << 22  # files from this size on are read one by one
_BATCH_BYTES = 1 << 26
_NO_ID = (1 << 64) - 1
_SEPARATOR = bytes((11, 8, *([255] * 9), 1))  # a node with id 2^64 - 1, between files


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
    batch: list[tuple[Path, bytes, list[int]]] = []
    size = 0
    for path, mine in zip(paths, ranks, strict=True):
        content = _small_content(path)
        if content is None:
            yield Batch.of(read_chakra(path, on_bytes), mine)
            continue
        if on_bytes:
            on_bytes(len(content))
        if content in index:
            batch[index[content]][2].extend(mine)
            continue
        index[content] = len(batch)
        batch.append((path, content, list(mine)))
        size += len(content)
        if size > _BATCH_BYTES:
            yield from _together(batch)
            index, batch, size = {}, [], 0
    yield from _together(batch)


def _small_content(path: Path) -> bytes | None:
    """The bytes of a file of v0.0.4 as it seems; None for what is read by itself."""
    try:
        with path.open("rb", buffering=0) as file:
            content = file.read(_LARGE_BYTES)
    except OSError as error:
        raise FormatError(str(path), error.strerror or str(error), "check the path and its permissions") from None
    return content if len(content) < _LARGE_BYTES and _nodes_at(content) else None


def _nodes_at(content: bytes) -> int:
    """Where the nodes of a file of v0.0.4 begin; 0 if it does not look like one."""
    size, begin = varint(content, 0, 5)
    is_metadata = begin > 0 and size > 0 and content[begin : begin + 1] == b"\n"
    lists_groups = content.find(b"process_groups", begin, begin + size) >= 0  # which only its own trace can look up
    return begin + size if is_metadata and not lists_groups and begin + size < len(content) else 0


def _together(batch: list[tuple[Path, bytes, list[int]]]) -> Iterator[Batch]:
    """One batch of all files where that gives the same as reading each; else one batch a file."""
    if len(batch) > 1 and (trace := _decode([content for _, content, _ in batch])) is not None:
        is_separator = trace.nodes["id"] == _NO_ID
        file = np.cumsum(is_separator) - is_separator
        if is_separator.sum() == len(batch):
            file = np.where(is_separator, -1, file).astype(np.int64)
            # Separators stand between the rows of files, and sort before all.
            yield Batch(trace, file, [str(path) for path, _, _ in batch], [ranks for _, _, ranks in batch])
            return
    for path, _, ranks in batch:
        yield Batch.of(read_chakra(path), ranks)


def _decode(contents: list[bytes]) -> ChakraTrace | None:
    """The nodes of all files in one trace; None where there is anything that has to be told of."""
    from foretrace.formats.chakra import decode
    from foretrace.formats.chakra.decoder import Decoder  # imports Numba
    from foretrace.formats.chakra.messages import Texts

    pieces = [part for content in contents for part in (memoryview(content)[_nodes_at(content) :], _SEPARATOR)]
    data = np.frombuffer(b"".join([*pieces, bytes(8)]), np.uint8)
    decoder = Decoder(lambda: 1.0)
    taken, status = decoder.feed(data[:-8])
    if status == decode.BROKEN_FRAME or taken != len(data) - 8:
        return None
    if decoder.count(decode.BAD) or decoder.count(decode.EMPTY) or decoder.count(decode.UNKNOWN):
        return None
    report = ReadReport("", "chakra et v0.0.4")
    return decoder.trace(report, Texts(report))
