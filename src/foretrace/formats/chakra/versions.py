"""Which version of Chakra a file has, told from its messages; and v0.0.1 to v0.0.3 as v0.0.4 says it.

Nothing in a file names its schema, and the versions use the same field numbers for different things. What tells them
apart is which fields hold numbers and which hold bytes:

- v0.0.1 has no metadata message, and parameters of a node are numbers in fields 8 to 20;
- v0.0.2 and v0.0.3 have attributes in field 11, which hold their type as a number in field 2; the two differ in the
  fields of the values;
- v0.0.4 has attributes in field 10.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from foretrace.formats.chakra.builder import Attribute, Builder
from foretrace.formats.chakra.messages import (
    UNKNOWN_FIELD,
    Texts,
    add_node,
    count_unknown,
    messages,
    parse,
    read_metadata,
)  # fmt: skip
from foretrace.formats.chakra.trace import CommType, NodeType, Wire
from foretrace.trace import ReadReport

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

MALFORMED = "message that is no node, left out"
EMPTY = "message of no length, left out"
CUT = "the file ends within a message: kept the nodes before it"
BROKEN = "a length that cannot be one: kept the nodes before it"


class Field(NamedTuple):
    """One field of a message: its number, wire type, and its number or bytes."""

    number: int
    kind: int
    value: Any


def varint(data: bytes, at: int, most: int = 10) -> tuple[int, int]:
    """The number at ``at`` and the position behind it; the position is -1 if it is cut or too long."""
    value = 0
    for index in range(min(most, len(data) - at)):
        byte = data[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at + index + 1
    return 0, -1


def fields(message: bytes) -> list[Field] | None:
    """All fields of a message, one level deep; None if it is malformed (groups count as that here)."""
    found: list[Field] = []
    at = 0
    while at < len(message):
        tag, at = varint(message, at, 5)
        kind = tag & 7
        if at < 0 or tag < 8 or tag >> 32 or kind in (3, 4, 6, 7):
            return None
        value: Any = None
        if kind == VARINT:
            value, at = varint(message, at)
        else:
            size = 8 if kind == FIXED64 else 4
            if kind == BYTES:
                size, at = varint(message, at, 5)
            if at < 0 or size > len(message) - at:
                return None
            value = message[at : at + size]
            at += size
        if at < 0:
            return None
        found.append(Field(tag >> 3, kind, value))
    return found


@dataclass
class Frames:
    """The messages of a file, each with the byte that it begins at; `problem` says why they ended early."""

    data: bytes
    start: int = 0
    is_whole: bool = True
    problem: str = ""
    problem_at: int = -1

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        at, end = self.start, len(self.data)
        while at < end:
            size, begin = varint(self.data, at, 5)
            if (begin < 0 and end - at >= 5) or size > 0x7FFFFFFF:
                self.problem, self.problem_at = BROKEN, at
                return
            if begin < 0 or size > end - begin:
                if self.is_whole:
                    self.problem, self.problem_at = CUT, at
                return
            yield at, self.data[begin : begin + size]
            at = begin + size


@dataclass(frozen=True)
class Told:
    """A version and what told it.

    Attributes:
        metadata: the fields of the metadata message, None if the file has none.
        nodes_at: the byte where the nodes begin.
    """

    version: str
    how: str
    is_guess: bool = False
    metadata: tuple[Field, ...] | None = None
    nodes_at: int = 0


def tell(frames: Frames) -> Told:
    """The version of a file from its first messages."""
    metadata: tuple[Field, ...] | None = None
    votes: Counter[str] = Counter()
    nodes_at = frames.start
    is_first = True
    for at, message in frames:
        if is_first and (metadata := _as_metadata(message)) is not None:
            _, begin = varint(frames.data, at, 5)
            nodes_at = begin + len(message)
            for field in metadata:
                if _is_attribute(field.value, old=True):
                    votes.update(("old attributes", *_old_attribute_votes(field.value)))
        elif message:
            for vote in _votes(fields(message) or []):
                votes[vote] += 1
        is_first = is_first and not message
        if at > 1 << 12 and votes["v0.0.4"] + votes["v0.0.1"] + votes["old attributes"] > 0:
            break
    return _decide(votes, metadata, nodes_at)


def _decide(votes: Counter[str], metadata: tuple[Field, ...] | None, nodes_at: int) -> Told:
    if any(f.number == 1 and not votes["old attributes"] and not _is_attribute(f.value) for f in metadata or ()):
        return Told("v0.0.4", "its metadata name a version", metadata=metadata, nodes_at=nodes_at)
    if votes["v0.0.4"]:
        return Told("v0.0.4", "attributes in field 10", metadata=metadata, nodes_at=nodes_at)
    if votes["old attributes"]:
        if votes["v0.0.2"] > votes["v0.0.3"]:
            return Told("v0.0.2", "attributes in field 11, integers in 5", metadata=metadata, nodes_at=nodes_at)
        return Told("v0.0.3", "attributes in field 11, integers in 7", metadata=metadata, nodes_at=nodes_at)
    if votes["v0.0.1"]:
        return Told("v0.0.1", "parameters of nodes in fields of their own", metadata=metadata, nodes_at=nodes_at)
    if votes["like v0.0.4"] or metadata is not None:
        return Told("v0.0.4", "packed dependencies or metadata", metadata=metadata, nodes_at=nodes_at)
    if votes["like v0.0.1"]:
        return Told("v0.0.1", "a node 0 whose id is written out", metadata=metadata, nodes_at=nodes_at)
    return Told("v0.0.4", "nothing in the file tells it", True, metadata, nodes_at)


def _votes(node: list[Field]) -> Iterator[str]:
    if node and all(field.number != 1 for field in node):
        yield "like v0.0.4"  # proto3 leaves out an id of 0, proto2 does not
    for number, kind, value in node:
        if number == 10 and kind == BYTES and _is_attribute(value):
            yield "v0.0.4"
        elif number == 11 and kind == BYTES and _is_attribute(value, old=True):
            yield "old attributes"
            yield from _old_attribute_votes(value)
        elif 8 <= number <= 20 and kind == VARINT:
            yield "v0.0.1"
        elif number == 4 and kind == BYTES:
            yield "like v0.0.4"
        elif number == 1 and value == 0:
            yield "like v0.0.1"


def _old_attribute_votes(attribute: bytes) -> Iterator[str]:
    for number, kind, _ in fields(attribute) or []:
        if (number, kind) in {(4, FIXED32), (5, VARINT), (6, BYTES), (7, FIXED32), (8, VARINT), (9, BYTES)}:
            yield "v0.0.2"
        elif number >= 4:
            yield "v0.0.3"


def _is_attribute(message: Any, old: bool = False) -> bool:
    """Whether bytes are an AttributeProto: a name first, and in field 2 a type if it is an old one, else no number."""
    parts = fields(message) if isinstance(message, bytes) else None
    if not parts or parts[0].number != 1 or parts[0].kind != BYTES:
        return False
    has_type = any(part.number == 2 and part.kind == VARINT for part in parts)
    return has_type if old else not has_type


def _as_metadata(message: bytes) -> tuple[Field, ...] | None:
    """The fields of a GlobalMetadata: a version and attributes, or attributes in field 1; None if it is a node.

    In field 1 a node has a number. One without an id has its name in field 2, which is no attribute.
    """
    parts = fields(message)
    if not parts or any(part.number > 2 or part.kind != BYTES for part in parts):
        return None
    is_metadata = any(part.number == 1 for part in parts) or all(_is_attribute(part.value) for part in parts)
    return tuple(parts) if is_metadata else None


# -- numbers of the old versions as v0.0.4 numbers them ----------------------------------------------------------------

_TYPES_WITHOUT_METADATA = (
    NodeType.INVALID, NodeType.MEM_LOAD, NodeType.MEM_STORE, NodeType.COMP, NodeType.COMM_SEND, NodeType.COMM_RECV,
    NodeType.COMM_COLL,
)  # fmt: skip
NODE_TYPES: dict[str, tuple[NodeType, ...]] = {
    "v0.0.1": _TYPES_WITHOUT_METADATA,
    "v0.0.2": _TYPES_WITHOUT_METADATA,
    "v0.0.3": tuple(NodeType),
}
_COLLECTIVES = (CommType.ALL_REDUCE, CommType.ALL_TO_ALL, CommType.ALL_GATHER, CommType.REDUCE_SCATTER)
COMM_TYPES: dict[str, tuple[CommType | None, ...]] = {
    "v0.0.1": (None, *_COLLECTIVES),
    "v0.0.2": _COLLECTIVES,
    "v0.0.3": (*_COLLECTIVES, CommType.BROADCAST),
}

# Fields of v0.0.1 and the attributes that say the same today, with their types.
_PARAMETERS = {
    "tensor_loc": Wire.UINT32,
    "tensor_size": Wire.UINT64,
    "input_tensor_loc": Wire.UINT32,
    "input_tensor_size": Wire.UINT64,
    "output_tensor_loc": Wire.UINT32,
    "output_tensor_size": Wire.UINT64,
    "num_ops": Wire.INT64,
    "comm_type": Wire.INT64,
    "comm_src": Wire.INT32,
    "comm_dst": Wire.INT32,
    "comm_size": Wire.INT64,
    "comm_tag": Wire.INT32,
    "comm_priority": Wire.INT32,
}
_OLD_VALUES = {
    "v0.0.2": {"f": Wire.FLOAT, "i": Wire.INT64, "s": Wire.STRING},
    "v0.0.3": {"b": Wire.BOOL, "f": Wire.FLOAT, "u": Wire.UINT64, "i": Wire.INT64, "s": Wire.STRING},
}
_OLD_IO = ("inputs", "input_shapes", "input_types", "outputs", "output_shapes", "output_types")


class MessageReader:
    """Reads the messages of one file through protobuf into a `Builder`, whatever version they have."""

    def __init__(self, told: Told, report: ReadReport) -> None:
        self.told = told
        self.builder = Builder()
        self.bad = 0
        self._report = report
        self.text = Texts(report)
        self._schema = messages(told.version, lenient=True)

    def read(self, frames: Iterable[tuple[int, bytes]]) -> None:
        """Add the nodes of all frames."""
        for at, content in frames:
            if not content:
                self._report.drop(EMPTY, f"byte {at}")
                continue
            node = parse(self._schema.Node, content)
            if node is None:
                self.bad += 1
                self._report.drop(MALFORMED, f"byte {at}")
                continue
            self._report.note(UNKNOWN_FIELD, f"byte {at}", count_unknown(node))
            if self.told.version == "v0.0.4":
                add_node(self.builder, node, self.text)
            elif self.told.version == "v0.0.1":
                self._add_first(node)
            else:
                self._add_old(node)

    def metadata(self) -> tuple[str, dict[str, Any], dict[str, Wire]]:
        """Version, attributes and their types of the metadata message."""
        found = self.told.metadata or ()
        if self.told.version in ("v0.0.2", "v0.0.3"):
            attributes = [parse(self._schema.AttributeProto, part.value) for part in found]
            pairs = [self._old_attribute(item) for item in attributes if item is not None]
            return "", {a[0]: a[2] for a in pairs}, {a[0]: Wire(a[1]) for a in pairs}
        message = messages(lenient=True).GlobalMetadata()
        for number, _, value in found:
            if number == 2 or _is_attribute(value):  # for some weeks of 2023 they stood in field 1
                item = parse(messages(lenient=True).AttributeProto, value)
                if item is None:
                    self._report.drop("metadata that cannot be read")
                else:
                    message.attr.append(item)
            else:
                message.version = value
        return read_metadata(message, self.text, self._report)

    def _type(self, number: int) -> int:
        table = NODE_TYPES[self.told.version]
        if not 0 <= number < len(table):
            self._report.repair("node type that its version does not have: INVALID", str(number))
            return NodeType.INVALID
        return table[number]

    def _comm_type(self, number: int) -> CommType | None:
        table = COMM_TYPES[self.told.version]
        if not 0 <= number < len(table):
            self._report.drop("collective that its version does not have", str(number))
            return None
        return table[number]

    def _add_first(self, node: Any) -> None:
        attributes: list[Attribute] = []
        for name, wire in _PARAMETERS.items():
            if not node.HasField(name):
                continue
            value = getattr(node, name)
            if name == "comm_type":
                value = self._comm_type(value)
            if value is not None:
                attributes.append((name, *_fitting(wire, value), ""))
        if node.involved_dim:
            attributes.append(("involved_dim", Wire.BOOL_LIST, list(node.involved_dim), ""))
        if node.HasField("communicator_id"):
            attributes.append(("pg_name", Wire.STRING, str(node.communicator_id), ""))
        self.builder.add(
            node.id,
            self.text(node.name),
            self._type(node.node_type),
            data=node.parent,
            duration_micros=node.simulated_run_time,
            attributes=attributes,
        )

    def _add_old(self, node: Any) -> None:
        attributes: list[Attribute] = []
        duration = 0
        for item in node.attribute:
            name, wire, value, doc = self._old_attribute(item)
            is_integer = isinstance(value, int)
            if name == "runtime" and is_integer:
                duration = max(value, 0)
                continue
            if name == "comm_type" and is_integer:
                value = self._comm_type(value)
                if value is None:
                    continue
            attributes.append((name, wire, value, doc))
        io = [self.text(getattr(node, name)) for name in _OLD_IO]
        self.builder.add(
            node.id,
            self.text(node.name),
            self._type(node.type),
            data=node.parent,
            duration_micros=duration,
            io=io,
            attributes=attributes,
        )

    def _old_attribute(self, item: Any) -> Attribute:
        kinds = _OLD_VALUES[self.told.version]
        name, doc = self.text(item.name), self.text(item.doc_string)
        for field, wire in kinds.items():
            if item.HasField(field):
                value = getattr(item, field)
                return name, wire, self.text(value) if wire == Wire.STRING else value, doc
        lists = [(f"{field}s" if field != "s" else "strings", Wire(wire + 1)) for field, wire in kinds.items()]
        lists = [({"bs": "bools", "fs": "floats", "us": "uints", "is": "ints"}.get(f, f), w) for f, w in lists]
        for field, wire in lists:
            values = list(getattr(item, field))
            if values:
                return name, wire, [self.text(v) for v in values] if wire == Wire.STRING_LIST else values, doc
        # An empty list: the number of its type says which.
        index = item.type - len(kinds)
        return (name, lists[index][1], [], doc) if 0 <= index < len(lists) else (name, Wire.NONE, None, doc)


def _fitting(wire: Wire, value: int) -> tuple[Wire, int]:
    """The type, or the next wider one where the value needs it."""
    if wire == Wire.INT32 and value >= 1 << 31:
        return Wire.UINT32, value
    if wire == Wire.INT64 and value >= 1 << 63:
        return Wire.UINT64, value
    return wire, int(value)
