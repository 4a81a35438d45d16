"""Optimizers: operators on lists of tensors, and fused steps.

``_foreach_*`` count as the elementwise operator of that name does, summed over the list.

A fused step, for each parameter: Adam and AdamW 13 (first moment: difference, product, sum; second moment: square, two
products, sum; denominator: root, quotient, sum; update: quotient, product, difference), and for decay 1 in AdamW, 2 in
Adam, for amsgrad 1. SGD 2, for momentum 3 (none in the first step), for Nesterov's 2, for decay 2. Adagrad 7, for decay
2. Undoing a loss scale is 1, and writes the gradients back. Read are parameters, gradients, state and step counters.
"""

from __future__ import annotations

from functools import partial

from foretrace.machine.call import Call, Formula, OperatorCost, known_dtype, size_bytes, table_of, tensor_of
from foretrace.machine.operands import NONE, Operand, Unknown

_CATEGORY = "optimizer"
_TERNARY = ("addcmul", "addcdiv", "lerp")


def _list_tensors(call: Call) -> list[Operand]:
    """All tensors of all arguments; a list that was not recorded in full is refused."""
    found: list[Operand] = []
    for at, argument in enumerate(call.arguments):
        found += [argument] if isinstance(argument, Operand) else call.tensors(at)
    return [one for one in found if one.is_tensor]


def _dense(operands: list[Operand]) -> int:
    return size_bytes(tensor_of(one.shape, known_dtype(one)) for one in operands)


def _foreach(call: Call, per_element: int) -> OperatorCost:
    first = list(call.tensors(0))
    flops = per_element * sum(one.elements for one in first)
    return OperatorCost(flops, size_bytes(_list_tensors(call)), _dense(first), _CATEGORY)


def _foreach_copy(call: Call) -> OperatorCost:
    target, source = list(call.tensors(0)), list(call.tensors(1))
    return OperatorCost(sum(one.elements for one in target), size_bytes(source), _dense(target), "copy")


def _foreach_zero(call: Call) -> OperatorCost:
    return OperatorCost(0, 0, _dense(list(call.tensors(0))), "fill")


def _foreach_norm(call: Call) -> OperatorCost:
    """One number for each tensor."""
    given = list(call.tensors(0))
    results = call.outputs or [tensor_of((), call.dtype(2, known_dtype(one))) for one in given]
    return OperatorCost(2 * sum(one.elements for one in given), size_bytes(given), size_bytes(results), "reduction")


def _step(call: Call, per_parameter: int, states: tuple[str, ...], read_states: tuple[str, ...]) -> OperatorCost:
    """A fused step that writes the parameters and ``states``."""
    parameters, gradients = list(call.tensors("self")), list(call.tensors("grads"))
    written = parameters + [one for name in states for one in call.tensors(name)]
    read = parameters + gradients + [one for name in read_states for one in call.tensors(name)]
    if call.operand("grad_scale").dtype != NONE:
        per_parameter, written = per_parameter + 1, written + gradients
    flops = per_parameter * sum(one.elements for one in parameters)
    return OperatorCost(flops, size_bytes(read), _dense(written), _CATEGORY)


def _setting(call: Call, name: str) -> float:
    """A number; `Unknown` where it was not recorded, or was left out although it is required."""
    found = call.value(name)
    if not isinstance(found, int | float):
        raise Unknown
    return found


def _adam(call: Call) -> OperatorCost:
    decay = (1 if "adamw" in call.name else 2) if _setting(call, "weight_decay") else 0
    has_maximum = bool(_setting(call, "amsgrad"))
    moments = ("exp_avgs", "exp_avg_sqs", *(("max_exp_avg_sqs",) if has_maximum else ()))
    return _step(call, 13 + decay + has_maximum, moments, (*moments, "state_steps"))


def _sgd(call: Call) -> OperatorCost:
    has_momentum, is_first = bool(_setting(call, "momentum")), bool(_setting(call, "is_first_step"))
    per_parameter = 2 + 2 * bool(_setting(call, "weight_decay"))
    if has_momentum:
        per_parameter += 3 * (not is_first) + 2 * bool(_setting(call, "nesterov"))
    buffers = ("momentum_buffer_list",) if has_momentum else ()
    return _step(call, per_parameter, buffers, () if is_first else buffers)


def _adagrad(call: Call) -> OperatorCost:
    per_parameter = 7 + 2 * bool(_setting(call, "weight_decay"))
    return _step(call, per_parameter, ("state_sums",), ("state_sums", "state_steps"))


_ADAM = (
    "self grads exp_avgs exp_avg_sqs max_exp_avg_sqs state_steps lr beta1 beta2 weight_decay eps amsgrad maximize "
    "grad_scale found_inf"
)
_POINTWISE = (
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min cos cosh div erf erfc exp expm1 floor frac lerp "
    "lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan "
    "tanh trunc"
)
FORMULAS: dict[str, Formula] = {
    **{
        f"_foreach_{name}": ("", partial(_foreach, per_element=2 if name in _TERNARY else 1))
        for name in _POINTWISE.split()
    },
    "_foreach_copy": ("", _foreach_copy),
    "_foreach_zero": ("", _foreach_zero),
    "_foreach_norm": ("", _foreach_norm),
    **table_of(_ADAM, _adam, "_fused_adam _fused_adamw"),
    "_fused_sgd": (
        "self grads momentum_buffer_list weight_decay momentum lr dampening nesterov maximize is_first_step grad_scale",
        _sgd,
    ),
    "_fused_adagrad": ("self grads state_sums state_steps lr lr_decay weight_decay eps maximize grad_scale", _adagrad),
}
