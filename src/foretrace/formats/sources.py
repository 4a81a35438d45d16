"""Where trace bytes come from: files, folders, globs, archives; plain or gzip; always in bounded blocks."""

from __future__ import annotations

import glob
import queue
import shutil
import tarfile
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from isal import isal_zlib
from isal.igzip_lib import IsalError

from foretrace.trace import FormatError, ReadReport

BLOCK_BYTES = 1 << 20
_FIRST_BYTES = 1 << 14  # a small first block: reading the head of a file copies it once a member
_JSON_NAMES = (".json", ".json.gz")
_ARCHIVE_NAMES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")

PathLike = str | Path
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Source:
    """One trace file: where it lies and what to call it (``archive.zip!rank0.json`` for a member)."""

    path: Path
    name: str
    size_bytes: int

    @classmethod
    def of(cls, path: Path, name: str = "") -> Source:
        return cls(path, name or str(path), path.stat().st_size)


def find_sources(paths: PathLike | Sequence[PathLike], stack: ExitStack) -> list[Source]:
    """All trace files that the given paths stand for, in order of name within a folder, glob or archive.

    Archive members are unpacked into a temporary folder that lives as long as ``stack``.

    Raises:
        FormatError: if a path does not exist, or a folder, glob or archive holds no JSON file.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    sources = [source for path in paths for source in _expand(Path(path), stack)]
    if not sources:
        raise FormatError("(no path)", "nothing to read", "name at least one trace file or folder")
    return sources


def _expand(path: Path, stack: ExitStack) -> list[Source]:
    try:
        if path.is_dir():
            return _in_folder(path)
        if path.exists():
            return _unpack(path, stack) if _is_archive(path) else [Source.of(path)]
    except OSError as error:
        raise FormatError(str(path), error.strerror or str(error), "check the path and its permissions") from None
    found = sorted(glob.glob(str(path), recursive=True))
    if not found:
        raise FormatError(str(path), "no such file or folder", "check the path, or quote the glob pattern")
    return [source for match in found for source in _expand(Path(match), stack)]


def _in_folder(folder: Path) -> list[Source]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name.endswith(_JSON_NAMES))
    if not files:
        raise FormatError(str(folder), "no .json or .json.gz file in this folder", "name the folder of the traces")
    return [Source.of(path) for path in files]


def _is_archive(path: Path) -> bool:
    if not path.name.lower().endswith(_ARCHIVE_NAMES):
        return False
    return zipfile.is_zipfile(path) or tarfile.is_tarfile(path)


def _unpack(path: Path, stack: ExitStack) -> list[Source]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="foretrace-")))
    sources: list[Source] = []
    try:
        for name, copy_to in _members(path, stack):
            target = folder / f"{len(sources)}-{Path(name).name}"  # never the member's own path: it may lead outside
            copy_to(target)
            sources.append(Source.of(target, f"{path}!{name}"))
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, RuntimeError) as error:
        raise FormatError(str(path), f"archive is damaged ({error})", "unpack it by hand and name the files") from None
    if not sources:
        raise FormatError(str(path), "no .json or .json.gz file in this archive", "put the traces into it")
    return sorted(sources, key=lambda source: source.name)


def _members(path: Path, stack: ExitStack) -> Iterator[tuple[str, Callable[[Path], None]]]:
    if zipfile.is_zipfile(path):
        archive = stack.enter_context(zipfile.ZipFile(path))
        for name in archive.namelist():
            if name.endswith(_JSON_NAMES):
                yield name, lambda target, name=name: _copy(archive.open(name), target)  # type: ignore[misc]
        return
    tar = stack.enter_context(tarfile.open(path, "r:*"))  # noqa: SIM115
    for member in tar:
        if member.isfile() and member.name.endswith(_JSON_NAMES):
            content = tar.extractfile(member)
            if content is not None:
                yield member.name, lambda target, content=content: _copy(content, target)  # type: ignore[misc]


def _copy(content, target: Path) -> None:  # type: ignore[no-untyped-def]
    with content, target.open("wb") as file:
        shutil.copyfileobj(content, file, BLOCK_BYTES)


def blocks(source: Source, report: ReadReport, on_bytes: Callable[[int], None] | None = None) -> Iterator[bytes]:
    """The inflated content of a file in blocks of at most `BLOCK_BYTES`.

    A gzip file that is cut or damaged gives all that can be inflated, and the report says so.
    Reading and inflating run in a thread of their own, a few blocks ahead: the inflater frees the interpreter.
    """
    report.size_bytes = source.size_bytes
    return ahead(_inflated(source, report, on_bytes or (lambda count: None)))


def _inflated(source: Source, report: ReadReport, on_bytes: Callable[[int], None]) -> Iterator[bytes]:
    with source.path.open("rb") as file:
        first = file.read(BLOCK_BYTES // 8)
        pieces = _counted(first, file, on_bytes)
        if first[:2] == b"\x1f\x8b":
            yield from _gunzip(pieces, report, source.path)
        else:
            yield from pieces


def _counted(first: bytes, file, on_bytes: Callable[[int], None]) -> Iterator[bytes]:  # type: ignore[no-untyped-def]
    piece = first
    while piece:
        yield piece
        on_bytes(len(piece))
        piece = file.read(BLOCK_BYTES // 8)


def _gunzip(pieces: Iterator[bytes], report: ReadReport, path: Path) -> Iterator[bytes]:

    inflater = isal_zlib.decompressobj(31)
    out_bytes = 0
    for piece in pieces:
        waiting = piece
        while waiting:
            if inflater.eof:  # a further member, or padding behind the last one
                if not waiting.strip(b"\0"):
                    break
                inflater = isal_zlib.decompressobj(31)
            try:
                out = inflater.decompress(waiting, BLOCK_BYTES if out_bytes else _FIRST_BYTES)
            except IsalError as error:  # type: ignore[misc]
                for rest in _up_to_the_damage(path, out_bytes):
                    out_bytes += len(rest)
                    yield rest
                report.repair("damaged gzip stream: kept what precedes the damage", f"byte {out_bytes} ({error})")
                return
            out_bytes += len(out)
            if out:
                yield out
            waiting = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
            if not out and not inflater.eof and not waiting:
                break
    if not inflater.eof:
        report.repair("truncated gzip stream: kept what precedes the cut", f"byte {out_bytes}")


def _up_to_the_damage(path: Path, skip: int) -> Iterator[bytes]:
    """The content once more in small steps, less the first ``skip`` bytes: a failing call gives nothing back."""
    inflater = zlib.decompressobj(31)
    with path.open("rb") as file:
        while piece := file.read(64):
            try:
                while piece:
                    out = inflater.decompress(piece)
                    if out[skip:]:
                        yield out[skip:]
                    skip = max(skip - len(out), 0)
                    piece = inflater.unused_data
                    if inflater.eof:
                        inflater = zlib.decompressobj(31)
            except zlib.error:
                return


def ahead(items: Iterable[T], depth: int = 3) -> Iterator[T]:
    """Run an iterator in a thread, ``depth`` items ahead of its consumer; errors come out at their place."""
    done = object()
    results: queue.Queue[object] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: object) -> bool:
        while not stop.is_set():
            try:
                results.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put(item):
                    return
            put(done)
        except BaseException as error:  # handed to the consumer, which raises it
            put(error)

    threading.Thread(target=work, name="foretrace-read-ahead", daemon=True).start()
    try:
        while (item := results.get()) is not done:
            if isinstance(item, BaseException):
                raise item
            yield cast(T, item)
    finally:
        stop.set()
