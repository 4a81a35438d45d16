"""The nouns: `Timeline`, `ExecutionGraph` and `Job`, and the tables, lanes and process groups that they are made of."""

from foretrace.trace.graph import EdgeKind, ExecutionGraph, GraphError, GraphLane, LanePolicy, TaskKind
from foretrace.trace.job import Job, ProcessGroup
from foretrace.trace.lanes import Lane, LaneKind
from foretrace.trace.reading import FormatError, ReadReport
from foretrace.trace.strings import StringTable
from foretrace.trace.table import Table
from foretrace.trace.timeline import Category, Timeline

__all__ = [
    "Category",
    "EdgeKind",
    "ExecutionGraph",
    "FormatError",
    "GraphError",
    "GraphLane",
    "Job",
    "Lane",
    "LaneKind",
    "LanePolicy",
    "ProcessGroup",
    "ReadReport",
    "StringTable",
    "Table",
    "TaskKind",
    "Timeline",
]
