"""The dispatch mode that sees every operator below DTensor and other tensor subclasses, and writes it down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from foretrace.capture.fake import collectives, foreach, placeholders
from foretrace.capture.fake.devices import ASK_DEVICE, told_to_cpp, translated
from foretrace.capture.fake.nodes import CallTree
from foretrace.capture.fake.report import FakeReport
from foretrace.capture.fake.tensors import TensorNumbers
from foretrace.capture.fake.values import encode_all

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor})
_SHARDED = _PLAIN | {DTensor}
_UNSEEN = ("prim", "profiler")


@dataclass(frozen=True, slots=True)
class _Operator:
    """What the schema of an operator says."""

    name: str
    schema: str
    arguments: tuple[str, ...]
    defaults: tuple[Any, ...]
    is_collective: bool


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators into a `CallTree`. Must be entered after (on top of) the fake tensor mode.

    Attributes:
        is_recording: whether operators are written down; else only storages are noted, which may live on.
    """

    def __init__(self, tree: CallTree, numbers: TensorNumbers, report: FakeReport) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tree = tree
        self.numbers = numbers
        self.report = report
        self.is_recording = False
        self._operators: dict[Any, _Operator] = {}
        self._last_sequence = -1

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing is compiled here, and the guard against it costs more than the recording."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is ASK_DEVICE and type(args[0]) is FakeTensor:
            return told_to_cpp(args[0])
        kwargs = kwargs or {}
        if not _PLAIN.issuperset(types):
            if not _SHARDED.issuperset(types):
                return NotImplemented  # the subclass goes first; what it runs within comes back here
            with self:
                return foreach.on_shards(func, args, kwargs)
        if func.namespace in _UNSEEN:
            return func(*args, **kwargs)
        if self.is_recording:
            return self._record(func, args, translated(kwargs))
        result = self._run(func, args, kwargs)
        if isinstance(result, torch.Tensor):
            self.numbers.storage(result, -1)
        return result

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func.namespace == "aten" and foreach.changes_nothing(func._schema.name, args):
            return None
        try:
            result = func(*args, **kwargs)
            return collectives.completed(args, result) if func.namespace == "c10d" else result
        except placeholders.DATA_DEPENDENT as error:
            return placeholders.stand_in(func, args, kwargs, error, self.report)

    def _record(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = _described(func)
        tree = self.tree
        tree.enter_backward(torch._C._current_autograd_node())
        node = tree.new(operator.name)
        node.schema = operator.schema
        node.sequence = self._sequence()
        arguments = [*args, *operator.defaults[len(args) :]]
        for name, value in kwargs.items():
            arguments[operator.arguments.index(name)] = value
        node.inputs = encode_all(arguments, self.numbers, -1)
        result = self._run(func, args, kwargs)
        outputs = result if isinstance(result, tuple) else () if result is None else (result,)
        node.outputs = encode_all(outputs, self.numbers, node.id)
        if operator.is_collective:
            by_name = dict(zip(operator.arguments, arguments, strict=True))
            node.details = collectives.describe(operator.name, by_name, result)
        tree.finished.append(node)
        return result

    def _sequence(self) -> int:
        """The number of the autograd function that was made for the operator that runs now, -1 if none was."""
        following: int = torch._C._autograd._get_sequence_nr()
        if following == self._last_sequence:
            return -1
        is_first, self._last_sequence = self._last_sequence < 0, following
        return -1 if is_first else following - 1


def _described(func: Any) -> _Operator:
    schema = func._schema
    return _Operator(
        schema.name,
        str(schema),
        tuple(argument.name for argument in schema.arguments),
        tuple(argument.default_value for argument in schema.arguments),
        collectives.is_collective(schema.name),
    )
