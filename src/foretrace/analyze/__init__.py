"""Read-only questions to a `Job`: every answer is an Arrow table with times in nanoseconds."""

from foretrace.analyze.breakdown import breakdown, breakdown_by_step, overlap
from foretrace.analyze.clocks import clock_offsets
from foretrace.analyze.collectives import collective_members, collective_summary, collectives, collectives_by_size
from foretrace.analyze.critical_path import CriticalPath, critical_path, slack
from foretrace.analyze.diff import diff
from foretrace.analyze.idle import idle_causes
from foretrace.analyze.kernels import kernel_kinds, kernels
from foretrace.analyze.launch import launches, queue_length
from foretrace.analyze.operators import operators
from foretrace.analyze.steps import steps
from foretrace.analyze.stragglers import stragglers
from foretrace.analyze.utilization import counters, memory, utilization

__all__ = [
    "CriticalPath",
    "breakdown",
    "breakdown_by_step",
    "clock_offsets",
    "collective_members",
    "collective_summary",
    "collectives",
    "collectives_by_size",
    "counters",
    "critical_path",
    "diff",
    "idle_causes",
    "kernel_kinds",
    "kernels",
    "launches",
    "memory",
    "operators",
    "overlap",
    "queue_length",
    "slack",
    "steps",
    "stragglers",
    "utilization",
]
