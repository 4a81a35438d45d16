"""The Arrow file of a `Timeline`: written once, then memory-mapped.

An Arrow IPC file has one schema, so every column of every table is one list cell of a single row: reading a cell
gives the column without a copy. Strings, lanes and metadata are cells of the same row.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from foretrace.formats.sources import PathLike, Source
from foretrace.trace import FormatError, Lane, LaneKind, ReadReport, StringTable, Table, Timeline, arrow_arrays
from foretrace.trace.timeline import TABLES

VERSION = 1


def save(timeline: Timeline, path: PathLike) -> None:
    """Write a timeline as an Arrow file; an existing file is replaced only when the new one is complete.

    Raises:
        OSError: if the folder cannot be written.
    """
    import pyarrow as pa

    cells: dict[str, pa.Array] = {}
    strings: dict[str, list[str]] = {}
    for name, table in timeline.tables.items():
        strings[name] = list(table.strings)
        for column, values in table.items():
            cells[f"{name}.{column}"] = _cell(arrow_arrays.numbers(values))
    cells["strings"] = _cell(timeline.strings.to_arrow())
    header = {
        "version": VERSION,
        "rank": timeline.rank,
        "lanes": [asdict(lane) for lane in timeline.lanes],
        "string_columns": strings,
        "metadata": timeline.metadata,
        "report": timeline.report.to_dict(),
    }
    row = pa.Table.from_arrays(list(cells.values()), list(cells))
    row = row.replace_schema_metadata({"foretrace": msgspec.json.encode(header)})
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with pa.OSFile(str(unfinished), "wb") as file, pa.ipc.new_file(file, row.schema) as writer:
            writer.write_table(row)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _cell(values: Any) -> Any:
    """One list cell that shares the memory of ``values``."""
    import pyarrow as pa

    return pa.LargeListArray.from_arrays(arrow_arrays.numbers(np.array([0, len(values)], np.int64)), values)


def load(path: PathLike) -> Timeline:
    """Memory-map an Arrow file that `save` wrote.

    Raises:
        FormatError: if the file does not exist, or is another or a damaged Arrow file.
    """
    import pyarrow as pa

    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        header = msgspec.json.decode((table.schema.metadata or {})[b"foretrace"])
        if header["version"] != VERSION:
            raise FormatError(str(path), f"written by format version {header['version']}", "read the trace again")
        return _timeline(table, header)
    except (pa.ArrowInvalid, KeyError, IndexError, msgspec.DecodeError) as error:
        raise FormatError(str(path), f"no Arrow file of a timeline ({error})", "read the trace again") from None
    except OSError as error:
        raise FormatError(str(path), error.strerror or str(error), "check the path") from None


def _timeline(table: Any, header: dict[str, Any]) -> Timeline:
    strings = StringTable(arrow_arrays.to_texts(_values(table, "strings")))
    columns: dict[str, dict[str, Any]] = {name: {} for name in TABLES}
    for name in table.column_names:
        if "." in name:
            owner, column = name.split(".", 1)
            columns[owner][column] = arrow_arrays.to_numpy(_values(table, name))
    tables = {name: Table(columns[name], dict.fromkeys(header["string_columns"][name], strings)) for name in TABLES}
    lanes = [Lane(**{**lane, "kind": LaneKind(lane["kind"])}) for lane in header["lanes"]]
    report = ReadReport.from_dict(header["report"])
    return Timeline(
        lanes=lanes, strings=strings, rank=header["rank"], metadata=header["metadata"], report=report, **tables
    )


def _values(table: Any, name: str) -> Any:
    return table.column(name).chunk(0).values


def cache_path(source: Source, keep_python: bool, folder: Path | None) -> Path:
    """Where the Arrow file of a trace lies; it depends on the file's place, size and time of change."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretrace"
    status = source.path.stat()
    key = f"{VERSION}|{source.path.resolve()}|{status.st_size}|{status.st_mtime_ns}|{keep_python}"
    return (folder or default) / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.arrow"


def load_if_fresh(path: Path) -> Timeline | None:
    """The cached timeline, or None if there is none that can be read."""
    if not path.exists():
        return None
    try:
        return load(path)
    except FormatError:
        return None


__all__ = ["cache_path", "load", "load_if_fresh", "save"]
