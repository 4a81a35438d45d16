"""Collectives: what one rank hands in is read, what it gets is written; sums are not counted.

This is the size of the buffers, not what crosses the network: that depends on the algorithm. A buffer that is used for
both, as in an all-reduce or a broadcast, is read and written. The dtype of tensors in a list is not recorded by Kineto;
`record_param_comms` carries the sizes by itself (`foretrace.machine.timeline_costs` uses these).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from foretrace.machine.call import Call, Formula, OperatorCost, size_bytes, table_of, tensor_of
from foretrace.machine.operands import Operand, Unknown

_CATEGORY = "collective"


def _tensors(call: Call, at: int) -> list[Operand]:
    """A tensor or a list of them."""
    found = call.argument(at)
    return [call.tensor(at)] if isinstance(found, Operand) else list(call.tensors(at))


def _cost(read: Iterable[Operand], written: Iterable[Operand]) -> OperatorCost:
    return OperatorCost(0, size_bytes(read), size_bytes(written), _CATEGORY)


def _in_place(call: Call) -> OperatorCost:
    buffers = _tensors(call, 0)
    return _cost(buffers, buffers)


def _out_and_in(call: Call) -> OperatorCost:
    """The buffer for the result stands first."""
    return _cost(_tensors(call, 1), _tensors(call, 0))


def _send(call: Call) -> OperatorCost:
    return _cost(_tensors(call, 0), ())


def _receive(call: Call) -> OperatorCost:
    return _cost((), _tensors(call, 0))


def _recorded(call: Call) -> OperatorCost:
    """``record_param_comms`` of an execution trace: all tensors in, all tensors out; waits and barriers have none."""
    read = [one for argument in call.arguments for one in ([argument] if isinstance(argument, Operand) else argument)]
    read = [one for one in read if one.is_tensor]
    if not read or not call.outputs:
        raise Unknown
    return _cost(read, call.outputs)


def _functional(call: Call) -> OperatorCost:
    """``_c10d_functional``: a new tensor, larger or smaller by the size of the group."""
    given = call.tensor(0)

    def computed() -> Operand:
        if "all_gather" in call.name:
            return tensor_of((given.elements * _group_size(call, 1),), given.dtype)
        if "reduce_scatter" in call.name:
            return tensor_of((given.elements // _group_size(call, 2),), given.dtype)
        if "all_to_all" in call.name:
            return tensor_of((sum(call.sizes(1)) * prod(given.shape[1:]),), given.dtype)
        return tensor_of(given.shape, given.dtype)

    return _cost([given], [call.result(computed)])


def _group_size(call: Call, at: int) -> int:
    size = call.value(at)
    if not isinstance(size, int) or size < 1:
        raise Unknown
    return size


FORMULAS: dict[str, Formula] = {
    **table_of(
        "",
        _in_place,
        "c10d::allreduce c10d::allreduce_coalesced c10d::broadcast c10d::reduce nccl:all_reduce nccl:broadcast "
        "nccl:reduce gloo:all_reduce gloo:broadcast vllm::all_reduce symm_mem::multimem_all_reduce",
    ),
    **table_of(
        "",
        _out_and_in,
        "c10d::_allgather_base c10d::allgather c10d::allgather_into_tensor_coalesced c10d::_reduce_scatter_base "
        "c10d::reduce_scatter c10d::reduce_scatter_tensor_coalesced c10d::alltoall_base c10d::alltoall",
    ),
    "c10d::send": ("", _send),
    "c10d::recv": ("", _receive),
    "record_param_comms": ("", _recorded),
    **table_of(
        "",
        _functional,
        "_c10d_functional::all_reduce _c10d_functional::broadcast _c10d_functional::all_gather_into_tensor "
        "_c10d_functional::reduce_scatter_tensor _c10d_functional::all_to_all_single",
    ),
}
