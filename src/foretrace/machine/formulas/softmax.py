"""Softmax: 5 operations for each element (maximum, difference, exponential, sum, division); backward 4.

Backward of softmax: product with the result, sum, difference, product. Backward of log-softmax: sum, exponential,
product, difference.
"""

from __future__ import annotations

from foretrace.machine.call import Call, Formula, OperatorCost, known_dtype, size_bytes, table_of, tensor_of
from foretrace.machine.operands import Operand


def _softmax(call: Call) -> OperatorCost:
    """``_softmax(self, dim, half_to_float)`` and ``softmax(self, dim, dtype)``."""
    given = call.tensor(0)

    def computed() -> Operand:
        dtype = known_dtype(given)
        if call.name.startswith("_"):
            return tensor_of(given.shape, "float32" if call.value(2, False) else dtype)
        return tensor_of(given.shape, call.dtype(2, dtype))

    return OperatorCost(5 * given.elements, given.bytes, call.result(computed).bytes, "softmax")


def _backward(call: Call) -> OperatorCost:
    """``(grad_output, output, dim, input_dtype)``; the type is a tensor in PyTorch before 1.11."""
    gradient, output = call.tensor(0), call.tensor(1)

    def computed() -> Operand:
        named = call.operand(3)
        dtype = named.dtype if named.is_tensor else call.dtype(3, known_dtype(output))
        return tensor_of(gradient.shape, dtype)

    read = size_bytes((gradient, output))
    return OperatorCost(4 * gradient.elements, read, call.result(computed).bytes, "softmax")


FORMULAS: dict[str, Formula] = {
    **table_of("", _softmax, "_softmax softmax _log_softmax log_softmax _safe_softmax"),
    **table_of("", _backward, "_softmax_backward_data _log_softmax_backward_data"),
}
