"""A Chakra trace as an Arrow file: one row a node, one column an attribute, dependencies as lists.

The columns are ``id``, ``name``, ``type`` (text), ``start_micros``, ``duration_micros``, ``ctrl_deps``, ``data_deps``,
``inputs_values`` ... where any node has such, and each attribute under ``attr.NAME`` (null where a node has none; JSON
text for lists and bytes). The type of an attribute on the wire stands in the field's metadata, so that the file can
be turned back into a Chakra trace.
"""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.formats.chakra.columns import Attributes
from foretrace.formats.chakra.trace import FLOAT_WIRES, INTEGER_WIRES, ChakraTrace, Dependencies, NodeType, Wire
from foretrace.trace import FormatError, ReadReport, StringTable, Table, arrow_arrays

_KEY = b"foretrace.chakra"
_VERSION = 1
_UNSIGNED = (Wire.UINT64, Wire.FIXED64)


def to_arrow(trace: ChakraTrace) -> Any:
    """The ``pyarrow.Table`` of a trace. A second attribute of one name in a node is left out, and counted."""
    import pyarrow as pa

    arrays: dict[str, Any] = {}
    fields = []
    for name, column in trace.nodes.items():
        if name in trace.nodes.strings:
            arrays[name] = _texts(trace.strings, column)
        elif name == "type":
            labels = [NodeType(n).name for n in range(len(NodeType))]
            kinds = np.clip(column, 0, len(labels) - 1).astype(np.int8)
            arrays[name] = pa.DictionaryArray.from_arrays(arrow_arrays.numbers(kinds), arrow_arrays.texts(labels))
        else:
            arrays[name] = arrow_arrays.numbers(column)
        fields.append(pa.field(name, arrays[name].type))
    for name, lists in (("ctrl_deps", trace.control), ("data_deps", trace.data)):
        first = arrow_arrays.numbers(lists.first.astype(np.int64))
        arrays[name] = pa.LargeListArray.from_arrays(first, arrow_arrays.numbers(lists.ids))
        fields.append(pa.field(name, arrays[name].type))
    for name, wire, array in _attribute_columns(trace):
        arrays[name] = array
        fields.append(pa.field(name, array.type, metadata={"wire": wire.name}))
    header = {
        "version": _VERSION,
        "rank": trace.rank,
        "metadata": trace.metadata,
        "metadata_wires": {name: wire.name for name, wire in trace.metadata_wires.items()},
        "chakra": trace.version,
        "wrote_version": trace.wrote_version,
        "report": trace.report.to_dict(),
    }
    schema = pa.schema(fields, metadata={_KEY: json.dumps(header, default=str).encode()})
    return pa.Table.from_arrays(list(arrays.values()), schema=schema)


def _texts(strings: StringTable, ids: NDArray[np.integer]) -> Any:
    """String ids as dictionary-encoded text; a column uses few of the texts, and takes only those."""
    import pyarrow as pa

    used = np.flatnonzero(np.bincount(ids + 1, minlength=1)[1:])
    place = np.full(len(strings) + 1, -1, np.int32)
    place[used] = np.arange(len(used), dtype=np.int32)
    here = place[ids]
    indices = arrow_arrays.numbers(here, absent=np.asarray(here < 0))
    return pa.DictionaryArray.from_arrays(indices, arrow_arrays.texts(strings.lookup(used)))


def _attribute_columns(trace: ChakraTrace) -> Any:
    """Name, wire type and array of each attribute; one of several types gets a column for each."""
    table = trace.attributes
    if not table.num_rows:
        return
    key = table["name"].astype(np.int64) * 64 + table["wire"]
    for one in np.unique(key).tolist():
        rows = np.flatnonzero(key == one)
        node = table["node"][rows]
        first = np.append(True, node[1:] != node[:-1])
        trace.report.drop("second attribute of one name in a node", count=int((~first).sum()))
        rows = rows[first]
        wire, name = Wire(one % 64), trace.strings[one // 64]
        several = len(np.unique(table["wire"][table["name"] == one // 64])) > 1
        yield f"attr.{name}" + (f":{wire.name}" if several else ""), wire, _array(trace, rows, wire)


def _array(trace: ChakraTrace, rows: NDArray[np.intp], wire: Wire) -> Any:
    node, value = trace.attributes["node"][rows], trace.attributes["value"][rows]
    absent = np.ones(trace.num_nodes, np.bool_)
    absent[node] = False
    if wire == Wire.STRING:
        ids = np.full(trace.num_nodes, -1, np.int64)
        ids[node] = value
        return _texts(trace.strings, ids)
    if wire in INTEGER_WIRES or wire in FLOAT_WIRES:
        full = np.zeros(trace.num_nodes, np.int64)
        full[node] = value
        typed: NDArray[Any] = full
        if wire in FLOAT_WIRES:
            typed = full.view(np.float64)
        elif wire in _UNSIGNED:
            typed = full.view(np.uint64)
        elif wire == Wire.BOOL:
            typed = full != 0
        return arrow_arrays.numbers(typed, absent=absent)
    texts: list[str | None] = [None] * trace.num_nodes
    for at, row in zip(node.tolist(), rows.tolist(), strict=True):
        texts[at] = json.dumps(trace.value(row), default=_bytes_text)
    return arrow_arrays.texts(texts)


def _bytes_text(value: Any) -> Any:
    """Bytes as text, and NumPy numbers as Python's."""
    return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value.item()


def save_arrow(trace: ChakraTrace, path: str | Path) -> None:
    """Write the Arrow file (IPC, that is Feather 2); an existing file is replaced only when the new one is complete.

    Raises:
        FormatError: if it cannot be written.
    """
    import pyarrow as pa

    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    table = to_arrow(trace)
    try:
        with pa.OSFile(str(unfinished), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        unfinished.replace(path)
    except OSError as error:
        raise FormatError(str(path), error.strerror or str(error), "free space or choose another place") from None
    finally:
        unfinished.unlink(missing_ok=True)


def load_arrow(path: str | Path) -> ChakraTrace:
    """Read an Arrow file that `save_arrow` wrote.

    Raises:
        FormatError: if there is no such file, or it is another or a damaged Arrow file.
    """
    import pyarrow as pa

    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        header = json.loads((table.schema.metadata or {})[_KEY])
        if header["version"] != _VERSION:
            raise FormatError(str(path), f"written by format version {header['version']}", "convert the trace again")
        return _trace(table.combine_chunks(), header)
    except FormatError:
        raise
    except (pa.ArrowInvalid, KeyError, IndexError, ValueError, AttributeError) as error:
        raise FormatError(str(path), f"no Arrow file of a Chakra trace ({error})", "convert the trace again") from None
    except OSError as error:
        raise FormatError(str(path), error.strerror or str(error), "check the path") from None


def _trace(table: Any, header: dict[str, Any]) -> ChakraTrace:
    import pyarrow as pa

    strings = StringTable()
    objects: list[Any] = []
    attributes = Attributes(strings)
    nodes: dict[str, NDArray[Any]] = {}
    lists: dict[str, Dependencies] = {}
    texts = []
    for field in table.schema:
        column = table.column(field.name)
        array = column.chunk(0) if column.num_chunks else pa.array([], field.type)
        if field.name in ("ctrl_deps", "data_deps"):
            first = np.frombuffer(array.buffers()[1], np.int64, len(array) + 1, array.offset * 8)
            lists[field.name] = Dependencies(first, arrow_arrays.to_numpy(array.values))
        elif field.name.startswith("attr."):
            wire = Wire[field.metadata[b"wire"].decode()]
            _add(attributes, objects, field.name[5:].removesuffix(f":{wire.name}"), wire, array, strings)
        elif field.name == "type":
            numbers = [NodeType[text] for text in arrow_arrays.to_texts(array.dictionary)]
            nodes["type"] = np.array(numbers, np.int8)[arrow_arrays.to_numpy(array.indices)]
        elif hasattr(array, "dictionary"):
            texts.append(field.name)
            nodes[field.name] = _ids(array, strings)
        else:
            nodes[field.name] = arrow_arrays.to_numpy(array)
    return ChakraTrace(
        Table(nodes, dict.fromkeys(texts, strings)),
        lists["ctrl_deps"],
        lists["data_deps"],
        attributes.table(strings),
        strings,
        objects,
        metadata=header["metadata"],
        metadata_wires={name: Wire[wire] for name, wire in header["metadata_wires"].items()},
        version=header["chakra"],
        wrote_version=header["wrote_version"],
        rank=header["rank"],
        report=ReadReport.from_dict(header["report"]),
    )


def _present(array: Any) -> NDArray[np.intp]:
    """Rows that are not null."""
    validity = array.buffers()[0]
    if validity is None:
        return np.arange(len(array))
    bits = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")
    return np.flatnonzero(bits[array.offset : array.offset + len(array)])


def _ids(array: Any, strings: StringTable) -> NDArray[np.int32]:
    known = strings.intern_all(arrow_arrays.to_texts(array.dictionary))
    ids = np.full(len(array), -1, np.int32)
    rows = _present(array)
    ids[rows] = known[arrow_arrays.to_numpy(array.indices)[rows]]
    return ids


def _add(attributes: Attributes, objects: list[Any], name: str, wire: Wire, array: Any, strings: StringTable) -> None:
    rows = _present(array)
    if wire == Wire.STRING:
        attributes.add(name, wire, rows, _ids(array, strings)[rows])
    elif wire in INTEGER_WIRES or wire in FLOAT_WIRES:
        attributes.add(name, wire, rows, arrow_arrays.to_numpy(array)[rows])
    else:
        places = []
        for row in rows.tolist():
            value = json.loads(array[row].as_py())
            objects.append(_from_text(value))
            places.append(len(objects) - 1)
        attributes.add(name, wire, rows, np.array(places, np.int64))


def _from_text(value: Any) -> Any:
    if isinstance(value, dict):
        return base64.b64decode(value["base64"])
    return [_from_text(one) for one in value] if isinstance(value, list) else value
