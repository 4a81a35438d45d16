"""A batch of trace events as columns, in whichever way its text could be read.

`ScannedBatch` comes from the compiled scanner and holds no Python object per event; `DecodedBatch` comes from typed
structs, which is slower but copes with whatever could be mended. Both answer the same four questions about the
members that `chrome_events` declares.
"""

from __future__ import annotations

import importlib
import json
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from foretrace.formats.chrome_events import NO_RAW, Args, Damaged, Event, loads_tolerant
from foretrace.formats.columns import floats, integer, integers, nanoseconds
from foretrace.trace import ReadReport, StringTable


def _compiled_scanner() -> Any:
    """The compiled module, or None: without a C compiler structs do all, at less than half the speed."""
    try:
        return importlib.import_module("foretrace.formats._scanner")
    except ImportError:
        return None


_scanner = _compiled_scanner()

Rows = NDArray[np.intp]

_TOKEN, _INTEGER, _NUMBER, _TIME = range(4)
_UNRESOLVED = -2


class Batch(Protocol):
    """Columns of a batch; ``rows`` selects events, field names are those of `Event` and `Args`."""

    size: int

    def text(self, field: str, rows: Rows | None = None) -> NDArray[np.int32]:
        """String ids of a text or number member; -1 where it is absent or empty."""

    def raw(self, field: str, rows: Rows) -> NDArray[np.int32]:
        """String ids of the compact JSON text of a member; -1 where it is absent."""

    def integer(self, field: str, rows: Rows) -> NDArray[np.int64]:
        """An integer member; -1 where it is absent."""

    def number(self, field: str, rows: Rows) -> NDArray[np.float64]:
        """A number; NaN where it is absent."""

    def occurs(self, field: str) -> bool:
        """Whether any event may have the member."""

    def time(self, field: str, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
        """A time in nanoseconds, whether it is usable, and whether it is absent."""


def _kind(default: Any) -> int:
    if default is NO_RAW or default == "":
        return _TOKEN
    return _NUMBER if default is None else _INTEGER


_EVENT_FIELDS = {"ph": _TOKEN, "name": _TOKEN, "cat": _TOKEN, "pid": _TOKEN, "tid": _TOKEN}
_EVENT_FIELDS |= {"ts": _TIME, "dur": _TIME, "id": _INTEGER}
_ARGS_FIELDS = [(f.name, f.encode_name, _kind(f.default)) for f in msgspec.structs.fields(Args)]


class TokenTexts:
    """The scanner's tokens as ids of a `StringTable`; each distinct token is decoded once."""

    def __init__(self, strings: StringTable, report: ReadReport) -> None:
        self._strings = strings
        self._report = report
        self._tokens: list[bytes] = []
        self._ids = {"text": np.full(1, -1, np.int32), "raw": np.full(1, -1, np.int32)}

    def extend(self, tokens: list[bytes]) -> None:
        """Take the scanner's new tokens, in order."""
        self._tokens += tokens
        if len(self._tokens) >= len(self._ids["text"]):
            room = np.full(2 * len(self._tokens) + 1, _UNRESOLVED, np.int32)
            room[-1] = -1
            for way, ids in self._ids.items():
                self._ids[way] = room.copy()
                self._ids[way][: len(ids) - 1] = ids[:-1]

    def ids(self, tokens: NDArray[np.int32], way: str) -> NDArray[np.int32]:
        """String ids of tokens, read as ``"text"`` or kept as ``"raw"`` JSON; -1 stays -1."""
        known = self._ids[way]  # its last entry answers for -1
        found = known[tokens]
        unresolved = tokens[found == _UNRESOLVED]
        if len(unresolved):
            for token in set(unresolved.tolist()):
                known[token] = self._resolve(self._tokens[token], way)
            found = known[tokens]
        return found

    def _resolve(self, token: bytes, way: str) -> int:
        text = compact_text(token) if way == "raw" else self._text(token)
        return self._strings.intern(text) if text else -1

    def _text(self, token: bytes) -> str:
        if token[:1] == b'"' and b"\\" not in token:
            return token[1:-1].decode(errors="replace")
        try:
            value = msgspec.json.decode(token)
        except (msgspec.DecodeError, UnicodeDecodeError):
            try:
                value = loads_tolerant(token, self._report, "")
            except Damaged:
                return ""
        if isinstance(value, str):
            return value.encode("utf-8", "replace").decode()
        return "" if value is None else token.decode(errors="replace")


def compact_text(raw: bytes) -> str:
    """Compact JSON text of a member; rank lists, which come quoted (``"[0, 1]"``), lose their quotes."""
    if raw in (b"null", b'""', b""):
        return ""
    try:
        text = msgspec.json.format(raw, indent=-1).decode()
        if text.startswith('"'):
            text = str(msgspec.json.decode(text)).replace(" ", "")
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = raw.decode(errors="replace")
    return text


class ScannedBatch:
    """One result of the compiled scanner: for each field the rows in which it occurs, and its values there."""

    def __init__(self, texts: TokenTexts, report: ReadReport, source: bytes, scanned: tuple[Any, ...]) -> None:
        self.size, self._columns, odd, self._new_tokens = scanned
        self._all_texts = texts
        self._report = report
        self._source = source
        self._odd = np.frombuffer(odd, np.int64).reshape(-1, 4)
        self._dense: dict[str, NDArray[Any]] = {}

    @property
    def _texts(self) -> TokenTexts:
        """The texts of all tokens. Batches are scanned ahead in another thread, so each adds its tokens when used."""
        if self._new_tokens:
            self._all_texts.extend(self._new_tokens)
            self._new_tokens = []
        return self._all_texts

    def _column(self, field: str) -> NDArray[Any]:
        """The field in every event of the batch, with the kind's value for "absent" in the gaps."""
        if field not in self._dense:
            number, kind = _FIELDS[field]
            rows_text, values_text = self._columns[number]
            rows, values = np.frombuffer(rows_text, np.int32), np.frombuffer(values_text, _DTYPES[kind])
            if len(rows) != self.size or not (rows[1:] > rows[:-1]).all():
                dense = np.full(self.size, _ABSENT[kind], _DTYPES[kind])
                dense[rows] = values  # a member that occurs twice counts with its last value, as in any JSON reader
                values = dense
            self._dense[field] = values
        return self._dense[field]

    def text(self, field: str, rows: Rows | None = None) -> NDArray[np.int32]:
        return self._string_ids(field, rows, "text")

    def raw(self, field: str, rows: Rows) -> NDArray[np.int32]:
        return self._string_ids(field, rows, "raw")

    def _string_ids(self, field: str, rows: Rows | None, way: str) -> NDArray[np.int32]:
        key = f"{way} {field}"
        if key not in self._dense:
            self._dense[key] = self._texts.ids(self._column(field), way)
        ids = self._dense[key]
        return ids if rows is None else ids[rows]

    def occurs(self, field: str) -> bool:
        return bool(self._columns[_FIELDS[field][0]][0])

    def integer(self, field: str, rows: Rows) -> NDArray[np.int64]:
        column = self._column(field)[rows]
        for at, value in self._odd_values(field, rows):
            column[at] = integer(value, self._report, field.removeprefix("args."))
        return column

    def number(self, field: str, rows: Rows) -> NDArray[np.float64]:
        column = self._column(field)[rows]
        for at, value in self._odd_values(field, rows):
            column[at] = floats([value])[0]
        return column

    def time(self, field: str, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
        column = self._column(field)[rows]
        valid = np.ones(len(column), np.bool_)
        absent = column == _NO_TIME
        for at, value in self._odd_values(field, rows):
            exact, usable = nanoseconds([value])
            column[at], valid[at], absent[at] = exact[0], usable[0] or value is None, value is None
        column[absent] = 0
        return column, valid, absent

    def _odd_values(self, field: str, rows: Rows) -> list[tuple[int, Any]]:
        """(position within ``rows``, value) of the members that are no plain number."""
        if not len(self._odd) or not len(rows):
            return []
        odd = self._odd[self._odd[:, 1] == _FIELDS[field][0]]
        at = np.minimum(np.searchsorted(rows, odd[:, 0]), len(rows) - 1)
        mine = rows[at] == odd[:, 0]
        values = [self._source[start : start + length] for start, length in odd[mine][:, 2:].tolist()]
        return [(position, _plain(value)) for position, value in zip(at[mine].tolist(), values, strict=True)]


def _plain(token: bytes) -> Any:
    """A number as `msgspec.Raw`, which `nanoseconds` and `integer` read exactly; anything else decoded."""
    if token[:1] in b"-0123456789":
        return msgspec.Raw(token)
    return json.loads(token)


_NO_TIME = -(1 << 63)
_DTYPES = (np.int32, np.int64, np.float64, np.int64)
_ABSENT = (-1, -1, np.nan, _NO_TIME)
# Number and kind of every field; the scanner numbers them in this order.
_FIELDS = {
    field: (number, kind)
    for number, (field, kind) in enumerate(
        [*_EVENT_FIELDS.items(), *((f"args.{name}", kind) for name, _, kind in _ARGS_FIELDS)]
    )
}


class BatchScanner:
    """Reads the text of whole events with the compiled scanner; `scan` gives None where that cannot."""

    def __init__(self, strings: StringTable, report: ReadReport) -> None:
        self._report = report
        self._texts = TokenTexts(strings, report)
        event_fields = list(_EVENT_FIELDS.items())
        args_fields = [(encoded, kind) for _, encoded, kind in _ARGS_FIELDS]
        self._scanner = _scanner.Scanner(event_fields, args_fields) if _scanner is not None else None

    def scan(self, text: bytes) -> ScannedBatch | None:
        """The batch, or None if the text is damaged or odd in a way that needs the struct decoder."""
        if self._scanner is None:
            return None
        if not text.isascii():
            try:
                text.decode()
            except UnicodeDecodeError:
                return None
        scanned = self._scanner.scan(text)
        return None if scanned is None else ScannedBatch(self._texts, self._report, text, scanned)


class DecodedBatch:
    """Events as structs."""

    def __init__(self, strings: StringTable, report: ReadReport, events: list[Event]) -> None:
        self.size = len(events)
        self._strings = strings
        self._report = report
        self._events = events

    def _values(self, field: str, rows: Rows | None) -> list[Any]:
        events = self._events if rows is None else [self._events[row] for row in rows.tolist()]
        if field.startswith("args."):
            name = field[5:]
            return [getattr(event.args, name) for event in events]
        return [getattr(event, field) for event in events]

    def text(self, field: str, rows: Rows | None = None) -> NDArray[np.int32]:
        values = self._values(field, rows)
        texts = [value if type(value) is str else "" if value is None else str(value) for value in values]
        ids = self._strings.intern_all(texts)
        empty = self._strings.find("")
        if empty >= 0:
            ids[ids == empty] = -1
        return ids

    def raw(self, field: str, rows: Rows) -> NDArray[np.int32]:
        texts = [compact_text(bytes(value)) for value in self._values(field, rows)]
        return np.array([self._strings.intern(text) if text else -1 for text in texts], np.int32)

    def occurs(self, field: str) -> bool:
        return True

    def integer(self, field: str, rows: Rows) -> NDArray[np.int64]:
        return integers(self._values(field, rows), self._report, field)

    def number(self, field: str, rows: Rows) -> NDArray[np.float64]:
        return floats(self._values(field, rows))

    def time(self, field: str, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
        values = self._values(field, rows)
        absent = np.array([value is None or (value is NO_RAW) or _is_null(value) for value in values], np.bool_)
        times, valid = nanoseconds([0 if gone else value for value, gone in zip(values, absent.tolist(), strict=True)])
        return times, valid, absent


def _is_null(value: Any) -> bool:
    return isinstance(value, msgspec.Raw) and bytes(value) in (b"", b"null")
