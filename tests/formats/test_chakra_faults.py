"""Damaged Chakra files: a result or a clear error, the same from the compiled reader and from protobuf's."""

from __future__ import annotations

import json
import random
import resource
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToJson

from foretrace.formats.chakra import read as reading
from foretrace.formats.chakra.read import read_chakra
from foretrace.formats.chakra.schema import messages
from foretrace.formats.chakra.write import write_json
from foretrace.trace import FormatError
from tests.formats.chakra_files import SCHEMA, et, frame, of_trace, small_nodes

VALUE_FIELDS = [field for field in SCHEMA.AttributeProto.DESCRIPTOR.fields if field.number > 2]
SAMPLE: dict[str, Any] = {"string": "text", "bytes": b"\xff\x01", "bool": True, "double": 0.5, "float": 1.5}


def rich_nodes() -> list[Any]:
    """Small nodes, and one with an attribute of every type."""
    nodes = small_nodes(6)
    full = SCHEMA.Node(id=1 << 60, name="é", type=7, start_time_micros=77)
    for field in VALUE_FIELDS:
        item = full.attr.add(name=field.name, doc_string="d" * (field.number % 3))
        value = SAMPLE.get(field.name.split("_")[0], 3)
        if field.message_type is None:
            setattr(item, field.name, value)
        else:
            getattr(item, field.name).values.extend([value] * 3)
    return [*nodes, full]


def old_file(version: str) -> bytes:
    schema = messages(version)
    if version == "v0.0.1":
        nodes = [schema.Node(id=at, name="n", node_type=6, parent=[0], comm_type=1, comm_size=9) for at in range(6)]
        return b"".join(frame(node.SerializeToString()) for node in nodes)
    nodes = [schema.Node(id=at, name="n", type=6, parent=[0], input_shapes="[1]") for at in range(6)]
    for node in nodes:
        node.attribute.add(name="runtime", type=1 if version == "v0.0.2" else 3, i=5)
        node.attribute.add(name="f", type=0 if version == "v0.0.2" else 1, f=5)
        node.attribute.add(name="l", type=5 if version == "v0.0.2" else 9, strings=["a", "b"])
    return b"".join(frame(node.SerializeToString()) for node in nodes)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Files of all forms to be damaged."""
    metadata = SCHEMA.GlobalMetadata(version="0.0.4")
    metadata.attr.add(name="schema", string_val="1.0.1")
    nodes = rich_nodes()
    folder = tmp_path_factory.mktemp("originals")
    (folder / "x.et").write_bytes(et(nodes, metadata))
    write_json(read_chakra(folder / "x.et"), folder / "x.json")
    jsonized = "".join(MessageToJson(message) for message in [metadata, *nodes]).encode()
    old = [old_file(version) for version in ("v0.0.1", "v0.0.2", "v0.0.3")]
    return [et(nodes, metadata)] * 5 + [*old, (folder / "x.json").read_bytes(), jsonized]


def _flip(rng: random.Random, data: bytearray) -> None:
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set(rng: random.Random, data: bytearray) -> None:
    data[rng.randrange(len(data))] = rng.choice((0, 0x7F, 0x80, 0xFF, 0x0A, 0x52, rng.randrange(256)))


def _cut(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data)) :]


def _remove(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.randint(1, 20)]


def _insert(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.choice((rng.randbytes(rng.randint(1, 12)), b"\xff\xff\xff\xff\x07", b"\x80" * 11, b"\0" * 5))


def _repeat(rng: random.Random, data: bytearray) -> None:
    at, to = rng.randrange(len(data)), rng.randrange(len(data))
    data[to:to] = data[at : at + rng.randint(1, 200)]


MUTATIONS: list[Callable[[random.Random, bytearray], None]] = [_flip, _set, _cut, _remove, _insert, _repeat]


def damaged(rng: random.Random, originals: list[bytes]) -> bytes:
    data = bytearray(rng.choice(originals))
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        if data:
            rng.choice(MUTATIONS)(rng, data)
    return bytes(data)


def outcome(path: Path, is_compiled: bool, patch: pytest.MonkeyPatch) -> Any:
    """All that is read and reported, or the message of the error."""
    patch.setattr(reading, "SMALL_BYTES", 1 if is_compiled else 1 << 40)
    try:
        trace = read_chakra(path)
    except FormatError as error:
        assert "\n" not in str(error) and str(path) in str(error)
        return str(error)
    report = trace.report
    # Not the examples: of skipped fields and empty messages, protobuf's way alone says the place.
    return of_trace(trace), trace.metadata_wires, report.repaired, report.dropped, report.noted, report.kind


def fuzz(folder: Path, originals: list[bytes], seed: int, count: int, budget_s: float = 1e9) -> Counter[str]:
    rng = random.Random(seed)
    path = folder / "damaged.0.et"
    seen: Counter[str] = Counter()
    end = time.monotonic() + budget_s
    with pytest.MonkeyPatch.context() as patch:
        for at in range(count):
            if time.monotonic() > end:
                break
            data = damaged(rng, originals)
            path.write_bytes(data)
            one, other = (outcome(path, is_compiled, patch) for is_compiled in (False, True))
            assert one == other, (seed, at, data)
            seen["error" if isinstance(one, str) else "trace"] += 1
    return seen


def test_damaged_files_give_a_result_or_a_clear_error(tmp_path: Path, originals: list[bytes]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen = fuzz(tmp_path, originals, seed=20261201, count=2000)
    assert seen["trace"] > 1200 and seen["error"] > 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # in KiB: compiling is part of it


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_damaged_files(tmp_path: Path, originals: list[bytes]) -> None:
    seen = fuzz(tmp_path, originals, seed=4, count=100_000, budget_s=150)
    assert seen.total() > 10_000


def test_lengths_that_claim_gigabytes(tmp_path: Path) -> None:
    """Claims of a damaged file reserve no memory."""
    claim = b"\xff\xff\xff\xff\x07"  # 2 GiB less one
    node = small_nodes(1)[0].SerializeToString()
    for inner in (b"\x2a" + claim, b"\x22" + claim, b"\x12" + claim, b"\x52" + claim, b"\x42\x06\x0a" + claim):
        for data in (et([]) + frame(node) + frame(inner), et([]) + frame(node) + claim + inner):
            path = tmp_path / "x.et"
            path.write_bytes(data)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with pytest.MonkeyPatch.context() as patch:
                one, other = (outcome(path, is_compiled, patch) for is_compiled in (False, True))
            assert one == other and len(one[0]) == 1
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_a_large_claim_is_not_copied_block_by_block(tmp_path: Path) -> None:
    """A length near the file's own size at its beginning: the time stays that of reading it some few times."""
    path = tmp_path / "x.et"
    body = b"".join(frame(node.SerializeToString()) for node in small_nodes(60)) * 4000
    path.write_bytes(et([]) + b"\xff\xff\xff\x7f" + body)
    trace = read_chakra(path)
    assert trace.num_nodes == 0
    assert trace.report.repaired == {"the file ends within a message: kept the nodes before it": 1}


@pytest.mark.parametrize("text", ["NaN", "1e999", "-0", "9" * 5000, '"\\ud800"', "[[[]]]", "{}", "null", "true"])
def test_json_values_of_any_kind(tmp_path: Path, text: str) -> None:
    keys = ["Id", "Name", "NodeType", "ctrlDeps", "data_deps", "runtime", "start_time_micros", "inputs", "x"]
    for key in keys:
        path = tmp_path / "x.json"
        path.write_text('{"workload_graph": [{"Id": 1, "%s": %s}, {"Id": 2}], "version": %s}' % (key, text, text))  # noqa: UP031
        try:
            trace = read_chakra(path)
        except FormatError as error:
            assert "\n" not in str(error)
        else:
            assert trace.num_nodes <= 2
            write_json(trace, path)
            json.loads(path.read_text())
