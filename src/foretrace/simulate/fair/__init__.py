"""The third fidelity: a fluid network in which collectives overlap, flows share links fairly, and things fail.

Nothing here imports Numba before a plan is run.
"""

from foretrace.simulate.fair.lower import lower
from foretrace.simulate.fair.plan import (
    Distribution,
    FairPlan,
    Fault,
    FaultKind,
    Kind,
    jitter,
    with_faults,
)
from foretrace.simulate.fair.run import FairOutcome, node_spans, rank_finishes, simulate
from foretrace.simulate.fair.wiring import Wiring

__all__ = [
    "Distribution",
    "FairOutcome",
    "FairPlan",
    "Fault",
    "FaultKind",
    "Kind",
    "Wiring",
    "jitter",
    "lower",
    "node_spans",
    "rank_finishes",
    "simulate",
    "with_faults",
]
