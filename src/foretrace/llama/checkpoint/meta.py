"""Meta's checkpoints: ``params.json`` and one ``consolidated.NN.pth`` a tensor-parallel rank."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretrace.generate.model import Transformer
from foretrace.llama.checkpoint.files import new_folder, read_json, to_json
from foretrace.llama.checkpoint.pickles import read_tensors
from foretrace.llama.checkpoint.weights import EMBEDDING, HEAD, Checkpoint, Weights, check_shapes, shapes
from foretrace.llama.config import LlamaConfig, ffn_hidden
from foretrace.llama.rope import Rope
from foretrace.trace.reading import FormatError

_SHARD = re.compile(r"consolidated\.(\d+)\.pth")
_BY_COLUMNS = ("wo.weight", "w2.weight", EMBEDDING)  # split along dimension 1; other matrices along dimension 0
_LLAMA_3_SCALING = Rope(500000.0, "llama3", 8.0, 8192, 1.0, 4.0)  # constants of Meta's code for use_scaled_rope
_KNOWN = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps",
    "rope_theta", "use_scaled_rope", "rope_scaling_factor", "max_seq_len", "max_batch_size",
}  # fmt: skip
_GET_AGAIN = "get params.json of the model"


def read_meta(folder: Path, context: int | None = None) -> Checkpoint:
    """A checkpoint of any number of shards; weights are merged one by one when they are asked for.

    Args:
        folder: with ``params.json`` and ``consolidated.*.pth``; ``tokenizer.model`` is there or one folder up.
        context: longest sequence, which ``params.json`` does not say; 4096 if None.

    Raises:
        FormatError: if a file is missing, cut off, no checkpoint, or does not fit the others.
    """
    shards = {path: read_tensors(path) for path in _shard_files(folder)}
    notes: Counter[str] = Counter()
    params = read_json(folder / "params.json", _GET_AGAIN)
    config = _config(folder / "params.json", params, _vocabulary(folder, params, shards), shards, context, notes)
    joined = _merged_shapes(folder, shards, config)
    check_shapes(joined, config, str(folder))
    wanted = shapes(config)
    for name in joined.keys() - wanted.keys():
        notes["rope.freqs left out: computed from rope_theta" if name == "rope.freqs" else f"{name} left out"] += 1
    weights = Weights(tuple(wanted), lambda name: _merge(name, [shard[name] for shard in shards.values()], config))
    dtype = next(iter(shards.values()))[EMBEDDING].dtype
    return Checkpoint(folder, config, weights, dtype, _tokenizer(folder, notes), notes)


def write_meta(
    checkpoint: Checkpoint,
    folder: Path,
    shards: int = 1,
    dtype: torch.dtype | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Write a checkpoint of ``shards`` files; one shard is in memory at a time.

    Args:
        checkpoint: what to write.
        folder: must not exist, or be empty.
        shards: files, and ranks that Meta's code runs on.
        dtype: of the weights; as they are if None.
        progress: called with bytes done and in all.

    Returns:
        The names of the files.

    Raises:
        FormatError: if the sizes cannot be split that often, the format has no place for the model's rotary embedding,
            or the disk is full: then there is no folder.
    """
    config, source = checkpoint.config, str(checkpoint.folder)
    _check_split(config, shards, source)
    params = to_params(config, source)
    wanted = shapes(config)
    total, done = sum(torch.Size(shape).numel() for shape in wanted.values()) * (dtype or checkpoint.dtype).itemsize, 0
    with new_folder(folder) as unfinished:
        for rank in range(shards):
            shard = {}
            for name in [*wanted, *([HEAD] if config.sizes.is_tied else [])]:
                weight = checkpoint.weights[EMBEDDING if name == HEAD and config.sizes.is_tied else name]
                part = _part(name, weight, rank, shards).to(dtype or weight.dtype)
                shard[name] = part.clone()  # a view would be written with all it is a view of
                done += part.nbytes
                if progress:
                    progress(min(done, total), total)
            try:
                torch.save(shard, unfinished / f"consolidated.{rank:02d}.pth")
            except RuntimeError as error:  # what PyTorch makes of a full disk
                raise OSError(f"consolidated.{rank:02d}.pth could not be written ({error})") from None
        (unfinished / "params.json").write_bytes(to_json(params))
        if checkpoint.tokenizer is not None:
            (unfinished / "tokenizer.model").write_bytes(checkpoint.tokenizer.read_bytes())
        return sorted(path.name for path in unfinished.iterdir())


def to_params(config: LlamaConfig, source: str = "model") -> dict[str, Any]:
    """The content of ``params.json``.

    Raises:
        FormatError: if Meta's code could not compute this rotary embedding.
    """
    sizes = config.sizes
    params: dict[str, Any] = {"dim": sizes.hidden, "n_layers": sizes.layers, "n_heads": sizes.heads}
    params |= {"n_kv_heads": sizes.kv_heads} if sizes.kv_heads != sizes.heads else {}
    params |= _ffn_rule(sizes.hidden, sizes.ffn_hidden)
    params |= {"norm_eps": config.norm_eps, "vocab_size": sizes.vocabulary, "max_seq_len": sizes.sequence}
    return params | _rope_params(config, source)


def _shard_files(folder: Path) -> list[Path]:
    found = {int(match[1]): path for path in folder.glob("consolidated.*.pth") if (match := _SHARD.match(path.name))}
    if not found:
        raise FormatError(str(folder), "holds no consolidated.*.pth", "name the folder of a checkpoint of Meta's")
    for rank in range(max(found)):
        if rank not in found:
            problem = f"is missing, while there is {found[max(found)].name}"
            raise FormatError(str(folder / f"consolidated.{rank:02d}.pth"), problem, "get this file too")
    return [found[rank] for rank in sorted(found)]


def _vocabulary(folder: Path, params: dict[str, Any], shards: Mapping[Path, dict[str, Tensor]]) -> int:
    """Rows of the embedding; ``params.json`` may say -1, which means as many as the tokenizer has."""
    rows = 0
    for path, shard in shards.items():
        if EMBEDDING not in shard:
            raise FormatError(str(path), f"{EMBEDDING} is missing", "name a checkpoint of Meta's")
        is_split_by_rows = len(shards) > 1 and shard[EMBEDDING].shape[1] == params.get("dim")
        rows = rows + shard[EMBEDDING].shape[0] if is_split_by_rows else shard[EMBEDDING].shape[0]
    says = params.get("vocab_size", -1)
    if says not in (-1, rows):
        problem = f"vocab_size is {says}, the embedding has {rows} rows"
        raise FormatError(str(folder / "params.json"), problem, "take the file that belongs to these weights")
    return rows


def _config(
    path: Path,
    params: dict[str, Any],
    vocabulary: int,
    shards: Mapping[Path, dict[str, Tensor]],
    context: int | None,
    notes: Counter[str],
) -> LlamaConfig:
    for name in params.keys() - _KNOWN:
        notes[f"params.json: {name} left out"] += 1
    is_tied = not any(HEAD in shard for shard in shards.values())
    if is_tied:
        notes[f"{HEAD} is missing: taken as tied to the embedding"] += 1
    try:
        heads, kv_heads = params["n_heads"], params.get("n_kv_heads") or params["n_heads"]
        inner = ffn_hidden(params["dim"], params.get("multiple_of", 256), params.get("ffn_dim_multiplier"))
        longest = context or params.get("max_seq_len") or 4096
        sizes = Transformer(params["n_layers"], params["dim"], heads, kv_heads, inner, vocabulary, longest,
                            is_tied=is_tied, dtype_bytes=_bytes_of(shards))  # fmt: skip
        return LlamaConfig(sizes, params.get("norm_eps", 1e-5), _rope(params, notes))
    except KeyError as error:
        raise FormatError(str(path), f"{error.args[0]} is missing", _GET_AGAIN) from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise FormatError(str(path), str(error), _GET_AGAIN) from None


def _bytes_of(shards: Mapping[Path, dict[str, Tensor]]) -> int:
    return next(iter(shards.values()))[EMBEDDING].element_size()


def _rope(params: dict[str, Any], notes: Counter[str]) -> Rope:
    if not params.get("use_scaled_rope"):
        return Rope(params.get("rope_theta", 10000.0))
    notes["use_scaled_rope: low 1, high 4 and an original context of 8192 as in Meta's code"] += 1
    scaling = _LLAMA_3_SCALING
    factor = params.get("rope_scaling_factor") or scaling.factor
    theta = params.get("rope_theta", scaling.theta)
    return Rope(theta, "llama3", factor, scaling.original_context, scaling.low, scaling.high)


def _rope_params(config: LlamaConfig, source: str) -> dict[str, Any]:
    rope, head_size = config.rope, config.sizes.head_size
    if rope.scaling == "none":
        return {"rope_theta": rope.theta}
    if rope.scaling == "ntk":  # nothing but another base
        return {"rope_theta": rope.theta * rope.factor ** (head_size / (head_size - 2))}
    scaling = _LLAMA_3_SCALING
    constants = (scaling.original_context, scaling.low, scaling.high)
    if rope.scaling != "llama3" or (rope.original_context, rope.low, rope.high) != constants:
        problem = f"params.json has no place for this RoPE scaling ({rope.scaling})"
        raise FormatError(source, problem, "write the checkpoint for Hugging Face")
    params = {"rope_theta": rope.theta, "use_scaled_rope": True}
    return params if rope.factor == scaling.factor else params | {"rope_scaling_factor": rope.factor}


def _ffn_rule(hidden: int, inner: int) -> dict[str, Any]:
    """A ``multiple_of`` and ``ffn_dim_multiplier`` by which Meta's code comes to this inner size."""
    for multiple_of, multiplier in ((256, None), (4096, 1.3), (1024, 1.3), (inner & -inner, None)):
        if ffn_hidden(hidden, multiple_of, multiplier) == inner:
            rule: dict[str, Any] = {"multiple_of": multiple_of}
            return rule if multiplier is None else rule | {"ffn_dim_multiplier": multiplier}
    # Half above, so that rounding down gives it whatever the floating-point error.
    return {"multiple_of": inner & -inner, "ffn_dim_multiplier": (inner + 0.5) / ffn_hidden(hidden, 1)}


def _dimension(name: str, weight: Tensor, shards: int, hidden: int) -> int | None:
    """Along which dimension a weight is split over ranks; None for one that each rank has all of."""
    if weight.dim() < 2:
        return None
    if name == EMBEDDING and shards > 1 and weight.shape[1] == hidden:
        return 0  # since Llama 3
    return 1 if name.endswith(_BY_COLUMNS) else 0


def _merged_shapes(
    folder: Path, shards: Mapping[Path, dict[str, Tensor]], config: LlamaConfig
) -> dict[str, tuple[int, ...]]:
    first, *others = shards.items()
    for path, shard in others:
        for name in first[1].keys() ^ shard.keys():
            holder = path if name not in shard else first[0]
            raise FormatError(str(holder), f"{name} is missing", "take all shards of one checkpoint")
        for name, weight in shard.items():
            if weight.shape != first[1][name].shape or weight.dtype != first[1][name].dtype:
                problem = f"{name} differs in shape or type from {first[0].name}"
                raise FormatError(str(path), problem, "take all shards of one checkpoint")
    merged = {}
    for name, weight in first[1].items():
        shape, dimension = list(weight.shape), _dimension(name, weight, len(shards), config.sizes.hidden)
        if dimension is not None:
            shape[dimension] *= len(shards)
        merged[name] = tuple(shape)
    return merged


def _merge(name: str, parts: list[Tensor], config: LlamaConfig) -> Tensor:
    dimension = _dimension(name, parts[0], len(parts), config.sizes.hidden)
    return parts[0] if dimension is None or len(parts) == 1 else torch.cat(parts, dimension)


def _part(name: str, weight: Tensor, rank: int, shards: int) -> Tensor:
    if weight.dim() < 2:
        return weight
    return weight.chunk(shards, 1 if name.endswith(_BY_COLUMNS) else 0)[rank]


def _check_split(config: LlamaConfig, shards: int, source: str) -> None:
    sizes = config.sizes
    for what, size in {
        "heads": sizes.heads,
        "heads of keys and values": sizes.kv_heads,
        "inner channels of the FFN": sizes.ffn_hidden,
        "tokens of the vocabulary": sizes.vocabulary,
    }.items():
        if size % shards:
            raise FormatError(source, f"{size} {what} cannot be split over {shards} shards", "take fewer shards")


def _tokenizer(folder: Path, notes: Counter[str]) -> Path | None:
    """Beside the weights, or one folder up, where Meta's download puts it."""
    for path in (folder / "tokenizer.model", folder.absolute().parent / "tokenizer.model"):
        if path.is_file():
            return path
    notes["no tokenizer.model"] += 1
    return None
