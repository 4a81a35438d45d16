"""``foretrace llama``: Llama 2's checkpoints, tokenizer and training."""

from __future__ import annotations

import enum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from foretrace import FormatError
from foretrace.cli import llama_train, show
from foretrace.cli.files import check_writable
from foretrace.cli.options import AsJson, print_json

PANEL = "Llama 2"
app = typer.Typer(no_args_is_help=True, help="Llama 2: checkpoints, tokenizer, training.")
app.command()(llama_train.tokenize)
app.command()(llama_train.pretrain)
app.command("eval")(llama_train.evaluate)
app.command()(llama_train.sample)


class CheckpointFormat(enum.StrEnum):
    """Whose files a checkpoint has."""

    meta = "meta"
    hf = "hf"


class Dtype(enum.StrEnum):
    """Types of weights, as PyTorch names them."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Folder of a checkpoint.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="Folder to write: new, or empty.", show_default=False)],
    to: Annotated[CheckpointFormat, typer.Option("--to", help="Format to write.")],
    kind: Annotated[
        CheckpointFormat | None, typer.Option("--from", help="Format to read; found out if not given.")
    ] = None,
    shards: Annotated[int, typer.Option(min=1, help="Files to write, with --to meta: one a rank.")] = 1,
    max_shard_gb: Annotated[float, typer.Option(min=0.0, help="Largest file, with --to hf, in 10^9 bytes.")] = 5.0,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the weights; as they are if not given.")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Longest sequence, where the files do not say.")] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a checkpoint between Meta's files and Hugging Face's, and split it anew."""
    _need_libraries()
    from foretrace.llama.checkpoint.convert import convert as run
    from foretrace.llama.checkpoint.weights import DTYPES

    if shards > 1 and to is not CheckpointFormat.meta:
        raise FormatError("--shards", "is for --to meta", "take --max-shard-gb")
    with show.reading_bar("converting") as progress:
        document = run(
            source,
            target,
            to.value,
            kind=kind.value if kind else None,
            shards=shards,
            max_shard_bytes=int(max_shard_gb * 1e9),
            dtype=DTYPES[dtype.value] if dtype else None,
            context=context,
            progress=progress,
        )
    _print(document, as_json)


@app.command()
def tokenizer(
    texts: Annotated[list[Path], typer.Argument(help="Text files to learn from.", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", help="The tokenizer.model to write.")],
    vocabulary: Annotated[int, typer.Option(min=260, help="Tokens.")] = 32000,
    as_json: AsJson = False,
) -> None:
    """Train a tokenizer with Llama's settings: SentencePiece BPE with bytes, digits one by one."""
    _need_libraries()
    from foretrace.llama.tokenizer import Tokenizer

    check_writable(output)
    with show.working("training the tokenizer"):
        try:
            trained = Tokenizer.train((_text(path) for path in texts), vocabulary)
        except FormatError:
            raise
        except ValueError as error:
            raise FormatError(", ".join(map(str, texts)), str(error), "change --vocabulary or add text") from None
    trained.save(output)
    _print({"written": str(output), "vocabulary": trained.size}, as_json)


def _need_libraries() -> None:
    for name in ("torch", "sentencepiece", "safetensors"):
        if find_spec(name) is None:
            raise FormatError("foretrace llama", f"needs {name}", "pip install foretrace[llama]")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise FormatError(str(path), error.strerror or str(error), "name text files") from None
    except UnicodeDecodeError as error:
        raise FormatError(str(path), f"is no UTF-8 at byte {error.start}", "name text files") from None


def _print(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(document)
        return
    for key, value in document.items():
        if isinstance(value, dict):
            value = ", ".join(f"{reason}: {count}" for reason, count in value.items())
        text = ", ".join(value) if isinstance(value, list) else value
        show.out.print(f"  {key.replace('_', ' ')}: {text}", highlight=False, markup=False)
