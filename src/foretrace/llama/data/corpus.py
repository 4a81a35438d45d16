"""Text files -> a `TokenStore`: what a document is, and its tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from foretrace.llama.data.store import TokenStore, digest_of, write_store
from foretrace.llama.tokenizer import Tokenizer
from foretrace.trace.reading import FormatError

_SUFFIXES = (".txt", ".md", ".jsonl")


def text_files(paths: Sequence[Path]) -> list[Path]:
    """Files of text; a folder stands for those in it (.txt, .md, .jsonl), sorted by name.

    Raises:
        FormatError: if one does not exist, or a folder has none.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise FormatError(str(path), "no such file", "name text files or folders of them")
        inside = sorted(p for p in path.rglob("*") if p.suffix in _SUFFIXES) if path.is_dir() else [path]
        if not inside:
            raise FormatError(str(path), "no text in this folder", f"name files, or put {', '.join(_SUFFIXES)} there")
        found += inside
    return found


def documents(path: Path, separator: str = "") -> Iterator[str]:
    """The documents of a file: each line's ``text`` in ``.jsonl``; else the whole file, or its parts.

    Args:
        path: UTF-8 text.
        separator: what stands between documents, e.g. two empty lines; ``""`` for one document a file.

    Raises:
        FormatError: naming the line, if a file cannot be read or is something else.
    """
    try:
        with path.open(encoding="utf-8") as file:
            if path.suffix == ".jsonl":
                yield from _lines(path, file)
                return
            text = file.read()
    except OSError as error:
        raise FormatError(str(path), error.strerror or str(error), "check the path and its permissions") from None
    except UnicodeDecodeError as error:
        raise FormatError(str(path), f"it is no UTF-8 at byte {error.start}", "save it as UTF-8") from None
    yield from (part for part in (text.split(separator) if separator else [text]) if part.strip())


def _lines(path: Path, file: Iterator[str]) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise FormatError(str(path), f"line {number} has no text", 'write {"text": "..."} on each line')
        if text.strip():
            yield text


def tokenize(
    paths: Sequence[Path],
    tokenizer_path: Path,
    folder: Path,
    separator: str = "",
    on_file: Callable[[int], None] | None = None,
) -> TokenStore:
    """Tokenize documents into a store; each begins with BOS and ends with EOS.

    Args:
        paths: of text; see `text_files`.
        tokenizer_path: a ``tokenizer.model``.
        folder: of the store.
        separator: see `documents`.
        on_file: called with the bytes of each file when it is done.

    Raises:
        FormatError: if a file cannot be read, or the folder exists.
    """
    tokenizer = Tokenizer.load(tokenizer_path)

    def encoded() -> Iterator[list[int]]:
        for path in text_files(paths):
            for text in documents(path, separator):
                yield tokenizer.encode(text, bos=True, eos=True)
            if on_file:
                on_file(path.stat().st_size)

    return write_store(folder, encoded(), tokenizer.size, digest_of(tokenizer_path))
