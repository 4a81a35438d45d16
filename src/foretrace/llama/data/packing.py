"""`PackedRows`: documents in a random order, one behind the other, cut into rows of equal length.

A row is found from its number alone. So the position in the data is one number, which resumes exactly, also on another
number of ranks; and no row needs those before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretrace.llama.attention import Documents
from foretrace.llama.data.store import TokenStore
from foretrace.trace.reading import FormatError

IGNORED = -100  # a target that counts for nothing, as in `torch.nn.functional.cross_entropy`
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Rows of tokens.

    Attributes:
        tokens_BT, targets_BT: int64; the target of a token is the one behind it in its document.
        lengths: tokens of the pieces of documents, row by row.
    """

    tokens_BT: Tensor
    targets_BT: Tensor
    lengths: Ints

    def attend(self, device: torch.device | str = "cpu") -> Documents:
        """Attention that does not look from one document into another."""
        return Documents(self.lengths, device)

    def num_targets(self) -> int:
        """Targets that count."""
        return int((self.targets_BT != IGNORED).sum())


class PackedRows:
    """Rows of ``length`` tokens, epoch after epoch.

    A document of n tokens gives n - 1 pairs of a token and its target. Pairs of all documents, shuffled anew in each
    epoch, form a stream that is cut every ``length`` pairs: nothing is padded, and a document that is cut goes on
    in the next row, seeing nothing of what was before. Pairs behind the last full row of an epoch are left out.

    Args:
        store: the documents.
        length: pairs of a row.
        seed: of the order.

    Raises:
        FormatError: if all documents together do not fill a row.
    """

    def __init__(self, store: TokenStore, length: int, seed: int = 0) -> None:
        self.store, self.length, self.seed = store, length, seed
        self.pairs = int(store.starts[-1]) - store.num_documents
        self.rows_per_epoch = self.pairs // length
        if length < 1 or not self.rows_per_epoch:
            problem = f"{self.pairs} tokens with a target, a row takes {length}"
            raise FormatError("the training data", problem, "take more text or shorter rows")
        self._epoch = lru_cache(2)(self._epoch_of_number)  # the one at hand, and the next one

    def _epoch_of_number(self, epoch: int) -> tuple[Ints, Ints]:
        """The documents in the order of an epoch, and where their pairs begin in its stream."""
        order = np.random.default_rng((self.seed, epoch)).permutation(self.store.num_documents)
        sizes = np.diff(self.store.starts)[order] - 1
        return order, np.concatenate(([0], np.cumsum(sizes)))

    def row(self, number: int) -> tuple[Ints, Ints, list[int]]:
        """Tokens and targets of row ``number``, counted over all epochs, and the lengths of the pieces in it."""
        epoch, place = divmod(number, self.rows_per_epoch)
        order, starts = self._epoch(epoch)
        begin, end = place * self.length, (place + 1) * self.length
        tokens, targets, lengths = np.empty(self.length, np.int64), np.empty(self.length, np.int64), []
        at, filled = int(np.searchsorted(starts, begin, "right")) - 1, 0
        while filled < self.length:
            size = min(int(starts[at + 1]), end) - begin - filled
            if size > 0:  # a document of one token has no pair
                first = int(self.store.starts[order[at]]) + begin + filled - int(starts[at])
                piece = self.store.tokens[first : first + size + 1]
                tokens[filled : filled + size], targets[filled : filled + size] = piece[:-1], piece[1:]
                lengths.append(size)
                filled += size
            at += 1
        return tokens, targets, lengths

    def batch(self, numbers: range | list[int]) -> Batch:
        """Several rows."""
        rows = [self.row(number) for number in numbers]
        tokens, targets = (torch.from_numpy(np.stack([row[i] for row in rows])) for i in (0, 1))
        return Batch(tokens, targets, np.array([length for row in rows for length in row[2]], np.int64))
