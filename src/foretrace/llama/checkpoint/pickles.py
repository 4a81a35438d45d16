"""Reading ``torch.save`` files without running what they may hold."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretrace.trace.reading import FormatError


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a ``.pth`` or ``.bin`` file, memory-mapped where its format allows.

    Names lose the ``_orig_mod.`` that a compiled model puts into them; what is no tensor is left out.

    Raises:
        FormatError: if the file is cut off, or holds objects that only running its pickle would make.
    """
    content = _load(path)
    if not isinstance(content, dict):
        raise FormatError(str(path), f"holds a {type(content).__name__}, no weights by name", "name a checkpoint")
    return {str(name).replace("_orig_mod.", ""): value for name, value in content.items() if isinstance(value, Tensor)}


def _load(path: Path) -> Any:
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
    try:
        if _is_zip(path):
            return torch.load(path, mmap=True, **options)
        return torch.load(path, **options)  # as PyTorch wrote before 1.6
    except pickle.UnpicklingError as error:
        if "weights_only" not in str(error):  # PyTorch says so where it met an object that it does not make
            raise _cut_off(path) from None
        problem = "holds Python objects besides tensors, and reading them could run a program"
        raise FormatError(str(path), problem, "get weights as safetensors, or tensors alone") from None
    except OSError as error:
        raise FormatError(str(path), error.strerror or str(error), "name a checkpoint") from None
    except (RuntimeError, EOFError, ValueError, KeyError, IndexError, AttributeError, TypeError):
        raise _cut_off(path) from None


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _cut_off(path: Path) -> FormatError:
    return FormatError(str(path), "is cut off or damaged", "get this file again")
