"""`LlamaConfig`: a transformer's sizes and what Llama fixes beside them, and the models of that family by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType

from foretrace.generate.model import MODELS, Transformer
from foretrace.llama.rope import Rope


@dataclass(frozen=True)
class LlamaConfig:
    """A Llama model.

    Attributes:
        sizes: layers, widths, heads, vocabulary and the longest sequence (Touvron et al. 2023, arXiv 2307.09288).
        norm_eps: added to the mean square in RMSNorm.
        rope: rotary position embedding.
    """

    sizes: Transformer
    norm_eps: float = 1e-5
    rope: Rope = field(default_factory=Rope)

    def __post_init__(self) -> None:
        sizes = self.sizes
        if sizes.norm != "rms" or not sizes.is_gated or not sizes.is_causal:
            raise ValueError("Llama has RMSNorm, a gated FFN and causal attention")
        if sizes.head_size % 2:
            raise ValueError(f"heads of {sizes.head_size} elements cannot be rotated in pairs: take an even size")
        if not self.norm_eps > 0:
            raise ValueError(f"norm_eps is {self.norm_eps}: it must be above 0")


def ffn_hidden(hidden: int, multiple_of: int = 256, multiplier: float | None = None) -> int:
    """The inner size of the FFN by the rule of Meta's reference code (llama/model.py, ``FeedForward``).

    Two thirds of 4 ``hidden``, times ``multiplier``, each rounded down, then up to a multiple of ``multiple_of``.
    """
    size = int(2 * 4 * hidden / 3)
    if multiplier is not None:
        size = int(multiplier * size)
    return -(-size // multiple_of) * multiple_of


def _small(layers: int, hidden: int, heads: int, kv_heads: int, vocabulary: int, sequence: int) -> LlamaConfig:
    inner = ffn_hidden(hidden, multiple_of=32)
    return LlamaConfig(Transformer(layers, hidden, heads, kv_heads, inner, vocabulary, sequence))


_CONFIGS = {
    **{name: LlamaConfig(sizes) for name, sizes in MODELS.items()},
    "llama-tiny": _small(2, 64, 4, 2, 256, 256),  # 0.1 M parameters, for tests
    "llama-1m": _small(4, 128, 4, 2, 1024, 512),
    "llama-10m": _small(8, 320, 10, 5, 1024, 1024),
}
CONFIGS = MappingProxyType(_CONFIGS)
