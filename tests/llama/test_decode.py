"""Decoding with a cache gives what the model gives without one."""

import dataclasses

import pytest
import torch

from foretrace.llama.decode.cache import KVCache
from foretrace.llama.decode.decoder import Decoder
from foretrace.llama.decode.generate import generate
from foretrace.llama.decode.int8 import Int8Linear, quantize
from foretrace.llama.decode.sampling import Sampling
from foretrace.llama.model import Llama
from tests.llama.peer import model_of, peer_of

GREEDY = Sampling(temperature=0)


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, 128, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def without_cache(model: Llama, prompt: list[int], most: int) -> tuple[list[int], torch.Tensor]:
    tokens, logits = list(prompt), []
    for _ in range(most):
        logits.append(model(torch.tensor([tokens]))[0, -1])
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :], torch.stack(logits)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("chunk", [512, 3])
def test_a_batch_gives_what_each_prompt_gives_alone(kv_heads: int, chunk: int) -> None:
    model = model_of(kv_heads=kv_heads)
    prompts = prompts_of(7, 1, 12)
    expected = [without_cache(model, prompt, 20) for prompt in prompts]
    decoder = Decoder(model, 3, 40, chunk)
    logits = [decoder.prefill(prompts)]
    for _ in range(19):
        logits.append(decoder.step(logits[-1].argmax(-1)))
    for row, (tokens, scores) in enumerate(expected):
        mine = torch.stack([step[row] for step in logits])
        assert mine.argmax(-1).tolist() == tokens
        torch.testing.assert_close(mine, scores, rtol=0, atol=2e-5)


def test_greedy_tokens_are_transformers_own_over_128_steps() -> None:
    model = model_of()
    peer = peer_of(model)
    (prompt,) = prompts_of(9)
    theirs = peer.generate(
        torch.tensor([prompt]), max_new_tokens=128, min_new_tokens=128, do_sample=False, pad_token_id=0
    )
    (answer,) = generate(Decoder(model, 1, 160), [prompt], 128, GREEDY)
    assert answer.tokens == theirs[0, 9:].tolist()


def test_the_cache_serves_the_plain_model_too() -> None:
    """Chunk by chunk into a cache that is not empty: the mask is not square."""
    model = model_of()
    tokens = torch.tensor(prompts_of(30))
    cache = KVCache(model.config.sizes, 1, 64, torch.float32)
    parts, begin = [], 0
    for size in (1, 11, 5, 1, 12):
        positions = torch.arange(begin, begin + size)
        parts.append(model(tokens[:, begin : begin + size], positions, cache))
        begin = cache.used = begin + size
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=0, atol=2e-5)


def test_a_decoder_leaves_the_model_as_it_was() -> None:
    model = model_of()
    tokens = torch.tensor(prompts_of(10))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    logits = model(tokens)
    decoder = Decoder(model, 1, 40)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    torch.testing.assert_close(model(tokens), logits)
    with torch.no_grad():
        model.layers["0"].attention.wk.weight.zero_()  # the same memory: no second copy of the weights
    reads = decoder.prefill(tokens.tolist())
    torch.testing.assert_close(reads[0], model(tokens)[0, -1], rtol=0, atol=2e-5)
    expected = model(torch.cat([tokens, tokens[:, :1]], 1))[0, -1]
    torch.testing.assert_close(decoder.step(tokens[:, 0])[0], expected, rtol=0, atol=2e-5)


def test_answers_end_at_stop_tokens_and_others_go_on() -> None:
    model = model_of()
    prompts = prompts_of(4, 6)
    free = generate(Decoder(model, 2, 60), prompts, 30, GREEDY, with_log_probabilities=True)
    stop = free[0].tokens[5]
    seen: list[tuple[int, int]] = []
    answers = generate(Decoder(model, 2, 60), prompts, 30, GREEDY, (stop,), on_token=lambda r, t: seen.append((r, t)))
    for answer, whole in zip(answers, free, strict=True):
        end = whole.tokens.index(stop) if stop in whole.tokens else 30
        assert answer.tokens == whole.tokens[:end]
        assert answer.is_finished == (stop in whole.tokens)
    for row, answer in enumerate(answers):
        assert [token for r, token in seen if r == row] == answer.tokens
    _, scores = without_cache(model, prompts[0], 30)
    expected = scores.log_softmax(-1).max(-1).values.tolist()
    assert free[0].log_probabilities == pytest.approx(expected, abs=1e-4)


def test_only_tokens_of_the_tokenizer_are_drawn() -> None:
    answers = generate(Decoder(model_of(), 2, 60), prompts_of(4, 6), 50, Sampling(2.0, 1.0), seed=0, vocabulary=20)
    assert max(token for answer in answers for token in answer.tokens) < 20


def test_an_answer_ends_where_the_cache_does() -> None:
    (answer,) = generate(Decoder(model_of(), 1, 12), prompts_of(8), 100, GREEDY)
    assert len(answer.tokens) == 4
    assert not answer.is_finished


def test_prompts_that_do_not_fit_are_refused() -> None:
    model = model_of()
    with pytest.raises(ValueError, match="200 tokens of prompt and answer, the model takes 160"):
        Decoder(model, 1, 200)
    decoder = Decoder(model, 2, 10)
    for prompts in ([], [[]], [[1], []]):
        with pytest.raises(ValueError, match="at least one token"):
            decoder.prefill(prompts)
    with pytest.raises(ValueError, match="was made for"):
        decoder.prefill(prompts_of(11))
    with pytest.raises(ValueError, match="was made for"):
        decoder.prefill(prompts_of(2, 2, 2))


def draws(sampling: Sampling, logits: list[float], count: int = 20_000) -> list[float]:
    many = torch.tensor(logits).expand(count, -1)
    tokens = sampling.draw(many, torch.Generator().manual_seed(0))
    return (torch.bincount(tokens, minlength=len(logits)) / count).tolist()


def test_sampling_follows_the_reference() -> None:
    """Tokens stay while the probability of those before them is at most top_p."""
    probabilities = [0.5, 0.3, 0.15, 0.05]
    logits = torch.tensor(probabilities).log().tolist()
    assert draws(Sampling(1.0, 1.0), logits) == pytest.approx(probabilities, abs=0.015)
    assert draws(Sampling(1.0, 0.6), logits) == pytest.approx([0.625, 0.375, 0, 0], abs=0.015)
    assert draws(Sampling(1.0, 0.49), logits) == [1, 0, 0, 0]
    assert draws(Sampling(1.0, 1.0, top_k=3), logits) == pytest.approx([0.526, 0.316, 0.158, 0], abs=0.015)
    squared = [p**2 / sum(q**2 for q in probabilities) for p in probabilities]
    assert draws(Sampling(0.5, 1.0), logits) == pytest.approx(squared, abs=0.015)
    assert draws(Sampling(0), logits) == [1, 0, 0, 0]


def test_a_seed_gives_the_same_answer_again() -> None:
    decoder = Decoder(model_of(), 1, 60)
    sampling = Sampling(1.0, 1.0)
    first, again, other = (generate(decoder, prompts_of(5), 30, sampling, seed=seed)[0].tokens for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}]
)
def test_settings_of_sampling_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 4, 5, 40])
def test_int8_products_are_those_of_the_rounded_weights(rows: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(96, 64), torch.randn(rows, 3, 64)
    product = Int8Linear.of(weight)
    scale = weight.abs().amax(1) / 127
    exact = x @ (torch.round(weight / scale[:, None]) * scale[:, None]).T
    assert int(product.weight.abs().max()) == 127
    assert float((product(x) - exact).abs().max()) < 0.01 * float(
        exact.abs().max()
    )  # activations are bf16 in the kernel


def test_an_int8_model_decodes_close_to_its_own() -> None:
    model = model_of()
    prompts = prompts_of(7, 5)
    expected = torch.stack([model(torch.tensor([prompt]))[0, -1] for prompt in prompts])
    small = quantize(model_of())
    assert not [name for name, module in small.named_modules() if isinstance(module, torch.nn.Linear)]
    decoder = Decoder(small, 2, 40)
    logits = decoder.prefill(prompts)
    assert float((logits - expected.detach()).abs().max()) < 0.05 * float(expected.detach().abs().max())
    decoder.step(logits.argmax(-1))


def test_rope_scaling_reaches_the_decoder() -> None:
    config = model_of().config
    scaled = dataclasses.replace(config, rope=dataclasses.replace(config.rope, scaling="linear", factor=4.0))
    model = Llama(scaled).eval()
    model.load_state_dict(model_of().state_dict())
    (prompt,) = prompts_of(9)
    tokens, _ = without_cache(model, prompt, 12)
    assert generate(Decoder(model, 1, 40), [prompt], 12, GREEDY)[0].tokens == tokens
