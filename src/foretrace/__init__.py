"""Foretrace: from execution traces to answers.

``foretrace.read(path)`` gives a `Job`; ``foretrace.analyze`` asks it where the time goes.
"""

from foretrace import analyze
from foretrace.formats import read
from foretrace.trace import FormatError, Job, Timeline

__version__ = "0.1.0"
__all__ = ["FormatError", "Job", "Timeline", "__version__", "analyze", "read"]
