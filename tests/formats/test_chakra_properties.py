"""Properties of reading and writing Chakra files: what protobuf writes is read, what is written protobuf reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.formats.chakra import ChakraTrace, Dependencies, Wire
from foretrace.formats.chakra import read as reading
from foretrace.formats.chakra import write as writing
from foretrace.formats.chakra.builder import Builder
from foretrace.formats.chakra.read import read_chakra
from foretrace.formats.chakra.write import write_chakra, write_json
from tests.formats.chakra_files import (
    SCHEMA,
    et,
    metadata_of_trace,
    of_metadata,
    of_node,
    of_trace,
    parsed,
)

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
ids = st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1))
_INT32, _INT64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
_UINT32, _UINT64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "double": st.floats(),
    "float": st.floats(width=32),
    **dict.fromkeys(("int32", "sint32", "sfixed32"), _INT32),
    **dict.fromkeys(("int64", "sint64", "sfixed64"), _INT64),
    **dict.fromkeys(("uint32", "fixed32"), _UINT32),
    **dict.fromkeys(("uint64", "fixed64"), _UINT64),
    "bool": st.booleans(),
    "string": texts,
    "bytes": st.binary(max_size=20),
}
keys = st.one_of(st.sampled_from(["is_cpu_op", "comm_type", "comm_size", "x", ""]), texts)


@st.composite
def attributes(draw: st.DrawFn, owner: Any) -> None:
    """Add an attribute of any type, or of none, to a message."""
    item = owner.attr.add(name=draw(keys), doc_string=draw(st.one_of(st.just(""), texts)))
    kind = draw(st.sampled_from([*VALUES, None]))
    if kind is None:
        return
    if draw(st.booleans()):
        setattr(item, f"{kind}_val", draw(VALUES[kind]))
    else:
        values = getattr(item, f"{kind}_list")
        values.SetInParent()
        values.values.extend(draw(st.lists(VALUES[kind], max_size=4)))


@st.composite
def nodes(draw: st.DrawFn) -> Any:
    node = SCHEMA.Node(
        id=draw(ids),
        name=draw(texts),
        type=draw(st.one_of(st.integers(0, 7), _INT32)),
        ctrl_deps=draw(st.lists(ids, max_size=4)),
        data_deps=draw(st.lists(ids, max_size=4)),
        start_time_micros=draw(_UINT64),
        duration_micros=draw(ids),
    )
    for side in draw(st.sets(st.sampled_from(["inputs", "outputs"]))):
        for part in draw(st.sets(st.sampled_from(["values", "shapes", "types"]))):
            setattr(getattr(node, side), part, draw(texts))
    for _ in range(draw(st.integers(0, 4))):
        draw(attributes(node))
    return node


@st.composite
def files(draw: st.DrawFn) -> tuple[Any, list[Any]]:
    metadata = SCHEMA.GlobalMetadata(version=draw(st.sampled_from(["0.0.4", "1.1.1-chakra.0.0.4", "é"])))
    for _ in range(draw(st.integers(0, 3))):
        draw(attributes(metadata))
    return metadata, draw(st.lists(nodes(), max_size=8))


def with_way(is_compiled: bool, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reading, "SMALL_BYTES", 1 if is_compiled else 1 << 40)
    patch.setattr(writing, "SMALL_ROWS", 0 if is_compiled else 1 << 40)


@pytest.mark.parametrize("is_compiled", [False, True])
@given(file=files())
def test_what_protobuf_writes_is_read_and_written_again(
    tmp_path_factory: pytest.TempPathFactory, is_compiled: bool, file: tuple[Any, list[Any]]
) -> None:
    metadata, messages = file
    folder = tmp_path_factory.mktemp("et")
    (folder / "a.3.et").write_bytes(et(messages, metadata))
    # A message of no length is no node: only what says something is in the file.
    wanted = [of_node(node) for node in messages if node.ByteSize()]
    with pytest.MonkeyPatch.context() as patch:
        with_way(is_compiled, patch)
        trace = read_chakra(folder / "a.3.et")
        assert of_trace(trace) == wanted
        assert metadata_of_trace(trace) == of_metadata(metadata)
        assert trace.wrote_version == metadata.version
        assert len(set(trace.strings)) == len(trace.strings)
        write_chakra(trace, folder / "b.3.et")
        again = read_chakra(folder / "b.3.et")
        same(again, trace)
        with_way(not is_compiled, patch)
        write_chakra(trace, folder / "c.3.et")
        same(read_chakra(folder / "b.3.et"), trace)
    assert (folder / "b.3.et").read_bytes() == (folder / "c.3.et").read_bytes()
    first, rest = parsed(folder / "b.3.et")
    assert [of_node(node) for node in rest] == wanted
    assert (first.version, of_metadata(first)) == (metadata.version, of_metadata(metadata))


def same(one: ChakraTrace, other: ChakraTrace) -> None:
    """Equal content, and equal columns of equal types."""
    assert of_trace(one) == of_trace(other)
    assert metadata_of_trace(one) == metadata_of_trace(other)
    assert (one.rank, one.wrote_version, one.version) == (other.rank, other.wrote_version, other.version)
    for mine, theirs in ((one.nodes, other.nodes), (one.attributes, other.attributes)):
        assert list(mine) == list(theirs)
        is_text = [name in mine.strings for name in mine]
        dtypes = [(mine[name].dtype, theirs[name].dtype) for name, text in zip(mine, is_text, strict=True) if not text]
        assert all(a == b for a, b in dtypes)
    pairs: list[tuple[Dependencies, Dependencies]] = [(one.control, other.control), (one.data, other.data)]
    for deps, others in pairs:
        assert (deps.ids.dtype, deps.first.dtype) == (others.ids.dtype, others.first.dtype)
        np.testing.assert_array_equal(deps.first, others.first)


_JSON_WIRES: dict[Wire, st.SearchStrategy[Any]] = {
    Wire.BOOL: st.booleans(),
    Wire.INT64: _INT64,
    Wire.UINT64: st.integers(2**63, 2**64 - 1),
    Wire.DOUBLE: st.floats(allow_nan=False, allow_infinity=False),
    Wire.STRING: texts,
    Wire.NONE: st.none(),
    Wire.BOOL_LIST: st.lists(st.booleans(), min_size=1, max_size=3),
    Wire.INT64_LIST: st.lists(_INT64, min_size=1, max_size=3),
    Wire.DOUBLE_LIST: st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=3),
    Wire.STRING_LIST: st.lists(texts, max_size=3),
}
_TAKEN = {"Id", "id", "Name", "name", "NodeType", "type", "node_type", "ctrlDeps", "ctrl_deps", "data_deps", "dataDeps"}
_TAKEN |= {"start_time_micros", "startTimeMicros", "runtime", "duration_micros", "durationMicros", "inputs", "outputs"}


@st.composite
def json_traces(draw: st.DrawFn) -> ChakraTrace:
    """Traces that the JSON form can say."""
    builder = Builder()
    for _ in range(draw(st.integers(0, 5))):
        names = draw(st.lists(texts.filter(lambda name: name not in _TAKEN), unique=True, max_size=4))
        wires = [draw(st.sampled_from([*_JSON_WIRES])) for _ in names]
        builder.add(
            draw(ids),
            draw(texts),
            draw(st.integers(0, 10)),
            control=draw(st.lists(ids, max_size=3)),
            data=draw(st.lists(ids, max_size=3)),
            start_micros=draw(ids),
            duration_micros=draw(ids),
            io=draw(st.one_of(st.just([]), st.lists(texts, min_size=6, max_size=6))),
            attributes=[(name, wire, draw(_JSON_WIRES[wire]), "") for name, wire in zip(names, wires, strict=True)],
        )
    return builder.trace()


@given(trace=json_traces())
def test_json_reads_back_equal(tmp_path_factory: pytest.TempPathFactory, trace: ChakraTrace) -> None:
    path = tmp_path_factory.mktemp("json") / "x.json"
    assert write_json(trace, path) == {}
    again = read_chakra(path)
    assert of_trace(again) == of_trace(trace)
    assert not again.report.warnings or set(again.report.warnings) == {"node of a type that v0.0.4 does not have"}


@given(file=files())
def test_what_json_loses_is_counted(tmp_path_factory: pytest.TempPathFactory, file: tuple[Any, list[Any]]) -> None:
    """Whatever differs after reading back was counted when writing; nodes and dependencies never differ."""
    folder = tmp_path_factory.mktemp("json")
    (folder / "x.et").write_bytes(et(file[1], file[0]))
    trace = read_chakra(folder / "x.et")
    lost = write_json(trace, Path(folder / "x.json"))
    again = read_chakra(folder / "x.json")
    plain, found = ([{**node, "attributes": None} for node in of_trace(t)] for t in (trace, again))
    assert plain == found
    if of_trace(trace) != of_trace(again):
        assert lost.total() > 0
