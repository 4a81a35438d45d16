"""Ids and parents of a PyTorch execution trace as the file states them, before reading mends the tree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from foretrace.formats.sources import PathLike, Source, blocks
from foretrace.trace import ReadReport


class _Node(msgspec.Struct):
    id: int
    ctrl_deps: int | None = None
    parent: int | None = None


class _File(msgspec.Struct):
    nodes: list[_Node]


def stated_parents(path: PathLike) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Id and parent of every node, in file order; -1 where no parent is stated. None if the file is no whole JSON."""
    source = Source.of(Path(path))
    text = b"".join(blocks(source, ReadReport(source.name)))
    try:
        pairs = [(n.id, n.ctrl_deps if n.ctrl_deps is not None else n.parent) for n in _nodes(text)]
    except (ValueError, AttributeError, TypeError, RecursionError):
        return None
    limit = 1 << 63
    ids, parents = (
        ([-1 if one is None or not -limit <= one < limit else one for one in side] for side in zip(*pairs, strict=True))
        if pairs
        else ([], [])
    )
    return np.array(ids, np.int64), np.array(parents, np.int64)


def _nodes(text: bytes) -> list[_Node]:
    try:
        return msgspec.json.decode(text, type=_File).nodes
    except msgspec.DecodeError:
        # Text behind the end, or control characters in strings: the standard library takes these.
        found: Any = json.JSONDecoder(strict=False).raw_decode(text.decode("utf-8", "replace").lstrip("\ufeff \t\r\n"))[
            0
        ]
        return msgspec.convert(found, _File).nodes
