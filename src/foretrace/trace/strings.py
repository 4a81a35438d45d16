"""The string table: every text of a timeline once, columns hold its id."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
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

    @cached_property
    def _ids(self) -> dict[str, int]:
        """Made when first needed: a table out of a file is mostly only looked up."""
        return {text: at for at, text in enumerate(self._list or ())}

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
        return self._ids.get(text, -1)

    def lookup(self, ids: NDArray[np.integer]) -> list[str]:
        """The texts of the given ids; -1 gives ``""``."""
        texts = [*self._texts(), ""]
        return [texts[i] for i in ids.tolist()]

    def _texts(self) -> list[str]:
        if self._list is None or ("_ids" in self.__dict__ and len(self._list) != len(self._ids)):
            self._list = list(self._ids)
        return self._list

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._texts()[index]

    def __len__(self) -> int:
        return len(self._texts())

    def to_arrow(self) -> pa.Array:
        """The texts as an Arrow string array, in the order of their ids."""
        return arrow_arrays.texts(self._texts())
