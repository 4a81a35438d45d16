"""Llama 2 as plain modules: weights and arithmetic, nothing else.

Parallelism, compilation and recomputation are applied from outside (`parallelize`). What a token may see is decided by
the ``attend`` that is handed in: causal attention, documents packed into a row (`attention.Documents`), a cache of keys
and values (`cache.KVCache`), or a context that is split over ranks.

Names of parameters are those of Meta's checkpoints. Letters behind a name are its dimensions: B sequences, T tokens of
a sequence, C channels of the residual stream, H heads, K heads of keys and values, D elements of a head, F inner
channels of the FFN, V tokens of the vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrace.llama.attention import causal
from foretrace.llama.config import LlamaConfig
from foretrace.llama.rope import rotate


class Attend(Protocol):
    """Mixes values over tokens: queries ``(B, T, H, D)``, keys and values ``(B, T, K, D)`` -> ``(B, T, H, D)``."""

    def __call__(self, layer: int, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
        """Attention of layer ``layer``, counted from 0."""


class RMSNorm(nn.Module):
    """Scale to a mean square of 1, in fp32, then by a weight a channel (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x_BTC: Tensor) -> Tensor:
        x = x_BTC.float()
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return scaled.type_as(x_BTC) * self.weight


class Attention(nn.Module):
    """Grouped-query attention with rotated queries and keys."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        sizes = config.sizes
        self.layer, self.head_size = layer, sizes.head_size
        kv_size = sizes.kv_heads * sizes.head_size
        self.wq = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.wk = nn.Linear(sizes.hidden, kv_size, bias=False)
        self.wv = nn.Linear(sizes.hidden, kv_size, bias=False)
        self.wo = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x_BTC: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        # The number of heads follows from the weights: under tensor parallelism a rank has a part of them.
        q_BTHD = rotate(self.wq(x_BTC).unflatten(-1, (-1, self.head_size)), rotation)
        k_BTKD = rotate(self.wk(x_BTC).unflatten(-1, (-1, self.head_size)), rotation)
        v_BTKD = self.wv(x_BTC).unflatten(-1, (-1, self.head_size))
        return self.wo(attend(self.layer, q_BTHD, k_BTKD, v_BTKD).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        sizes = config.sizes
        self.w1 = nn.Linear(sizes.hidden, sizes.ffn_hidden, bias=False)  # gate
        self.w2 = nn.Linear(sizes.ffn_hidden, sizes.hidden, bias=False)  # down
        self.w3 = nn.Linear(sizes.hidden, sizes.ffn_hidden, bias=False)  # up

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x_BTC)) * self.w3(x_BTC))


class Block(nn.Module):
    """One layer: attention and FFN, each behind a norm and added to its input."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.sizes.hidden, config.norm_eps)
        self.attention = Attention(config, layer)
        self.ffn_norm = RMSNorm(config.sizes.hidden, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x_BTC: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC), rotation, attend)
        return x_BTC + self.feed_forward(self.ffn_norm(x_BTC))


class Llama(nn.Module):
    """A decoder-only transformer: tokens in, logits of the next token out.

    A pipeline stage is the same module with some of its ``layers``, and without ``tok_embeddings`` (then it takes the
    residual stream in place of tokens) or ``norm`` and ``output`` (then it gives it).
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        sizes = config.sizes
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleDict({str(layer): Block(config, layer) for layer in range(sizes.layers)})
        self.norm: RMSNorm | None = RMSNorm(sizes.hidden, config.norm_eps)
        self.output: nn.Linear | None = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        if sizes.is_tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor | None = None, attend: Attend = causal) -> Tensor:
        """Logits ``(B, T, V)`` in the type of the weights.

        Args:
            tokens_BT: token ids.
            positions_BT: of the tokens in their sequences, ``(B, T)`` or ``(T,)``; 0, 1, ... if None.
            attend: see `Attend`.
        """
        if positions_BT is None:
            positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        rotation = self.config.rope.rotation(positions_BT, self.config.sizes.head_size)
        x_BTC = self.tok_embeddings(tokens_BT) if self.tok_embeddings is not None else tokens_BT
        for block in self.layers.values():
            x_BTC = block(x_BTC, rotation, attend)
        if self.norm is not None:
            x_BTC = self.norm(x_BTC)
        return self.output(x_BTC) if self.output is not None else x_BTC

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights anew: normal with deviation 0.02, those that write to the residual stream less by depth.

        The paper does not say how its weights were drawn; this is GPT-2's rule (Radford et al. 2019, section 2.3).
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            writes_residual = name.endswith(("wo.weight", "w2.weight"))
            scale = (2 * self.config.sizes.layers) ** -0.5 if writes_residual else 1.0
            parameter.normal_(0.0, 0.02 * scale, generator=generator)
