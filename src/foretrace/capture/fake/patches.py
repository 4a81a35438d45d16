"""Replacing attributes of PyTorch for one run, and putting them back."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

_ABSENT = object()


class Patches(AbstractContextManager["Patches"]):
    """Remembers what it replaces; leaving the context puts everything back, last first."""

    def __init__(self) -> None:
        self._old: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> Any:
        """Set ``owner.name``, and return what was there (None if nothing was)."""
        old = vars(owner).get(name, _ABSENT)
        self._old.append((owner, name, old))
        setattr(owner, name, value)
        return None if old is _ABSENT else old

    def __exit__(self, *_: object) -> None:
        while self._old:
            owner, name, old = self._old.pop()
            if old is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
