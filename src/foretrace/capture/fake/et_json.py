"""Writes nodes as PyTorch's execution trace, schema 1.1.1-chakra.0.0.4."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from foretrace.capture.fake.nodes import GROUPS_ID, ROOT_ID, THREAD_ID, USER_SCOPE, Node
from foretrace.capture.fake.tensors import Life
from foretrace.capture.fake.values import Encoded

SCHEMA = "1.1.1-chakra.0.0.4"
_PREFIX = "[pytorch|profiler|execution_trace|"
_EMPTY = Encoded([], [], [], [])
_COMPRESSION = 3  # a higher level halves the speed and saves a tenth
_UNSIGNED = ("in_msg_nelems", "out_msg_nelems", "global_rank_start", "pg_size")


def write(path: Path, nodes: Iterable[Node], lives: Sequence[Life], groups: Sequence[dict[str, Any]], rank: int) -> int:
    """Write one rank's trace, gzip-compressed, whole or not at all.

    Args:
        path: where to.
        nodes: in the order of their ends.
        lives: storages, for the top-level list ``storages``.
        groups: what the node ``## process_group:init ##`` lists.
        rank: stated at the top of the file.

    Returns:
        How many nodes it holds.
    """
    encoder = msgspec.json.Encoder()
    part = path.with_name(path.name + ".part")
    count = 0
    with gzip.open(part, "wb", compresslevel=_COMPRESSION) as file:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        head = {"schema": SCHEMA, "pid": rank, "time": now, "start_ts": 0, "rank": rank}
        file.write(encoder.encode(head)[:-1] + b',"nodes":[\n')
        for entry in _all_nodes(nodes, groups):
            file.write((b",\n" if count else b"") + encoder.encode(entry))
            count += 1
        tail = {
            "storages": [
                {
                    "storage_id": life.storage_id,
                    "size_bytes": life.size_bytes,
                    "device": life.device,
                    "allocated": life.allocated,
                    "freed": life.freed,
                }
                for life in lives
            ],
            "finish_ts": 0,
        }
        file.write(b"\n]," + encoder.encode(tail)[1:])
    part.replace(path)
    return count


def _all_nodes(nodes: Iterable[Node], groups: Sequence[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    yield _entry(Node(ROOT_ID, f"{_PREFIX}process]", ROOT_ID, 0, USER_SCOPE))
    yield _entry(Node(THREAD_ID, f"{_PREFIX}thread]", ROOT_ID, 0, USER_SCOPE))
    if groups:
        told = Encoded([json.dumps(list(groups))], [[]], ["String"], [[]])
        yield _entry(Node(GROUPS_ID, "## process_group:init ##", THREAD_ID, 1, USER_SCOPE, inputs=told))
    yield from map(_entry, nodes)


def _entry(node: Node) -> dict[str, Any]:
    inputs, outputs = node.inputs or _EMPTY, node.outputs or _EMPTY
    attributes = [
        {"name": "rf_id", "type": "uint64", "value": node.record_function_id},
        {"name": "fw_parent", "type": "uint64", "value": 0},
        {"name": "seq_id", "type": "int64", "value": node.sequence},
        {"name": "scope", "type": "uint64", "value": node.scope},
        {"name": "tid", "type": "uint64", "value": 1},
        {"name": "fw_tid", "type": "uint64", "value": node.forward_thread},
        {"name": "op_schema", "type": "string", "value": node.schema},
        {"name": "kernel_backend", "type": "string", "value": ""},
        {"name": "kernel_file", "type": "string", "value": ""},
        {"name": "tensor_range", "type": "string", "value": ""},
    ]
    attributes += [{"name": name, "type": _type(name, value), "value": value} for name, value in node.details.items()]
    return {
        "id": node.id,
        "name": node.name,
        "ctrl_deps": node.parent,
        "inputs": inputs._asdict(),
        "outputs": outputs._asdict(),
        "attrs": attributes,
    }


def _type(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "uint64" if name in _UNSIGNED else "int64"
    return "string"
