"""``foretrace llama tokenize|pretrain|eval|sample``: from text to a trained model and what it writes."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from foretrace import FormatError
from foretrace.cli import show
from foretrace.cli.options import AsJson, print_json

Threads = Annotated[int | None, typer.Option(min=1, help="Of PyTorch; its own choice if not given.")]
_SEPARATOR = "Text between documents of a file (\\n is a new line); a file is one document if not given."


class Dtype(enum.StrEnum):
    """What products are computed in."""

    fp32 = "fp32"
    bf16 = "bf16"


def tokenize(
    texts: Annotated[list[Path], typer.Argument(help="Text files, .jsonl with a text a line, or folders.")],
    tokenizer: Annotated[Path, typer.Option(help="A tokenizer.model.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the tokens: a new one.")],
    separator: Annotated[str, typer.Option(help=_SEPARATOR)] = "",
    as_json: AsJson = False,
) -> None:
    """Turn text into tokens, once for all runs."""
    from foretrace.llama.data.corpus import text_files, tokenize

    files = text_files(texts)
    total, done = sum(path.stat().st_size for path in files), 0
    with show.reading_bar("tokenizing") as bar:

        def on_file(size: int) -> None:
            nonlocal done
            done += size
            if bar:
                bar(done, total)

        store = tokenize(files, tokenizer, output, separator.replace("\\n", "\n"), on_file)
    document = {"written": str(output), "documents": store.num_documents, "tokens": int(store.starts[-1])}
    _print(document, as_json)


def pretrain(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of the run.")],
    data: Annotated[Path | None, typer.Option(help="Tokens (foretrace llama tokenize).")] = None,
    model: Annotated[str, typer.Option(help="llama-tiny, llama-1m, llama-10m, llama-2-7b, ...")] = "llama-1m",
    tokenizer: Annotated[Path | None, typer.Option(help="Its tokenizer.model, to go with the model.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Of the optimizer.")] = 1000,
    rows: Annotated[int, typer.Option(min=1, help="Of a step, over all ranks.")] = 8,
    row_length: Annotated[int, typer.Option(min=1, help="Tokens of a row.")] = 256,
    micro_rows: Annotated[int | None, typer.Option(min=1, help="Rows computed at once (all).")] = None,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate behind the warm-up.")] = 3e-4,
    warmup: Annotated[int, typer.Option(min=0, help="Steps of the warm-up.")] = 2000,
    weight_decay: Annotated[float, typer.Option(min=0, help="Of matrices.")] = 0.1,
    clip: Annotated[float, typer.Option(min=0, help="Largest norm of all gradients.")] = 1.0,
    dtype: Annotated[Dtype, typer.Option(help="Of products; weights stay fp32.")] = Dtype.fp32,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and order.")] = 0,
    threads: Threads = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps.")] = 1000,
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints that stay.")] = 3,
    log_every: Annotated[int, typer.Option(min=1, help="Steps between lines on stderr; the log has all.")] = 50,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in the folder, as it was begun.")
    ] = False,
    capture: Annotated[Path | None, typer.Option(help="Folder for traces of some steps.")] = None,
    capture_steps: Annotated[str, typer.Option(help="Which, counted from where it starts.")] = "3:5",
    as_json: AsJson = False,
) -> None:
    """Train a model from nothing: the paper's optimizer and schedule, packed documents, exact resumption."""
    from foretrace.llama.config import CONFIGS
    from foretrace.llama.processor import is_bf16_emulated, limit_threads
    from foretrace.llama.train.run import Run, read_run, read_settings, summary_line
    from foretrace.llama.train.settings import Settings

    limit_threads(threads)
    if resume and (output / "settings.json").is_file():
        settings, about = read_settings(output), read_run(output)
        data, tokenizer = Path(about["data"]), Path(about["tokenizer"]) if about.get("tokenizer") else None
    else:
        if data is None:
            raise FormatError("--data", "it is needed to begin a run", "give the folder of foretrace llama tokenize")
        if model not in CONFIGS:
            raise FormatError("--model", f"{model!r} is unknown", f"take one of {', '.join(CONFIGS)}")
        try:
            settings = Settings(
                model, steps, rows, row_length, micro_rows or rows, lr, warmup, weight_decay=weight_decay, clip=clip,
                dtype=dtype.value, seed=seed,
            )  # fmt: skip
        except ValueError as error:
            raise FormatError("settings", str(error), "change the option of that name") from None
    if settings.dtype == "bf16" and is_bf16_emulated():
        show.note("this processor has no instructions for bf16: products are emulated, several times slower than fp32")
    run = Run(output, settings, data, tokenizer, checkpoint_every, keep, capture, capture_steps)

    def tell(metrics: Any) -> None:
        if metrics.step % log_every == 0 or metrics.step == settings.steps:
            show.note(summary_line(metrics, settings.steps))

    _print(run.train(resume, tell), as_json)


def evaluate(
    model: Annotated[Path, typer.Argument(help="A run's folder, or a checkpoint of Meta's or Hugging Face's.")],
    data: Annotated[Path, typer.Option(help="Tokens (foretrace llama tokenize).")],
    length: Annotated[int | None, typer.Option(min=1, help="Longest piece of a document (the model's).")] = None,
    int8: Annotated[bool, typer.Option("--int8", help="With int8 weights.")] = False,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Perplexity of a model on documents."""
    from foretrace.llama.data.store import read_store
    from foretrace.llama.decode.int8 import quantize
    from foretrace.llama.evaluate import evaluate
    from foretrace.llama.processor import limit_threads
    from foretrace.llama.train.run import load_model

    limit_threads(threads)
    store = read_store(data)
    loaded, _ = load_model(model)
    if store.vocabulary > loaded.config.sizes.vocabulary:
        problem = f"{store.vocabulary} tokens, the model has {loaded.config.sizes.vocabulary}"
        raise FormatError(str(data), f"its vocabulary has {problem}", "take the model's own tokenizer")
    if int8:
        quantize(loaded)
    total, done = int(store.starts[-1]) - store.num_documents, 0
    with show.reading_bar("evaluating") as bar:

        def on_tokens(count: int) -> None:
            nonlocal done
            done += count
            if bar:
                bar(done, total)

        found = evaluate(loaded.eval(), store, length, on_tokens=on_tokens)
    _print({"loss": found.loss, "perplexity": found.perplexity, "tokens": found.tokens}, as_json)


def sample(
    model: Annotated[Path, typer.Argument(help="A run's folder, or a checkpoint of Meta's or Hugging Face's.")],
    prompt: Annotated[list[str] | None, typer.Option(help="To be continued; repeatable, all in one batch.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.model, where the model has none.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Of an answer, at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the most probable token.")] = 0.6,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Share of probability that is drawn from.")] = 0.9,
    top_k: Annotated[int, typer.Option(min=0, help="Tokens that are drawn from; 0: any.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the draws.")] = None,
    int8: Annotated[bool, typer.Option("--int8", help="With int8 weights.")] = False,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Continue texts."""
    from foretrace.llama.decode.decoder import Decoder
    from foretrace.llama.decode.generate import generate
    from foretrace.llama.decode.int8 import quantize
    from foretrace.llama.decode.sampling import Sampling
    from foretrace.llama.processor import limit_threads
    from foretrace.llama.tokenizer import EOS, Tokenizer
    from foretrace.llama.train.run import load_model

    limit_threads(threads)
    loaded, own = load_model(model)
    path = tokenizer or own
    if path is None:
        raise FormatError(str(model), "there is no tokenizer with the model", "give --tokenizer")
    words = Tokenizer.load(path)
    if words.size > loaded.config.sizes.vocabulary:
        problem = f"{words.size} tokens, the model has {loaded.config.sizes.vocabulary}"
        raise FormatError(str(path), f"its vocabulary has {problem}", "take the model's own tokenizer")
    if int8:
        quantize(loaded)
    prompts = prompt or [""]
    encoded = [words.encode(text, bos=True) for text in prompts]
    longest = max(map(len, encoded))
    try:
        sampling = Sampling(temperature, top_p, top_k)
        slots = min(longest + tokens, loaded.config.sizes.sequence)
        decoder = Decoder(loaded, len(encoded), slots)
        answers = generate(decoder, encoded, tokens, sampling, (EOS,), seed, vocabulary=words.size)
    except ValueError as error:
        raise FormatError("sampling", str(error), "change the options or shorten the prompts") from None
    rows: list[dict[str, Any]] = []
    for text, ids, answer in zip(prompts, encoded, answers, strict=True):
        whole = words.decode([*ids, *answer.tokens])
        rows.append({"prompt": text, "text": whole, "tokens": len(answer.tokens), "finished": answer.is_finished})
    if as_json:
        print_json({"answers": rows})
        return
    for row in rows:
        show.out.print(row["text"], highlight=False, markup=False)


def _print(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(document)
        return
    for key, value in document.items():
        if value not in (None, {}):
            show.out.print(f"  {key.replace('_', ' ')}: {value}", highlight=False, markup=False)
