"""Arguments of operators as the texts that Chakra's IOInfo holds: Python lists as ``str`` prints them."""

from __future__ import annotations

import importlib
import re
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.trace import StringTable
from foretrace.trace.graph import offsets
from foretrace.trace.operators import OperatorTrace

_WORDS = re.compile(r'"(?:[^"\\]|\\.)*"|\btrue\b|\bfalse\b|\bnull\b|,\s*')
_PYTHON = {"true": "True", "false": "False", "null": "None"}
_PARTS = ("values", "shapes", "types")


def _compiled() -> Any:
    """The compiled writer, or None where it could not be built."""
    try:
        return importlib.import_module("foretrace.formats.chakra._arguments")
    except ImportError:
        return None


_arguments = _compiled()


def operator_texts(
    trace: OperatorTrace, rows: NDArray[np.integer], strings: StringTable
) -> tuple[dict[str, NDArray[np.int32]], StringTable]:
    """The columns ``inputs_values`` ... ``outputs_types`` of a Chakra trace's nodes.

    Args:
        trace: the operators.
        rows: row of the trace for each node, -1 for none.
        strings: a table to go on from.

    Returns:
        the columns that have any text, and a table of ``strings`` and then their texts.
    """
    data, first = strings.to_utf8()
    if _arguments is not None:
        tables = _as_numbers(trace)
        raw_ids, more, more_first = _arguments.texts(*tables)
        ids = np.frombuffer(raw_ids, np.int32).reshape(-1, 2 * len(_PARTS))
        text, ends = np.frombuffer(more, np.uint8), np.frombuffer(more_first, np.int64)
    else:
        ids, texts = _slow_texts(trace)
        text, ends = texts.to_utf8()
    combined = StringTable.from_utf8(np.concatenate((data, text)), np.concatenate((first[:-1], first[-1] + ends)))
    shifted = np.vstack((np.where(ids >= 0, ids + len(first) - 1, -1), np.full((1, ids.shape[1]), -1))).astype(np.int32)
    names = [f"{side}_{part}" for side in ("inputs", "outputs") for part in _PARTS]
    columns = {name: shifted[rows, at] for at, name in enumerate(names)}
    return {name: column for name, column in columns.items() if (column >= 0).any()}, combined


def _as_numbers(trace: OperatorTrace) -> tuple[NDArray[Any], ...]:
    """The tables that `_arguments.texts` takes."""
    arguments, tensors = trace.arguments, trace.tensors
    texts = [_spaced(text) for text in trace.strings.lookup(np.arange(len(trace.strings)))]
    data = [text.encode("utf-8", "replace") for text in texts]
    ends = np.concatenate(([0], np.cumsum([len(one) for one in data]))).astype(np.int64)
    rows = np.stack([arguments[name].astype(np.int64) for name in ("is_output", "type", "shape", "value")], axis=1)
    names = ("element", "tensor_id", "storage_id", "offset", "elements", "element_bytes", "device")
    numbers = np.stack([tensors[name].astype(np.int64) for name in names], axis=1)
    of_argument = offsets(tensors["argument"], arguments.num_rows)
    blob = np.frombuffer(b"".join(data), np.uint8)
    return trace.first_argument, np.ascontiguousarray(rows), of_argument, np.ascontiguousarray(numbers), blob, ends


def _slow_texts(trace: OperatorTrace) -> tuple[NDArray[np.int32], StringTable]:
    """The ids of six texts a node, and their table: what `_arguments.texts` does."""
    strings = StringTable()
    made = np.full((trace.num_nodes, 2 * len(_PARTS)), -1, np.int32)
    arguments, values = trace.arguments, _values(trace)
    shapes, types = (strings_of(trace, arguments[name]) for name in ("shape", "type"))
    is_output, first = arguments["is_output"].tolist(), trace.first_argument.tolist()
    for node, (begin, end) in enumerate(pairwise(first)):
        middle = begin
        while middle < end and not is_output[middle]:
            middle += 1
        for side, span in enumerate((slice(begin, middle), slice(middle, end))):
            if span.stop > span.start:
                texts = (values[span], shapes[span], [f"'{kind}'" for kind in types[span]])
                for part, items in enumerate(texts):
                    made[node, side * len(_PARTS) + part] = strings.intern(f"[{', '.join(items)}]")
    return made, strings


def _spaced(text: str) -> str:
    """JSON as Python prints it, with a space after each comma outside of texts."""
    if "," not in text and '"' not in text and text not in _PYTHON:
        return text
    return _WORDS.sub(lambda m: f"'{m[0][1:-1]}'" if m[0][0] == '"' else _PYTHON.get(m[0], ", "), text)


def strings_of(trace: OperatorTrace, ids: NDArray[np.integer]) -> list[str]:
    """Texts of a column with a space after each comma, as Python prints lists."""
    distinct, inverse = np.unique(ids, return_inverse=True)
    texts = [_spaced(text) for text in trace.strings.lookup(distinct)]
    return [texts[at] for at in inverse.tolist()]


def _values(trace: OperatorTrace) -> list[str]:
    """The value of each argument; those of tensors are written out of the table of tensors."""
    arguments, tensors = trace.arguments, trace.tensors
    values = strings_of(trace, arguments["value"])
    numbers = zip(
        *(tensors[n].tolist() for n in ("tensor_id", "storage_id", "offset", "elements", "element_bytes")), strict=True
    )
    devices = trace.strings.lookup(tensors["device"])
    written = [
        f"[{a}, {b}, {c}, {d}, {e}, '{device}']" for (a, b, c, d, e), device in zip(numbers, devices, strict=True)
    ]
    element = tensors["element"].tolist()
    lists: dict[int, list[str]] = {}
    for at, argument in enumerate(tensors["argument"].tolist()):
        if element[at] < 0:
            values[argument] = written[at]
        else:
            lists.setdefault(argument, []).append(written[at])
    for argument, items in lists.items():
        values[argument] = f"[{', '.join(items)}]"
    return values
