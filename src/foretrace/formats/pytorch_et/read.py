"""`read_operators`: a PyTorch execution trace, whole or damaged, as an `OperatorTrace`."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from isal import igzip
from isal.igzip_lib import IsalError
from numpy.typing import NDArray

from foretrace.formats.pytorch_et.collectives import collectives, process_groups, with_ranks
from foretrace.formats.pytorch_et.slow_scanner import SlowScanner
from foretrace.formats.sources import PathLike, Source, blocks
from foretrace.trace import FormatError, ReadReport, StringTable, Table
from foretrace.trace.graph import offsets
from foretrace.trace.operators import OperatorTrace

SUPPORTED_SCHEMAS = ("1.0.1", "1.0.2", "1.0.3", "1.0.4", "1.1.0", "1.1.1")
_REMEDY = "name a file that torch.profiler.ExecutionTraceObserver wrote"
_NODES = re.compile(rb'"nodes"\s*:\s*\[')
# Where a node may begin, in the newer and in the older order of members.
_NODE = re.compile(rb'\{\s*"(?:id"\s*:|name"\s*:\s*"(?:[^"\\]|\\.)*"\s*,\s*"id"\s*:)')
_SHARE_BYTES = 1 << 20  # a part of the text that is worth a thread
_TEXTS = ("op_schema", "kernel_backend", "kernel_file", "tensor_range", "integer_statistics", "name")
_RANK = re.compile(r"rank[-_.]?(\d+)|(?<![.\d])[._](\d+)\.json", re.IGNORECASE)


def _compiled_scanner() -> Any:
    """The compiled scanner, or None where it could not be built."""
    try:
        return importlib.import_module("foretrace.formats.pytorch_et._scanner")
    except ImportError:
        return None


_scanner = _compiled_scanner()


def read_operators(path: PathLike | Source, on_bytes: Callable[[int], None] | None = None) -> OperatorTrace:
    """Read one PyTorch execution trace (``.json`` or ``.json.gz``).

    A file that is cut or broken gives its whole nodes; the report of the result counts what was left out.

    Raises:
        FormatError: if there is no such file, or no node in it.
    """
    try:
        source = path if isinstance(path, Source) else Source.of(Path(path))
        report = ReadReport(source.name, "pytorch et")
        text = _content(source, report, on_bytes)
    except OSError as error:
        raise FormatError(str(path), error.strerror or str(error), "check the path and its permissions") from None
    found = _NODES.search(text)
    if not found:
        problem = "is a Kineto trace" if b'"traceEvents"' in text[: 1 << 20] else "holds no list of nodes"
        raise FormatError(source.name, f"{problem}, not a PyTorch execution trace", _REMEDY)
    scanned = _scan(text, found.end(), report)
    members = _members_around(text, found, scanned.end, report)
    if not len(scanned.nodes) and len(scanned.broken):
        raise FormatError(source.name, f"no whole node in it (first broken one at byte {scanned.broken[0]})", _REMEDY)
    return _trace(scanned, members, report)


@dataclass
class _Scanned:
    """The rows of a scan; see the head of ``_scanner.c``. ``texts`` are those of all ids, two may be the same."""

    nodes: NDArray[np.int64]
    arguments: NDArray[np.int32]
    tensors: NDArray[np.int64]
    extras: NDArray[np.int32]
    texts: list[str]
    broken: NDArray[np.int64]
    end: int


def _scan(text: bytes, at: int, report: ReadReport) -> _Scanned:
    """All nodes of the list that begins before ``at``."""
    scanned = _compiled_scan(text, at, report) if _scanner is not None else _slow_scan(text, at)
    for place in scanned.broken.tolist():
        report.drop("node that is cut or no valid JSON", f"byte {place}")
    if scanned.end < 0:
        report.repair("file ends within the list of nodes: kept the whole ones", f"byte {len(text)}")
    return scanned


def _content(source: Source, report: ReadReport, on_bytes: Callable[[int], None] | None) -> bytes:
    """The inflated content of a file: at once where it is sound."""
    content = source.path.read_bytes()
    report.size_bytes = len(content)
    if content[:2] == b"\x1f\x8b":
        try:
            text: bytes = igzip.decompress(content)  # type: ignore[no-untyped-call]
        except (IsalError, EOFError, OSError):  # type: ignore[misc]  # damaged or cut: what precedes the damage
            return b"".join(blocks(source, report, on_bytes))
    else:
        text = content
    if on_bytes:
        on_bytes(len(content))
    return text


def _compiled_scan(text: bytes, at: int, report: ReadReport) -> _Scanned:
    """The compiled scanner, in as many threads as there are processors if the text is worth it."""
    borders = [at]
    share = max((len(text) - at) // max(os.cpu_count() or 1, 1), _SHARE_BYTES)
    while len(text) - borders[-1] > share + share // 2 and (found := _NODE.search(text, borders[-1] + share)):
        borders.append(found.start())
    if len(borders) == 1:
        return _of_scan(_scanner.scan(text, at), text, report)
    view = memoryview(text)
    with ThreadPoolExecutor(len(borders)) as threads:
        pairs = zip(borders, [*borders[1:], len(text)], strict=True)
        parts = list(threads.map(lambda pair: _scanner.scan(view[: pair[1]], pair[0]), pairs))
    # Behind the end of the list nothing is a node, whatever it looks like.
    used = next((count for count, part in enumerate(parts, 1) if part[0] >= 0), len(parts))
    return _joined([_of_scan(part, text, report) for part in parts[:used]])


def _of_scan(found: tuple[Any, ...], text: bytes, report: ReadReport) -> _Scanned:
    end, broken, nodes, arguments, tensors, extras, spans = found
    return _Scanned(
        np.frombuffer(nodes, np.int64).reshape(-1, 14),
        np.frombuffer(arguments, np.int32).reshape(-1, 7),
        np.frombuffer(tensors, np.int64).reshape(-1, 11),
        np.frombuffer(extras, np.int32).reshape(-1, 3),
        _texts(text, np.frombuffer(spans, np.int64).reshape(-1, 3), report),
        np.frombuffer(broken, np.int64),
        end,
    )


def _slow_scan(text: bytes, at: int) -> _Scanned:
    slow = SlowScanner(text)
    end = slow.scan(len(text[:at].decode("utf-8", "replace")))
    return _Scanned(
        np.frombuffer(slow.nodes, np.int64).reshape(-1, 14),
        np.frombuffer(slow.arguments, np.int32).reshape(-1, 7),
        np.frombuffer(slow.tensors, np.int64).reshape(-1, 11),
        np.frombuffer(slow.extras, np.int32).reshape(-1, 3),
        slow.texts,
        np.frombuffer(slow.broken, np.int64),
        len(slow.before(end)) if end >= 0 else -1,
    )


def _joined(parts: list[_Scanned]) -> _Scanned:
    """The rows of several scans one after the other; rows and ids count on."""
    first = parts[0]
    rows: dict[str, list[NDArray[Any]]] = {name: [] for name in ("nodes", "arguments", "tensors", "extras")}
    nodes = arguments = texts = 0
    for part in parts:
        for name, owner, owners, columns in (
            ("nodes", -1, 0, slice(8, 14)),
            ("arguments", 0, nodes, slice(3, 7)),
            ("tensors", 0, arguments, slice(7, 11)),
            ("extras", 0, nodes, slice(1, 3)),
        ):
            table = getattr(part, name).copy() if part is not first else getattr(part, name)
            if part is not first:
                ids = table[:, columns]
                ids[ids >= 0] += texts
                if owner >= 0:
                    table[:, owner] += owners
            rows[name].append(table)
        nodes, arguments, texts = nodes + len(part.nodes), arguments + len(part.arguments), texts + len(part.texts)
    broken = np.concatenate([part.broken for part in parts])
    tables = {name: np.concatenate(found) for name, found in rows.items()}
    return _Scanned(**tables, texts=[text for part in parts for text in part.texts], broken=broken, end=parts[-1].end)


def _texts(text: bytes, spans: NDArray[np.int64], report: ReadReport) -> list[str]:
    """The texts of spans, unescaped where they stood in a JSON string."""
    begins, ends, forms = (spans[:, column].tolist() for column in range(3))
    texts = [text[begin:end].decode("utf-8", "replace") for begin, end in zip(begins, ends, strict=True)]
    for at, (one, form) in enumerate(zip(texts, forms, strict=True)):
        if form and "\\" in one:
            texts[at] = _unescaped(one, report)
    return texts


def _unescaped(text: str, report: ReadReport) -> str:
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        report.repair("text with an invalid escape: kept as written", text[:40])
        return text


def _members_around(text: bytes, found: re.Match[bytes], end: int, report: ReadReport) -> dict[str, Any]:
    """What stands at the top of the file beside the nodes."""
    head = text[: found.start()] + b'"nodes": []'
    for rest in (text[end:], b"}") if end >= 0 else (b"}",):
        try:
            whole = (head + rest).decode("utf-8", "replace")
            members, stop = json.JSONDecoder(strict=False).raw_decode(whole.lstrip())
        except ValueError:
            continue
        if whole.lstrip()[stop:].strip():
            report.note("text after the end of the trace", f"byte {end}")
        if isinstance(members, dict):
            members.pop("nodes", None)
            return members
    report.repair("top of the file is no valid JSON: read the schema only", "byte 0")
    schema = re.search(rb'"schema"\s*:\s*"([^"]*)"', text[: found.start()])
    return {"schema": schema.group(1).decode("utf-8", "replace")} if schema else {}


def _trace(scanned: _Scanned, members: dict[str, Any], report: ReadReport) -> OperatorTrace:
    strings = StringTable()
    # Ids of the scan as ids of the table; the last entry answers for -1, "none".
    ids = np.append(strings.intern_all(scanned.texts), -1).astype(np.int32)
    count = len(scanned.nodes)
    order = np.argsort(scanned.nodes[:, 0], kind="stable")
    place = np.empty(count, np.int32)
    place[order] = np.arange(count, dtype=np.int32)
    in_order = scanned.nodes[order]
    nodes = _nodes(in_order[:, :8], ids[in_order[:, 8:]], order, report)
    texts = ("name", "schema", "kernel_backend", "kernel_file", "integer_statistics")
    node_table = Table(nodes, dict.fromkeys(texts, strings))
    argument_table, argument_place = _arguments(scanned.arguments, place, ids, strings)
    tensor_columns = _tensors(scanned.tensors, argument_table, argument_place, ids)
    schema = str(members.pop("schema", ""))
    if schema.split("-")[0] not in SUPPORTED_SCHEMAS:
        report.note(f"schema {schema or '(none)'} is not among those known")
    tensor_columns |= _numbered(node_table, tensor_columns, argument_table, strings)
    del tensor_columns["position"]
    tensor_table = Table(tensor_columns, dict.fromkeys(("device", "dtype", "shape", "strides"), strings))
    storages = _storages(members.pop("storages", None), strings)
    trace = OperatorTrace(
        node_table, argument_table, tensor_table, strings, storages=storages, schema=schema, report=report
    )
    trace.groups = process_groups(trace)
    trace.collectives = collectives(trace, _attributes(scanned.extras, place, ids, strings))
    trace.groups = with_ranks(trace.groups, trace.collectives)
    trace.rank = _rank(members, report)
    trace.metadata = members
    report.events["nodes"] = count
    return trace


def _nodes(
    numbers: NDArray[np.int64], texts: NDArray[np.int32], completion: NDArray[np.intp], report: ReadReport
) -> dict[str, NDArray[Any]]:
    """Columns of nodes in order of start, which is that of their ids."""
    ids, parents = np.ascontiguousarray(numbers[:, 0]), numbers[:, 1]
    report.note("node id that occurs twice", count=int((ids[1:] == ids[:-1]).sum()))
    at = np.minimum(np.searchsorted(ids, parents), max(len(ids) - 1, 0))
    own = np.arange(len(ids))
    is_known = (ids[at] == parents) & (at != own) if len(ids) else np.zeros(0, np.bool_)
    is_root = (parents == ids) | (parents < 0) | (numbers[:, 1] == 0)
    report.note("node whose parent is not in the file", count=int((~is_known & ~is_root).sum()))
    late = is_known & (at > own)
    report.note("node that begins before its parent: taken as a root", count=int(late.sum()))
    text = dict(zip(_TEXTS, texts.T, strict=True))
    return {
        "id": ids,
        "parent": np.where(is_known & ~late, at, -1).astype(np.int32),
        "completion": completion.astype(np.int32),
        "name": np.ascontiguousarray(text["name"]),
        "record_function_id": np.ascontiguousarray(numbers[:, 2]),
        "forward_parent": np.ascontiguousarray(numbers[:, 3]),
        "sequence": np.ascontiguousarray(numbers[:, 4]),
        "scope": numbers[:, 5].astype(np.int8),
        "thread": np.ascontiguousarray(numbers[:, 6]),
        "forward_thread": np.ascontiguousarray(numbers[:, 7]),
        "schema": np.ascontiguousarray(text["op_schema"]),
        "kernel_backend": np.ascontiguousarray(text["kernel_backend"]),
        "kernel_file": np.ascontiguousarray(text["kernel_file"]),
        # Where our own recorder did not look at the values, PyTorch may have noted their range.
        "integer_statistics": np.where(
            text["integer_statistics"] >= 0, text["integer_statistics"], text["tensor_range"]
        ),
    }


def _arguments(
    rows: NDArray[np.int32], place: NDArray[np.int32], ids: NDArray[np.int32], strings: StringTable
) -> tuple[Table, NDArray[np.int32]]:
    """The table of arguments in the order of nodes, and where each scanned one went."""
    node = place[rows[:, 0]]
    order = np.argsort(node, kind="stable")
    moved = np.empty(len(rows), np.int32)
    moved[order] = np.arange(len(rows), dtype=np.int32)
    rows = rows[order]
    columns = {
        "node": node[order],
        "is_output": rows[:, 1].astype(np.bool_),
        "position": rows[:, 2].copy(),
        **{name: ids[rows[:, 3 + at]] for at, name in enumerate(("type", "shape", "strides", "value"))},
    }
    return Table(columns, dict.fromkeys(("type", "shape", "strides", "value"), strings)), moved


def _tensors(
    rows: NDArray[np.int64], arguments: Table, moved: NDArray[np.int32], ids: NDArray[np.int32]
) -> dict[str, NDArray[Any]]:
    argument = moved[rows[:, 0]]
    order = np.argsort(argument, kind="stable")
    argument, rows = argument[order], rows[order]
    names = ("tensor_id", "storage_id", "offset", "elements", "element_bytes")
    return {
        "argument": argument,
        "node": arguments["node"][argument],
        "is_output": arguments["is_output"][argument],
        "position": arguments["position"][argument],
        "element": rows[:, 1].astype(np.int32),
        **{name: np.ascontiguousarray(rows[:, 2 + at]) for at, name in enumerate(names)},
        **{name: ids[rows[:, 7 + at]] for at, name in enumerate(("device", "dtype", "shape", "strides"))},
    }


def _numbered(
    nodes: Table, tensors: dict[str, NDArray[Any]], arguments: Table, strings: StringTable
) -> dict[str, NDArray[Any]]:
    """Which tensor each row is, and who wrote it last."""
    from foretrace.formats.pytorch_et.values import mutated_positions, number_tensors

    schemas = nodes["schema"]
    used = np.flatnonzero(np.bincount(schemas + 1, minlength=1)[1:])
    by_schema = np.zeros(len(strings) + 1, np.int64)
    by_schema[used] = [mutated_positions(text) for text in strings.lookup(used)]
    return number_tensors(nodes["parent"], by_schema[schemas], offsets(tensors["node"], nodes.num_rows), tensors)


def _attributes(
    extras: NDArray[np.int32], place: NDArray[np.int32], ids: NDArray[np.int32], strings: StringTable
) -> dict[int, dict[str, Any]]:
    """Attributes that are no columns of nodes, by node."""
    found: dict[int, dict[str, Any]] = {}
    names, values = strings.lookup(ids[extras[:, 1]]), strings.lookup(ids[extras[:, 2]])
    for node, name, text in zip(place[extras[:, 0]].tolist(), names, values, strict=True):
        try:
            found.setdefault(node, {})[name] = json.loads(text)
        except (ValueError, RecursionError):
            found.setdefault(node, {})[name] = text
    return found


def _storages(entries: Any, strings: StringTable) -> Table:
    """Storages that the recorder noted at the top of the file."""
    kept = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    columns: dict[str, NDArray[Any]] = {
        name: np.array([_whole(entry.get(name)) for entry in kept], np.int64)
        for name in ("storage_id", "size_bytes", "allocated", "freed")
    }
    columns["device"] = np.array([strings.intern(str(entry.get("device", ""))) for entry in kept], np.int32)
    return Table(columns, {"device": strings})


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and abs(value) < 1 << 62 else -1


def _rank(members: dict[str, Any], report: ReadReport) -> int:
    """The rank that the file states, else the one in its name, else -1."""
    stated = members.get("rank")
    if isinstance(stated, int) and not isinstance(stated, bool) and 0 <= stated < 1 << 31:
        return stated
    found = [int(a or b) for a, b in _RANK.findall(report.path.rsplit("/", 1)[-1])]
    if not found or found[-1] >= 1 << 31:
        return -1
    report.guess("rank from the file's name", str(found[-1]))
    return found[-1]
