"""Reading and writing Chakra ETs against protobuf (upb) in the same run: nodes a second, bytes of a node in memory.

Protobuf's side does what a program has to do with it: split the file into messages, parse each, take its fields, and
put the attributes into a dictionary; writing serializes messages that are made already.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foretrace.formats.chakra.feeder import Feeder
from foretrace.formats.chakra.read import read_chakra
from foretrace.formats.chakra.schema import messages
from foretrace.formats.chakra.trace import ChakraTrace
from foretrace.formats.chakra.write import write_chakra

HERE = Path(__file__).parent
RECORDED = HERE.parent / ".." / "shared" / "traces" / "chakra-et" / "dangling-deps.0.et"
SCHEMA = messages()
ROUNDS = 5
GENERATED_NODES = 1_000_000
PROTOBUF_NODES = 50_000  # as many are measured, and speeds compared: a million objects would not fit a small machine


def _frame(content: bytes) -> bytes:
    size, head = len(content), bytearray()
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes((*head, size)) + content


def generated(count: int) -> bytes:
    """A file of nodes of 87 bytes: three of four are work, the fourth is a collective; two dependencies each."""
    parts = [_frame(SCHEMA.GlobalMetadata(version="0.0.4").SerializeToString())]
    for at in range(count):
        is_collective = at % 4 == 0
        node = SCHEMA.Node(id=at, name=f"layer{at % 48}_forward_mlp", type=7 if is_collective else 4)
        node.duration_micros = 100 + at % 57
        node.data_deps.extend(other for other in (at - 1, at - 3) if other >= 0)
        node.attr.add(name="is_cpu_op", bool_val=False)
        if is_collective:
            node.attr.add(name="comm_type", int64_val=0)
            node.attr.add(name="comm_size", int64_val=(1 << 20) + at % 5)
        else:
            node.attr.add(name="num_ops", int64_val=123456789)
            node.attr.add(name="tensor_size", uint64_val=12345678)
        parts.append(_frame(node.SerializeToString()))
    return b"".join(parts)


def _messages(data: bytes, most: int) -> list[bytes]:
    """The messages of a file without its metadata, ``most`` at most."""
    found: list[bytes] = []
    at, end = 0, len(data)
    while at < end and len(found) <= most:
        size = shift = 0
        while True:
            byte = data[at]
            at += 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        found.append(data[at : at + size])
        at += size
    return found[1:]


def _fields(node: Any) -> tuple[Any, ...]:
    attributes = {}
    for item in node.attr:
        kind = item.WhichOneof("value")
        attributes[item.name] = getattr(item, kind) if kind else None
    dependencies = list(node.data_deps), list(node.ctrl_deps)
    return node.id, node.name, node.type, node.duration_micros, *dependencies, attributes


def protobuf_read(data: bytes, most: int) -> int:
    """Read with field access; gives the number of nodes."""
    found = _messages(data, most)
    node = SCHEMA.Node()
    for content in found:
        node.ParseFromString(content)
        _fields(node)
    return len(found)


def protobuf_write(nodes: list[Any], path: Path) -> int:
    """Write messages that are made already."""
    with path.open("wb") as file:
        file.write(_frame(SCHEMA.GlobalMetadata(version="0.0.4").SerializeToString()))
        for node in nodes:
            file.write(_frame(node.SerializeToString()))
    return len(nodes)


def column_bytes(trace: ChakraTrace) -> dict[str, int]:
    """Bytes of the columns, and of the texts beside them."""
    columns = [*trace.nodes.values(), *trace.attributes.values()]
    columns += [part for kind in (trace.control, trace.data) for part in (kind.first, kind.ids)]
    text, first = trace.strings.to_utf8()
    return {"columns": sum(column.nbytes for column in columns), "texts": text.nbytes + first.nbytes}


def _speed(work: Callable[[], int]) -> float:
    """Nodes a second of one run, reading or writing included."""
    begin = time.perf_counter()
    count = work()
    return count / (time.perf_counter() - begin)


def _case(path: Path, folder: Path, rounds: int) -> dict[str, Any]:
    data = path.read_bytes()
    trace = read_chakra(path)
    write_chakra(trace, folder / "ours.et")  # compiles, if nothing is compiled yet
    nodes = [SCHEMA.Node.FromString(content) for content in _messages(data, PROTOBUF_NODES)]
    sides: dict[str, Callable[[], int]] = {
        "read": lambda: read_chakra(path).num_nodes,
        "protobuf_read": lambda: protobuf_read(data, PROTOBUF_NODES),
        "write": lambda: (write_chakra(trace, folder / "ours.et"), trace.num_nodes)[1],
        "protobuf_write": lambda: protobuf_write(nodes, folder / "theirs.et"),
    }
    runs: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, work in sides.items():
            runs[name].append(_speed(work))
    sizes = column_bytes(trace)
    result: dict[str, Any] = {
        "nodes": trace.num_nodes,
        "file_bytes_per_node": round(len(data) / trace.num_nodes, 1),
        "dependencies_per_node": round((len(trace.data.ids) + len(trace.control.ids)) / trace.num_nodes, 1),
        "column_bytes_per_node": round(sizes["columns"] / trace.num_nodes, 1),
        "text_bytes_per_node": round(sizes["texts"] / trace.num_nodes, 1),
    }
    for name, speeds in runs.items():
        best, median = max(speeds), sorted(speeds)[len(speeds) // 2]
        result[f"{name}_nodes_per_s"] = {"best": round(best), "median": round(median)}
    for name in ("read", "write"):
        ratios = sorted(a / b for a, b in zip(runs[name], runs[f"protobuf_{name}"], strict=True))
        result[f"{name}_over_protobuf"] = round(ratios[len(ratios) // 2], 1)
    return result


def _feeder(path: Path) -> dict[str, Any]:
    trace = read_chakra(path)
    begin = time.perf_counter()
    feeder = Feeder(trace)
    made = time.perf_counter()
    while (row := feeder.next()) is not None:
        feeder.complete(row)
    done = time.perf_counter()
    return {"nodes": trace.num_nodes, "make_s": round(made - begin, 2), "feed_s": round(done - made, 2)}


def measure(nodes: int = GENERATED_NODES, recorded: Path = RECORDED, rounds: int = ROUNDS) -> dict[str, Any]:
    """All figures: a generated file, the recorded one 40 times over where it is there, and the feeder."""
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "generated.0.et"
        path.write_bytes(generated(nodes))
        result["generated"] = _case(path, folder, rounds)
        result["feeder"] = _feeder(path)
        if recorded.exists():
            metadata, *body = _messages(b"\0" + recorded.read_bytes(), 1 << 62)
            many = folder / "recorded.0.et"
            many.write_bytes(_frame(metadata) + b"".join(map(_frame, body)) * 40)
            result["recorded, 40 times over"] = _case(many, folder, rounds)
    return result


def main() -> None:
    """Print the figures as JSON."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--nodes", type=int, default=GENERATED_NODES)
    arguments.add_argument("--recorded", type=Path, default=RECORDED)
    arguments.add_argument("--rounds", type=int, default=ROUNDS)
    options = arguments.parse_args()
    json.dump(measure(options.nodes, options.recorded, options.rounds), sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
