"""What each collective of the program was: type, group, sizes, reduction. Seen at the ``c10d`` operators.

Every back end's collectives pass them, from Python (FSDP2, functional collectives) and from C++ (DDP's gradient
buckets), and their arguments hold the process group and the reduction that PyTorch's execution trace leaves out.
"""

from __future__ import annotations

import functools
import itertools
import json
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from foretrace.capture.kernels import Watch, overloads
from foretrace.capture.matching import Call, elements_of

# Operators and the names that NCCL's own records give these collectives.
NAMES = {
    "c10d::allreduce_": "allreduce",
    "c10d::allreduce_coalesced_": "allreduce_coalesced",
    "c10d::allgather_": "all_gather",
    "c10d::_allgather_base_": "_allgather_base",
    "c10d::allgather_coalesced_": "allgather_coalesced",
    "c10d::allgather_into_tensor_coalesced_": "allgather_into_tensor_coalesced",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::_reduce_scatter_base_": "_reduce_scatter_base",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "c10d::reduce_": "reduce",
    "c10d::broadcast_": "broadcast",
    "c10d::gather_": "gather",
    "c10d::scatter_": "scatter",
    "c10d::alltoall_": "all_to_all",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::send": "send",
    "c10d::recv_": "recv",
    "c10d::recv_any_source_": "recv",
    "c10d::barrier": "barrier",
    "c10d::monitored_barrier_": "barrier",
}
_BARRIERS = ("c10d::barrier", "c10d::monitored_barrier_")
_INPUTS = ("input", "inputs", "input_tensor", "input_tensors", "input_list", "tensors", "tensor")
_OUTPUTS = ("output", "outputs", "output_tensor", "output_tensors", "output_lists", "tensors", "tensor")
_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
_DTYPES = {
    torch.float32: "Float",
    torch.float64: "Double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.int16: "Short",
    torch.int8: "Char",
    torch.uint8: "Byte",
    torch.bool: "Bool",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}


@dataclass(frozen=True)
class Group:
    """A process group: ``ranks`` are those of the world, in the order of the group; empty if unknown."""

    name: str
    description: str
    backend: str
    ranks: tuple[int, ...]
    size: int

    def document(self) -> dict[str, Any]:
        """As it stands in ``job.json``."""
        return {
            "name": self.name,
            "description": self.description,
            "backend": self.backend,
            "ranks": list(self.ranks),
            "size": self.size,
        }


@dataclass(slots=True)
class Collective:
    """One call. Ranks are those of the world; -1 and ``None`` where the collective has no such thing."""

    name: str
    group: Group
    dtype: str
    in_elements: int
    out_elements: int
    is_async: bool
    in_split: list[int] = field(default_factory=list)
    out_split: list[int] = field(default_factory=list)
    reduction: Any = None
    source_rank: int = -1
    target_rank: int = -1
    tag: int = -1

    def attributes(self) -> list[dict[str, Any]]:
        """Attributes of a node in an execution trace: NCCL's first, then ours."""
        group = self.group
        start, stride = rank_range(group.ranks)
        found = [
            _text("collective_name", self.name),
            _text("dtype", self.dtype),
            _number("in_msg_nelems", self.in_elements),
            _number("out_msg_nelems", self.out_elements),
            _text("in_split_size", json.dumps(self.in_split)),
            _text("out_split_size", json.dumps(self.out_split)),
            _number("global_rank_start", start),
            _number("global_rank_stride", stride),
            _text("pg_name", group.name),
            _text("pg_desc", group.description),
            _number("pg_size", group.size),
            _text("pg_ranks", json.dumps(group.ranks)),
            {"name": "is_async", "type": "bool", "value": self.is_async},
        ]
        if self.reduction is not None:
            found.append(_text("reduce_op", reduction_name(self.reduction)))
        for name, value in (("src_rank", self.source_rank), ("dst_rank", self.target_rank), ("tag", self.tag)):
            if value >= 0:
                found.append(_number(name, value))
        return found


def _text(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "type": "string", "value": value}


def _number(name: str, value: int) -> dict[str, Any]:
    return {"name": name, "type": "uint64" if value >= 0 else "int64", "value": value}


def rank_range(ranks: tuple[int, ...]) -> tuple[int, int]:
    """First rank and distance of ranks, as NCCL's records have them; -1 where they are not evenly apart."""
    if not ranks:
        return -1, -1
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    even = all(b - a == stride for a, b in itertools.pairwise(ranks))
    return ranks[0], stride if even else -1


def reduction_name(reduction: Any) -> str:
    """``"SUM"`` and so on of a reduction that came through the dispatcher."""
    torch.autograd._enable_record_function(False)  # type: ignore[attr-defined]  # asking is a TorchScript call
    try:
        number = int(reduction.op()) if callable(getattr(reduction, "op", None)) else int(reduction)
    finally:
        torch.autograd._enable_record_function(True)  # type: ignore[attr-defined]
    return _REDUCTIONS[number] if number < len(_REDUCTIONS) else str(number)


class CollectiveWatch:
    """Notes every collective from `install` to `remove`, in order on each thread."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.groups: dict[str, Group] = {}
        self._watch = Watch(overloads(set(NAMES)), self._look)
        self.install, self.remove = self._watch.install, self._watch.remove

    @property
    def failures(self) -> int:
        """Calls that could not be looked at."""
        return self._watch.failures

    def _look(self, operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = {**dict(zip(_argument_names(operator), args, strict=False)), **kwargs}
        call = Call(operator, threading.get_native_id(), elements_of(list(values.values())), None)
        self.calls.append(call)  # first of all, so that one that cannot be described keeps its place
        call.details = self._describe(operator, values)

    def _describe(self, operator: str, values: dict[str, Any]) -> Collective:
        group, process_group = self._group(values["process_group"])
        inputs: Any = next((values[name] for name in _INPUTS if name in values), [])
        outputs: Any = next((values[name] for name in _OUTPUTS if name in values), [])
        no_data = operator in _BARRIERS
        first = _first_tensor(inputs) if _first_tensor(inputs) is not None else _first_tensor(outputs)
        found = Collective(
            NAMES[operator],
            group,
            "" if first is None or no_data else _DTYPES.get(first.dtype, str(first.dtype).removeprefix("torch.")),
            0 if no_data else sum(elements_of(inputs)),
            0 if no_data else sum(elements_of(outputs)),
            bool(values.get("async_op", operator != "c10d::monitored_barrier_")),
            list(values.get("input_split_sizes", ())),
            list(values.get("output_split_sizes", ())),
            values.get("reduce_op"),
            tag=values.get("tag", -1),
        )
        self._set_peers(found, operator, values, process_group)
        return found

    @staticmethod
    def _set_peers(found: Collective, operator: str, values: dict[str, Any], process_group: Any) -> None:
        """Source and target of what has one, as ranks of the world."""
        ranks = found.group.ranks
        own = process_group.rank()
        peer = values.get("root_rank", values.get("src", values.get("dst", -1)))
        source, target = peer, -1
        if operator in ("c10d::reduce_", "c10d::gather_"):
            source, target = -1, peer
        elif operator == "c10d::send":
            source, target = own, peer
        elif operator in ("c10d::recv_", "c10d::recv_any_source_"):
            source, target = peer, own
        found.source_rank = ranks[source] if 0 <= source < len(ranks) else -1
        found.target_rank = ranks[target] if 0 <= target < len(ranks) else -1

    def _group(self, boxed: Any) -> tuple[Group, Any]:
        process_group = boxed if isinstance(boxed, dist.ProcessGroup) else dist.ProcessGroup.unbox(boxed)
        name = process_group.group_name
        if name not in self.groups:
            self.groups[name] = group_of(process_group)
        return self.groups[name], process_group


def group_of(process_group: dist.ProcessGroup) -> Group:
    """What is known of a process group; one that was not made by torch.distributed has no ranks."""
    try:
        ranks = tuple(dist.get_process_group_ranks(process_group))
        backend = dist.get_backend_config(process_group)
    except (KeyError, ValueError, RuntimeError):
        ranks, backend = (), ""
    return Group(
        process_group.group_name, process_group.group_desc, str(backend), ranks, len(ranks) or process_group.size()
    )


def all_groups() -> dict[str, Group]:
    """Every process group that this rank is a member of, by name."""
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    from torch.distributed import distributed_c10d

    found = {}
    for process_group in list(distributed_c10d._world.pg_map):
        group = group_of(process_group)
        found[group.name] = group
    return found


@functools.cache
def _argument_names(operator: str) -> tuple[str, ...]:
    return tuple(argument.name for argument in torch._C._get_schema(operator, "").arguments)


def _first_tensor(value: Any) -> torch.Tensor | None:
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return value if isinstance(value, torch.Tensor) else None
