"""Workloads out of a description: a transformer, a parallel plan, and what every rank does in a step.

>>> from foretrace.generate import MODELS, ParallelPlan, generate
>>> plan = ParallelPlan(tp=8, pp=4, dp=2, micro_batches=8, sequence_parallel=True)
>>> generate(MODELS["llama-2-70b"], plan, granularity="layer")
Workload(64 ranks, 4 programs, 234960 nodes)
"""

from foretrace.generate.layers import Boundary, Operator, Shapes
from foretrace.generate.model import MODELS, Transformer
from foretrace.generate.plan import ParallelPlan, PlanError
from foretrace.generate.schedule import BACKWARD, FORWARD, schedule
from foretrace.generate.transformer import MOST_GROUPS, generate

__all__ = [
    "BACKWARD",
    "FORWARD",
    "MODELS",
    "MOST_GROUPS",
    "Boundary",
    "Operator",
    "ParallelPlan",
    "PlanError",
    "Shapes",
    "Transformer",
    "generate",
    "schedule",
]
