"""What `_scanner.c` does, in Python, for installations without a C compiler."""

from __future__ import annotations

import itertools
import json
import re
from array import array
from typing import Any

_NUMBERS = ("id", "ctrl_deps", "rf_id", "fw_parent", "seq_id", "scope", "tid", "fw_tid")
_TEXTS = ("op_schema", "kernel_backend", "kernel_file", "tensor_range", "integer_statistics", "name")
_ABSENT = {"id": -1, "ctrl_deps": -1, "seq_id": -1}
_OLD = (
    "inputs",
    "input_shapes",
    "input_types",
    "input_strides",
    "outputs",
    "output_shapes",
    "output_types",
    "output_strides",
)
_PARTS = ("values", "shapes", "types", "strides")
_NODE = re.compile(r'\{\s*"(?:id"\s*:|name"\s*:\s*"(?:[^"\\]|\\.)*"\s*,\s*"id"\s*:)')
_SPACE = re.compile(r"[\s,]*")


class SlowScanner:
    """Rows of one text; see the head of ``_scanner.c`` for what they hold."""

    def __init__(self, text: bytes) -> None:
        self._text = text.decode("utf-8", "replace")
        self.nodes, self.tensors, self.broken = array("q"), array("q"), array("q")
        self.arguments, self.extras = array("i"), array("i")
        self.texts: list[str] = []
        self._ids: dict[str, int] = {}
        self._known_place = (0, 0)  # of a character, and of its byte

    def scan(self, at: int) -> int:
        """Scan from the inside of the list of nodes on; returns the place after it, -1 if the text ends before."""
        decoder = json.JSONDecoder(strict=False)
        text = self._text
        while True:
            at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
            if at >= len(text):
                return -1
            if text[at] == "]":
                return at + 1
            rows = (self.nodes, self.arguments, self.tensors, self.extras)
            lengths = [len(one) for one in rows]
            try:
                node, stop = decoder.raw_decode(text, at)
                self._add(node)
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
                for one, length in zip(rows, lengths, strict=True):
                    del one[length:]
                self.broken.append(self._bytes_before(at))
                found = _NODE.search(text, at + 1)
                if not found:
                    return -1
                stop = found.start()
            at = stop

    def before(self, place: int) -> bytes:
        """The bytes of the text up to a place."""
        return self._text[:place].encode("utf-8", "replace")

    def _bytes_before(self, place: int) -> int:
        """Their number; places are asked for in ascending order."""
        known, count = self._known_place
        self._known_place = place, count + len(self._text[known:place].encode("utf-8", "replace"))
        return self._known_place[1]

    def _add(self, node: dict[str, Any]) -> None:
        members, extras = dict(node), []
        members.setdefault("ctrl_deps", node.get("parent", -1))
        attributes = node.get("attrs")
        for attribute in attributes if isinstance(attributes, list) else ():
            if {"name", "value"} <= attribute.keys() and isinstance(attribute["name"], str):
                name, value = attribute["name"], attribute["value"]
                if name in _NUMBERS[1:] or name in _TEXTS[:-1]:
                    members[name] = value
                else:
                    extras.append((name, value))
        if not isinstance(members["name"], str):
            raise TypeError("a node without a name")
        row = len(self.nodes) // 14
        numbers = [_number(members.get(name), _ABSENT.get(name, 0)) for name in _NUMBERS]
        texts = [members.get(name) for name in _TEXTS]
        if numbers[0] < 0:
            raise ValueError("a node without an id")
        self.nodes.extend(numbers)
        self.nodes.extend(self._id(text) if isinstance(text, str) else -1 for text in texts)
        for name, value in extras:
            self.extras.extend((row, self._id(name), self._id(json.dumps(value))))
        for is_output, first in ((0, "inputs"), (1, "outputs")):
            lists = node.get(first)
            if isinstance(lists, dict):
                parts = [lists.get(part) for part in _PARTS]
            else:
                at = _OLD.index(first)
                parts = [lists, *(node.get(name) for name in _OLD[at + 1 : at + 4])]
            self._add_arguments(row, is_output, parts)

    def _add_arguments(self, node: int, is_output: int, parts: list[Any]) -> None:
        values, *rest = (part if isinstance(part, list) else [] for part in parts)
        lists = itertools.zip_longest(values, *(part[: len(values)] for part in rest))
        for position, (value, shape, kind, strides) in enumerate(lists):
            tensors = self._add_tensors(value, shape, strides, kind) if isinstance(kind, str) else 0
            kind_id = self._id(kind) if isinstance(kind, str) else -1
            value_id = -1 if tensors else self._id(json.dumps(value, separators=(",", ":")))
            self.arguments.extend((node, is_output, position, kind_id, self._raw(shape), self._raw(strides), value_id))

    def _raw(self, part: Any) -> int:
        return -1 if part is None else self._id(json.dumps(part, separators=(",", ":")))

    def _add_tensors(self, value: Any, shape: Any, strides: Any, kind: str) -> int:
        found, element = 0, 0
        is_plain = _is_tensor(kind)
        stack = [(value, shape, strides, kind)]
        while stack:
            value, shape, strides, kind = stack.pop()
            if _is_tensor(kind):
                found += self._add_tensor(value, shape, strides, kind[7:-1], -1 if is_plain else element)
                element += 1
            elif "[" in kind and isinstance(value, list):
                kinds = _split(kind[kind.index("[") + 1 : -1])
                shapes, all_strides = (list(p) if isinstance(p, list) else [] for p in (shape, strides))
                items = itertools.zip_longest(
                    value, shapes[: len(value)], all_strides[: len(value)], kinds[: len(value)]
                )
                stack.extend((v, s, t, k or "") for v, s, t, k in reversed(list(items)))
            else:
                element += 1
        return found

    def _add_tensor(self, value: Any, shape: Any, strides: Any, dtype: str, element: int) -> int:
        if not isinstance(value, list) or len(value) < 6 or not isinstance(value[5], str):
            return 0
        if not all(map(_is_whole, value[:5])):
            return 0
        row = (len(self.arguments) // 7, element, *(_wrapped(number) for number in value[:5]))
        self.tensors.extend((*row, self._id(value[5]), self._id(dtype), self._raw(shape), self._raw(strides)))
        return 1

    def _id(self, text: str) -> int:
        known = self._ids.setdefault(text, len(self._ids))
        if known == len(self.texts):
            self.texts.append(text)
        return known


def _split(kinds: str) -> list[str]:
    """Types of a list, split at commas outside of brackets."""
    parts, depth = [""], 0
    for c in kinds:
        depth += (c in "([<") - (c in ")]>")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return parts


def _number(value: Any, absent: int) -> int:
    if isinstance(value, list):
        value = value[0] if value else absent
    return _wrapped(value) if _is_whole(value) else absent


def _is_whole(value: Any) -> bool:
    """Whether a value is a whole number of at most 20 digits, as all numbers of 64 bits are."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**20


def _is_tensor(kind: str) -> bool:
    return kind.startswith("Tensor(") and len(kind) > len("Tensor()")


def _wrapped(number: int) -> int:
    """The lowest 64 bits, as a signed number."""
    return ((number + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)
