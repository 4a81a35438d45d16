"""What a PyTorch execution trace says of communication: process groups, and each collective's sizes and group."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from foretrace.trace import ProcessGroup, StringTable, Table
from foretrace.trace.operators import OperatorTrace

_TEXTS = ("collective", "dtype", "group", "group_description", "group_ranks", "reduction", "in_split", "out_split")
_NUMBERS = (
    *("in_elements", "out_elements", "group_size", "rank_start", "rank_stride"),
    *("source_rank", "target_rank", "tag"),
)
# Attributes of a node, as NCCL's and our own recorder name them, and the columns that they fill.
_COLUMN_OF = {
    "collective_name": "collective",
    "dtype": "dtype",
    "pg_name": "group",
    "pg_desc": "group_description",
    "pg_ranks": "group_ranks",
    "reduce_op": "reduction",
    "in_split_size": "in_split",
    "out_split_size": "out_split",
    "in_msg_nelems": "in_elements",
    "out_msg_nelems": "out_elements",
    "pg_size": "group_size",
    "global_rank_start": "rank_start",
    "global_rank_stride": "rank_stride",
    "src_rank": "source_rank",
    "dst_rank": "target_rank",
    "tag": "tag",
}
_GROUP_NODE = "## process_group:init ##"
_COMMS = "record_param_comms"
Attributes = dict[int, dict[str, Any]]


def process_groups(trace: OperatorTrace) -> dict[str, ProcessGroup]:
    """Groups out of the nodes named ``## process_group:init ##``."""
    groups: dict[str, ProcessGroup] = {}
    for node in np.flatnonzero(trace.nodes["name"] == trace.strings.find(_GROUP_NODE)).tolist():
        values = trace.strings.lookup(
            trace.arguments["value"][trace.first_argument[node] : trace.first_argument[node + 1]]
        )
        for text in values:
            entries = _json(_json(text))
            for entry in entries if isinstance(entries, list) else ():
                if not isinstance(entry, dict) or "pg_name" not in entry:
                    continue
                ranks = entry.get("ranks") or ()
                if not (isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks)):
                    ranks = ()
                size = entry.get("group_size")
                groups[str(entry["pg_name"])] = ProcessGroup(
                    str(entry["pg_name"]),
                    str(entry.get("pg_desc", "")),
                    str(entry.get("backend_config", "")),
                    tuple(ranks),
                    size if isinstance(size, int) else -1,
                )
    return groups


def with_ranks(groups: dict[str, ProcessGroup], table: Table) -> dict[str, ProcessGroup]:
    """The groups, and what the collectives tell of them: their ranks, and groups that no node lists."""
    if not table.num_rows:
        return groups
    columns = (table.texts(name) for name in ("group", "group_description", "group_ranks"))
    for name, description, text in dict.fromkeys(zip(*columns, strict=True)):
        ranks, known = _json(text), groups.get(name)
        if (
            name
            and isinstance(ranks, list)
            and all(isinstance(rank, int) for rank in ranks)
            and not (known and known.ranks)
        ):
            backend = known.backend if known else ""
            groups[name] = ProcessGroup(name, description, backend, tuple(ranks), len(ranks))
    return groups


def collectives(trace: OperatorTrace, attributes: Attributes) -> Table:
    """The table `OperatorTrace.collectives`: nodes with a collective's attributes, or ``record_param_comms`` without.

    Args:
        trace: its nodes and arguments.
        attributes: by node, the attributes that are not columns of nodes.
    """
    rows: list[tuple[int, dict[str, Any]]] = []
    for node, found in attributes.items():
        if "collective_name" in found:
            rows.append((node, {_COLUMN_OF[name]: value for name, value in found.items() if name in _COLUMN_OF}))
    known = {node for node, _ in rows}
    unnamed = np.flatnonzero(trace.nodes["name"] == trace.strings.find(_COMMS)).tolist()
    rows += [(node, told) for node in unnamed if node not in known and (told := _from_arguments(trace, node))]
    rows.sort(key=lambda row: row[0])
    return _table(rows, trace.strings)


def _from_arguments(trace: OperatorTrace, node: int) -> dict[str, Any]:
    """What the arguments of ``record_param_comms`` tell: ``(tensors, seq, group, rank, name, splits, ..., size)``."""
    span = slice(int(trace.first_argument[node]), int(trace.first_argument[node + 1]))
    inputs = ~trace.arguments["is_output"][span]
    values = [_json(text) for text in trace.strings.lookup(trace.arguments["value"][span][inputs])]
    at = next((i for i, value in enumerate(values) if isinstance(value, str)), -1)
    if at < 0:
        return {}
    told: dict[str, Any] = {"collective": values[at]}
    for value in values[:at]:
        if isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value):
            told["group"], told["group_description"] = value
    rest = values[at + 1 :]
    for name, value in zip(("in_split", "out_split"), rest, strict=False):
        told[name] = json.dumps(value) if isinstance(value, list) and value else ""
    numbers = [value for value in rest if isinstance(value, int)]
    if numbers:
        told["group_size"] = numbers[-1]
    if len(numbers) >= 3:
        told["rank_start"], told["rank_stride"] = numbers[-3:-1]
    elements = trace.tensors["elements"]
    mine = slice(int(trace.first_tensor[node]), int(trace.first_tensor[node + 1]))
    is_output = trace.tensors["is_output"][mine]
    told["in_elements"] = int(elements[mine][~is_output].sum())
    told["out_elements"] = int(elements[mine][is_output].sum())
    dtypes = trace.strings.lookup(trace.tensors["dtype"][mine])
    told["dtype"] = dtypes[0] if dtypes else ""
    return told


def _table(rows: list[tuple[int, dict[str, Any]]], strings: StringTable) -> Table:
    columns: dict[str, Any] = {"node": np.array([node for node, _ in rows], np.int32)}
    for name in _TEXTS:
        texts = [_text(told.get(name, "")) for _, told in rows]
        columns[name] = np.array([strings.intern(text) if text else -1 for text in texts], np.int32)
    for name in _NUMBERS:
        columns[name] = np.array([_number(told.get(name, -1)) for _, told in rows], np.int64)
    return Table(columns, dict.fromkeys(_TEXTS, strings))


def _text(value: Any) -> str:
    """A text, or the JSON of anything else; an empty list says as much as nothing."""
    text = value if isinstance(value, str) else json.dumps(value)
    return "" if text == "[]" else text


def _number(value: Any) -> int:
    """A number, also one in quotes; a list of one (``src_rank`` of some versions) is its item."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if abs(number) < 1 << 63 else -1


def _json(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None
