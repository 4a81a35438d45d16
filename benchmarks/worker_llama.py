"""One fresh process that alternates two sides in blocks of steps: prints seconds of each, by case.

Cases: ``train`` (transformers' Llama, ours, ours again), ``bf16`` (ours in fp32 and under bf16 autocast), ``packing``
(documents padded in batches, and packed into rows), ``decode`` (transformers' generate, ours, ours in int8).
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from foretrace.llama.attention import Documents
from foretrace.llama.config import CONFIGS, LlamaConfig
from foretrace.llama.decode.decoder import Decoder
from foretrace.llama.decode.generate import generate
from foretrace.llama.decode.int8 import quantize
from foretrace.llama.decode.sampling import Sampling
from foretrace.llama.model import Llama

BLOCKS = 4
TOKENS = 128  # of an answer
ROWS, LENGTH, ROW_LENGTH = 8, 256, 2048


def main() -> None:
    case, name = sys.argv[1:3]
    torch.manual_seed(0)
    torch.set_num_threads(2)
    sides, steps = {"train": train, "bf16": bf16, "packing": packing, "decode": decode}[case](CONFIGS[name])
    for side in sides.values():
        side()  # warm-up
    seconds = dict.fromkeys(sides, 0.0)
    for block in range(BLOCKS):
        for side in list(sides)[:: 1 if block % 2 == 0 else -1]:
            begin = time.perf_counter()
            for _ in range(steps):
                sides[side]()
            seconds[side] += time.perf_counter() - begin
    print(json.dumps(seconds))


def stepper(model: torch.nn.Module, logits: Callable[[torch.Tensor], torch.Tensor], dtype: str) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), 1e-5, 0.1, fused=True)
    tokens = torch.randint(0, 1024, (ROWS, LENGTH + 1))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            found = logits(tokens[:, :-1])
        cross_entropy(found.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def ours(config: LlamaConfig) -> Llama:
    model = Llama(config)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def peer(config: LlamaConfig) -> torch.nn.Module:
    from transformers import LlamaConfig as PeerConfig
    from transformers import LlamaForCausalLM

    sizes = config.sizes
    return LlamaForCausalLM(
        PeerConfig(
            vocab_size=sizes.vocabulary,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.ffn_hidden,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            rms_norm_eps=config.norm_eps,
            max_position_embeddings=sizes.sequence,
            attn_implementation="sdpa",
        )
    )


def train(config: LlamaConfig) -> tuple[dict[str, Callable[[], None]], int]:
    theirs = peer(config)
    mine = [ours(config) for _ in range(2)]
    return {
        "theirs": stepper(theirs, lambda tokens: theirs(tokens, use_cache=False).logits, "fp32"),
        "ours": stepper(mine[0], mine[0], "fp32"),
        "again": stepper(mine[1], mine[1], "fp32"),
    }, 3


def bf16(config: LlamaConfig) -> tuple[dict[str, Callable[[], None]], int]:
    mine, theirs = [ours(config) for _ in range(2)], peer(config)
    return {
        "fp32": stepper(mine[0], mine[0], "fp32"),
        "bf16": stepper(mine[1], mine[1], "bf16"),
        "theirs": stepper(theirs, lambda tokens: theirs(tokens, use_cache=False).logits, "bf16"),
    }, 1


def packing(config: LlamaConfig) -> tuple[dict[str, Callable[[], None]], int]:
    """Documents of lengths log-uniform in 16..512: padded to the longest of a batch of 16, or packed into rows."""
    rng, lengths = np.random.default_rng(0), []
    while sum(lengths) < 4 * ROW_LENGTH:
        lengths.append(int(np.exp(rng.uniform(np.log(16), np.log(512)))))
    lengths[-1] -= sum(lengths) - 4 * ROW_LENGTH
    documents = [torch.randint(0, 1024, (length,)) for length in lengths]
    model = ours(config)

    def padded() -> None:
        for begin in range(0, len(documents), 16):
            tokens = pad_sequence(documents[begin : begin + 16], batch_first=True)
            targets = pad_sequence(documents[begin : begin + 16], batch_first=True, padding_value=-100)
            cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum").backward()

    def packed() -> None:
        attend = Documents(lengths)
        tokens = torch.cat(documents).view(-1, ROW_LENGTH)
        logits = model(tokens, attend.positions().view(tokens.shape), attend)
        cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum").backward()

    return {"padded": padded, "packed": packed}, 1


def decode(config: LlamaConfig) -> tuple[dict[str, Callable[[], None]], int]:
    model, theirs = ours(config), peer(config).eval()
    decoders = [Decoder(model, 1, 16 + TOKENS), Decoder(quantize(copy.deepcopy(model)), 1, 16 + TOKENS)]
    prompt = torch.randint(3, 1000, (1, 16))
    options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}

    def answer(decoder: Decoder) -> Callable[[], None]:
        return lambda: (generate(decoder, prompt.tolist(), TOKENS, Sampling(0)), None)[1]

    return {
        "theirs": lambda: (theirs.generate(prompt, **options), None)[1],
        "ours": answer(decoders[0]),
        "int8": answer(decoders[1]),
    }, 1


if __name__ == "__main__":
    main()
