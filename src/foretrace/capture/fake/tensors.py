"""Which tensor is which: numbers of tensor objects, and the storages that they lie in, with their lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

_TAG = "_foretrace_tensor_id"
NO_STORAGE = 0


@dataclass(slots=True)
class Life:
    """A storage from its allocation to its release. A storage that is resized to nothing and back has two lives.

    Attributes:
        allocated: node that made it, -1 where it was there before or its maker was not recorded.
        freed: last node that had begun when it went, -1 while it lives.
    """

    storage_id: int
    size_bytes: int
    device: str
    allocated: int
    freed: int = -1


@dataclass(slots=True)
class _Known:
    reference: weakref.ref[Any]
    life: Life


class TensorNumbers:
    """Numbers for tensors and storages, out of the counter that nodes are numbered with."""

    def __init__(self, next_id: Callable[[], int], last_node: Callable[[], int]) -> None:
        self._next_id = next_id
        self._last_node = last_node
        self._storages: dict[int, _Known] = {}
        self.lives: list[Life] = []

    def tensor(self, tensor: torch.Tensor) -> int:
        """The number of a tensor object; the same as long as it lives, never given again."""
        tag = tensor.__dict__.get(_TAG)
        # A deep copy takes its tag along.
        if tag is not None and tag[0] == id(tensor):
            number: int = tag[1]
            return number
        number = self._next_id()
        tensor.__dict__[_TAG] = (id(tensor), number)
        return number

    def storage(self, tensor: torch.Tensor, node: int) -> int:
        """The number of a tensor's storage, `NO_STORAGE` if it has none.

        Args:
            tensor: any tensor.
            node: the node that made the tensor, -1 for one that was there before.
        """
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return NO_STORAGE
        address = storage._cdata
        known = self._storages.get(address)
        if known is None:
            reference = weakref.ref(storage, partial(self._freed, address))
            life = Life(self._next_id(), storage.nbytes(), str(tensor.device), node)
            self._storages[address] = known = _Known(reference, life)
            self.lives.append(life)
        elif known.life.size_bytes != storage.nbytes():
            self._resize(known, storage.nbytes(), node)
        return known.life.storage_id

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Take note of the new size of a storage."""
        known = self._storages.get(storage._cdata)
        if known is not None and known.life.size_bytes != storage.nbytes():
            self._resize(known, storage.nbytes(), self._last_node())

    def _resize(self, known: _Known, size_bytes: int, node: int) -> None:
        old = known.life
        if old.size_bytes and old.freed < 0:
            old.freed = self._last_node()
        known.life = Life(old.storage_id, size_bytes, old.device, node)
        if size_bytes:
            self.lives.append(known.life)

    def _freed(self, address: int, _: Any) -> None:
        known = self._storages.pop(address, None)
        if known is not None and known.life.freed < 0:
            known.life.freed = self._last_node()

    def lives_of(self, first_node: int, last_node: int) -> list[Life]:
        """The lives that touch the nodes from ``first_node`` to ``last_node``; what lies outside them is -1."""
        found = []
        for life in self.lives:
            if life.allocated > last_node or 0 <= life.freed < first_node:
                continue
            allocated = life.allocated if life.allocated >= first_node else -1
            freed = life.freed if life.freed <= last_node else -1
            found.append(Life(life.storage_id, life.size_bytes, life.device, allocated, freed))
        return found
