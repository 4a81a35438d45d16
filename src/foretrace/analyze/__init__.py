"""Read-only questions to a `Job`: every answer is an Arrow table with times in nanoseconds."""

from foretrace.analyze.breakdown import breakdown, breakdown_by_step, overlap
from foretrace.analyze.idle import idle_causes
from foretrace.analyze.launch import launches, queue_length
from foretrace.analyze.steps import steps
from foretrace.analyze.utilization import counters, memory, utilization

__all__ = [
    "breakdown",
    "breakdown_by_step",
    "counters",
    "idle_causes",
    "launches",
    "memory",
    "overlap",
    "queue_length",
    "steps",
    "utilization",
]
