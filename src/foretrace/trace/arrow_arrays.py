"""NumPy columns and texts -> Arrow arrays over the same memory.

``pyarrow.array`` imports pandas wherever that is installed, which takes longer than reading a trace; these go
without.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa


def numbers(column: NDArray[Any], absent: NDArray[np.bool_] | None = None) -> pa.Array:
    """An Arrow array that shares the column's memory (Booleans, which Arrow packs into bits, are copied).

    Args:
        column: one dimension, of a numeric or Boolean type.
        absent: True where the value is null.
    """
    import pyarrow as pa

    column = np.ascontiguousarray(column)
    values = _bits(column) if column.dtype == np.bool_ else pa.py_buffer(column)
    return pa.Array.from_buffers(pa.from_numpy_dtype(column.dtype), len(column), [_validity(absent), values])


def texts(values: Sequence[str | None]) -> pa.Array:
    """An Arrow string array; None becomes null, lone surrogates a question mark."""
    import pyarrow as pa

    encoded = [b"" if value is None else value.encode("utf-8", "replace") for value in values]
    ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)))
    is_large = len(ends) > 0 and ends[-1] >= 1 << 31
    offsets = np.append(0, ends).astype(np.int64 if is_large else np.int32)
    absent = np.fromiter((value is None for value in values), np.bool_, len(encoded))
    buffers = [_validity(absent), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.large_string() if is_large else pa.string(), len(encoded), buffers)


def _validity(absent: NDArray[np.bool_] | None) -> Any:
    return _bits(~absent) if absent is not None and absent.any() else None


def _bits(column: NDArray[np.bool_]) -> Any:
    import pyarrow as pa

    return pa.py_buffer(np.packbits(column, bitorder="little"))


def to_numpy(array: pa.Array) -> NDArray[Any]:
    """The values of an Arrow array without nulls, sharing its memory (Booleans are unpacked)."""
    _, buffer = array.buffers()
    if str(array.type) == "bool":
        bits = np.unpackbits(np.frombuffer(buffer, np.uint8), bitorder="little")
        return bits[array.offset : array.offset + len(array)].astype(np.bool_)
    dtype = np.dtype(array.type.to_pandas_dtype())
    if buffer is None or not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, len(array), array.offset * dtype.itemsize)


def to_texts(array: pa.Array) -> list[str]:
    """The texts of an Arrow string array without nulls."""
    _, offsets, data = array.buffers()
    if not len(array):
        return []
    width = np.int64 if str(array.type) == "large_string" else np.int32
    ends = np.frombuffer(offsets, width, array.offset + len(array) + 1)[array.offset :].tolist()
    content = data.to_pybytes() if data is not None else b""
    return [content[a:b].decode() for a, b in itertools.pairwise(ends)]
