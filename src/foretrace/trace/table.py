"""A table of equally long NumPy columns: the one container that all nouns are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foretrace.trace import arrow_arrays

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa

    from foretrace.trace.strings import StringTable

Column = NDArray[Any]


class Table(Mapping[str, Column]):
    """Named columns of one length, read by name (``table["start_ns"]``).

    Columns listed in ``strings`` hold ids into a `StringTable`, -1 meaning "none"; `to_arrow` gives them
    back as dictionary-encoded text without copying the ids.

    Raises:
        ValueError: if the columns differ in length.
    """

    def __init__(self, columns: Mapping[str, Column], strings: Mapping[str, StringTable] | None = None) -> None:
        self._columns = dict(columns)
        self.strings: dict[str, StringTable] = {k: v for k, v in (strings or {}).items() if k in self._columns}
        lengths = {len(column) for column in self._columns.values()}
        if len(lengths) > 1:
            detail = {name: len(column) for name, column in self._columns.items()}
            raise ValueError(f"columns of one table must have one length, got {detail}")
        self.num_rows: int = lengths.pop() if lengths else 0

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        """Number of columns, as for any mapping; rows are counted by `num_rows`."""
        return len(self._columns)

    def __repr__(self) -> str:
        return f"Table({self.num_rows} rows: {', '.join(self._columns)})"

    def take(self, rows: Column) -> Table:
        """The given rows (indices or a Boolean mask), in that order."""
        return Table({name: column[rows] for name, column in self._columns.items()}, self.strings)

    def texts(self, name: str) -> list[str]:
        """The text of a string column, row by row; an absent string is ``""``."""
        table = self.strings[name]
        return table.lookup(self._columns[name])

    def to_arrow(self) -> pa.Table:
        """An Arrow table that shares the memory of every numeric column and of every string id."""
        import pyarrow as pa

        arrays: dict[str, pa.Array] = {}
        for name, column in self._columns.items():
            if name in self.strings:
                ids = arrow_arrays.numbers(column, absent=np.asarray(column < 0))
                arrays[name] = pa.DictionaryArray.from_arrays(ids, self.strings[name].to_arrow())
            else:
                arrays[name] = arrow_arrays.numbers(column)
        return pa.Table.from_arrays(list(arrays.values()), list(arrays))

    def to_pandas(self) -> pd.DataFrame:
        """A pandas frame; needs pandas (``pip install 'foretrace[pandas]'``)."""
        frame: pd.DataFrame = self.to_arrow().to_pandas()
        return frame

    def to_polars(self) -> pl.DataFrame:
        """A Polars frame; needs polars (``pip install 'foretrace[polars]'``)."""
        import polars

        frame = polars.from_arrow(self.to_arrow())
        assert isinstance(frame, polars.DataFrame)
        return frame
