"""Small PyTorch execution traces for tests, in today's and in the oldest form."""

from __future__ import annotations

from typing import Any

Tensor = list[Any]


def tensor(number: int, storage: int, elements: int = 4, offset: int = 0) -> Tensor:
    return [number, storage, offset, elements, 4, "cpu"]


def argument(value: Any) -> tuple[Any, Any, str, Any]:
    """Value, shape, type and strides of an argument, as PyTorch writes them."""
    if isinstance(value, list) and len(value) == 6 and isinstance(value[5], str):
        return value, [value[3]], "Tensor(float)", [1]
    if isinstance(value, list):
        parts = [argument(one) for one in value]
        kinds = ",".join(part[2] for part in parts)
        return value, [part[1] for part in parts], f"GenericList[{kinds}]", [part[3] for part in parts]
    kind = {bool: "Bool", int: "Int", float: "Double", str: "String"}[type(value)]
    return value, [], kind, []


def node(number: int, name: str, parent: int, inputs: Any = (), outputs: Any = (), **attributes: Any) -> dict[str, Any]:
    """A node of schema 1.1.1; other keywords become attributes."""
    told = {"rf_id": number, "fw_parent": 0, "seq_id": -1, "scope": 0, "tid": 1, "fw_tid": 0, "op_schema": ""}
    sides = {}
    for side, values in (("inputs", inputs), ("outputs", outputs)):
        parts = [argument(value) for value in values]
        names = ("values", "shapes", "types", "strides")
        sides[side] = {part: [one[at] for one in parts] for at, part in enumerate(names)}
    attrs = [{"name": key, "type": "string", "value": value} for key, value in {**told, **attributes}.items()]
    return {"id": number, "name": name, "ctrl_deps": parent, **sides, "attrs": attrs}


def trace(*nodes: dict[str, Any], **members: Any) -> dict[str, Any]:
    root = node(1, "[pytorch|profiler|execution_trace|process]", 1, rf_id=0, scope=7)
    return {"schema": "1.1.1-chakra.0.0.4", "pid": 7, "nodes": [*nodes, root], "finish_ts": 9, **members}


def oldest(document: dict[str, Any]) -> dict[str, Any]:
    """The same as schema 1.0.1 writes it: flat members, no strides."""
    nodes = []
    for one in document["nodes"]:
        attributes = {entry["name"]: entry["value"] for entry in one["attrs"]}
        flat = {"name": one["name"], "id": one["id"], "parent": one["ctrl_deps"], **attributes}
        for side in ("input", "output"):
            lists = one[f"{side}s"]
            flat |= {f"{side}s": lists["values"], f"{side}_shapes": lists["shapes"], f"{side}_types": lists["types"]}
        nodes.append(flat)
    return {**document, "schema": "1.0.1", "nodes": nodes}
