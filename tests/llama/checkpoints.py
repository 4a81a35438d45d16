"""What the tests of checkpoints share: random models, and a tokenizer trained on the standard library."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from foretrace.generate.model import Transformer
from foretrace.llama.config import LlamaConfig
from foretrace.llama.model import Llama
from foretrace.llama.rope import Rope
from foretrace.llama.tokenizer import Tokenizer

VOCABULARY = 512


@functools.cache
def tokenizer() -> Tokenizer:
    folder = Path(functools.__file__).parent
    texts = [(folder / name).read_text() for name in ("functools.py", "argparse.py", "heapq.py")]
    return Tokenizer.train([*texts, "naïve café – ☃ über Straße 12345 [INST] [/INST] <<SYS>> <</SYS>>"], VOCABULARY)


def config_of(
    heads: int = 4,
    kv_heads: int = 2,
    layers: int = 2,
    inner: int = 96,
    vocabulary: int = VOCABULARY,
    rope: Rope | None = None,
    norm_eps: float = 1e-5,
    is_tied: bool = False,
    head_size: int = 16,
) -> LlamaConfig:
    sizes = Transformer(layers, heads * head_size, heads, kv_heads, inner, vocabulary, 128, is_tied=is_tied,
                        dtype_bytes=4)  # fmt: skip
    return LlamaConfig(sizes, norm_eps, rope or Rope())


def model_of(config: LlamaConfig, seed: int = 0) -> Llama:
    """Weights larger than at the start of training: a wrong layout shows."""
    torch.manual_seed(seed)
    model = Llama(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.15)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval()


@torch.no_grad()
def logits(model: torch.nn.Module, length: int = 40, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Of random tokens, enough of them for a wrong rotation to show."""
    tokens = torch.randint(3, vocabulary, (2, length), generator=torch.Generator().manual_seed(length))
    out = model(tokens)
    return out if isinstance(out, torch.Tensor) else out.logits


def peer(folder: Path) -> torch.nn.Module:
    """What transformers makes of a folder; every weight must be there, and none be left over."""
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], report
    return model.eval()
