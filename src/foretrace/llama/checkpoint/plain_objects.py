"""Reading checkpoints of ``torch.distributed.checkpoint`` without running what they may hold.

PyTorch's own reader unpickles the index and everything that is no tensor, which runs whatever program a stranger put
there. Here the index is made of the classes of an index alone, and the rest of plain values.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import ReadItem

from foretrace.trace.reading import FormatError

_INDEX_CLASSES = {
    ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
    for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )
}  # fmt: skip
_INDEX_CLASSES |= {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): lambda name: {str(torch.strided): torch.strided}[name],
    ("pathlib", "PosixPath"): PurePosixPath,
}
_INDEX_CLASSES |= {
    ("torch", name): kind for name in dir(torch) if isinstance(kind := getattr(torch, name), torch.dtype)
}


class PlainReader(FileSystemReader):
    """PyTorch's reader, with an index that cannot run anything.

    Args:
        folder: of the checkpoint.

    Raises:
        FormatError: if its index is missing, damaged, or holds anything else.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._index = _read_index(folder / ".metadata")

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """The index: where each tensor lies."""
        self._index.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return self._index


class PlainPlanner(DefaultLoadPlanner):
    """PyTorch's planner; what is no tensor is read as plain values."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value where the state has its place."""
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True, map_location="cpu"), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)  # unpickles anything, and now there is nothing but plain values


def check_plain(value: Any, place: str = "") -> None:
    """Refuse, before it is written, what could not be read again.

    Raises:
        ValueError: if there is anything but tensors, numbers, text and containers of these.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str | int):
                raise ValueError(f"{place or 'the state'} has a key {key!r}: only text and integers are kept")
            check_plain(item, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            check_plain(item, f"{place}[{at}]")
    elif not (value is None or isinstance(value, Tensor) or type(value) in (bool, int, float, str, bytes)):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ValueError(f"{place} is a {kind}: only tensors, numbers, text and containers of these are kept")


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _INDEX_CLASSES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _INDEX_CLASSES[module, name]


def _read_index(path: Path) -> metadata.Metadata:
    try:
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
        places = {stored.relative_path for stored in index.storage_data.values()}
    except OSError as error:
        raise FormatError(str(path), error.strerror or str(error), "take another checkpoint") from None
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise FormatError(str(path), f"is damaged, or no index ({error})", "take another checkpoint") from None
    if not isinstance(index, metadata.Metadata):
        raise FormatError(str(path), "is no index of a checkpoint", "take another checkpoint")
    for place in places:
        if Path(place).name != place:
            raise FormatError(str(path), f"names a file outside of its folder ({place})", "take another checkpoint")
    return index
