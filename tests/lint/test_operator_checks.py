"""Rules over PyTorch execution traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.formats.lint import lint
from foretrace.formats.pytorch_et import read_operators
from foretrace.formats.pytorch_et.stated import stated_parents
from foretrace.trace.operator_checks import _num_cycles, _on_cycle, check_operators


def node(number: int, parent: int, name: str = "aten::mm", rf_id: int | None = None, **more: Any) -> dict[str, Any]:
    side = {"values": [], "shapes": [], "types": [], "strides": []}
    attributes = [{"name": "rf_id", "type": "uint64", "value": number if rf_id is None else rf_id}]
    base = {"id": number, "name": name, "ctrl_deps": parent, "inputs": side, "outputs": side, "attrs": attributes}
    return {**base, **more}


def tensor(tensor_id: int, storage: int, elements: int, shape: list[int], kind: str = "float", width: int = 4) -> Any:
    value = [tensor_id, storage, 0, elements, width, "cpu"]
    return {"values": [value], "shapes": [shape], "types": [f"Tensor({kind})"], "strides": [[1] * len(shape)]}


def trace(*nodes: dict[str, Any], schema: str | None = "1.1.1", **more: Any) -> dict[str, Any]:
    root = node(1, 0, "[pytorch|profiler|execution_trace|process]", rf_id=0)
    head = {"schema": schema} if schema is not None else {}
    return {**head, "pid": 1, "time": "now", "start_ts": 1, "nodes": [root, *nodes], "finish_ts": 2, **more}


def found(folder: Path, document: dict[str, Any]) -> dict[str, int]:
    path = folder / "rank0.json"
    path.write_text(json.dumps(document))
    ((result,), _) = lint([path])
    assert result.error == "" and result.kind == "pytorch-et"
    assert all(one.example.startswith(f"{path}: ") and not one.repairable for one in result.findings)
    return {one.rule.name: one.count for one in result.findings}


def test_sound(tmp_path: Path) -> None:
    first = node(2, 1, inputs=tensor(5, 6, 12, [3, 4]), outputs=tensor(7, 8, 1, [], "double", 8))
    undefined = node(3, 2, inputs=tensor(9, 0, 0, []))
    assert found(tmp_path, trace(first, undefined)) == {}


FAULTS: list[tuple[str, int, dict[str, Any]]] = [
    ("missing-schema", 1, trace(schema=None)),
    ("unknown-schema", 1, trace(schema="9.0")),
    ("repeated-node-id", 2, trace(node(2, 1, rf_id=0), node(2, 1, rf_id=0), node(2, 1, rf_id=0))),
    ("dangling-parent", 2, trace(node(2, 9), node(3, 8))),
    ("parent-cycle", 2, trace(node(2, 3), node(3, 2), node(4, 6), node(5, 4), node(6, 5), node(7, 6))),
    ("child-starts-before-parent", 1, trace(node(2, 3), node(3, 1))),
    ("duplicate-record-function-id", 1, trace(node(2, 1, rf_id=4), node(3, 1, rf_id=4), node(4, 1, rf_id=0))),
    ("tensor-shape-mismatch", 1, trace(node(2, 1, inputs=tensor(5, 6, 11, [3, 4])))),
    ("tensor-type-mismatch", 1, trace(node(2, 1, inputs=tensor(5, 6, 12, [3, 4], "float", 2)))),
    (
        "tensor-storage-mismatch",
        1,
        trace(
            node(
                2,
                1,
                inputs={
                    "values": [[5, 6, 0, 1, 4, "cpu"], [5, 7, 0, 1, 4, "cpu"]],
                    "shapes": [[1], [1]],
                    "types": ["Tensor(float)"] * 2,
                    "strides": [[1], [1]],
                },
            )
        ),
    ),
    (
        "storage-too-small",
        1,
        trace(
            node(2, 1, inputs=tensor(5, 6, 12, [3, 4]), outputs=tensor(7, 8, 3, [3])),
            storages=[
                {"storage_id": 6, "size_bytes": 8, "allocated": 1, "freed": 2, "device": "cpu"},
                {"storage_id": 8, "size_bytes": 4, "allocated": 1, "freed": 2, "device": "cpu"},
                {"storage_id": 8, "size_bytes": 12, "allocated": 2, "freed": 3, "device": "cpu"},
            ],
        ),
    ),
]


@pytest.mark.parametrize(("rule", "count", "document"), FAULTS, ids=[rule for rule, _, _ in FAULTS])
def test_faults(tmp_path: Path, rule: str, count: int, document: dict[str, Any]) -> None:
    assert found(tmp_path, document) == {rule: count}


def test_a_cut_file(tmp_path: Path) -> None:
    path = tmp_path / "et.json.gz"
    text = json.dumps(trace(*(node(number, 1) for number in range(2, 50))))
    path.write_bytes(gzip.compress(text[: len(text) // 2].encode()))
    ((result,), _) = lint([path])
    assert [one.rule.name for one in result.findings] == ["damaged-file"]


@pytest.mark.parametrize("tail", ["", " junk"])
def test_parents_as_stated(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "et.json"
    path.write_text(json.dumps(trace(node(5, 2), {"id": 3, "name": "x", "parent": 5})) + tail)
    ids, parents = stated_parents(path) or ([], [])
    assert list(ids) == [1, 5, 3] and list(parents) == [0, 2, 5]
    path.write_text('{"nodes": [{"id": 1},')
    assert stated_parents(path) is None


@given(st.lists(st.integers(-1, 14), max_size=15))
def test_cycles_of_parents(above: list[int]) -> None:
    above = [one if one < len(above) else -1 for one in above]
    cycles: set[frozenset[int]] = set()
    for start in range(len(above)):
        walk = [start]
        while above[walk[-1]] >= 0 and above[walk[-1]] not in walk:
            walk.append(above[walk[-1]])
        if above[walk[-1]] == start:
            cycles.add(frozenset(walk))
    rows = np.flatnonzero(_on_cycle(np.array(above, np.int64)))
    assert set(rows.tolist()) == set().union(*cycles)
    assert _num_cycles(np.array(above, np.int64), rows) == len(cycles)


def test_recorded_traces_are_clean(shared: Path) -> None:
    for path in [*(shared / "traces/pytorch-et").glob("*.json.gz"), shared / "traces/simple-add-et-kineto/et.json.gz"]:
        read = read_operators(path)
        assert read.num_nodes and check_operators(read, stated_parents(path))[0] == []


def test_ranks_are_compared(tmp_path: Path) -> None:
    def collective(number: int, elements: int) -> dict[str, Any]:
        told = {
            "collective_name": "allreduce", "dtype": "Float", "pg_name": "0", "in_msg_nelems": elements,
            "out_msg_nelems": elements, "pg_size": 2,
        }  # fmt: skip
        attributes = [{"name": name, "type": "", "value": value} for name, value in told.items()]
        return node(number, 1, "record_param_comms", attrs=attributes, inputs=tensor(5, 6, elements, [elements]))

    paths = [tmp_path / f"rank{rank}.json" for rank in range(2)]
    for path, sizes in zip(paths, ((8, 8), (8, 9)), strict=True):
        path.write_text(json.dumps(trace(*(collective(2 + at, one) for at, one in enumerate(sizes)))))
    results, _ = lint(paths)
    assert [[one.rule.name for one in result.findings] for result in results] == [[], ["divergent-collective-size"]]
    path.write_text(json.dumps(trace(collective(2, 8))))
    results, _ = lint(paths)
    assert sorted(one.rule.name for result in results for one in result.findings) == ["collective-count-differs"]
