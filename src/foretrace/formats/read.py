"""`read`: any number of trace files, folders, globs or archives -> `Job`."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from foretrace.formats.columns import Progress
from foretrace.formats.kineto import read_timeline
from foretrace.formats.sources import PathLike, Source, find_sources
from foretrace.trace import FormatError, Job, ProcessGroup, Timeline


def read(
    path_or_paths: PathLike | Sequence[PathLike],
    *,
    keep_python: bool = True,
    executor: Executor | None = None,
    cache: bool | PathLike = False,
    progress: Progress | None = None,
) -> Job:
    """Read Kineto or Chrome traces: one rank per file.

    Args:
        path_or_paths: files (``.json``, ``.json.gz``), folders, globs, or archives (``.zip``, ``.tar``, ``.tar.gz``).
        keep_python: keep ``python_function`` events, which can be most of a file.
        executor: reads the files in parallel, e.g. a ``ProcessPoolExecutor`` or Dask's ``Client.get_executor()``;
            without one, threads do, since inflating and scanning release the interpreter.
        cache: True keeps an Arrow file of each trace in the user's cache folder and loads that from then on
            (a path names another folder). A changed file is read again.
        progress: called with (bytes done, bytes in all) while reading.

    Returns:
        The job. Each timeline's ``report`` says what was repaired, dropped or guessed.

    Raises:
        FormatError: if a path does not exist or holds no trace. In a folder or archive, files of another kind
            beside at least one trace are passed over and counted in ``Job.warnings``.
    """
    with ExitStack() as stack:
        sources = find_sources(path_or_paths, stack)
        single = len(sources) == 1 or not _only_folders(path_or_paths)
        timelines, warnings = _read_all(sources, keep_python, executor, cache, progress, strict=single)
    return make_job(timelines, warnings)


def _only_folders(path_or_paths: PathLike | Sequence[PathLike]) -> bool:
    paths = [path_or_paths] if isinstance(path_or_paths, str | Path) else path_or_paths
    return not any(Path(path).is_file() and str(path).endswith((".json", ".json.gz")) for path in paths)


def _read_all(
    sources: list[Source],
    keep_python: bool,
    executor: Executor | None,
    cache: bool | PathLike,
    progress: Progress | None,
    strict: bool,
) -> tuple[list[Timeline], Counter[str]]:
    meter = _Meter(progress, sum(source.size_bytes for source in sources))
    timelines: list[Timeline] = []
    refused: list[FormatError] = []
    if executor is None and len(sources) > 1:
        with ThreadPoolExecutor(min(len(sources), os.cpu_count() or 1)) as threads:
            return _read_all(sources, keep_python, threads, cache, progress, strict)
    if executor is None:
        attempts = (partial(_read_one, source, keep_python, cache, meter.add) for source in sources)
    else:
        futures = [executor.submit(_read_one, source, keep_python, cache) for source in sources]
        attempts = (partial(_awaited, future, meter, source) for future, source in zip(futures, sources, strict=True))
    for attempt in attempts:
        try:
            timelines.append(attempt())
        except FormatError as error:
            if strict:
                raise
            refused.append(error)
    if not timelines:
        raise refused[0]
    warnings = Counter({"file that is no Kineto trace, passed over": len(refused)} if refused else {})
    return timelines, warnings


def _read_one(source: Source, keep_python: bool, cache: bool | PathLike, on_bytes: Any = None) -> Timeline:
    if cache is False:
        return _read_file(source, keep_python, on_bytes)
    from foretrace.formats import arrow  # not needed, and not imported, without a cache

    path = arrow.cache_path(source, keep_python, None if cache is True else Path(cache))
    timeline = arrow.load_if_fresh(path)
    if timeline is None:
        timeline = _read_file(source, keep_python, on_bytes)
        arrow.save(timeline, path)
    elif on_bytes:
        on_bytes(source.size_bytes)
    return timeline


def _read_file(source: Source, keep_python: bool, on_bytes: Any) -> Timeline:
    try:
        return read_timeline(source, keep_python=keep_python, on_bytes=on_bytes)
    except OSError as error:
        problem = error.strerror or str(error)
        raise FormatError(source.name, problem, "check the path and its permissions") from None


def _awaited(future: Any, meter: _Meter, source: Source) -> Timeline:
    timeline: Timeline = future.result()
    meter.add(source.size_bytes)
    return timeline


class _Meter:
    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._done, self._total = progress, 0, total

    def add(self, count: int) -> None:
        self._done += count
        if self._progress:
            self._progress(self._done, self._total)


def make_job(timelines: list[Timeline], warnings: Counter[str] | None = None) -> Job:
    """Put timelines together: give ranks to those without one, sort, and merge the process groups."""
    taken: set[int] = set()
    for timeline in timelines:
        if timeline.rank >= 0 and timeline.rank not in taken:
            taken.add(timeline.rank)
        elif timeline.rank >= 0:
            timeline.report.guess(f"rank {timeline.rank} occurs twice: given the next free one")
            timeline.rank = -1
    free = (rank for rank in range(len(timelines) + len(taken) + 1) if rank not in taken)
    for timeline in timelines:
        if timeline.rank < 0:
            timeline.rank = next(free)
            timeline.report.guess("no rank in the trace or its name")
    timelines = sorted(timelines, key=lambda timeline: timeline.rank)
    job = Job(timelines, _groups(timelines), _world_size(timelines), Counter(warnings or {}))
    missing = job.world_size - len(timelines)
    if len(timelines) > 1 and missing > 0:
        job.warnings["missing rank"] += missing
    return job


def _world_size(timelines: list[Timeline]) -> int:
    sizes = [_info(timeline).get("world_size") for timeline in timelines]
    return max([len(timelines), *(size for size in sizes if isinstance(size, int) and 0 < size < 1 << 31)])


def _info(timeline: Timeline) -> dict[str, Any]:
    info = timeline.metadata.get("distributedInfo")
    return info if isinstance(info, dict) else {}


def _groups(timelines: list[Timeline]) -> dict[str, ProcessGroup]:
    """Process groups from ``distributedInfo`` and from the metadata of collectives, which completes them."""
    groups: dict[str, ProcessGroup] = {}
    for timeline in timelines:
        for entry in _info(timeline).get("pg_config") or []:
            if isinstance(entry, dict):
                name = str(entry.get("pg_name", entry.get("pg_id", "")))
                found = ProcessGroup(
                    name,
                    str(entry.get("pg_desc", "")),
                    str(entry.get("backend_config", entry.get("backend", ""))),
                    _ranks(entry.get("ranks")),
                    _size(entry.get("pg_size", entry.get("group_count"))),
                )
                groups.setdefault(name, found)
        table = timeline.collectives
        if not table.num_rows:
            continue
        columns = [table.texts(name) for name in ("group", "group_description", "group_ranks")]
        for name, description, ranks in dict.fromkeys(zip(*columns, strict=True)):
            known = groups.get(name)
            if name and (known is None or not known.ranks):
                parsed = _ranks(ranks)
                known = known or ProcessGroup(name)
                size = len(parsed) or known.size
                groups[name] = ProcessGroup(name, description or known.description, known.backend, parsed, size)
    return groups


def _size(value: Any) -> int:
    return value if isinstance(value, int) else -1


def _ranks(value: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return ()
    if isinstance(value, list) and all(isinstance(rank, int) for rank in value):
        return tuple(value)
    return ()
