"""How large a simulated cluster may be: beyond these numbers memory or time runs out before there is an answer.

They stand here and in docs/cluster.md, and nowhere else.
"""

from __future__ import annotations

from typing import Final

MOST_RANKS: Final = 1 << 22
MOST_QUEUES: Final = 1 << 10  # of a dimension
MOST_QUEUES_OF_ALL: Final = 1 << 26  # of all dimensions of all ranks
MOST_CHUNKS: Final = 1 << 16  # into which a collective is cut
MOST_CHUNKS_OF_ALL: Final = 1 << 25  # of one collective, on all ranks that are simulated
MOST_DIRECT: Final = 1 << 14  # ranks of a collective in which each sends to each
MOST_LINKS: Final = 1 << 26  # where messages queue for links or share them
MOST_ACTIVITIES: Final = 1 << 25  # of the fluid model: computations, messages and delays
MOST_JOBS: Final = 1 << 10  # on one machine
MOST_SEED: Final = (1 << 63) - 1
MOST_SLOTS: Final = 1 << 20  # for communication, of a rank in the fluid model
MOST_NODES: Final = 1 << 28  # of all ranks that are simulated
MOST_LAYERS: Final = 1 << 20  # of a generated step, over all micro-batches
MOST_NS: Final = 1 << 62  # 146 years: the sum of two such times still fits 64 bits
