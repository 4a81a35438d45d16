"""The nouns: `Timeline` and `Job`, with the tables, lanes and process groups that they are made of."""

from foretrace.trace.job import Job, ProcessGroup
from foretrace.trace.lanes import Lane, LaneKind
from foretrace.trace.reading import FormatError, ReadReport
from foretrace.trace.strings import StringTable
from foretrace.trace.table import Table
from foretrace.trace.timeline import Category, Timeline

__all__ = [
    "Category",
    "FormatError",
    "Job",
    "Lane",
    "LaneKind",
    "ProcessGroup",
    "ReadReport",
    "StringTable",
    "Table",
    "Timeline",
]
