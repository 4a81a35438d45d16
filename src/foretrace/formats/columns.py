"""Python values of decoded events -> NumPy columns; odd values are mended and counted, never fatal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from foretrace.trace import ReadReport, StringTable, Table

_LIMIT_NS = 1 << 62


class Columns:
    """Collects the rows of one table batch by batch."""

    def __init__(self) -> None:
        self._parts: dict[str, list[NDArray[Any]]] = defaultdict(list)

    def add(self, **columns: NDArray[Any]) -> None:
        """Append one batch of rows; every call names the same columns."""
        for name, values in columns.items():
            self._parts[name].append(values)

    def table(self, strings: StringTable, string_columns: Sequence[str] = ()) -> Table:
        """All rows as a table."""
        columns = {name: np.concatenate(parts) for name, parts in self._parts.items()}
        return Table(columns, dict.fromkeys(string_columns, strings))


def integers(values: list[Any], report: ReadReport, what: str) -> NDArray[np.int64]:
    """An int64 column. None becomes -1, text is parsed, integers beyond int64 wrap to their two's complement."""
    try:
        column = np.array(values)
    except (ValueError, OverflowError):
        column = np.empty(0, object)
    if column.dtype == np.int64 and len(column) == len(values):
        return column
    return np.fromiter((integer(value, report, what) for value in values), np.int64, len(values))


def integer(value: Any, report: ReadReport, what: str) -> int:
    """One value of an int64 column, mended as `integers` does it."""
    if isinstance(value, msgspec.Raw):
        value = bytes(value).decode()
    if value is None or value == "":
        return -1
    try:
        number = _parsed(value) if isinstance(value, str) else int(value)
    except (ValueError, OverflowError):  # text that is no number, NaN, Infinity
        report.repair(f"{what} is no integer")
        return -1
    if not -(1 << 63) <= number < 1 << 63:
        report.repair("integer beyond int64 (kept modulo 2^64)", what)
        number = (number + (1 << 63)) % (1 << 64) - (1 << 63)
    return number


def _parsed(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        return int(float(text))


def floats(values: list[Any]) -> NDArray[np.float64]:
    """A float64 column; whatever is no number becomes NaN."""
    try:
        return np.array(values, np.float64)  # None becomes NaN
    except (TypeError, ValueError, OverflowError):
        return np.array([_float(value) for value in values], np.float64)


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def nanoseconds(values: list[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Microseconds -> int64 nanoseconds, exactly, and which of them are usable.

    Integers stay exact; floats are split into whole and fractional microseconds first, so that an absolute time
    of 10^15 us does not lose its last digits to the multiplication.
    """
    try:
        column = np.array(values)
    except (ValueError, OverflowError):
        column = np.empty(0, object)
    if len(column) == len(values):
        if column.dtype == np.int64:
            valid = np.abs(column) < _LIMIT_NS // 1000
            return np.where(valid, column, 0) * 1000, valid
        if column.dtype == np.float64:
            valid = np.abs(column) < _LIMIT_NS / 1000  # False for NaN and infinity
            column = np.where(valid, column, 0.0)
            whole = np.floor(column)
            return whole.astype(np.int64) * 1000 + np.rint((column - whole) * 1000).astype(np.int64), valid
    pairs = [_nanoseconds(value) for value in values]
    valid = np.array([pair is not None and abs(pair) < _LIMIT_NS for pair in pairs], np.bool_)
    good = [pair if ok and pair is not None else 0 for pair, ok in zip(pairs, valid.tolist(), strict=True)]
    return np.array(good, np.int64), valid


def _nanoseconds(value: Any) -> int | None:
    try:
        if isinstance(value, msgspec.Raw):
            text = bytes(value)
            # The usual form has exactly three decimals; then the digits alone are the nanoseconds.
            if text[-4:-3] == b"." and text[-3:].isdigit():
                return int(text[:-4] + text[-3:])
            value = Decimal(text.decode())
        if isinstance(value, int):
            return value * 1000
        return round(Decimal(value) * 1000)
    except (ArithmeticError, ValueError, TypeError, OverflowError):
        return None


Progress = Callable[[int, int], None]
