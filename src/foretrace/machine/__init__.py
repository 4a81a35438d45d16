"""What hardware does: the cost of an operator from its shapes."""

from foretrace.machine.call import CATEGORIES, OperatorCost
from foretrace.machine.cost_tables import timeline_costs, trace_costs
from foretrace.machine.dtypes import element_bytes, normalize_dtype
from foretrace.machine.operands import Operand, kineto_arguments, trace_argument
from foretrace.machine.operator_cost import operator_cost

__all__ = [
    "CATEGORIES",
    "Operand",
    "OperatorCost",
    "element_bytes",
    "kineto_arguments",
    "normalize_dtype",
    "operator_cost",
    "timeline_costs",
    "trace_argument",
    "trace_costs",
]
