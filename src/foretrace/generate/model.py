"""`Transformer`: the sizes of a decoder-only language model, and what follows from them alone."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

DTYPES = MappingProxyType({1: "float8_e4m3fn", 2: "bfloat16", 4: "float32"})  # bytes of an element: PyTorch's name
_NORMS = ("rms", "layer")


@dataclass(frozen=True)
class Transformer:
    """A decoder-only transformer: pre-norm layers of attention and feed-forward network (FFN), no biases in products.

    Attributes:
        layers: number of layers.
        hidden: size of the residual stream.
        heads: heads of queries; their size is ``hidden / heads``.
        kv_heads: heads of keys and values; fewer than ``heads`` in grouped-query attention.
        ffn_hidden: inner size of the FFN.
        vocabulary: tokens of the vocabulary.
        sequence: tokens of a sequence.
        is_gated: the FFN has three matrices (SwiGLU: gate, up, down) instead of two.
        norm: ``"rms"`` (one weight a channel) or ``"layer"`` (weight and bias).
        is_tied: embedding and output head are one matrix.
        is_causal: a token attends to those before it: half of all pairs.
        dtype_bytes: of an element of weights and activations: 1, 2 or 4.

    Raises:
        ValueError: if sizes do not fit each other.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    vocabulary: int
    sequence: int = 4096
    is_gated: bool = True
    norm: Literal["rms", "layer"] = "rms"
    is_tied: bool = False
    is_causal: bool = True
    dtype_bytes: int = 2

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocabulary", "sequence"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: at least 1 is needed")
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is no multiple of heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}")
        if self.norm not in _NORMS:
            raise ValueError(f"norm {self.norm!r} is none of {', '.join(_NORMS)}")
        if self.dtype_bytes not in DTYPES:
            raise ValueError(f"dtype_bytes {self.dtype_bytes} is none of {', '.join(map(str, DTYPES))}")

    @property
    def dtype(self) -> str:
        """PyTorch's name of the element type."""
        return DTYPES[self.dtype_bytes]

    @property
    def head_size(self) -> int:
        """Elements of a head."""
        return self.hidden // self.heads

    @property
    def qkv_size(self) -> int:
        """Elements of queries, keys and values of a token together."""
        return self.hidden + 2 * self.kv_heads * self.head_size

    @property
    def norm_parameters(self) -> int:
        """Parameters of one normalization."""
        return self.hidden * (2 if self.norm == "layer" else 1)

    @property
    def layer_matrices(self) -> int:
        """Elements of the matrices of one layer: queries, keys and values; output; FFN."""
        attention = self.hidden * self.qkv_size + self.hidden * self.hidden
        return attention + (3 if self.is_gated else 2) * self.hidden * self.ffn_hidden

    def parameters(self) -> int:
        """Parameters of the whole model, the tied matrix once."""
        embeddings = (1 if self.is_tied else 2) * self.vocabulary * self.hidden
        layers = self.layers * (self.layer_matrices + 2 * self.norm_parameters)
        return embeddings + layers + self.norm_parameters

    def parameter_bytes(self) -> int:
        """Bytes of the weights in the element type of the model."""
        return self.parameters() * self.dtype_bytes

    def matrix_flops_per_token(self) -> int:
        """FLOPs of a token's forward pass in products with weights: 2 for each element of layers and output head.

        Source: Kaplan et al. 2020 (arXiv 2001.08361, section 2.1), with the output head counted.
        """
        return 2 * (self.layers * self.layer_matrices + self.vocabulary * self.hidden)

    def attention_flops_per_token(self) -> int:
        """FLOPs of a token's forward pass in the products of attention: scores and values, 2 hidden each for a pair.

        A causal mask leaves half of all pairs (Dao 2023, arXiv 2307.08691, section 4.1).
        """
        pairs_of_two = self.sequence if self.is_causal else 2 * self.sequence
        return 2 * self.layers * self.hidden * pairs_of_two

    def forward_flops_per_token(self) -> int:
        """FLOPs of a token's forward pass, in products alone; a training step has three times as many."""
        return self.matrix_flops_per_token() + self.attention_flops_per_token()


# Touvron et al. 2023 (arXiv 2307.09288), table 1; inner sizes from the rule of Meta's reference code.
_LLAMA_2 = {
    "llama-2-7b": Transformer(32, 4096, 32, 32, 11008, 32000),
    "llama-2-13b": Transformer(40, 5120, 40, 40, 13824, 32000),
    "llama-2-34b": Transformer(48, 8192, 64, 8, 22016, 32000),
    "llama-2-70b": Transformer(80, 8192, 64, 8, 28672, 32000),
}
MODELS = MappingProxyType(_LLAMA_2)
