"""The two JSON forms of Chakra traces.

- The one that mlcommons' feeder reads: ``{"workload_graph": [{"Id": 0, "Name": ..., "NodeType": 4, ...}, ...]}``, with
  attributes as further members of a node.
- What ``chakra_jsonizer`` prints: protobuf's JSON of each message, one behind the other.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from foretrace.formats.chakra.builder import Attribute, Builder, count_types
from foretrace.formats.chakra.messages import BAD_UTF8, WIRE_OF
from foretrace.formats.chakra.trace import IO_COLUMNS, ChakraTrace, NodeType, Wire, wire_of
from foretrace.trace import FormatError, ReadReport

JSON_START = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{\s*["}]')
CUT_JSON = "JSON that is cut or damaged: kept the nodes before that place"
_LIMIT = 1 << 64

# Members of a node that are no attributes: what this writes first, then other spellings that are read.
_SPELLINGS = {
    "id": ("Id", "id"),
    "name": ("Name", "name"),
    "type": ("NodeType", "type", "node_type"),
    "control": ("ctrlDeps", "ctrl_deps"),
    "data": ("data_deps", "dataDeps"),
    "start": ("start_time_micros", "startTimeMicros"),
    "duration": ("runtime", "duration_micros", "durationMicros"),
}
_RESERVED = frozenset(name for names in _SPELLINGS.values() for name in names)
_IO_PARTS = ("values", "shapes", "types")
_RANGES = {
    Wire.INT32: (-(1 << 31), 1 << 31),
    Wire.SINT32: (-(1 << 31), 1 << 31),
    Wire.SFIXED32: (-(1 << 31), 1 << 31),
    Wire.UINT32: (0, 1 << 32),
    Wire.FIXED32: (0, 1 << 32),
    Wire.UINT64: (0, _LIMIT),
    Wire.FIXED64: (0, _LIMIT),
}


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


_VALUE_FIELDS = {**WIRE_OF, **{_camel(name): wire for name, wire in WIRE_OF.items()}}
_TYPE_NAMES = {**{kind.name: kind.value for kind in NodeType}, **{f"{kind.name}_NODE": kind.value for kind in NodeType}}


def read_json(data: bytes, report: ReadReport) -> ChakraTrace:
    """Either form as a trace.

    Raises:
        FormatError: if it is JSON of another kind.
    """
    text = data.decode("utf-8-sig", "replace")
    if "\ufffd" in text:
        report.repair(BAD_UTF8, count=max(text.count("\ufffd") - data.count("\ufffd".encode()), 0))
    first, _ = _value(text, 0)
    match = re.search(r'"workload_graph"\s*:\s*\[', text)
    if isinstance(first, dict) and isinstance(first.get("workload_graph"), list):
        return _Reader(report).graph(first, first["workload_graph"], "chakra et json")
    if first is None and match:
        report.repair(CUT_JSON)
        return _Reader(report).graph({}, _elements(text, match.end()), "chakra et json")
    if isinstance(first, dict) and _is_message(first):
        return _Reader(report).messages(_concatenated(text, report))
    problem = "JSON that is no Chakra trace" if first is not None else "damaged JSON, or no Chakra trace"
    raise FormatError(report.path, problem, 'name a file with a "workload_graph" or the output of chakra_jsonizer')


def _value(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at ``at`` and the place behind it; None if there is none."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at


def _elements(text: str, at: int) -> Iterator[Any]:
    """The elements of a list that begins at ``at``, as far as they are whole."""
    while True:
        element, at = _value(text, at)
        if element is None:
            return
        yield element
        comma = re.compile(r"\s*,").match(text, at)
        if comma is None:
            return
        at = comma.end()


def _concatenated(text: str, report: ReadReport) -> Iterator[Any]:
    at, last = 0, len(text.rstrip())
    while at < last:
        value, end = _value(text, at)
        if value is None:
            report.repair(CUT_JSON, f"character {at}")
            return
        yield value
        at = end


_MESSAGE_KEYS = frozenset(
    {
        "version", "attr", "id", "name", "type", "ctrlDeps", "dataDeps", "startTimeMicros", "durationMicros", "inputs",
        "outputs", "ctrl_deps", "data_deps", "start_time_micros", "duration_micros",
    }
)  # fmt: skip


def _is_message(value: dict[str, Any]) -> bool:
    """Whether an object is a GlobalMetadata or Node in protobuf's JSON."""
    attributes = value.get("attr", [])
    return bool(value) and value.keys() <= _MESSAGE_KEYS and isinstance(attributes, list)


class _Reader:
    def __init__(self, report: ReadReport) -> None:
        self._report = report
        self._builder = Builder()

    def _finish(self, kind: str, **members: Any) -> ChakraTrace:
        trace = self._builder.trace(self._report, **members)
        self._report.kind = kind
        count_types(trace)
        return trace

    # -- the form with "workload_graph" ----------------------------------------------------------------------------

    def graph(self, top: dict[str, Any], items: Iterable[Any], kind: str) -> ChakraTrace:
        """The trace of a document and the nodes in it."""
        for at, item in enumerate(items):
            if isinstance(item, dict):
                self._add(item, f"node {at}")
            else:
                self._report.drop("element that is no node", f"node {at}")
        given = top.get("metadata")
        metadata: dict[str, Any] = {}
        for name, value in (given if isinstance(given, dict) else {}).items():
            if self._wire(value, name) is not None:
                metadata[_clean(name)] = _cleaned(value)
        version = top.get("version", "")
        wires = {name: wire_of(value) for name, value in metadata.items()}
        wrote = _clean(version) if isinstance(version, str) else ""
        return self._finish(kind, metadata=metadata, metadata_wires=wires, wrote_version=wrote)

    def _add(self, item: dict[str, Any], place: str) -> None:
        node_id = self._number(_first(item, "id"), "id", place)
        if node_id is None:
            self._report.drop("node without an id", place)
            return
        attributes: list[Attribute] = []
        io = [""] * 6
        for key, value in item.items():
            if key in _RESERVED:
                continue
            if key in ("inputs", "outputs") and isinstance(value, dict):
                texts = [value.get(part) for part in _IO_PARTS]
                begin = 3 if key == "outputs" else 0
                io[begin : begin + 3] = [_clean(text) if isinstance(text, str) else "" for text in texts]
                continue
            wire = self._wire(value, place)
            if wire is not None:
                attributes.append((_clean(key), wire, _cleaned(value), ""))
        self._builder.add(
            node_id,
            self._name(_first(item, "name"), place),
            self._type(_first(item, "type"), place),
            control=self._ids(_first(item, "control"), place),
            data=self._ids(_first(item, "data"), place),
            start_micros=self._number(_first(item, "start"), "start", place) or 0,
            duration_micros=self._number(_first(item, "duration"), "runtime", place) or 0,
            io=io,
            attributes=attributes,
        )

    def _wire(self, value: Any, place: str) -> Wire | None:
        try:
            return wire_of(value)
        except TypeError:
            self._report.drop("attribute of a value that Chakra does not have", place)
            return None

    def _name(self, value: Any, place: str) -> str:
        if value is not None and not isinstance(value, str):
            self._report.repair("name that is no text", place)
        return "" if value is None else _clean(value if isinstance(value, str) else str(value))

    def _type(self, value: Any, place: str) -> int:
        if isinstance(value, str) and value in _TYPE_NAMES:
            return _TYPE_NAMES[value]
        if isinstance(value, int) and -(1 << 31) <= value < 1 << 31:
            return int(value)
        if value is not None:
            self._report.repair("node type that is none: INVALID", place)
        return 0

    def _ids(self, value: Any, place: str) -> list[int]:
        ids = [self._number(element, "dependency", place) for element in (value if isinstance(value, list) else [])]
        return [found for found in ids if found is not None]

    def _number(self, value: Any, what: str, place: str) -> int | None:
        """A number from 0 to 2^64 - 1, of an integer, a whole text (protobuf writes 64 bits so), or a rounded float."""
        if value is None:
            return None
        number: int | None = None
        if isinstance(value, int) and not isinstance(value, bool):
            number = value
        elif isinstance(value, str) and re.fullmatch(r"\d{1,20}", value, re.ASCII):
            number = int(value)
        elif isinstance(value, float) and math.isfinite(value):
            number = round(value)
            self._report.repair(f"{what} that is no integer: rounded", place)
        if number is None or not 0 <= number < _LIMIT:
            self._report.drop(f"{what} that is no number from 0 to 2^64 - 1", place)
            return None
        return number

    # -- protobuf's JSON, message by message -------------------------------------------------------------

    def messages(self, items: Iterable[Any]) -> ChakraTrace:
        """The trace of protobuf's JSON objects."""
        metadata: dict[str, Any] = {}
        wires: dict[str, Wire] = {}
        version = ""
        for at, item in enumerate(items):
            place = f"message {at}"
            if not isinstance(item, dict):
                self._report.drop("message that is no object", place)
            elif at == 0 and item.keys() <= {"version", "attr"}:
                version = _clean(item["version"]) if isinstance(item.get("version"), str) else ""
                for name, wire, value, _ in self._attributes(item.get("attr"), place):
                    metadata[name], wires[name] = value, Wire(wire)
            else:
                self._add_message(item, place)
        return self._finish("chakra et jsonized", metadata=metadata, metadata_wires=wires, wrote_version=version)

    def _add_message(self, item: dict[str, Any], place: str) -> None:
        io: list[str] = []
        for side in ("inputs", "outputs"):
            texts = item.get(side)
            texts = texts if isinstance(texts, dict) else {}
            io += [_clean(text) if isinstance(text := texts.get(part), str) else "" for part in _IO_PARTS]
        unknown = item.keys() - _MESSAGE_KEYS
        self._report.note("member that no node has, skipped", place, len(unknown))
        self._builder.add(
            self._number(item.get("id"), "id", place) or 0,
            self._name(item.get("name"), place),
            self._type(item.get("type"), place),
            control=self._ids(_first(item, "control"), place),
            data=self._ids(_first(item, "data"), place),
            start_micros=self._number(_first(item, "start"), "start", place) or 0,
            duration_micros=self._number(_first(item, "duration"), "duration", place) or 0,
            io=io,
            attributes=self._attributes(item.get("attr"), place),
        )

    def _attributes(self, items: Any, place: str) -> Iterator[Attribute]:
        for item in items if isinstance(items, list) else []:
            if not isinstance(item, dict):
                self._report.drop("attribute that is no object", place)
                continue
            name, doc = item.get("name", ""), item.get("docString", item.get("doc_string", ""))
            wire, value = Wire.NONE, None
            try:
                for key in item:
                    if key in _VALUE_FIELDS:
                        wire = _VALUE_FIELDS[key]
                        value = _protobuf_value(wire, item[key])
            except (TypeError, ValueError, OverflowError, AttributeError):
                self._report.drop("attribute whose value is not of its type", place)
                continue
            if isinstance(name, str) and isinstance(doc, str):
                yield _clean(name), wire, value, _clean(doc)
            else:
                self._report.drop("attribute whose name is no text", place)


def _first(item: dict[str, Any], what: str) -> Any:
    return next((item[name] for name in _SPELLINGS[what] if name in item), None)


def _clean(text: str) -> str:
    """A text that UTF-8 can hold: JSON can escape half of a pair."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return _clean(value)
    if isinstance(value, list):
        wire = wire_of(value)
        return [float(element) if wire == Wire.DOUBLE_LIST else _cleaned(element) for element in value]
    return value


def _protobuf_value(wire: Wire, value: Any) -> Any:
    """A value of protobuf's JSON as a Python value of its type; raises ValueError and its like if it is none."""
    if wire % 2 == 0:
        values = value.get("values", [])
        if not isinstance(values, list):
            raise TypeError("no list")
        return [_protobuf_value(Wire(wire - 1), element) for element in values]
    if wire == Wire.BOOL:
        if not isinstance(value, bool):
            raise TypeError("no bool")
        return value
    if wire == Wire.STRING:
        return _clean(value + "")
    if wire == Wire.BYTES:
        text = value.replace("-", "+").replace("_", "/")
        try:
            return base64.b64decode(text + "=" * (-len(text) % 4))
        except binascii.Error:
            raise ValueError("no base64") from None
    if isinstance(value, bool):
        raise TypeError("no number")
    if wire in (Wire.DOUBLE, Wire.FLOAT):
        number = float(value)
        return float(np.float32(number)) if wire == Wire.FLOAT else number
    low, high = _RANGES.get(wire, (-(1 << 63), 1 << 63))
    whole = int(value)
    if not low <= whole < high or (isinstance(value, float) and whole != value):
        raise ValueError("out of range")
    return whole


# -- writing -----------------------------------------------------------------------------------------------------------


def to_json(trace: ChakraTrace, lost: Counter[str]) -> Iterator[str]:
    """The pieces of the document ``{"workload_graph": ...}``; ``lost`` counts what the form cannot carry."""
    dump = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
    metadata = {}
    for name, value in trace.metadata.items():
        if _carries(trace.metadata_wires.get(name), value, lost, "metadata"):
            metadata[name] = value
    yield "{"
    if trace.wrote_version:
        yield f'"version": {dump(trace.wrote_version)}, '
    if metadata:
        yield f'"metadata": {dump(metadata)}, '
    yield '"workload_graph": ['
    separator = "\n"
    for node in _json_nodes(trace, lost):
        yield separator + dump(node)
        separator = ",\n"
    yield "\n]}\n"


def _json_nodes(trace: ChakraTrace, lost: Counter[str]) -> Iterator[dict[str, Any]]:
    nodes = trace.nodes
    columns = [nodes[name].tolist() for name in ("id", "type", "start_micros", "duration_micros")]
    names = nodes.texts("name")
    io = {name: nodes.texts(name) for name in IO_COLUMNS if name in nodes}
    keys = trace.attributes.texts("name")
    first = trace.first_attribute.tolist()
    if "doc_string" in trace.attributes:
        lost["doc string of an attribute"] += int((trace.attributes["doc_string"] >= 0).sum())
    for row, (node_id, kind, start, duration) in enumerate(zip(*columns, strict=True)):
        node: dict[str, Any] = {
            "Id": node_id,
            "Name": names[row],
            "NodeType": kind,
            "ctrlDeps": trace.control.of(row).tolist(),
            "data_deps": trace.data.of(row).tolist(),
            "runtime": duration,
        }
        if start:
            node["start_time_micros"] = start
        for column, texts in io.items():
            if texts[row]:
                side, part = column.split("_")
                node.setdefault(side, {})[part] = texts[row]
        for attribute in range(first[row], first[row + 1]):
            key, value = keys[attribute], trace.value(attribute)
            if key in node or key in _RESERVED:
                lost["attribute of a name that its node has already"] += 1
            elif _carries(Wire(int(trace.attributes["wire"][attribute])), value, lost, "attribute"):
                node[key] = value
        yield node


def _carries(wire: Wire | None, value: Any, lost: Counter[str], what: str) -> bool:
    """Whether JSON holds a value; counts it if not, or if its type will be another one when it is read."""
    try:
        natural = wire_of(value)
    except TypeError:
        natural = Wire.BYTES
    parts = value if isinstance(value, list) else [value]
    if natural in (Wire.BYTES, Wire.BYTES_LIST) or any(isinstance(p, float) and not math.isfinite(p) for p in parts):
        lost[f"{what} of bytes, or of a number that is not finite"] += 1
        return False
    if wire is not None and wire != natural:
        lost[f"type of {'an ' if what == 'attribute' else ''}{what}"] += 1
    return True
