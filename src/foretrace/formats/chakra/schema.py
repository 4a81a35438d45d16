"""The protobuf schemas of Chakra, built at run time: no generated code, no clash with another `ChakraProtoMsg`.

Descriptors lie in a pool of their own, so a program may import mlcommons' ``chakra`` package beside this one.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "ChakraProtoMsg"
VERSIONS = ("v0.0.1", "v0.0.2", "v0.0.3", "v0.0.4")

# Types of values in AttributeProto of v0.0.4; each has a field of its own, and the next number is a list of such.
VALUE_TYPES = (
    "double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64", "sfixed32",
    "sfixed64", "bool", "string", "bytes",
)  # fmt: skip

_ENUMS: dict[str, dict[str, tuple[str, ...]]] = {
    "v0.0.4": {
        "NodeType": (
            "INVALID_NODE", "METADATA_NODE", "MEM_LOAD_NODE", "MEM_STORE_NODE", "COMP_NODE", "COMM_SEND_NODE",
            "COMM_RECV_NODE", "COMM_COLL_NODE",
        ),
        "CollectiveCommType": (
            "ALL_REDUCE", "REDUCE", "ALL_GATHER", "GATHER", "SCATTER", "BROADCAST", "ALL_TO_ALL", "REDUCE_SCATTER",
            "REDUCE_SCATTER_BLOCK", "BARRIER",
        ),
    },
    "v0.0.3": {
        "NodeType": (
            "INVALID_NODE", "METADATA_NODE", "MEM_LOAD_NODE", "MEM_STORE_NODE", "COMP_NODE", "COMM_SEND_NODE",
            "COMM_RECV_NODE", "COMM_COLL_NODE",
        ),
        "CollectiveCommType": ("ALL_REDUCE", "ALL_TO_ALL", "ALL_GATHER", "REDUCE_SCATTER", "BROADCAST"),
        "AttributeType": (
            "BOOL", "FLOAT", "UINT", "INT", "STRING", "BOOLS", "FLOATS", "UINTS", "INTS", "STRINGS",
        ),
    },
    "v0.0.2": {
        "NodeType": (
            "INVALID_NODE", "MEM_LOAD_NODE", "MEM_STORE_NODE", "COMP_NODE", "COMM_SEND_NODE", "COMM_RECV_NODE",
            "COMM_COLL_NODE",
        ),
        "CollectiveCommType": ("ALL_REDUCE", "ALL_TO_ALL", "ALL_GATHER", "REDUCE_SCATTER"),
        "AttributeType": ("FLOAT", "INT", "STRING", "FLOATS", "INTS", "STRINGS"),
    },
    "v0.0.1": {
        "NodeType": (
            "INVALID_NODE", "MEM_LOAD_NODE", "MEM_STORE_NODE", "COMP_NODE", "COMM_SEND_NODE", "COMM_RECV_NODE",
            "COMM_COLL_NODE",
        ),
        "MemoryType": ("INVALID_MEMORY", "LOCAL_MEMORY", "REMOTE_MEMORY", "STORAGE_MEMORY"),
        "CollectiveCommType": ("INVALID_COMM", "ALL_REDUCE", "ALL_TO_ALL", "ALL_GATHER", "REDUCE_SCATTER"),
    },
}  # fmt: skip

# Messages as lines of "[repeated] TYPE NAME NUMBER"; "oneof" before a type puts the field into the oneof `value`.
_IO_STRINGS = [
    f"string {name} {number}"
    for number, name in enumerate(
        ("inputs", "input_shapes", "input_types", "outputs", "output_shapes", "output_types"), 5
    )
]
_OLD_NODE = ["uint64 id 1", "string name 2", "NodeType type 3", "repeated uint64 parent 4", *_IO_STRINGS]
_MESSAGES: dict[str, dict[str, list[str]]] = {
    "v0.0.4": {
        **{f"{name.capitalize()}List": [f"repeated {name} values 1"] for name in VALUE_TYPES},
        "AttributeProto": [
            "string name 1",
            "string doc_string 2",
            *(
                f"oneof {kind} {name}_{suffix} {number + 2 * index}"
                for index, name in enumerate(VALUE_TYPES)
                for suffix, kind, number in (("val", name, 3), ("list", f"{name.capitalize()}List", 4))
            ),
        ],
        "GlobalMetadata": ["string version 1", "repeated AttributeProto attr 2"],
        "IOInfo": ["string values 1", "string shapes 2", "string types 3"],
        "Node": [
            "uint64 id 1", "string name 2", "NodeType type 3", "repeated uint64 ctrl_deps 4",
            "repeated uint64 data_deps 5", "uint64 start_time_micros 6", "uint64 duration_micros 7", "IOInfo inputs 8",
            "IOInfo outputs 9", "repeated AttributeProto attr 10",
        ],
        "Tensor": [
            "uint64 tensor_id 1", "uint64 storage_id 2", "uint64 offset 3", "uint64 num_elem 4", "uint64 elem_bytes 5",
            "string device 6",
        ],
    },
    "v0.0.3": {
        "AttributeProto": [
            "string name 1", "AttributeType type 2", "string doc_string 3", "bool b 4", "float f 5", "uint64 u 6",
            "int64 i 7", "string s 8", "repeated bool bools 9", "repeated float floats 10", "repeated uint64 uints 11",
            "repeated int64 ints 12", "repeated string strings 13",
        ],
        "GlobalMetadata": ["repeated AttributeProto attribute 1"],
        "Node": [*_OLD_NODE, "repeated AttributeProto attribute 11"],
    },
    "v0.0.2": {
        "AttributeProto": [
            "string name 1", "AttributeType type 2", "string doc_string 3", "float f 4", "int64 i 5", "string s 6",
            "repeated float floats 7", "repeated int64 ints 8", "repeated string strings 9",
        ],
        "Node": [*_OLD_NODE, "repeated AttributeProto attribute 11"],
    },
    "v0.0.1": {
        "Node": [
            "uint64 id 1", "string name 2", "NodeType node_type 3", "repeated uint64 parent 4",
            "MemoryType tensor_loc 5", "uint64 tensor_size 6", "uint64 simulated_run_time 7",
            "MemoryType input_tensor_loc 8", "uint64 input_tensor_size 9", "MemoryType output_tensor_loc 10",
            "uint64 output_tensor_size 11", "uint64 num_ops 12", "CollectiveCommType comm_type 13",
            "repeated bool involved_dim 14", "uint32 communicator_id 15", "uint32 comm_src 16", "uint32 comm_dst 17",
            "uint64 comm_size 18", "uint32 comm_tag 19", "uint32 comm_priority 20",
        ],
    },
}  # fmt: skip


@cache
def messages(version: str = "v0.0.4", *, lenient: bool = False) -> SimpleNamespace:
    """The message classes of a version: ``messages().Node()``, ``.GlobalMetadata()``, ``.AttributeProto()``, ...

    Args:
        version: ``"v0.0.1"`` to ``"v0.0.4"``. The fields of the first three are optional throughout, so that an
            incomplete node of a damaged file can be read.
        lenient: text fields hold bytes and enumerations plain numbers: such classes read what is no UTF-8 and
            numbers that the version does not know.
    """
    pool = descriptor_pool.DescriptorPool()
    pool.Add(_file(version, lenient))
    names = [*_MESSAGES[version]]
    classes = {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in names}
    return SimpleNamespace(**classes)


def _file(version: str, lenient: bool) -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name=f"foretrace/chakra_{version}{'_lenient' if lenient else ''}.proto",
        package=PACKAGE,
        syntax="proto3" if version == "v0.0.4" else "proto2",
    )
    enums = _ENUMS[version]
    for name, values in enums.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, lines in _MESSAGES[version].items():
        message = file.message_type.add(name=name)
        if any(line.startswith("oneof") for line in lines):
            message.oneof_decl.add(name="value")
        for line in lines:
            _add_field(message, line, enums, lenient)
    return file


def _add_field(message: Any, line: str, enums: dict[str, Any], lenient: bool) -> None:
    *label, kind, name, number = line.split()
    field = message.field.add(name=name, number=int(number))
    kinds = descriptor_pb2.FieldDescriptorProto
    field.label = kinds.LABEL_REPEATED if label == ["repeated"] else kinds.LABEL_OPTIONAL
    if label == ["oneof"]:
        field.oneof_index = 0
    if kind in enums and lenient:
        field.type = kinds.TYPE_INT32
    elif kind in enums:
        field.type = kinds.TYPE_ENUM
        field.type_name = f".{PACKAGE}.{kind}"
    elif kind in VALUE_TYPES:
        kind = "bytes" if lenient and kind == "string" else kind
        field.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
    else:
        field.type = kinds.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"
