"""What all tests share."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parent.parent

# A busy machine is no failure; in CI the same examples are drawn every time.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session")
def data() -> Path:
    """The small traces that the repository itself holds."""
    return REPOSITORY / "tests" / "data"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of large recorded traces beside the repository (or at $FORETRACE_SHARED).

    A test that needs it is skipped where it is absent, and fails in CI.
    """
    folder = Path(os.environ.get("FORETRACE_SHARED") or REPOSITORY.parent / "shared")
    if not folder.is_dir():
        reason = f"no recorded traces: {folder} is not a folder (set FORETRACE_SHARED to where they are)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return folder


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("browser"):
        missing = [program for program in ("chromium", "chromedriver") if shutil.which(program) is None]
        if missing:
            pytest.skip(f"{' and '.join(missing)} not found on PATH")
