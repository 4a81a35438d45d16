"""Arrow tables out of rows or columns: the form in which every answer is returned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from foretrace.trace import Job, Timeline

if TYPE_CHECKING:
    import pyarrow as pa

INT, FLOAT, TEXT, BOOL = "int64", "float64", "string", "bool"


def table_of(schema: Mapping[str, str], rows: Iterable[Mapping[str, Any] | tuple[Any, ...]]) -> pa.Table:
    """A table with the given column types; rows are mappings, or tuples in the order of the schema."""
    import pyarrow as pa

    rows = list(rows)
    columns = {}
    for at, (name, kind) in enumerate(schema.items()):
        values = [row[at] if isinstance(row, tuple) else row.get(name) for row in rows]
        columns[name] = pa.array(values, pa.type_for_alias(kind))
    return pa.table(columns)


def timelines_of(job: Job | Timeline) -> list[Timeline]:
    """The timelines of a job, or the one given."""
    return [job] if isinstance(job, Timeline) else list(job.timelines)
