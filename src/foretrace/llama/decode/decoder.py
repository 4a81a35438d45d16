"""`Decoder`: one token after another, with as few operators a token as there can be.

A small model spends its time on calling operators and a large one on reading weights. So a step is written out here:
products that share their input are one product, and nothing is allocated that has not to be. The same arithmetic as
`model.Llama`, which reads the prompt; tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from foretrace.llama.decode.cache import KVCache
from foretrace.llama.decode.int8 import Int8Linear
from foretrace.llama.model import Block, Llama

Product = Callable[[Tensor], Tensor]


class _Layer(NamedTuple):
    attention_norm: Tensor
    qkv: Product
    output: Product
    ffn_norm: Tensor
    gate_up: Product
    down: Product


class Decoder:
    """A model with a cache, for one batch after another.

    The model's matrices are laid out anew, without a second copy: ``wq``, ``wk`` and ``wv`` become parts of one.

    Args:
        model: on one device, with all layers; its weights must not be trained on.
        rows: sequences of a batch, at most.
        slots: tokens of a sequence, prompt and answer together.
        chunk: tokens of the prompts that are read at once.

    Raises:
        ValueError: if ``slots`` is more than the model's longest sequence.
    """

    def __init__(self, model: Llama, rows: int, slots: int, chunk: int = 512) -> None:
        sizes = model.config.sizes
        if slots > sizes.sequence:
            raise ValueError(f"{slots} tokens of prompt and answer, the model takes {sizes.sequence}")
        assert model.tok_embeddings is not None and model.norm is not None and model.output is not None
        self.model, self.sizes, self.rows, self.slots, self.chunk = model.eval(), sizes, rows, slots, chunk
        weight = model.tok_embeddings.weight
        self._cache_of: Callable[[int], KVCache] = lambda n: KVCache(sizes, n, slots, weight.dtype, weight.device)
        self._embedding, self._norm, self._head = weight.detach(), model.norm.weight.detach(), _product(model.output)
        self._layers = [_fused(block) for block in model.layers.values()]  # type: ignore[arg-type]
        self._rotation = model.config.rope.rotation(torch.arange(slots, device=weight.device), sizes.head_size)
        self.cache = self._cache_of(0)
        self._lengths: list[int] = []

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read prompts into an empty cache; logits of the token behind each, shape ``(rows, V)``.

        Raises:
            ValueError: if there is no prompt, one has no token, or prompts are too many or too long.
        """
        self._lengths = [len(prompt) for prompt in prompts]
        if not self._lengths or not min(self._lengths):
            raise ValueError("a prompt has at least one token")
        if len(prompts) > self.rows or max(self._lengths) > self.slots:
            raise ValueError(f"{len(prompts)} prompts of at most {max(self._lengths)} tokens: the decoder was made for "
                             f"{self.rows} of {self.slots}")  # fmt: skip
        if len(prompts) != len(self.cache.keys[0]):
            self.cache = self._cache_of(len(prompts))
        self.cache.used = 0
        longest = max(self._lengths)
        padded = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
        last = torch.tensor(self._lengths, device=self._embedding.device) - 1
        residual = self._embedding.new_empty(len(prompts), self.sizes.hidden)
        for begin in range(0, longest, self.chunk):
            x_BTC = self._read(padded[:, begin : begin + self.chunk].to(self._embedding.device))
            mine = ((last >= begin) & (last < begin + self.chunk)).nonzero()[:, 0]
            residual[mine] = x_BTC[mine, last[mine] - begin].to(residual.dtype)
        return self._head(self._normed(residual, self._norm)).float()

    def _read(self, tokens_BT: Tensor) -> Tensor:
        """The residual stream of the next tokens of all prompts."""
        begin = self.cache.used
        rotation = self._rotation[begin : begin + tokens_BT.shape[1]]
        x_BTC = embedding(tokens_BT, self._embedding)
        for block in self.model.layers.values():
            x_BTC = block(x_BTC, rotation, self.cache)
        self.cache.used += tokens_BT.shape[1]
        return x_BTC

    @torch.inference_mode()
    def step(self, tokens_B: Tensor) -> Tensor:
        """Append a token to each row; logits of the next one, shape ``(rows, V)``.

        Raises:
            ValueError: if the cache is full.
        """
        end = max(self._lengths) + 1
        if end > self.slots:
            raise ValueError(f"the cache is full: it was made for {self.slots} tokens")
        rows, heads, kv_heads, head_size = len(tokens_B), self.sizes.heads, self.sizes.kv_heads, self.sizes.head_size
        turned = (heads + kv_heads) * head_size
        place, rotation, mask = self._places(end)
        x_BC = embedding(tokens_B, self._embedding)
        for layer, keys, values in zip(self._layers, self.cache.keys, self.cache.values, strict=True):
            qkv = layer.qkv(self._normed(x_BC, layer.attention_norm))
            pairs = torch.view_as_complex(qkv[:, :turned].float().view(rows, heads + kv_heads, head_size // 2, 2))
            qk_BHD = torch.view_as_real(pairs * rotation).view(rows, heads + kv_heads, head_size).to(qkv.dtype)
            keys[place] = qk_BHD[:, heads:]
            values[place] = qkv[:, turned:].view(rows, kv_heads, head_size)
            mixed = scaled_dot_product_attention(
                qk_BHD[:, :heads, None], keys[:, :, :end], values[:, :, :end], mask, enable_gqa=heads != kv_heads
            )
            x_BC = x_BC + layer.output(mixed.view(rows, -1))
            gate, up = layer.gate_up(self._normed(x_BC, layer.ffn_norm)).chunk(2, -1)
            x_BC = x_BC + layer.down(silu(gate) * up)
        self._lengths = [length + 1 for length in self._lengths]
        return self._head(self._normed(x_BC, self._norm)).float()

    def _places(self, end: int) -> tuple[Any, Tensor, Tensor | None]:
        """Where each row's token goes, how it is turned, and what it may see (None: all that there is)."""
        if min(self._lengths) == end - 1:
            return (slice(None), slice(None), end - 1), self._rotation[end - 1], None
        at = torch.tensor(self._lengths, device=self._embedding.device)
        rows = torch.arange(len(at), device=at.device)
        mask = torch.arange(end, device=at.device) <= at[:, None]
        return (rows, slice(None), at), self._rotation[at], mask[:, None, None]

    def _normed(self, x_BC: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x_BC, (self.sizes.hidden,), weight, self.model.config.norm_eps)


def _fused(block: Block) -> _Layer:
    attention, ffn = block.attention, block.feed_forward
    return _Layer(
        block.attention_norm.weight.detach(),
        _merged(attention.wq, attention.wk, attention.wv),
        _product(attention.wo),
        block.ffn_norm.weight.detach(),
        _merged(ffn.w1, ffn.w3),
        _product(ffn.w2),
    )


def _product(module: nn.Module) -> Product:
    if isinstance(module, Int8Linear):
        return module.forward
    weight: Tensor = module.weight.detach()  # type: ignore[operator]
    return lambda x: linear(x, weight)


@torch.no_grad()
def _merged(*modules: Any) -> Product:
    """One product in place of several of the same input; the modules keep their parts of the matrix."""
    weight = torch.cat([module.weight.detach() for module in modules])
    for module, part in zip(modules, weight.split([len(module.weight) for module in modules]), strict=True):
        if isinstance(module, Int8Linear):
            module.weight = part
        else:
            module.weight.data = part
    if not isinstance(modules[0], Int8Linear):
        return lambda x: linear(x, weight)
    return Int8Linear(weight, torch.cat([module.scale for module in modules])).forward
