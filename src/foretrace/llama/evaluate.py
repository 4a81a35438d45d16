"""Perplexity of a model on documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from foretrace.llama.attention import Documents, Ints
from foretrace.llama.data.store import TokenStore
from foretrace.llama.model import Llama


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts.

    Attributes:
        loss: mean negative logarithm of the probability of a token.
        tokens: that were predicted.
    """

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """The exponential of the loss; infinite where a double does not hold it."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@torch.inference_mode()
def evaluate(
    model: Llama,
    store: TokenStore,
    length: int | None = None,
    tokens_at_once: int = 4096,
    on_tokens: Callable[[int], None] | None = None,
) -> Evaluation:
    """Predict every token of every document but the first one of each.

    A document that is longer than ``length`` is cut into pieces, which do not see each other.

    Args:
        model: any Llama.
        store: documents.
        length: of the longest piece; the model's longest sequence if None.
        tokens_at_once: of a batch.
        on_tokens: called with the tokens of each batch.
    """
    longest = min(length or model.config.sizes.sequence, model.config.sizes.sequence)
    parameter = next(iter(model.parameters()), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    total, count = 0.0, 0
    for tokens, targets, lengths in _batches(store, longest, tokens_at_once):
        documents = Documents(lengths, device)
        inputs = torch.from_numpy(tokens).to(device)[None]
        logits = model(inputs, documents.positions()[None], documents)[0]
        total += float(cross_entropy(logits.float(), torch.from_numpy(targets).to(device), reduction="sum"))
        count += len(targets)
        if on_tokens:
            on_tokens(len(targets))
    return Evaluation(total / max(count, 1), count)


def _batches(store: TokenStore, longest: int, most: int) -> Iterator[tuple[Ints, Ints, list[int]]]:
    """Tokens, targets and lengths of pieces, together about ``most`` tokens."""
    pieces: list[Ints] = []
    size = 0
    for number in range(store.num_documents):
        document = np.asarray(store.document(number), np.int64)
        for begin in range(0, len(document) - 1, longest):
            piece = document[begin : begin + longest + 1]
            if size and size + len(piece) - 1 > most:
                yield _joined(pieces)
                pieces, size = [], 0
            pieces.append(piece)
            size += len(piece) - 1
    if pieces:
        yield _joined(pieces)


def _joined(pieces: list[Ints]) -> tuple[Ints, Ints, list[int]]:
    tokens, targets = (np.concatenate([piece[part] for piece in pieces]) for part in (slice(-1), slice(1, None)))
    return tokens, targets, [len(piece) - 1 for piece in pieces]
