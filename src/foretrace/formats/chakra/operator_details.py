"""Arguments of operators as the texts that Chakra's IOInfo holds: Python lists as ``str`` prints them."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from foretrace.trace import StringTable
from foretrace.trace.operators import OperatorTrace

_WORDS = re.compile(r'"(?:[^"\\]|\\.)*"|\btrue\b|\bfalse\b|\bnull\b')
_PYTHON = {"true": "True", "false": "False", "null": "None"}


def python_text(json_text: str) -> str:
    """JSON as Python prints the same value; texts keep their escapes."""
    return _WORDS.sub(lambda m: _PYTHON.get(m[0]) or f"'{m[0][1:-1]}'", json_text)


def operator_texts(
    trace: OperatorTrace, rows: NDArray[np.integer], strings: StringTable
) -> dict[str, NDArray[np.int32]]:
    """The columns ``inputs_values`` ... ``outputs_types`` of a Chakra trace's nodes.

    Args:
        trace: the operators.
        rows: row of the trace for each node, -1 for none.
        strings: where the texts go.
    """
    wanted = np.unique(rows[rows >= 0])
    made = {
        f"{side}_{part}": np.full(trace.num_nodes + 1, -1, np.int32)
        for side in ("inputs", "outputs")
        for part in ("values", "shapes", "types")
    }
    arguments = trace.arguments
    values = _values(trace)
    shapes, types = (strings_of(trace, arguments[name]) for name in ("shape", "type"))
    is_output = arguments["is_output"].tolist()
    first = trace.first_argument
    for row in wanted.tolist():
        begin, end = int(first[row]), int(first[row + 1])
        middle = begin
        while middle < end and not is_output[middle]:
            middle += 1
        for side, span in (("inputs", slice(begin, middle)), ("outputs", slice(middle, end))):
            if span.stop > span.start:
                made[f"{side}_values"][row] = strings.intern(f"[{', '.join(values[span])}]")
                made[f"{side}_shapes"][row] = strings.intern(f"[{', '.join(shapes[span])}]")
                made[f"{side}_types"][row] = strings.intern("[" + ", ".join(f"'{t}'" for t in types[span]) + "]")
    return {name: column[rows] for name, column in made.items() if (column >= 0).any()}


def strings_of(trace: OperatorTrace, ids: NDArray[np.integer]) -> list[str]:
    """Texts of a column with a space after each comma, as Python prints lists."""
    distinct, inverse = np.unique(ids, return_inverse=True)
    texts = [python_text(text).replace(",", ", ").replace(",  ", ", ") for text in trace.strings.lookup(distinct)]
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
