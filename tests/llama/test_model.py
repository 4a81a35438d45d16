"""The model is transformers' Llama to the last digits, and each mistake that others made in it is a test."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from foretrace.generate.model import Transformer
from foretrace.llama.attention import Documents
from foretrace.llama.config import CONFIGS, LlamaConfig, ffn_hidden
from foretrace.llama.model import Llama, RMSNorm
from foretrace.llama.rope import SCALINGS, Rope, rotate
from tests.llama.peer import model_of, peer_of

CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-34b", 33_743_970_304),
        ("llama-2-70b", 68_976_648_192),
    ],
)
def test_released_sizes_have_the_released_number_of_parameters(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = Llama(CONFIGS[name])
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert CONFIGS[name].sizes.parameters() == parameters


@pytest.mark.parametrize("name", CONFIGS)
def test_the_description_counts_what_the_model_has(name: str) -> None:
    with torch.device("meta"):
        model = Llama(CONFIGS[name])
    assert sum(parameter.numel() for parameter in model.parameters()) == CONFIGS[name].sizes.parameters()


def test_inner_sizes_follow_the_references_rule() -> None:
    """llama.cpp#2276: rounding after the multiplier only gave 28416 for the 70B's 28672."""
    found = [ffn_hidden(4096), ffn_hidden(5120), ffn_hidden(8192), ffn_hidden(8192, 4096, 1.3)]
    assert found == [11008, 13824, 22016, 28672]


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([(4, 4), (4, 2), (4, 1), (8, 2), (2, 2)]),
    st.integers(1, 3),
    st.lists(st.integers(1, 12), min_size=1, max_size=3),
    st.sampled_from(["left", "right"]),
    st.sampled_from([1e-5, 1e-6]),
)
def test_logits_are_transformers_own_with_padding_on_either_side(
    heads: tuple[int, int], layers: int, lengths: list[int], side: str, eps: float
) -> None:
    model = model_of(*heads, layers=layers, norm_eps=eps)
    peer, longest = peer_of(model), max(lengths)
    tokens, mask = torch.zeros(len(lengths), longest, dtype=torch.long), torch.zeros(len(lengths), longest)
    pieces = []
    for row, length in enumerate(lengths):
        place = slice(longest - length, longest) if side == "left" else slice(0, length)
        tokens[row, place] = torch.randint(0, 128, (length,))
        mask[row, place] = 1
        pieces += [n for n in ((longest - length, length) if side == "left" else (length, longest - length)) if n]
    documents = Documents(pieces)
    with torch.no_grad():
        theirs = peer(tokens, attention_mask=mask).logits
        mine = model(tokens, documents.positions().view(tokens.shape), documents)
    torch.testing.assert_close(mine[mask > 0], theirs[mask > 0], **CLOSE)


def test_gradients_are_transformers_own() -> None:
    model = model_of()
    peer, tokens = peer_of(model), torch.randint(0, 128, (3, 20))
    for one, logits in ((model, model(tokens)), (peer, peer(tokens).logits)):
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        assert all(parameter.grad is not None for parameter in one.parameters())
    assert model.tok_embeddings is not None and model.output is not None
    torch.testing.assert_close(model.tok_embeddings.weight.grad, peer.model.embed_tokens.weight.grad, **CLOSE)
    torch.testing.assert_close(model.output.weight.grad, peer.lm_head.weight.grad, **CLOSE)
    ours = model.layers["0"].feed_forward.w2.weight.grad
    torch.testing.assert_close(ours, peer.model.layers[0].mlp.down_proj.weight.grad, **CLOSE)


@pytest.mark.parametrize(
    ("rope", "stated"),
    [
        (Rope(), {"rope_type": "default"}),
        (Rope(scaling="linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}),
        (
            Rope(500000.0, "llama3", 8.0, 8192),
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 8192},
        ),
        (
            Rope(10000.0, "yarn", 4.0, 4096, 1.0, 32.0),
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
        ),
    ],
)  # fmt: skip
def test_scaled_frequencies_are_transformers_own(rope: Rope, stated: dict[str, object]) -> None:
    from transformers import LlamaConfig as PeerConfig

    config = PeerConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=32768,
        rope_parameters={"rope_theta": rope.theta, **stated},
    )
    if rope.scaling == "none":
        expected, scale = 1.0 / 10000.0 ** (torch.arange(0, 128, 2) / 128), 1.0
    else:
        expected, scale = ROPE_INIT_FUNCTIONS[rope.scaling](config, "cpu")
    torch.testing.assert_close(rope.frequencies(128), expected, rtol=1e-6, atol=0)
    assert rope.score_scale == pytest.approx(scale)


def test_ntk_scaling_slows_the_slowest_pair_by_the_factor() -> None:
    plain, scaled = Rope().frequencies(64), Rope(scaling="ntk", factor=8.0).frequencies(64)
    assert float(scaled[0]) == float(plain[0])
    assert float(plain[-1] / scaled[-1]) == pytest.approx(8.0, rel=1e-4)


def test_rotation_is_of_neighboring_pairs() -> None:
    """karpathy/llama2.c#286: the first half against the second is another model's layout."""
    x = torch.randn(1, 3, 2, 4)
    turned = rotate(x, Rope().rotation(torch.tensor([0, 1, 2]), 4))
    torch.testing.assert_close(turned[:, 0], x[:, 0])
    angle = torch.tensor(1.0)
    first = x[0, 1, 0, 0] * angle.cos() - x[0, 1, 0, 1] * angle.sin()
    torch.testing.assert_close(turned[0, 1, 0, 0], first)


def test_only_the_distance_of_tokens_counts() -> None:
    q, k, rope = torch.randn(16), torch.randn(16), Rope()

    def score(at: int, other: int) -> float:
        turned = [rotate(x.view(1, 1, 1, 16), rope.rotation(torch.tensor([p]), 16)) for x, p in ((q, at), (k, other))]
        return float((turned[0] * turned[1]).sum())

    assert score(5, 3) == pytest.approx(score(1005, 1003), abs=1e-3)


def test_angles_stay_in_fp32_whatever_the_model_is() -> None:
    """transformers#25681: a table in bf16 takes position 257 for 256."""
    model = model_of().to(torch.bfloat16)
    positions = torch.tensor([256, 257])
    turned = model.config.rope.rotation(positions, 16)
    assert turned.dtype == torch.complex64
    assert not torch.equal(turned[0], turned[1])
    exact = torch.tensor([256.0, 257.0]).double()
    torch.testing.assert_close(turned[:, 0, 0], torch.polar(torch.ones_like(exact), exact).to(torch.complex64))
    assert rotate(torch.randn(1, 2, 1, 16, dtype=torch.bfloat16), turned).dtype == torch.bfloat16


def test_compiled_rotation_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, turned = torch.randn(2, 5, 3, 8), Rope().rotation(torch.arange(5), 8)
    expected = rotate(x, turned)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(rotate(x, turned), expected)


def test_norm_computes_in_fp32_and_multiplies_behind_the_cast() -> None:
    norm = RMSNorm(256, 1e-5).to(torch.bfloat16)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = torch.randn(4, 256, dtype=torch.bfloat16) * 100
    wide = x.float()
    expected = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(torch.bfloat16) * norm.weight
    assert torch.equal(norm(x), expected)


def test_a_tied_model_has_one_matrix() -> None:
    sizes = Transformer(2, 64, 4, 2, 96, 128, 64, is_tied=True)
    model = Llama(LlamaConfig(sizes))
    assert model.output is not None and model.tok_embeddings is not None
    assert model.output.weight is model.tok_embeddings.weight
    assert sum(parameter.numel() for parameter in model.parameters()) == sizes.parameters()


def test_initial_weights_depend_on_the_seed_alone() -> None:
    models = [Llama(CONFIGS["llama-tiny"]) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        model.init_weights(torch.Generator().manual_seed(seed))
    one, again, other = (torch.cat([p.flatten() for p in model.parameters()]) for model in models)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    block = models[0].layers["0"]
    assert block.attention.wq.weight.detach().std().item() == pytest.approx(0.02, rel=0.1)
    assert block.attention.wo.weight.detach().std().item() == pytest.approx(0.01, rel=0.1)  # 0.02 / sqrt(2 x 2 layers)
    tokens = torch.randint(0, 256, (4, 32))
    loss = torch.nn.functional.cross_entropy(models[0](tokens).flatten(0, 1), torch.randint(0, 256, (128,)))
    assert loss.item() == pytest.approx(torch.log(torch.tensor(256.0)).item(), abs=0.1)


@pytest.mark.parametrize("lengths", [[7], [1, 1, 1], [5, 9, 2, 16], [3] * 8, [30, 1, 1]])
def test_packed_documents_do_not_see_each_other(lengths: list[int]) -> None:
    """trl#784, #805: positions that start anew do not keep attention apart; only that does."""
    model, total = model_of(), sum(lengths)
    tokens = torch.randint(0, 128, (total,))
    documents = Documents(lengths)
    packed = model(tokens[None], documents.positions()[None], documents)[0]
    alone = torch.cat([model(piece[None])[0] for piece in tokens.split(lengths)])
    torch.testing.assert_close(packed, alone, **CLOSE)
    parameters = list(model.parameters())
    mine, theirs = (torch.autograd.grad(logits.square().sum(), parameters) for logits in (packed, alone))
    largest = max(float(gradient.abs().max()) for gradient in theirs)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * largest)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.sampled_from([(4, 4), (4, 2)]))
def test_packed_attention_is_attention_of_each_document(lengths: list[int], heads: tuple[int, int]) -> None:
    total = sum(lengths)
    q, k, v = (torch.randn(1, total, count, 8, requires_grad=True) for count in (heads[0], heads[1], heads[1]))
    found = Documents(lengths)(0, q, k, v)
    mask = torch.block_diag(*(torch.ones(n, n) for n in lengths)).tril().bool()
    repeated = [x.repeat_interleave(heads[0] // heads[1], 2) for x in (k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), repeated[0].transpose(1, 2), repeated[1].transpose(1, 2), attn_mask=mask
    ).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    weight = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad((found * weight).sum(), (q, k, v)),
        torch.autograd.grad((expected * weight).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def test_documents_that_do_not_fill_the_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="the batch has 10 tokens, its documents 9"):
        model_of()(torch.zeros(1, 10, dtype=torch.long), None, Documents([4, 5]))
    with pytest.raises(ValueError, match="at least one token"):
        Documents([4, 0])


@pytest.mark.parametrize(
    ("change", "problem"),
    [({"norm": "layer"}, "RMSNorm"), ({"is_gated": False}, "gated"), ({"heads": 64, "kv_heads": 64}, "in pairs")],
)
def test_sizes_that_are_no_llama_are_refused(change: dict[str, object], problem: str) -> None:
    sizes = dataclasses.replace(CONFIGS["llama-tiny"].sizes, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=problem):
        LlamaConfig(sizes)


@pytest.mark.parametrize(
    "wrong", [{"theta": 1.0}, {"factor": 0.5}, {"scaling": "x"}, {"low": 5.0}, {"original_context": 0}]
)
def test_rope_settings_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="RoPE"):
        Rope(**wrong)  # type: ignore[arg-type]
    assert set(SCALINGS) == {"none", "linear", "ntk", "llama3", "yarn"}
