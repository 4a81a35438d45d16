"""Losses.

Operations for each element: 2 for squares and absolute differences (difference, power), 4 for Huber and its kind, 6 for
cross entropy of probabilities or logits with targets of the same shape, 3 for `kl_div`; one more to sum up, unless
nothing is reduced. Negative log-likelihood picks one element for each target: one operation for each, to sum up. Cross
entropy of classes is a log-softmax (5 for each element) and this; of probabilities, a log-softmax, a product and a sum
(7). Gradients count as many as the loss without its sum.
"""

from __future__ import annotations

from math import prod

from foretrace.machine.call import Call, Formula, OperatorCost, broadcast, known_dtype, size_bytes, table_of, tensor_of
from foretrace.machine.dtypes import element_bytes, promote
from foretrace.machine.operands import Operand, Unknown

_PER_ELEMENT = {
    "mse_loss": 2,
    "l1_loss": 2,
    "smooth_l1_loss": 4,
    "huber_loss": 4,
    "binary_cross_entropy": 6,
    "binary_cross_entropy_with_logits": 6,
    "kl_div": 3,
}
_NO_REDUCTION = 0


def _is_reduced(call: Call) -> bool:
    return bool(call.value("reduction", 1) != _NO_REDUCTION)


def _difference(call: Call) -> OperatorCost:
    """A loss of two tensors of one shape."""
    given, target = call.tensor("self"), call.tensor("target")
    weights = [call.optional(name) for name in ("weight", "pos_weight") if name in call.signature]
    shape = broadcast((given.shape, target.shape))
    is_reduced = _is_reduced(call)

    def computed() -> Operand:
        dtype = promote((known_dtype(given), known_dtype(target)))
        if not dtype:
            raise Unknown
        return tensor_of(() if is_reduced else shape, dtype)

    flops = prod(shape) * (_PER_ELEMENT[call.name] + is_reduced)
    return OperatorCost(flops, size_bytes([given, target, *weights]), call.result(computed).bytes, "loss")


def _gradient_of_difference(call: Call) -> OperatorCost:
    gradient, given, target = call.tensor("grad_output"), call.tensor("self"), call.tensor("target")
    flops = given.elements * _PER_ELEMENT[call.name.removesuffix("_backward")]
    weight = call.optional("weight") if "weight" in call.signature else None
    read = size_bytes((gradient, given, target, weight))
    return OperatorCost(flops, read, tensor_of(given.shape, known_dtype(given)).bytes, "loss")


def _classes(call: Call) -> tuple[Operand, Operand, Operand | None, int]:
    """Scores, targets, weights and bytes of one score; targets must be classes, not probabilities."""
    given, target = call.tensor("self"), call.tensor("target")
    expected = given.shape[:1] + given.shape[2:] if len(given.shape) > 1 else ()
    if not given.shape or target.shape != expected:
        raise Unknown
    return given, target, call.optional("weight"), element_bytes(known_dtype(given))


def _picking(call: Call) -> OperatorCost:
    _, target, weight, size = _classes(call)
    is_reduced = _is_reduced(call)
    results = (1 if is_reduced else target.elements) * size
    if call.name.endswith("_forward"):
        results += size  # the sum of the weights
    read = target.elements * size + size_bytes((target, weight))
    return OperatorCost(target.elements * is_reduced, read, results, "loss")


def _picking_backward(call: Call) -> OperatorCost:
    """Zeros everywhere but at the targets."""
    given, target, weight, size = _classes(call)
    read = size_bytes((call.tensor("grad_output"), target, weight))
    return OperatorCost(target.elements, read, given.elements * size, "loss")


def _cross_entropy(call: Call) -> OperatorCost:
    if call.value("label_smoothing", 0.0):
        raise Unknown
    is_reduced = _is_reduced(call)
    if call.tensor("target").shape == call.tensor("self").shape:
        return _cross_entropy_of_probabilities(call, is_reduced)
    given, target, weight, size = _classes(call)
    flops = 5 * given.elements + target.elements * is_reduced
    written = (1 if is_reduced else target.elements) * size
    return OperatorCost(flops, size_bytes((given, target, weight)), written, "loss")


def _cross_entropy_of_probabilities(call: Call, is_reduced: bool) -> OperatorCost:
    given, target, weight = call.tensor("self"), call.tensor("target"), call.optional("weight")
    classes = given.shape[1 if len(given.shape) > 1 else 0]
    samples = given.elements // classes if classes else 0
    written = (1 if is_reduced else samples) * element_bytes(known_dtype(given))
    return OperatorCost(7 * given.elements, size_bytes((given, target, weight)), written, "loss")


_PAIR, _TRIPLE = "self target reduction", "grad_output self target reduction"
_CLASSES = "self target weight reduction ignore_index"
FORMULAS: dict[str, Formula] = {
    **table_of(_PAIR, _difference, "mse_loss l1_loss smooth_l1_loss huber_loss kl_div"),
    "binary_cross_entropy": ("self target weight reduction", _difference),
    "binary_cross_entropy_with_logits": ("self target weight pos_weight reduction", _difference),
    **table_of(_TRIPLE, _gradient_of_difference, "mse_loss_backward smooth_l1_loss_backward huber_loss_backward"),
    "binary_cross_entropy_backward": ("grad_output self target weight reduction", _gradient_of_difference),
    **table_of(_CLASSES, _picking, "nll_loss nll_loss_forward nll_loss_nd nll_loss2d nll_loss2d_forward"),
    **table_of(f"grad_output {_CLASSES}", _picking_backward, "nll_loss_backward nll_loss2d_backward"),
    "cross_entropy_loss": (f"{_CLASSES} label_smoothing", _cross_entropy),
}
