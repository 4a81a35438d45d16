"""Progress over the bytes of several files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

Progress = Callable[[int, int], None]


def meter(progress: Progress | None, paths: Sequence[Path]) -> Callable[[int], None] | None:
    """What readers tell the bytes to that they have read: ``progress`` is called with the sum and the whole."""
    if progress is None:
        return None
    total, done = sum(path.stat().st_size for path in paths if path.is_file()), 0

    def add(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    return add
