"""Chakra files of all versions: what is read and written, and what the report says of it."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.json_format import MessageToJson

from foretrace.formats.chakra import ChakraTrace, CommType, NodeType, Wire
from foretrace.formats.chakra import read as reading
from foretrace.formats.chakra import write as writing
from foretrace.formats.chakra.builder import Builder
from foretrace.formats.chakra.read import read_chakra
from foretrace.formats.chakra.schema import VERSIONS, messages
from foretrace.formats.chakra.write import write_chakra, write_json
from foretrace.formats.sources import Source
from foretrace.trace import FormatError, StringTable
from tests.formats.chakra_files import (
    SCHEMA,
    et,
    frame,
    metadata_of_trace,
    of_metadata,
    of_node,
    of_trace,
    parsed,
    small_nodes,
    split,
    varint,
)


@pytest.fixture(params=["protobuf", "compiled"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small files go through protobuf, others through compiled code; both must do the same."""
    is_compiled = request.param == "compiled"
    monkeypatch.setattr(reading, "SMALL_BYTES", 1 if is_compiled else 1 << 40)
    monkeypatch.setattr(writing, "SMALL_ROWS", 0 if is_compiled else 1 << 40)
    return str(request.param)


def read_bytes(folder: Path, data: bytes, name: str = "trace.0.et") -> ChakraTrace:
    path = folder / name
    path.write_bytes(data)
    return read_chakra(path)


# -- v0.0.4 ------------------------------------------------------------------------------------------------------------


def test_a_small_file(tmp_path: Path, way: str) -> None:
    metadata = SCHEMA.GlobalMetadata(version="0.0.4")
    metadata.attr.add(name="schema", string_val="1.1.1-chakra.0.0.4")
    metadata.attr.add(name="pid", uint64_val=1 << 63)
    nodes = small_nodes()
    trace = read_bytes(tmp_path, et(nodes, metadata), "job.17.et")
    assert of_trace(trace) == [of_node(node) for node in nodes]
    assert metadata_of_trace(trace) == of_metadata(metadata)
    assert (trace.rank, trace.version, trace.wrote_version) == (17, "v0.0.4", "0.0.4")
    assert trace.integers("comm_size").tolist()[3] == 8
    assert trace.texts("pg_name")[3] == "1"
    report = trace.report
    assert (report.kind, report.events) == ("chakra et v0.0.4", {"COMP": 9, "COMM_COLL": 3})
    assert "metadata name a version" in report.examples["version"]
    assert not report.warnings


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("x.3.et", 3),
        ("x.3.et.gz", 3),
        ("x.3.json", 3),
        ("chakra.0.0.4.12.et", 12),
        ("x.et", -1),
        ("x3.et", -1),
        ("x.3", 3),
        ("x.99999999999999.et", -1),
    ],
)
def test_ranks_of_names(tmp_path: Path, name: str, rank: int) -> None:
    assert read_bytes(tmp_path, et(small_nodes(2)), name).rank == rank


def test_sources_gzip_and_progress(tmp_path: Path, way: str) -> None:
    data = et(small_nodes())
    wanted = of_trace(read_bytes(tmp_path, data))
    packed = tmp_path / "packed.4.et.gz"
    packed.write_bytes(gzip.compress(data))
    seen: list[int] = []
    trace = read_chakra(Source.of(packed, "archive.zip!packed.4.et.gz"), seen.append)
    assert of_trace(trace) == wanted
    assert (trace.rank, trace.report.path, sum(seen)) == (4, "archive.zip!packed.4.et.gz", packed.stat().st_size)
    packed.write_bytes(gzip.compress(data)[:-20])
    cut = read_chakra(packed)
    assert of_trace(cut) == wanted[: cut.num_nodes]
    assert cut.report.repaired["truncated gzip stream: kept what precedes the cut"] == 1


def unpacked(node: Any) -> bytes:
    """A node whose dependencies stand alone, as proto2 writes them, after all else and mixed."""
    control, data = list(node.ctrl_deps), list(node.data_deps)
    rest = type(node).FromString(node.SerializeToString())
    rest.ClearField("ctrl_deps")
    rest.ClearField("data_deps")
    parts = [rest.SerializeToString(), *(b"\x20" + varint(i) for i in control), *(b"\x28" + varint(i) for i in data)]
    return b"".join(parts)


def test_dependencies_packed_or_not(tmp_path: Path, way: str) -> None:
    nodes = small_nodes()
    for at, node in enumerate(nodes):
        node.data_deps.append((1 << (5 * at)) + 3)
    data = frame(SCHEMA.GlobalMetadata(version="0.0.4").SerializeToString())
    trace = read_bytes(tmp_path, data + b"".join(frame(unpacked(node)) for node in nodes))
    assert of_trace(trace) == [of_node(node) for node in nodes]
    assert trace.data.ids.dtype == np.uint64
    assert trace.control.ids.dtype == np.uint8


def test_unknown_fields_are_skipped_and_counted(tmp_path: Path, way: str) -> None:
    node = small_nodes(1)[0]
    extra = b"".join(
        (b"\x58\x05", b"\x5a\x03abc", b"\x61" + b"x" * 8, b"\x6d" + b"x" * 4, b"\x73\x08\x01\x74", b"\xa2\x06\x00")
    )
    data = et([]) + frame(node.SerializeToString() + extra) + frame(small_nodes(2)[1].SerializeToString())
    trace = read_bytes(tmp_path, data)
    assert of_trace(trace) == [of_node(node) for node in small_nodes(2)]
    assert trace.report.noted == {"field that no version of Chakra has, skipped": 6}


def test_empty_messages_are_counted_and_not_the_end(tmp_path: Path, way: str) -> None:
    first, second = (frame(node.SerializeToString()) for node in small_nodes(2))
    trace = read_bytes(tmp_path, et([]) + first + b"\0\0" + second + b"\0")
    assert trace.num_nodes == 2
    assert trace.report.dropped == {"message of no length, left out": 3}


def test_malformed_messages_leave_no_row(tmp_path: Path, way: str) -> None:
    good = [frame(node.SerializeToString()) for node in small_nodes(3)]
    # Its last field claims more bytes than the message has; what stands before must leave no trace.
    bad = small_nodes(4)[3].SerializeToString() + b"\x52\x7f\x0a"
    data = et([]) + good[0] + frame(bad) + good[1] + frame(bad) + good[2]
    trace = read_bytes(tmp_path, data)
    assert of_trace(trace) == [of_node(node) for node in small_nodes(3)]
    assert trace.report.dropped == {"message that is no node, left out": 2}
    assert trace.report.examples["message that is no node, left out"] == f"byte {len(et([])) + len(good[0])}"


def test_a_file_cut_anywhere_gives_the_whole_nodes(tmp_path: Path, way: str) -> None:
    nodes = small_nodes(5)
    data, wanted = et(nodes), [of_node(node) for node in nodes]
    ends = np.cumsum([len(frame(message)) for message in split(data)]).tolist()
    for cut in range(ends[0], len(data)):
        trace = read_bytes(tmp_path, data[:cut])
        assert of_trace(trace) == wanted[: sum(end <= cut for end in ends[1:])]
        is_cut = cut not in ends
        assert trace.report.repaired.total() == is_cut
        if is_cut:
            place = trace.report.examples["the file ends within a message: kept the nodes before it"]
            assert place == f"byte {max(end for end in ends if end <= cut)}"


@pytest.mark.parametrize("size", [1, 64, 97, 1000])
def test_any_block_size_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    nodes = small_nodes(200)
    data = et(nodes)
    monkeypatch.setattr(reading, "SMALL_BYTES", 1)
    monkeypatch.setattr(reading, "_HEAD_BYTES", 1)
    monkeypatch.setattr(reading, "_BLOCK_BYTES", size)
    assert of_trace(read_bytes(tmp_path, data)) == [of_node(node) for node in nodes]
    cut = read_bytes(tmp_path, gzip.compress(data[:-5]))
    assert of_trace(cut) == [of_node(node) for node in nodes[:-1]]
    assert cut.report.repaired == {"the file ends within a message: kept the nodes before it": 1}


@pytest.mark.parametrize("length", [b"\xff\xff\xff\xff\x0f", b"\xff\xff\xff\xff\xff\xff\x01"])
def test_a_length_that_cannot_be(tmp_path: Path, way: str, length: bytes) -> None:
    trace = read_bytes(tmp_path, et(small_nodes(3)) + length + b"rest")
    assert trace.num_nodes == 3
    assert trace.report.repaired == {"a length that cannot be one: kept the nodes before it": 1}


def test_text_that_is_no_utf8(tmp_path: Path, way: str) -> None:
    lenient = messages(lenient=True)
    nodes = [lenient.Node(id=1, name=b"caf\xe9"), lenient.Node(id=2, name=b"caf\xe8"), lenient.Node(id=3, name=b"ok")]
    nodes[2].attr.add(name=b"l").string_list.values.extend([b"\xff", "é".encode()])
    nodes[2].attr.add(name=b"caf\xe9", bytes_val=b"\xff\xfe")
    trace = read_bytes(tmp_path, et(nodes))
    assert trace.nodes.texts("name") == ["caf\ufffd", "caf\ufffd", "ok"]
    assert trace.attributes.texts("name") == ["l", "caf\ufffd"]
    assert [trace.value(0), trace.value(1)] == [["\ufffd", "é"], b"\xff\xfe"]
    assert len(set(trace.strings)) == len(trace.strings)
    assert "text that is no UTF-8: each wrong byte replaced" in trace.report.repaired


def test_texts_that_are_valid_only_together(tmp_path: Path, way: str) -> None:
    lenient = messages(lenient=True)
    nodes = [lenient.Node(id=1, name=b"x\xc3"), lenient.Node(id=2, name=b"\xa9y")]
    assert read_bytes(tmp_path, et(nodes)).nodes.texts("name") == ["x\ufffd", "\ufffdy"]


def test_node_types_that_v004_does_not_have(tmp_path: Path, way: str) -> None:
    nodes = [SCHEMA.Node(id=1, type=8), SCHEMA.Node(id=2, type=-1), SCHEMA.Node(id=3, type=1 << 20)]
    trace = read_bytes(tmp_path, et(nodes))
    assert trace.nodes["type"].tolist() == [8, -1, 1 << 20]
    assert trace.report.noted == {"node of a type that v0.0.4 does not have": 3}


def test_a_node_larger_than_all_buffers(tmp_path: Path, way: str) -> None:
    big = SCHEMA.Node(id=1 << 40, name="n" * 300_000)
    big.data_deps.extend(range(150_000))
    for at in range(70_000):
        big.attr.add(name=f"key {at % 9000}", string_val=f"value {at}")
    nodes = [*small_nodes(3), big, small_nodes(4)[3]]
    trace = read_bytes(tmp_path, et(nodes))
    assert of_trace(trace) == [of_node(node) for node in nodes]
    write_chakra(trace, tmp_path / "again.et")
    assert (tmp_path / "again.et").read_bytes() == et(nodes)


def test_columns_that_begin_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled way takes texts of inputs and doc strings into account where they first occur."""
    monkeypatch.setattr(reading, "SMALL_BYTES", 1)
    nodes = [SCHEMA.Node(id=at, name="n") for at in range(1, 20_000)]
    for node in nodes[::3]:
        node.attr.add(name="a", int32_val=-1)
    nodes[-2].outputs.shapes = "[[1]]"
    nodes[-1].attr.add(name="a", doc_string="said", float_val=0.5)
    trace = read_bytes(tmp_path, et(nodes))
    assert of_trace(trace) == [of_node(node) for node in nodes]


def test_as_many_names_as_nodes(tmp_path: Path, way: str) -> None:
    nodes = [SCHEMA.Node(id=at, name=f"operator number {at} of all") for at in range(1, 20_001)]
    trace = read_bytes(tmp_path, et(nodes))
    assert len(trace.strings) == 20_000
    assert trace.strings.find("operator number 777 of all") == trace.nodes["name"][776]
    assert trace.nodes.texts("name") == [node.name for node in nodes]
    assert trace.nodes["name"].dtype == np.int16


def test_columns_are_narrow(tmp_path: Path, way: str) -> None:
    trace = read_bytes(tmp_path, et(small_nodes()))
    assert {trace.nodes[name].dtype.itemsize for name in ("name", "type", "start_micros")} == {1}
    assert (trace.data.ids.dtype, trace.data.first.dtype, trace.nodes["id"].dtype) == (np.uint8, np.int32, np.uint64)


# -- other versions ----------------------------------------------------------------------------------------------------


def test_metadata_of_2023(tmp_path: Path, way: str) -> None:
    """For some weeks attributes stood in field 1 of the metadata, then in field 2 without a version."""
    item = SCHEMA.AttributeProto(name="schema", string_val="1.0.1").SerializeToString()
    nodes = [frame(node.SerializeToString()) for node in small_nodes(3)]
    for tag in (b"\x0a", b"\x12"):
        trace = read_bytes(tmp_path, b"".join((frame(tag + frame(item)), *nodes)))
        assert (trace.version, trace.wrote_version, trace.num_nodes) == ("v0.0.4", "", 3)
        assert trace.metadata == {"schema": "1.0.1"}
    trace = read_bytes(tmp_path, b"".join(nodes))
    assert (trace.version, trace.metadata, trace.num_nodes) == ("v0.0.4", {}, 3)
    assert not trace.report.guessed


def test_a_version_that_nothing_tells(tmp_path: Path, way: str) -> None:
    trace = read_bytes(tmp_path, frame(SCHEMA.Node(id=4, name="a", type=4).SerializeToString()))
    assert trace.version == "v0.0.4"
    assert trace.report.guessed == {"version v0.0.4: nothing in the file tells it": 1}


def test_v001(tmp_path: Path, way: str) -> None:
    schema = messages("v0.0.1")
    nodes = [
        schema.Node(id=0, name="load", node_type=1, tensor_loc=2, tensor_size=1 << 40),
        schema.Node(id=1, name="work", node_type=3, simulated_run_time=55, num_ops=10**12, parent=[0]),
        schema.Node(id=2, name="sum", node_type=6, comm_type=1, comm_size=4096, involved_dim=[True, False]),
        schema.Node(id=3, name="send", node_type=4, comm_dst=3, comm_tag=1 << 31, comm_size=1, parent=[1, 2]),
        schema.Node(id=4, name="receive", node_type=5, comm_src=1, comm_priority=2, communicator_id=7),
        schema.Node(id=5, name="store", node_type=2, comm_type=0),
    ]
    nodes += [schema.Node(id=6 + at, name="c", node_type=6, comm_type=at) for at in (2, 3, 4)]
    trace = read_bytes(tmp_path, b"".join(frame(node.SerializeToString()) for node in nodes))
    assert (trace.version, trace.wrote_version) == ("v0.0.1", "")
    assert trace.report.kind == "chakra et v0.0.1" and not trace.report.warnings
    assert trace.nodes["type"].tolist() == [
        NodeType.MEM_LOAD, NodeType.COMP, NodeType.COMM_COLL, NodeType.COMM_SEND, NodeType.COMM_RECV,
        NodeType.MEM_STORE, NodeType.COMM_COLL, NodeType.COMM_COLL, NodeType.COMM_COLL,
    ]  # fmt: skip
    found = of_trace(trace)
    assert found[0]["attributes"] == [("tensor_loc", "UINT32", "2", ""), ("tensor_size", "UINT64", str(1 << 40), "")]
    assert (found[1]["duration"], found[1]["data"], found[1]["control"]) == (55, [0], [])
    assert found[2]["attributes"] == [
        ("comm_type", "INT64", "0", ""),
        ("comm_size", "INT64", "4096", ""),
        ("involved_dim", "BOOL_LIST", "[True, False]", ""),
    ]
    assert ("comm_tag", "UINT32", str(1 << 31), "") in found[3]["attributes"]
    assert ("pg_name", "STRING", "'7'", "") in found[4]["attributes"]
    assert found[5]["attributes"] == []
    collectives = [CommType.ALL_TO_ALL, CommType.ALL_GATHER, CommType.REDUCE_SCATTER]
    assert trace.integers("comm_type").tolist()[6:] == collectives
    write_chakra(trace, tmp_path / "new.0.et")
    again = read_chakra(tmp_path / "new.0.et")
    assert (again.version, again.wrote_version, of_trace(again)) == ("v0.0.4", "0.0.4", found)


def test_v002(tmp_path: Path, way: str) -> None:
    schema = messages("v0.0.2")
    nodes = [schema.Node(id=at, name=f"n{at}", type=3 if at < 4 else 6, parent=[at - 1] * (at > 0)) for at in range(6)]
    for node in nodes:
        node.attribute.add(name="runtime", type=1, i=12)
        node.attribute.add(name="is_cpu_op", type=1, i=1)
    for node, kind in zip(nodes[4:], (2, 3), strict=True):
        node.attribute.add(name="comm_type", type=1, i=kind)
    nodes[0].inputs, nodes[0].output_types = "[1, 2]", "['Tensor']"
    item = nodes[1].attribute
    item.add(name="f", type=0, f=0.5, doc_string="a half")
    item.add(name="s", type=2, s="text")
    item.add(name="fs", type=3, floats=[0.25, 1.0])
    item.add(name="is", type=4, ints=[-1, 5])
    item.add(name="ss", type=5, strings=["a", "é"])
    item.add(name="none", type=4)
    trace = read_bytes(tmp_path, b"".join(frame(node.SerializeToString()) for node in nodes))
    assert trace.version == "v0.0.2" and not trace.report.warnings
    assert trace.nodes["type"].tolist() == [NodeType.COMP] * 4 + [NodeType.COMM_COLL] * 2
    assert trace.nodes["duration_micros"].tolist() == [12] * 6
    assert trace.integers("comm_type").tolist()[4:] == [CommType.ALL_GATHER, CommType.REDUCE_SCATTER]
    found = of_trace(trace)
    assert found[0]["io"] == ["[1, 2]", "", "", "", "", "['Tensor']"]
    assert found[3]["data"] == [2]
    assert found[1]["attributes"][1:] == [
        ("f", "FLOAT", "0.5", "a half"),
        ("s", "STRING", "'text'", ""),
        ("fs", "FLOAT_LIST", "[0.25, 1.0]", ""),
        ("is", "INT64_LIST", "[-1, 5]", ""),
        ("ss", "STRING_LIST", "['a', 'é']", ""),
        ("none", "INT64_LIST", "[]", ""),
    ]


def test_v003(tmp_path: Path, way: str) -> None:
    schema = messages("v0.0.3")
    metadata = schema.GlobalMetadata()
    metadata.attribute.add(name="schema", type=4, s="1.0.2")
    nodes = [schema.Node(id=9, name="meta", type=1), schema.Node(id=10, name="cast", type=7, parent=[9])]
    items = nodes[1].attribute
    items.add(name="runtime", type=3, i=8)
    items.add(name="comm_type", type=3, i=4)
    items.add(name="is_cpu_op", type=0, b=False)
    items.add(name="f", type=1, f=-0.0)
    items.add(name="u", type=2, u=(1 << 64) - 1)
    items.add(name="s", type=4, s="")
    items.add(name="bs", type=5, bools=[True])
    items.add(name="us", type=7, uints=[1 << 63])
    trace = read_bytes(tmp_path, et(nodes, metadata))
    assert (trace.version, trace.metadata) == ("v0.0.3", {"schema": "1.0.2"})
    assert trace.nodes["type"].tolist() == [NodeType.METADATA, NodeType.COMM_COLL]
    assert of_trace(trace)[1]["attributes"] == [
        ("comm_type", "INT64", "5", ""),
        ("is_cpu_op", "BOOL", "False", ""),
        ("f", "FLOAT", "-0.0", ""),
        ("u", "UINT64", str((1 << 64) - 1), ""),
        ("s", "STRING", "''", ""),
        ("bs", "BOOL_LIST", "[True]", ""),
        ("us", "UINT64_LIST", str([1 << 63]), ""),
    ]
    assert trace.nodes["duration_micros"].tolist() == [0, 8]


def test_numbers_that_an_old_version_does_not_have(tmp_path: Path) -> None:
    lenient = messages("v0.0.1", lenient=True)
    nodes = [lenient.Node(id=0, name=b"a", node_type=9, comm_type=8, num_ops=1)]
    trace = read_bytes(tmp_path, frame(nodes[0].SerializeToString()))
    assert (trace.nodes["type"].tolist(), trace.integers("comm_type").tolist()) == ([0], [-1])
    assert trace.report.repaired == {"node type that its version does not have: INVALID": 1}
    assert trace.report.dropped == {"collective that its version does not have": 1}


def test_our_schemas_live_beside_another_chakra() -> None:
    """mlcommons' package registers the same names in protobuf's default pool."""
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    file.message_type.add(name="Node").field.add(name="other", number=1, type=5, label=1)
    descriptor_pool.Default().Add(file)
    for version in VERSIONS:
        assert "id" in messages.__wrapped__(version).Node.DESCRIPTOR.fields_by_name


# -- JSON --------------------------------------------------------------------------------------------------------------


def graph(*nodes: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"workload_graph": list(nodes), **more}).encode()


def test_json_form(tmp_path: Path) -> None:
    node = {"Id": 4, "Name": "sum", "NodeType": 7, "ctrlDeps": [1], "data_deps": [2, 3], "runtime": 6}
    node |= {
        "is_cpu_op": False,
        "comm_size": 1 << 63,
        "tensor_size": 5,
        "share": 0.5,
        "dims": [True],
        "mixed": [1, 0.5],
    }
    trace = read_bytes(tmp_path, graph(node), "x.2.json")
    (found,) = of_trace(trace)
    assert (found["id"], found["type"], found["control"], found["data"], found["duration"]) == (4, 7, [1], [2, 3], 6)
    assert found["attributes"] == [
        ("is_cpu_op", "BOOL", "False", ""),
        ("comm_size", "UINT64", str(1 << 63), ""),
        ("tensor_size", "INT64", "5", ""),
        ("share", "DOUBLE", "0.5", ""),
        ("dims", "BOOL_LIST", "[True]", ""),
        ("mixed", "DOUBLE_LIST", "[1.0, 0.5]", ""),
    ]
    assert (trace.rank, trace.report.kind) == (2, "chakra et json")
    assert not trace.report.warnings


def test_json_form_with_faults(tmp_path: Path) -> None:
    nodes: list[Any] = [
        {"Id": 1, "Name": 5, "NodeType": "COMP_NODE", "runtime": 2.6, "data_deps": [-1, "7", None], "x": {"y": 1}},
        {"Name": "no id"},
        {"Id": -3},
        17,
        {"Id": "12", "NodeType": [], "ctrl_deps": 4, "Name": "\ud800"},
    ]
    trace = read_bytes(tmp_path, graph(*nodes), "x.json")
    found = of_trace(trace)
    assert [(n["id"], n["name"], n["type"], n["data"], n["duration"]) for n in found] == [
        (1, "5", 4, [7], 3),
        (12, "?", 0, [], 0),
    ]
    assert trace.report.dropped.total() == 6 and trace.report.repaired.total() == 3


def test_json_form_that_is_cut(tmp_path: Path) -> None:
    data = graph({"Id": 1, "Name": "a"}, {"Id": 2, "Name": "b"}, {"Id": 3, "Name": "c"})
    trace = read_bytes(tmp_path, data[:-12], "x.json")
    assert trace.nodes["id"].tolist() == [1, 2]
    assert trace.report.repaired == {"JSON that is cut or damaged: kept the nodes before that place": 1}


@pytest.mark.parametrize("preserve", [False, True])
@pytest.mark.parametrize("indent", [None, 2])
def test_output_of_the_jsonizer(tmp_path: Path, preserve: bool, indent: int | None) -> None:
    nodes = small_nodes()
    for name, value in {"double_val": float("nan"), "bytes_val": b"\xff\0", "sint64_val": -(1 << 63)}.items():
        nodes[0].attr.add(name=name, doc_string="d", **{name: value})
    nodes[1].attr.add(name="e").float_list.values.extend([float("-inf"), 0.5])
    nodes[1].attr.add(name="nothing")
    metadata = SCHEMA.GlobalMetadata(version="0.0.4")
    metadata.attr.add(name="schema", string_val="1.0.1")
    text = "".join(
        MessageToJson(message, indent=indent, preserving_proto_field_name=preserve) for message in [metadata, *nodes]
    )
    trace = read_bytes(tmp_path, text.encode(), "out.5.json")
    assert of_trace(trace) == [of_node(node) for node in nodes]
    assert (trace.rank, trace.wrote_version, trace.metadata) == (5, "0.0.4", {"schema": "1.0.1"})
    assert trace.report.kind == "chakra et jsonized" and not trace.report.warnings
    cut = read_bytes(tmp_path, text[:-9].encode(), "out.5.json")
    assert of_trace(cut) == [of_node(node) for node in nodes[:-1]]


def test_json_round_trip(tmp_path: Path) -> None:
    builder = Builder()
    attributes: list[Any] = [
        ("is_cpu_op", Wire.BOOL, True, ""), ("n", Wire.INT64, -5, ""), ("big", Wire.UINT64, 1 << 63, ""),
        ("share", Wire.DOUBLE, 1.0, ""), ("text", Wire.STRING, "é\n", ""), ("list", Wire.STRING_LIST, ["a", ""], ""),
        ("nothing", Wire.NONE, None, ""), ("inputs", Wire.STRING_LIST, ["as STAGE writes it"], ""),
    ]  # fmt: skip
    builder.add(1 << 63, "é", 4, data=[1], control=[2], start_micros=5, duration_micros=6, attributes=attributes)
    builder.add(2, "", 7, io=["v", "", "t", "", "s", ""])
    trace = builder.trace(metadata={"schema": "1", "n": 3}, wrote_version="0.0.4")
    assert write_json(trace, tmp_path / "x.0.json") == {}
    again = read_chakra(tmp_path / "x.0.json")
    assert of_trace(again) == of_trace(trace)
    assert (again.metadata, again.wrote_version) == (trace.metadata, "0.0.4")
    assert write_json(trace, tmp_path / "x.0.json.gz") == {}
    assert of_trace(read_chakra(tmp_path / "x.0.json.gz")) == of_trace(trace)


def test_json_counts_what_it_cannot_carry(tmp_path: Path) -> None:
    builder = Builder()
    attributes: list[Any] = [
        ("a", Wire.INT32, 1, ""), ("b", Wire.BYTES, b"x", ""), ("c", Wire.DOUBLE, float("nan"), ""),
        ("a", Wire.INT64, 2, ""), ("Id", Wire.INT64, 3, ""), ("d", Wire.INT64, 4, "doc"),
        ("l", Wire.INT32_LIST, [], ""),
        ("f", Wire.FLOAT_LIST, [float("inf")], ""), ("bs", Wire.BYTES_LIST, [b""], ""),
    ]  # fmt: skip
    builder.add(1, attributes=attributes)
    trace = builder.trace(metadata={"b": b"", "i": 1}, metadata_wires={"b": Wire.BYTES, "i": Wire.SINT32})
    assert write_json(trace, tmp_path / "x.json") == {
        "attribute of bytes, or of a number that is not finite": 4,
        "attribute of a name that its node has already": 2,
        "type of an attribute": 2,
        "doc string of an attribute": 1,
        "metadata of bytes, or of a number that is not finite": 1,
        "type of metadata": 1,
    }
    (node,) = json.loads((tmp_path / "x.json").read_text())["workload_graph"]
    assert (node["Id"], node["a"], node["d"], node["l"]) == (1, 1, 4, [])


# -- writing -----------------------------------------------------------------------------------------------------------


def test_written_files_are_those_of_protobuf(tmp_path: Path, way: str) -> None:
    metadata = SCHEMA.GlobalMetadata(version="0.0.4")
    metadata.attr.add(name="schema", string_val="1.1.1-chakra.0.0.4")
    metadata.attr.add(name="finish_ts", uint64_val=7)
    data = et(small_nodes(40), metadata)
    trace = read_bytes(tmp_path, data)
    write_chakra(trace, tmp_path / "again.0.et")
    assert (tmp_path / "again.0.et").read_bytes() == data
    write_chakra(trace, tmp_path / "again.0.et.gz")
    assert gzip.decompress((tmp_path / "again.0.et.gz").read_bytes()) == data
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.0.et", "again.0.et.gz", "trace.0.et"]


def test_a_node_of_defaults_alone_is_no_empty_message(tmp_path: Path, way: str) -> None:
    builder = Builder()
    builder.add(0)
    builder.add(1)
    write_chakra(builder.trace(), tmp_path / "x.et")
    metadata, nodes = parsed(tmp_path / "x.et")
    assert metadata.version == "0.0.4"
    assert [node.id for node in nodes] == [0, 1]
    assert min(map(len, split((tmp_path / "x.et").read_bytes()))) > 0
    assert of_trace(read_chakra(tmp_path / "x.et")) == of_trace(builder.trace())


def test_a_trace_without_nodes(tmp_path: Path, way: str) -> None:
    write_chakra(Builder().trace(metadata={"schema": "x"}), tmp_path / "x.et")
    trace = read_chakra(tmp_path / "x.et")
    assert (trace.num_nodes, trace.metadata, of_trace(trace)) == (0, {"schema": "x"}, [])


@pytest.mark.parametrize(
    ("wire", "value"), [(Wire.INT32, 1 << 31), (Wire.UINT32, -1), (Wire.SFIXED32, -(1 << 40)), (Wire.FIXED32, 1 << 32)]
)
def test_values_that_do_not_fit_are_refused(tmp_path: Path, way: str, wire: Wire, value: int) -> None:
    builder = Builder()
    builder.add(1, attributes=[("x", wire, value, "")])
    with pytest.raises(ValueError, match="attribute 'x'"):
        write_chakra(builder.trace(), tmp_path / "x.et")
    assert not list(tmp_path.iterdir())


def test_a_failure_leaves_the_old_file(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.et"
    path.write_bytes(b"old")
    trace = Builder().trace(metadata={"bad": object()})
    with pytest.raises(TypeError):
        write_chakra(trace, path)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.et"]


def test_traces_that_others_made_are_written(tmp_path: Path, way: str) -> None:
    """Columns of any integer type, texts that were added after reading."""
    trace = read_bytes(tmp_path, et(small_nodes(6)))
    trace.nodes._columns["name"] = np.full(6, trace.strings.intern("a name that is new: é"), np.int64)
    trace.nodes._columns["type"] = trace.nodes["type"].astype(np.int64)
    trace.data.first = trace.data.first.astype(np.int64)
    write_chakra(trace, tmp_path / "y.et")
    _, nodes = parsed(tmp_path / "y.et")
    assert [of_node(node) for node in nodes] == of_trace(trace)
    assert nodes[3].name == "a name that is new: é"


# -- files that are none -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.et", b"", "empty"),
        ("text.et", b"hello, this is a text and no trace at all\n" * 9, "no Chakra trace"),
        ("page.et", b"<html></html>", "no Chakra trace"),
        ("zeros.et", b"\0" * 4000, "no Chakra trace"),
        ("ones.et", b"\xff" * 4000, "no Chakra trace"),
        ("image.et", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)), "no Chakra trace"),
        ("kineto.json", b'{"traceEvents": [{"ph": "X"}]}', "no Chakra trace"),
        ("host.json", b'{"schema": "1.0.2", "nodes": []}', "no Chakra trace"),
        ("empty.json", b"{}", "no Chakra trace"),
        ("open.json", b'{"workload', "no Chakra trace"),
        ("list.json", b"[1, 2]", "no Chakra trace"),
        ("deep.json", b'{"a":' * 100_000, "no Chakra trace"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(
    tmp_path: Path, way: str, name: str, content: bytes, message: str
) -> None:
    with pytest.raises(FormatError, match=message) as error:
        read_bytes(tmp_path, content, name)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_missing_files(tmp_path: Path) -> None:
    for path in (tmp_path / "nope.et", tmp_path):
        with pytest.raises(FormatError):
            read_chakra(path)


# -- strings -----------------------------------------------------------------------------------------------------------


def test_strings_that_are_decoded_when_needed() -> None:
    texts = ["a", "", "é", "longer than eight bytes"]
    data = np.frombuffer("".join(texts).encode(), np.uint8)
    first = np.cumsum([0, *(len(text.encode()) for text in texts)])
    table = StringTable.from_utf8(data, first)
    assert len(table) == 4
    assert [table.find(text) for text in (*texts, "no", "\ud800")] == [0, 1, 2, 3, -1, -1]
    assert table._list is None  # nothing was decoded yet
    assert table.to_utf8()[0] is data
    assert table.intern("new") == 4
    assert (list(table), table.intern("é"), table.find("new")) == ([*texts, "new"], 2, 4)
    encoded, ends = table.to_utf8()
    assert (encoded.tobytes().decode(), ends.tolist()) == ("".join(texts) + "new", [*first.tolist(), first[-1] + 3])


def test_small_files_do_not_import_numba(tmp_path: Path) -> None:
    (tmp_path / "x.0.et").write_bytes(et(small_nodes(300)))
    code = (
        "import sys; from foretrace.formats.chakra.read import read_chakra; "
        "from foretrace.formats.chakra.write import write_chakra; "
        f"trace = read_chakra({str(tmp_path / 'x.0.et')!r}); write_chakra(trace, {str(tmp_path / 'y.0.et')!r}); "
        "assert trace.num_nodes == 300; assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
    assert (tmp_path / "y.0.et").read_bytes() == (tmp_path / "x.0.et").read_bytes()


# -- a recorded trace --------------------------------------------------------------------------------------------------


def test_a_recorded_trace(shared: Path, tmp_path: Path, way: str) -> None:
    path = shared / "traces" / "chakra-et" / "dangling-deps.0.et"
    trace = read_chakra(path)
    _, nodes = parsed(path)
    assert of_trace(trace) == [of_node(node) for node in nodes]
    assert (trace.rank, trace.num_nodes, len(trace.data.ids)) == (0, 3664, sum(len(n.data_deps) for n in nodes))
    assert trace.report.events == {"COMP": 3643, "COMM_COLL": 21} and not trace.report.warnings
    assert trace.metadata["schema"] == "1.0.1"
    write_chakra(trace, tmp_path / "again.0.et")
    assert split((tmp_path / "again.0.et").read_bytes())[1:] == split(path.read_bytes())[1:]
