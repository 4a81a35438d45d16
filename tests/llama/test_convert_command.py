"""``foretrace llama convert`` and ``foretrace llama tokenizer``."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from foretrace.cli.main import main
from foretrace.llama.checkpoint.meta import read_meta, write_meta
from foretrace.llama.checkpoint.weights import of_model
from foretrace.llama.tokenizer import Tokenizer
from tests.llama.checkpoints import config_of, model_of


def foretrace(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: object) -> tuple[int, Any]:
    """The exit code, and the JSON on stdout or the line on stderr."""
    monkeypatch.setattr("sys.argv", ["foretrace", "llama", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), json.loads(out) if not ended.value.code else err


def test_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = functools.partial(foretrace, capsys, monkeypatch)
    text = Path(functools.__file__)
    code, found = run("tokenizer", text, "--vocabulary", 400, "-o", tmp_path / "tokenizer.model", "--json")
    assert (code, found["vocabulary"], Tokenizer.load(tmp_path / "tokenizer.model").size) == (0, 400, 400)
    original = of_model(model_of(config_of(vocabulary=400)), tokenizer=tmp_path / "tokenizer.model")
    write_meta(original, tmp_path / "meta", 2)
    code, found = run("convert", "--from", "meta", "--to", "hf", tmp_path / "meta", tmp_path / "hf", "--json")
    assert code == 0 and found["parameters"] == original.config.sizes.parameters()
    assert found["files"] == sorted(path.name for path in (tmp_path / "hf").iterdir())
    code, found = run("convert", "--to", "meta", "--shards", 2, tmp_path / "hf", tmp_path / "again", "--json")
    again = read_meta(tmp_path / "again")
    assert code == 0 and all(torch.equal(again.weights[name], weight) for name, weight in original.weights.items())
    code, line = run("convert", "--to", "meta", tmp_path / "hf", tmp_path / "again")
    assert (code, line.count("\n")) == (2, 1) and str(tmp_path / "again") in line and "exists" in line


def test_mistakes_are_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = functools.partial(foretrace, capsys, monkeypatch)
    (tmp_path / "a").write_bytes(b"\xff")
    for words, message in (
        (("convert", "--to", "hf", tmp_path / "none", tmp_path / "out"), "none: is no folder"),
        (("convert", "--to", "hf", tmp_path, tmp_path / "out"), "neither params.json nor config.json"),
        (("convert", "--to", "hf", "--shards", 2, tmp_path, tmp_path / "out"), "--max-shard-gb"),
        (("tokenizer", tmp_path / "a", "-o", tmp_path / "t"), "no UTF-8 at byte 0"),
        (("tokenizer", "-o", tmp_path / "t", Path(functools.__file__), "--vocabulary", 90000), "--vocabulary"),
    ):
        code, line = run(*words)
        assert (code, line.count("\n")) == (2, 1) and message in line, line
