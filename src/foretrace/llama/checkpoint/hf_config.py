"""``config.json`` of Hugging Face's Llama, and `LlamaConfig`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foretrace.generate.model import Transformer
from foretrace.llama.config import LlamaConfig
from foretrace.llama.rope import Rope
from foretrace.llama.tokenizer import BOS, EOS, UNK
from foretrace.trace.reading import FormatError

_NEWER = "only plain Llama models are read"


def from_hf_config(
    document: dict[str, Any], path: Path, vocabulary: int, has_head: bool, dtype_bytes: int
) -> LlamaConfig:
    """What ``config.json`` says of a model.

    Args:
        document: its content; rotary embedding as transformers 5 writes it (``rope_parameters``), or as before.
        path: what errors call it.
        vocabulary: rows of the embedding, which counts.
        has_head: there is an output head; else it is tied to the embedding.
        dtype_bytes: of an element of the weights.

    Raises:
        FormatError: if a size is missing, sizes do not fit each other, or the model is none of `model.Llama`.
    """
    _refuse_others(document, path)
    try:
        hidden, heads = document["hidden_size"], document["num_attention_heads"]
        kv_heads = document.get("num_key_value_heads") or heads
        layers, inner = document["num_hidden_layers"], document["intermediate_size"]
        longest = document.get("max_position_embeddings", 2048)
        is_tied = bool(document.get("tie_word_embeddings", False)) or not has_head
        sizes = Transformer(layers, hidden, heads, kv_heads, inner, vocabulary, longest,
                            is_tied=is_tied, dtype_bytes=dtype_bytes)  # fmt: skip
        if (document.get("head_dim") or sizes.head_size) != sizes.head_size:
            raise ValueError(f"head_dim {document['head_dim']} is not hidden_size / num_attention_heads")
        return LlamaConfig(sizes, document.get("rms_norm_eps", 1e-6), _rope(document))
    except KeyError as error:
        problem = f"{error.args[0]} is missing"
    except (TypeError, ValueError, ZeroDivisionError) as error:
        problem = str(error)
    raise FormatError(str(path), problem, "take the config.json of the model")


def to_hf_config(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """The content of ``config.json``, for transformers 5 (``rope_parameters``, ``dtype``) and for earlier readers."""
    sizes, rope = config.sizes, _rope_parameters(config)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn_hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_size,
        "max_position_embeddings": sizes.sequence,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": sizes.is_tied,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def to_generation_config(config: LlamaConfig) -> dict[str, Any]:
    """The content of ``generation_config.json``: Meta's defaults for chat (llama/generation.py).

    Padding is the unknown token, which byte fallback never gives: padding with the end token would hide that from loss
    and attention.
    """
    tokens = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": UNK}
    return tokens | {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": config.sizes.sequence}


def _refuse_others(document: dict[str, Any], path: Path) -> None:
    if document.get("model_type") != "llama":
        raise FormatError(str(path), f"model_type is {document.get('model_type')!r}, not 'llama'", _NEWER)
    for name in ("attention_bias", "mlp_bias"):
        if document.get(name):
            raise FormatError(str(path), f"{name} is set: Llama has no biases", _NEWER)
    if document.get("hidden_act", "silu") != "silu":
        raise FormatError(str(path), f"hidden_act is {document['hidden_act']!r}, not 'silu'", _NEWER)


def _rope(document: dict[str, Any]) -> Rope:
    old: dict[str, Any] = document.get("rope_scaling") or {}
    given: dict[str, Any] = document.get("rope_parameters") or old
    theta = float(given.get("rope_theta", document.get("rope_theta", 10000.0)))
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    # Where the original context is not said, transformers takes the model's longest sequence.
    original = given.get("original_max_position_embeddings") or document.get("max_position_embeddings", 2048)
    factor = float(given["factor"])
    if kind == "linear":
        return Rope(theta, "linear", factor)
    if kind == "llama3":
        low, high = float(given["low_freq_factor"]), float(given["high_freq_factor"])
        return Rope(theta, "llama3", factor, original, low, high)
    if kind == "yarn":
        low, high = float(given.get("beta_slow") or 1), float(given.get("beta_fast") or 32)
        rope = Rope(theta, "yarn", factor, original, low, high)
        is_other = any(given.get(name) for name in ("mscale", "mscale_all_dim")) or not given.get("truncate", True)
        if is_other or abs((given.get("attention_factor") or rope.score_scale) - rope.score_scale) > 1e-6:
            raise ValueError("rope_parameters: a yarn with its own attention_factor, mscale or truncate is not known")
        return rope
    raise ValueError(f"rope_parameters: rope_type {kind!r} is none of default, linear, llama3, yarn")


def _rope_parameters(config: LlamaConfig) -> dict[str, Any]:
    rope, head_size = config.rope, config.sizes.head_size
    if rope.scaling == "none":
        return {"rope_type": "default", "rope_theta": rope.theta}
    if rope.scaling == "ntk":  # nothing but another base
        theta = rope.theta * rope.factor ** (head_size / (head_size - 2))
        return {"rope_type": "default", "rope_theta": theta}
    common: dict[str, Any] = {"rope_type": rope.scaling, "rope_theta": rope.theta, "factor": rope.factor}
    if rope.scaling == "linear":
        return common
    common["original_max_position_embeddings"] = rope.original_context
    if rope.scaling == "llama3":
        return common | {"low_freq_factor": rope.low, "high_freq_factor": rope.high}
    return common | {"beta_slow": rope.low, "beta_fast": rope.high}
