"""The string table: every text of a timeline once, columns hold its id."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foretrace.trace import arrow_arrays

if TYPE_CHECKING:
    import pyarrow as pa


class StringTable(Sequence[str]):
    """Distinct strings in order of first use; ids are int32 and -1 stands for "none"."""

    def __init__(self, strings: Iterable[str] = ()) -> None:
        self._list: list[str] | None = list(dict.fromkeys(strings))
        self._encoded: tuple[NDArray[np.uint8], NDArray[np.int64]] | None = None

    @classmethod
    def from_utf8(cls, data: NDArray[np.uint8], first: NDArray[np.int64]) -> StringTable:
        """A table that decodes its texts only when they are asked for.

        Args:
            data: distinct texts in valid UTF-8, one behind the other.
            first: where each begins and ends, shape ``(texts + 1,)``.
        """
        table = cls()
        table._list, table._encoded = None, (data, first)
        return table

    def to_utf8(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """The texts as `from_utf8` takes them; a lone surrogate becomes a question mark."""
        if self._encoded is not None and len(self._encoded[1]) == len(self) + 1:
            return self._encoded
        encoded = [text.encode("utf-8", "replace") for text in self._texts()]
        first = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), out=first[1:])
        return np.frombuffer(b"".join(encoded), np.uint8), first

    @cached_property
    def _ids(self) -> dict[str, int]:
        """Made when first needed: a table out of a file is mostly only looked up."""
        return {text: at for at, text in enumerate(self._texts())}

    def intern(self, text: str) -> int:
        """The id of ``text``, which is added when it is new."""
        return self._ids.setdefault(text, len(self._ids))

    def intern_all(self, texts: Sequence[str]) -> NDArray[np.int32]:
        """The ids of many strings at once, shape ``(len(texts),)``."""
        ids = self._ids
        # Only the few new strings take the slow road; the many known ones are one dictionary look-up each.
        for text in dict.fromkeys(texts):
            if text not in ids:
                ids[text] = len(ids)
        return np.fromiter(map(ids.__getitem__, texts), np.int32, len(texts))

    def find(self, text: str) -> int:
        """The id of ``text``, or -1 when it does not occur."""
        if self._list is None and self._encoded is not None and "_ids" not in self.__dict__:
            return self._find_encoded(text.encode("utf-8", "surrogatepass"))
        return self._ids.get(text, -1)

    def _find_encoded(self, text: bytes) -> int:
        """As `find`, without decoding all."""
        data, first = self._encoded or (np.empty(0, np.uint8), np.zeros(1, np.int64))
        rows = np.flatnonzero(np.diff(first) == len(text))
        for offset, byte in enumerate(text):
            rows = rows[data[first[rows] + offset] == byte]
        return int(rows[0]) if len(rows) else -1

    def lookup(self, ids: NDArray[np.integer]) -> list[str]:
        """The texts of the given ids; -1 gives ``""``."""
        texts = self._texts()
        return [texts[i] if i >= 0 else "" for i in ids.tolist()]

    def _texts(self) -> list[str]:
        if self._list is None and "_ids" not in self.__dict__ and self._encoded is not None:
            data, first = self._encoded
            raw, ends = data.tobytes(), first.tolist()
            self._list = [raw[a:b].decode() for a, b in pairwise(ends)]
        if self._list is None or ("_ids" in self.__dict__ and len(self._list) != len(self._ids)):
            self._list = list(self._ids)
        return self._list

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._texts()[index]

    def __len__(self) -> int:
        if self._list is None and "_ids" not in self.__dict__ and self._encoded is not None:
            return len(self._encoded[1]) - 1
        return len(self._texts())

    def to_arrow(self) -> pa.Array:
        """The texts as an Arrow string array, in the order of their ids."""
        return arrow_arrays.texts(self._texts())
