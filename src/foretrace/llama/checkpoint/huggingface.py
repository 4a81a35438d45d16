"""Hugging Face's checkpoints: ``config.json``, weights as safetensors with an index, and tokenizer files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from foretrace.llama.checkpoint.adapter import from_hf, hf_name, to_hf
from foretrace.llama.checkpoint.files import new_folder, read_json, to_json
from foretrace.llama.checkpoint.hf_config import from_hf_config, to_generation_config, to_hf_config
from foretrace.llama.checkpoint.hf_tokenizer import tokenizer_files
from foretrace.llama.checkpoint.pickles import read_tensors
from foretrace.llama.checkpoint.weights import DTYPES, EMBEDDING, HEAD, Checkpoint, Weights, check_shapes, shapes
from foretrace.llama.config import LlamaConfig
from foretrace.llama.tokenizer import Tokenizer
from foretrace.trace.reading import FormatError

MAX_SHARD_BYTES = 5 * 10**9  # what transformers took for long
_INDEX, _OLD_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"
_KEPT = (
    "tokenizer.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip
_GET_AGAIN = "get this file again"
_Read = Callable[[], Tensor]


def read_hf(folder: Path, context: int | None = None) -> Checkpoint:
    """A checkpoint in safetensors, or in the older ``pytorch_model*.bin`` without running what these may hold.

    The vocabulary is that of the embedding, whatever ``config.json`` says: models are often given a [PAD] token later.

    Args:
        folder: with ``config.json`` and the weights.
        context: longest sequence; that of ``config.json`` if None.

    Raises:
        FormatError: if a file is missing, cut off, no checkpoint of a Llama, or does not fit the others.
    """
    document = read_json(folder / "config.json", "name the folder of a checkpoint of Hugging Face's")
    if context is not None:
        document["max_position_embeddings"] = context
    found = _tensors(folder)
    notes: Counter[str] = Counter()
    embedding = hf_name(EMBEDDING)
    if embedding not in found:
        raise FormatError(str(folder), f"{embedding} is missing", "get the missing files of the checkpoint")
    vocabulary = found[embedding].shape[0]
    if document.get("vocab_size", vocabulary) != vocabulary:
        notes[f"vocab_size {document['vocab_size']} of config.json is not the embedding's {vocabulary}"] += 1
    has_head = hf_name(HEAD) in found
    dtype = found[embedding].read().dtype
    config = from_hf_config(document, folder / "config.json", vocabulary, has_head, dtype.itemsize)
    if not has_head and not document.get("tie_word_embeddings"):
        notes["lm_head.weight is missing: taken as tied to the embedding"] += 1
    names = {name: hf_name(name) for name in shapes(config)}
    by_name = {name: found[theirs].shape for name, theirs in names.items() if theirs in found}
    check_shapes(by_name, config, str(folder))
    for theirs in found.keys() - set(names.values()):
        kind = "rotary_emb.inv_freq" if theirs.endswith("rotary_emb.inv_freq") else theirs
        notes[f"{kind} left out"] += 1
    weights = Weights(tuple(names), lambda name: from_hf(name, found[names[name]].read(), config))
    tokenizer = folder / "tokenizer.model"
    if not tokenizer.is_file():
        notes["no tokenizer.model"] += 1
    return Checkpoint(folder, config, weights, dtype, tokenizer if tokenizer.is_file() else None, notes)


def write_hf(
    checkpoint: Checkpoint,
    folder: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: torch.dtype | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Write a checkpoint that ``AutoModelForCausalLM.from_pretrained`` and vLLM load; one file is in memory at a time.

    Tokenizer files are made from ``tokenizer.model``; a checkpoint of Hugging Face's keeps those it has.

    Args:
        checkpoint: what to write.
        folder: must not exist, or be empty.
        max_shard_bytes: largest size of a file, unless one weight is larger.
        dtype: of the weights; as they are if None.
        progress: called with bytes done and in all.

    Returns:
        The names of the files.

    Raises:
        FormatError: if the disk is full or the tokenizer cannot be read: then there is no folder.
    """
    config, kind = checkpoint.config, dtype or checkpoint.dtype
    files = {"config.json": to_json(to_hf_config(config, _name_of(kind)))}
    files |= {"generation_config.json": to_json(to_generation_config(config))}
    files |= _tokenizer_files(checkpoint)
    plan = _plan(config, kind, max_shard_bytes)
    with new_folder(folder) as unfinished:
        total, done = _write_weights(checkpoint, plan, unfinished, dtype, progress), {}
        if len(plan) > 1:
            done = {hf_name(name): file for file, names in plan.items() for name in names}
            files[_INDEX] = to_json({"metadata": {"total_size": total}, "weight_map": done})
        for name, content in files.items():
            (unfinished / name).write_bytes(content)
        return sorted(path.name for path in unfinished.iterdir())


class _Stored:
    """A tensor of a file that is open: its shape is known, its elements are read on demand."""

    def __init__(self, shape: tuple[int, ...], read: _Read) -> None:
        self.shape, self.read = shape, read


def _tensors(folder: Path) -> dict[str, _Stored]:
    """All tensors of a folder, by Hugging Face's names."""
    for index, single, opened in (
        (_INDEX, "model.safetensors", _safetensors),
        (_OLD_INDEX, "pytorch_model.bin", _pickled),
    ):
        if (folder / index).is_file():
            by_file = read_json(folder / index, _GET_AGAIN).get("weight_map")
            if not isinstance(by_file, dict):
                raise FormatError(str(folder / index), "has no weight_map", _GET_AGAIN)
            return _from_index(folder, folder / index, by_file, opened)
        if (folder / single).is_file():
            return opened(folder / single)
    remedy = "name the folder of a checkpoint of Hugging Face's"
    raise FormatError(str(folder), "holds neither model.safetensors, pytorch_model.bin nor an index of them", remedy)


def _from_index(
    folder: Path, index: Path, by_file: dict[str, Any], opened: Callable[[Path], dict[str, _Stored]]
) -> dict[str, _Stored]:
    found: dict[str, _Stored] = {}
    for file in sorted({str(name) for name in by_file.values()}):
        if Path(file).name != file:
            raise FormatError(str(index), f"names a file outside of its folder ({file})", "take another checkpoint")
        if not (folder / file).is_file():
            raise FormatError(str(folder / file), f"is missing, while {index.name} names it", "get this file too")
        found |= opened(folder / file)
    for name, file in by_file.items():
        if name.replace("_orig_mod.", "") not in found:
            raise FormatError(str(folder / str(file)), f"{name} is missing, while {index.name} names it", _GET_AGAIN)
    return found


def _safetensors(path: Path) -> dict[str, _Stored]:
    try:
        file = safe_open(path, framework="pt")
        shapes_of = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise FormatError(str(path), f"is cut off or damaged ({error})", _GET_AGAIN) from None
    except OSError as error:
        raise FormatError(str(path), error.strerror or str(error), _GET_AGAIN) from None
    return {
        name.replace("_orig_mod.", ""): _Stored(shape, partial(file.get_tensor, name))
        for name, shape in shapes_of.items()
    }


def _pickled(path: Path) -> dict[str, _Stored]:
    return {name: _Stored(tuple(value.shape), partial(_itself, value)) for name, value in read_tensors(path).items()}


def _itself(value: Tensor) -> Tensor:
    return value


def _plan(config: LlamaConfig, dtype: torch.dtype, most: int) -> dict[str, list[str]]:
    """Which weights go into which file."""
    files: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes(config).items():
        needs = torch.Size(shape).numel() * dtype.itemsize
        if files[-1] and size + needs > most:
            files.append([])
            size = 0
        files[-1].append(name)
        size += needs
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{at:05d}-of-{len(files):05d}.safetensors": names for at, names in enumerate(files, 1)}


def _write_weights(
    checkpoint: Checkpoint,
    plan: Mapping[str, list[str]],
    folder: Path,
    dtype: torch.dtype | None,
    progress: Callable[[int, int], None] | None,
) -> int:
    total = checkpoint.config.sizes.parameters() * (dtype or checkpoint.dtype).itemsize
    done = 0
    for file, names in plan.items():
        tensors = {}
        for name in names:
            weight = to_hf(name, checkpoint.weights[name], checkpoint.config)
            tensors[hf_name(name)] = weight.to(dtype or weight.dtype).contiguous()
        try:
            save_file(tensors, folder / file, metadata={"format": "pt"})  # without it transformers does not load
        except SafetensorError as error:
            raise OSError(f"{file} could not be written ({error})") from None
        done += sum(weight.nbytes for weight in tensors.values())
        if progress:
            progress(min(done, total), total)
    return done


def _tokenizer_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Those that the checkpoint has itself, if it is one of Hugging Face's; else made."""
    has_own = (checkpoint.folder / "config.json").is_file()
    paths = [checkpoint.folder / name for name in _KEPT if has_own and (checkpoint.folder / name).is_file()]
    kept = {path.name: path.read_bytes() for path in paths}
    if checkpoint.tokenizer is None or "tokenizer_config.json" in kept:
        return kept
    return tokenizer_files(Tokenizer.load(checkpoint.tokenizer), checkpoint.config.sizes.sequence) | kept


def _name_of(dtype: torch.dtype) -> str:
    names = {kind: name for name, kind in DTYPES.items()}
    return names.get(dtype, str(dtype).removeprefix("torch."))
