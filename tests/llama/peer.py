"""transformers' Llama with the weights of ours, by a conversion of its own in plain words."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig as PeerConfig
from transformers import LlamaForCausalLM

from foretrace.generate.model import Transformer
from foretrace.llama.config import LlamaConfig
from foretrace.llama.model import Llama

_NAMES = {
    "wq": "q_proj",
    "wk": "k_proj",
    "wv": "v_proj",
    "wo": "o_proj",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}


def model_of(
    heads: int = 4, kv_heads: int = 2, layers: int = 2, sequence: int = 160, hidden: int = 64, **config: Any
) -> Llama:
    """A small model with weights so large that no two logits are nearly equal, as they are before training."""
    torch.manual_seed(heads * 10 + kv_heads)
    model = Llama(LlamaConfig(Transformer(layers, hidden, heads, kv_heads, 96, 128, sequence), **config))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.15)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval()


def peer_of(model: Llama) -> LlamaForCausalLM:
    """The same model in transformers."""
    sizes = model.config.sizes
    peer = LlamaForCausalLM(
        PeerConfig(
            vocab_size=sizes.vocabulary,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.ffn_hidden,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            rms_norm_eps=model.config.norm_eps,
            max_position_embeddings=sizes.sequence,
            rope_parameters={"rope_type": "default", "rope_theta": model.config.rope.theta},
        )
    )
    peer.load_state_dict(_weights(model))
    return peer.eval()


def _weights(model: Llama) -> dict[str, torch.Tensor]:
    assert model.output is not None and model.norm is not None and model.tok_embeddings is not None
    found = {"lm_head.weight": model.output.weight, "model.norm.weight": model.norm.weight}
    found["model.embed_tokens.weight"] = model.tok_embeddings.weight
    for number, block in model.layers.items():
        place = f"model.layers.{number}."
        found[place + "input_layernorm.weight"] = block.attention_norm.weight
        found[place + "post_attention_layernorm.weight"] = block.ffn_norm.weight
        for part, mine in (("self_attn", block.attention), ("mlp", block.feed_forward)):
            for name, module in mine.named_children():
                weight = module.weight.detach()
                if name in ("wq", "wk"):  # the first elements of all pairs, then the second ones
                    heads = weight.unflatten(0, (-1, model.config.sizes.head_size))
                    weight = torch.cat([heads[:, 0::2], heads[:, 1::2]], 1).flatten(0, 1)
                found[f"{place}{part}.{_NAMES[name]}.weight"] = weight
    return found
