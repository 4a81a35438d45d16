"""Arrow tables out of rows or columns: the form in which every answer is returned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foretrace.trace import Job, Timeline, arrow_arrays

if TYPE_CHECKING:
    import pyarrow as pa

INT, FLOAT, TEXT, BOOL = "int64", "float64", "string", "bool"
_DTYPES = {INT: np.int64, FLOAT: np.float64, BOOL: np.bool_}


def table_of(schema: Mapping[str, str], rows: Iterable[Mapping[str, Any] | tuple[Any, ...]]) -> pa.Table:
    """A table with the given column types; rows are mappings, or tuples in the order of the schema."""
    rows = list(rows)
    columns: dict[str, pa.Array] = {}
    for at, (name, kind) in enumerate(schema.items()):
        values = [row[at] if isinstance(row, tuple) else row.get(name) for row in rows]
        if kind == TEXT:
            columns[name] = arrow_arrays.texts(values)
        else:
            absent = np.fromiter((value is None for value in values), np.bool_, len(values))
            numbers = [0 if value is None else value for value in values]
            columns[name] = arrow_arrays.numbers(np.array(numbers, _DTYPES[kind]), absent)
    return table_of_arrays(columns)


def table_of_columns(columns: Mapping[str, NDArray[Any]]) -> pa.Table:
    """A table that shares the memory of NumPy columns."""
    return table_of_arrays({name: arrow_arrays.numbers(column) for name, column in columns.items()})


def table_of_arrays(columns: Mapping[str, pa.Array]) -> pa.Table:
    """A table of Arrow arrays."""
    import pyarrow as pa

    return pa.Table.from_arrays(list(columns.values()), list(columns))


def timelines_of(job: Job | Timeline) -> list[Timeline]:
    """The timelines of a job, or the one given."""
    return [job] if isinstance(job, Timeline) else list(job.timelines)
