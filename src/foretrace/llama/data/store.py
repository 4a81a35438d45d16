"""`TokenStore`: the tokens of many documents in a folder, mapped into memory.

``tokens.bin`` has the tokens one document behind the other, little-endian, two bytes each where the vocabulary allows
it; ``starts.npy`` where each document begins, and their end; ``store.json`` the format's version, the vocabulary and a
digest of the tokenizer. A folder is complete or absent: it is written under another name first.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foretrace.trace.reading import FormatError

_VERSION = 1
_WRITTEN_AT_ONCE = 1 << 20  # tokens
_REMEDY = "make the store again with: foretrace llama tokenize"


@dataclass(frozen=True)
class TokenStore:
    """Tokens of documents.

    Attributes:
        tokens: of all documents, uint16 or uint32.
        starts: where each document begins, and their end; shape ``(documents + 1,)``.
        vocabulary: tokens of the vocabulary; all ids are below.
        tokenizer: digest of the tokenizer that made them, "" if unknown.
    """

    tokens: NDArray[np.unsignedinteger]
    starts: NDArray[np.int64]
    vocabulary: int
    tokenizer: str = ""

    @property
    def num_documents(self) -> int:
        """Documents."""
        return len(self.starts) - 1

    def document(self, number: int) -> NDArray[np.unsignedinteger]:
        """The tokens of one document."""
        return self.tokens[self.starts[number] : self.starts[number + 1]]


def write_store(
    folder: Path, documents: Iterable[Sequence[int]], vocabulary: int, tokenizer: str = "", overwrite: bool = False
) -> TokenStore:
    """Write documents, each of at least one token, into a new folder.

    Raises:
        FormatError: if the folder exists, a token is outside of the vocabulary, or nothing is to be written.
    """
    if folder.exists() and not overwrite:
        raise FormatError(str(folder), "it exists already", "remove it, or name another folder")
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        _write(draft, str(folder), documents, vocabulary, tokenizer)
        if folder.exists():
            shutil.rmtree(folder)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return read_store(folder)


def _write(draft: Path, name: str, documents: Iterable[Sequence[int]], vocabulary: int, tokenizer: str) -> None:
    dtype = np.uint16 if vocabulary <= 1 << 16 else np.uint32
    starts = [0]
    with (draft / "tokens.bin").open("wb") as file:
        part: list[int] = []
        for document in documents:
            if not len(document):
                continue
            if min(document) < 0 or max(document) >= vocabulary:
                problem = f"document {len(starts) - 1} has token {max(document)} or {min(document)}"
                raise FormatError(
                    name, problem, f"the vocabulary has the ids 0 to {vocabulary - 1}: check the tokenizer"
                )
            part.extend(document)
            starts.append(starts[-1] + len(document))
            if len(part) > _WRITTEN_AT_ONCE:
                file.write(np.array(part, dtype).tobytes())
                part = []
        file.write(np.array(part, dtype).tobytes())
    if len(starts) == 1:
        raise FormatError(name, "there is no document with text", "check the input files")
    np.save(draft / "starts.npy", np.array(starts, np.int64))
    about = {"version": _VERSION, "vocabulary": vocabulary, "tokenizer": tokenizer, "dtype": np.dtype(dtype).name}
    (draft / "store.json").write_text(json.dumps(about) + "\n")


def read_store(folder: Path) -> TokenStore:
    """Map a store into memory.

    Raises:
        FormatError: naming the file, if it is missing, cut off, or of another version.
    """
    about_path, tokens_path, starts_path = (folder / name for name in ("store.json", "tokens.bin", "starts.npy"))
    try:
        about = json.loads(about_path.read_text())
        version, vocabulary, dtype = about["version"], int(about["vocabulary"]), np.dtype(about["dtype"])
    except OSError as error:
        raise FormatError(str(about_path), error.strerror or str(error), _REMEDY) from None
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(str(about_path), f"it is no description of a token store: {error}", _REMEDY) from None
    if version != _VERSION:
        raise FormatError(str(about_path), f"version {version} of the format, {_VERSION} is read", _REMEDY)
    try:
        starts = np.load(starts_path, allow_pickle=False)
        size = tokens_path.stat().st_size
    except (OSError, ValueError) as error:
        raise FormatError(str(starts_path), f"it cannot be read: {error}", _REMEDY) from None
    if starts.ndim != 1 or len(starts) < 2 or starts[0] != 0 or (np.diff(starts) < 1).any():
        raise FormatError(str(starts_path), "its documents do not lie one behind the other", _REMEDY)
    if size != int(starts[-1]) * dtype.itemsize:
        problem = f"{size} bytes, its documents have {int(starts[-1]) * dtype.itemsize}"
        raise FormatError(str(tokens_path), problem, _REMEDY)
    tokens = np.memmap(tokens_path, dtype, mode="r")
    return TokenStore(tokens, starts, vocabulary, str(about.get("tokenizer", "")))


def digest_of(path: Path) -> str:
    """Digest of a tokenizer's file, as stores name it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
