"""Messages of Chakra files as protobuf objects: metadata, small files of v0.0.4, and lists in attributes."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from foretrace.formats.chakra.builder import Attribute, Builder
from foretrace.formats.chakra.schema import VALUE_TYPES, messages
from foretrace.formats.chakra.trace import Wire
from foretrace.trace import ReadReport

UNKNOWN_FIELD = "field that no version of Chakra has, skipped"
BAD_UTF8 = "text that is no UTF-8: each wrong byte replaced"

# The field of AttributeProto by `Wire`, and back.
FIELD_OF: dict[int, str] = {
    3 + 2 * index + is_list: f"{name}_{'list' if is_list else 'val'}"
    for index, name in enumerate(VALUE_TYPES)
    for is_list in (0, 1)
}
WIRE_OF = {name: Wire(number) for number, name in FIELD_OF.items()}


def parse(kind: type[Message], content: bytes) -> Any:
    """A message, or None if protobuf refuses the bytes."""
    message = kind()
    try:
        message.ParseFromString(content)
    except DecodeError:
        return None
    return message


class Texts:
    """Decodes text fields; what is no UTF-8 is mended and counted once for each text."""

    def __init__(self, report: ReadReport) -> None:
        self._report = report
        self._bad: set[bytes] = set()

    def __call__(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            if raw not in self._bad:
                self._bad.add(raw)
                self._report.repair(BAD_UTF8)
            return raw.decode(errors="replace")


def attribute_value(message: Any, text: Texts) -> tuple[Wire, Any]:
    """Type and Python value of a lenient AttributeProto of v0.0.4."""
    name = message.WhichOneof("value")
    if name is None:
        return Wire.NONE, None
    wire, value = WIRE_OF[name], getattr(message, name)
    if wire == Wire.STRING:
        return wire, text(value)
    if wire == Wire.STRING_LIST:
        return wire, [text(element) for element in value.values]
    return wire, list(value.values) if wire % 2 == 0 else value


def attributes_of(items: Any, text: Texts) -> Iterator[Attribute]:
    """The attributes of a lenient v0.0.4 message."""
    for item in items:
        yield (text(item.name), *attribute_value(item, text), text(item.doc_string))


def add_node(builder: Builder, node: Any, text: Texts) -> None:
    """Add a lenient Node of v0.0.4."""
    io: list[str] = []
    if node.HasField("inputs") or node.HasField("outputs"):
        io = [
            text(getattr(side, part)) for side in (node.inputs, node.outputs) for part in ("values", "shapes", "types")
        ]
    builder.add(
        node.id,
        text(node.name),
        node.type,
        control=node.ctrl_deps,
        data=node.data_deps,
        start_micros=node.start_time_micros,
        duration_micros=node.duration_micros,
        io=io,
        attributes=attributes_of(node.attr, text),
    )


def count_unknown(message: Any) -> int:
    """Fields of a message, and of all messages in it, that its schema does not have."""
    count = len(UnknownFieldSet(message))
    for field, value in message.ListFields():
        if field.message_type is not None:
            count += sum(map(count_unknown, [value] if isinstance(value, Message) else value))
    return count


def read_metadata(message: Any, text: Texts, report: ReadReport) -> tuple[str, dict[str, Any], dict[str, Wire]]:
    """Version, attributes and their types of a lenient GlobalMetadata of v0.0.4."""
    values: dict[str, Any] = {}
    wires: dict[str, Wire] = {}
    for name, wire, value, _ in attributes_of(message.attr, text):
        if name in values:
            report.drop("metadata of a name that comes again, the last is kept", repr(name))
        values[name], wires[name] = value, Wire(wire)
    return text(message.version), values, wires


def readable(value: Any) -> Any:
    """A value that JSON can hold: bytes become base64."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return [readable(element) for element in value] if isinstance(value, list) else value


__all__ = ["FIELD_OF", "WIRE_OF", "Texts", "add_node", "attribute_value", "attributes_of", "messages", "parse"]
