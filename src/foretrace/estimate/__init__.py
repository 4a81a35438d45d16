"""What would happen: what-if changes of a graph, and how far their answers can be trusted."""

from foretrace.estimate.validate import validate
from foretrace.estimate.what_if import WhatIf, what_if_scaled

__all__ = ["WhatIf", "validate", "what_if_scaled"]
