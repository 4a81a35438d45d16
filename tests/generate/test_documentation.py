"""Examples of the documentation run and print what they say."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

import foretrace.generate

PAGE = Path(__file__).parents[2] / "docs" / "generate.md"


def test_docstring() -> None:
    found = doctest.testmod(foretrace.generate)
    assert found.attempted and not found.failed


def test_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), {})
    assert (tmp_path / "job.0.et").stat().st_size > 1000
