"""`convert`: a checkpoint from one format to another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from foretrace.llama.checkpoint.huggingface import MAX_SHARD_BYTES, read_hf, write_hf
from foretrace.llama.checkpoint.meta import read_meta, write_meta
from foretrace.llama.checkpoint.weights import Checkpoint
from foretrace.trace.reading import FormatError

Format = Literal["meta", "hf"]


def find_format(folder: Path) -> Format:
    """Whose checkpoint a folder holds.

    Raises:
        FormatError: if it is nobody's.
    """
    if (folder / "params.json").is_file():
        return "meta"
    if (folder / "config.json").is_file():
        return "hf"
    problem = "holds neither params.json nor config.json" if folder.is_dir() else "is no folder"
    raise FormatError(str(folder), problem, "name the folder of a checkpoint of Meta's or Hugging Face's")


def read_checkpoint(folder: Path, kind: Format | None = None, context: int | None = None) -> Checkpoint:
    """A checkpoint of Meta's or Hugging Face's; its weights are read when they are asked for.

    Args:
        folder: where it lies.
        kind: whose it is; found out if None.
        context: longest sequence, where it is not the one that the checkpoint says.

    Raises:
        FormatError: if a file is missing, cut off, no checkpoint of a Llama, or does not fit the others.
    """
    read = read_meta if (kind or find_format(folder)) == "meta" else read_hf
    return read(folder, context)


def convert(
    source: Path,
    target: Path,
    to: Format,
    *,
    kind: Format | None = None,
    shards: int = 1,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: torch.dtype | None = None,
    context: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Read a checkpoint and write it anew.

    Args:
        source: a folder. target: another one, which must not exist or be empty.
        to: the format to write.
        kind: the format of ``source``; found out if None.
        shards: files of Meta's format. max_shard_bytes: of a file of Hugging Face's.
        dtype: of the weights; as they are if None.
        context: longest sequence, where it is not the one that the checkpoint says.
        progress: called with bytes done and in all.

    Returns:
        What was written: the model's sizes, files, and notes on what was left out or assumed.

    Raises:
        FormatError: if the source cannot be read or the target not be written; then there is no target.
    """
    checkpoint = read_checkpoint(source, kind, context)
    if to == "meta":
        files = write_meta(checkpoint, target, shards, dtype, progress)
    else:
        files = write_hf(checkpoint, target, max_shard_bytes, dtype, progress)
    sizes = checkpoint.config.sizes
    return {
        "source": str(source),
        "written": str(target),
        "format": to,
        "files": files,
        "parameters": sizes.parameters(),
        "dtype": str(dtype or checkpoint.dtype).removeprefix("torch."),
        "vocabulary": sizes.vocabulary,
        "notes": dict(checkpoint.notes),
    }
