"""Process groups that a Chakra trace lists: in its metadata, or in metadata nodes as PyTorch's recorder writes them."""

from __future__ import annotations

import ast
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.formats.chakra.trace import ChakraTrace, NodeType, Wire

DEFAULT_GROUPS = ("", "0")  # all ranks


def groups_of(trace: ChakraTrace) -> dict[str, tuple[int, ...]]:
    """Ranks by name of the group, ascending; ``()`` where the file says "all" or does not say."""
    found: dict[str, tuple[int, ...]] = {}
    texts = [trace.metadata.get("process_groups")]
    if "inputs_values" in trace.nodes:
        rows = np.flatnonzero(trace.nodes["type"] == NodeType.METADATA)
        texts += trace.strings.lookup(trace.nodes["inputs_values"][rows])
    for text in texts:
        for entry in _entries(text):
            if isinstance(entry, dict) and "pg_name" in entry:
                ranks = entry.get("ranks") or ()
                is_list = isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks)
                found[str(entry["pg_name"])] = tuple(sorted(ranks)) if is_list else ()
    return found


def groups_named(trace: ChakraTrace, nodes: NDArray[np.integer]) -> tuple[list[str], NDArray[np.int64]]:
    """Distinct names of groups that nodes have as pg_name, ``""`` for none, and the place of each node's among them.

    Args:
        nodes: rows of the trace.
    """
    ids = np.full(trace.num_nodes, -1, np.int64)
    rows = trace.attribute_rows("pg_name")
    rows = rows[trace.attributes["wire"][rows] == Wire.STRING]
    ids[trace.attributes["node"][rows]] = trace.attributes["value"][rows]
    distinct, place = np.unique(ids[nodes], return_inverse=True)
    return trace.strings.lookup(distinct), place


def _entries(text: Any) -> list[Any]:
    """The list of groups in a text: JSON, or JSON within a list as Python or JSON prints it."""
    for _ in range(3):
        if isinstance(text, list) and len(text) == 1 and isinstance(text[0], str):
            text = text[0]
        if not isinstance(text, str) or "pg_name" not in text:
            break
        text = _parsed(text)
    return text if isinstance(text, list) else []


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
