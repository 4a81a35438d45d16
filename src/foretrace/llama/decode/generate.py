"""`generate`: answers to prompts, token by token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from foretrace.llama.decode.decoder import Decoder
from foretrace.llama.decode.sampling import Sampling


@dataclass
class Answer:
    """What followed a prompt.

    Attributes:
        tokens: without the one that ended it.
        log_probabilities: of each of them under the model (temperature 1).
        is_finished: it came to an end, and was not cut off.
    """

    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    is_finished: bool = False


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    most: int,
    sampling: Sampling | None = None,
    stop: Collection[int] = (),
    seed: int | None = None,
    on_token: Callable[[int, int], None] | None = None,
    with_log_probabilities: bool = False,
    vocabulary: int | None = None,
) -> list[Answer]:
    """Continue prompts, all in one batch.

    Args:
        prompts: tokens.
        most: tokens of an answer; fewer where the cache ends before.
        sampling: how tokens are drawn; as in Meta's reference code if None.
        stop: tokens that end an answer.
        seed: of the draws.
        on_token: called with the row and each token of an answer.
        with_log_probabilities: note them, too.
        vocabulary: tokens that there are, where the model has room for more; all of the model's if None.

    Raises:
        ValueError: see `Decoder.prefill`.
    """
    sampling = sampling or Sampling()
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    answers = [Answer() for _ in prompts]
    logits = decoder.prefill(prompts)
    room = min(most, decoder.slots - max(len(prompt) for prompt in prompts))
    for place in range(room):
        logits = logits[:, :vocabulary]
        tokens = sampling.draw(logits, generator)
        chosen = tokens.tolist()
        scores = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0].tolist() if with_log_probabilities else None
        for row, (answer, token) in enumerate(zip(answers, chosen, strict=True)):
            if answer.is_finished:
                continue
            if token in stop:
                answer.is_finished = True
                continue
            answer.tokens.append(token)
            if scores:
                answer.log_probabilities.append(scores[row])
            if on_token:
                on_token(row, token)
        if place == room - 1 or all(answer.is_finished for answer in answers):
            break
        logits = decoder.step(tokens)
    return answers
