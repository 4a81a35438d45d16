"""What a communication operator does: its kind, sizes, group and peers, named as NCCL's metadata names them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from foretrace.capture.fake.values import dtype_name

# Operator -> name of the collective, argument that is sent, argument that is received (None: the result).
_KINDS: dict[str, tuple[str, str, str | None]] = {
    "c10d::allreduce_": ("allreduce", "tensors", "tensors"),
    "c10d::allreduce_coalesced_": ("allreduce_coalesced", "tensors", "tensors"),
    "c10d::_allgather_base_": ("_allgather_base", "input_tensor", "output_tensor"),
    "c10d::allgather_": ("all_gather", "input_tensors", "output_tensors"),
    "c10d::allgather_coalesced_": ("allgather_coalesced", "input_list", "output_lists"),
    "c10d::allgather_into_tensor_coalesced_": ("allgather_into_tensor_coalesced", "inputs", "outputs"),
    "c10d::_reduce_scatter_base_": ("_reduce_scatter_base", "input_tensor", "output_tensor"),
    "c10d::reduce_scatter_": ("reduce_scatter", "input_tensors", "output_tensors"),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor_coalesced", "inputs", "outputs"),
    "c10d::broadcast_": ("broadcast", "tensors", "tensors"),
    "c10d::reduce_": ("reduce", "tensors", "tensors"),
    "c10d::gather_": ("gather", "input_tensors", "output_tensors"),
    "c10d::scatter_": ("scatter", "input_tensors", "output_tensors"),
    "c10d::alltoall_": ("all_to_all", "input_tensors", "output_tensors"),
    "c10d::alltoall_base_": ("all_to_allv", "input", "output"),
    "c10d::barrier": ("barrier", "", ""),
    "c10d::monitored_barrier_": ("barrier", "", ""),
    "c10d::send": ("send", "tensors", ""),
    "c10d::recv_": ("recv", "", "tensors"),
    "c10d::recv_any_source_": ("recv", "", "tensors"),
    "_c10d_functional::all_reduce": ("allreduce", "input", None),
    "_c10d_functional::all_reduce_": ("allreduce", "input", "input"),
    "_c10d_functional::all_reduce_coalesced": ("allreduce_coalesced", "inputs", None),
    "_c10d_functional::all_reduce_coalesced_": ("allreduce_coalesced", "inputs", "inputs"),
    "_c10d_functional::all_gather_into_tensor": ("_allgather_base", "input", None),
    "_c10d_functional::all_gather_into_tensor_out": ("_allgather_base", "input", "out"),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("allgather_into_tensor_coalesced", "inputs", None),
    "_c10d_functional::reduce_scatter_tensor": ("_reduce_scatter_base", "input", None),
    "_c10d_functional::reduce_scatter_tensor_out": ("_reduce_scatter_base", "input", "out"),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced", "inputs", None),
    "_c10d_functional::all_to_all_single": ("all_to_allv", "input", None),
    "_c10d_functional::broadcast": ("broadcast", "input", None),
    "_c10d_functional::broadcast_": ("broadcast", "input", "input"),
    "_c10d_functional::isend": ("send", "tensor", ""),
    "_c10d_functional::irecv": ("recv", "", "tensor"),
}
_REDUCE_OPS = {op.value: name for name, op in dist.ReduceOp.RedOpType.__members__.items()}


def is_collective(name: str) -> bool:
    """Whether an operator, named ``namespace::name``, communicates."""
    return name in _KINDS


def completed(args: Sequence[Any], result: Any) -> Any:
    """The result of a ``c10d`` operator with work that is done, and that hands out its tensors.

    The work of the fake process group has no tensors, but DDP takes the reduced gradients from there.
    """
    if isinstance(result, tuple):
        return (*result[:-1], _work_of(_tensors(result[0])))
    return _work_of(_tensors(args[0])) if isinstance(result, torch.ScriptObject) else result


def _work_of(tensors: list[torch.Tensor]) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(tensors)
    return c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]


def describe(name: str, arguments: Mapping[str, Any], result: Any) -> dict[str, Any]:
    """Attributes of a communication operator's node.

    Args:
        name: ``namespace::name``, of which `is_collective` is true.
        arguments: by their name in the schema.
        result: what the operator returned.
    """
    kind, sent, received = _KINDS[name]
    inputs = _tensors(arguments.get(sent)) if sent else []
    outputs = _tensors(result if received is None else arguments.get(received)) if received != "" else []
    group = _group(arguments)
    ranks = dist.get_process_group_ranks(group)
    told: dict[str, Any] = {
        "collective_name": kind,
        "dtype": dtype_name((inputs or outputs)[0].dtype) if inputs or outputs else "",
        "in_msg_nelems": _elements(inputs),
        "out_msg_nelems": _elements(outputs),
        "in_split_size": json.dumps(list(arguments.get("input_split_sizes") or [])),
        "out_split_size": json.dumps(list(arguments.get("output_split_sizes") or [])),
        "global_rank_start": ranks[0],
        "global_rank_stride": _stride(ranks),
        "pg_name": group.group_name,
        "pg_desc": group.group_desc,
        "pg_size": len(ranks),
        "pg_ranks": json.dumps(ranks),
        "is_async": bool(arguments.get("async_op", True)),
    }
    return told | _reduction(arguments) | _peers(kind, arguments, ranks)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    return []


def _elements(tensors: list[torch.Tensor]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)


def _group(arguments: Mapping[str, Any]) -> dist.ProcessGroup:
    boxed = arguments.get("process_group")
    if boxed is not None:
        return boxed if isinstance(boxed, dist.ProcessGroup) else dist.ProcessGroup.unbox(boxed)
    name = arguments["group_name"]
    return c10d._resolve_process_group(dist.GroupName(name)) if isinstance(name, str) else name


def _stride(ranks: list[int]) -> int:
    """The distance of neighbors, 0 in a group of one, -1 where it is not the same everywhere."""
    steps = {b - a for a, b in pairwise(ranks)}
    return steps.pop() if len(steps) == 1 else (0 if not steps else -1)


def _reduction(arguments: Mapping[str, Any]) -> dict[str, Any]:
    told = arguments.get("reduce_op")
    if told is None:
        return {}
    if isinstance(told, str):
        return {"reduce_op": told.upper()}
    number = int(told.op())
    return {"reduce_op": _REDUCE_OPS.get(number, str(number))}


def _peers(kind: str, arguments: Mapping[str, Any], ranks: list[int]) -> dict[str, Any]:
    """Ranks of the whole job that send and receive; operators name them by their place in the group."""
    told: dict[str, Any] = {}
    own = dist.get_rank()
    if kind == "send":
        told = {"src_rank": own, "dst_rank": ranks[arguments["dst"]]}
    elif kind == "recv":
        source = arguments.get("src", -1)
        told = {"src_rank": ranks[source] if source >= 0 else -1, "dst_rank": own}
    elif kind in ("broadcast", "scatter"):
        root = arguments["src"] if "src" in arguments else arguments["root_rank"]
        told = {"src_rank": ranks[root]}
    elif kind in ("reduce", "gather"):
        told = {"dst_rank": ranks[arguments["root_rank"]]}
    if "tag" in arguments:
        told["tag"] = arguments["tag"]
    return told
