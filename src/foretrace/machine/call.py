"""One call of an operator, as formulas look at it, and the cost that they answer with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from foretrace.machine.dtypes import dtype_of_number
from foretrace.machine.operands import NONE, SCALAR, SCALAR_LIST, UNKNOWN_DTYPE, Argument, Operand, Unknown


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """What an operator computes and moves, from its shapes alone.

    Attributes:
        flops: floating-point operations; a multiplication and the addition after it are two.
        read_bytes, written_bytes: each operand once, as if caches held everything in between.
        category: what kind of work it is: one of `CATEGORIES`.
    """

    flops: int
    read_bytes: int
    written_bytes: int
    category: str

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes


CATEGORIES = (
    "gemm",
    "attention",
    "convolution",
    "normalization",
    "softmax",
    "loss",
    "elementwise_unary",
    "elementwise_binary",
    "elementwise_ternary",
    "reduction",
    "scan",
    "pooling",
    "dropout",
    "embedding",
    "indexing",
    "copy",
    "fill",
    "random",
    "optimizer",
    "collective",
    "view",
)


@dataclass(frozen=True, slots=True)
class Call:
    """An operator with its arguments.

    Attributes:
        name: without namespace ``aten::``, overload and the underscore of in-place operators.
        arguments: as recorded: in the order of the schema, perhaps with outputs of an ``out=`` call at the end.
        outputs: recorded output tensors, those in lists too; empty where none were recorded.
        is_in_place: whether it writes to its first argument.
        signature: names of the arguments, for formulas that ask by name.
    """

    name: str
    arguments: Sequence[Argument]
    outputs: tuple[Operand, ...] = ()
    is_in_place: bool = False
    signature: tuple[str, ...] = ()

    def argument(self, at: int | str) -> Argument:
        """The argument at a place or of a name; an absent one is `NONE`."""
        place = self.signature.index(at) if isinstance(at, str) else at
        return self.arguments[place] if place < len(self.arguments) else Operand()

    def operand(self, at: int | str) -> Operand:
        """As `argument`, where a list of tensors is not expected."""
        found = self.argument(at)
        if not isinstance(found, Operand):
            raise Unknown
        return found

    def tensor(self, at: int | str, dimensions: int | None = None) -> Operand:
        """A tensor, with this number of dimensions if given."""
        found = self.operand(at)
        if not found.is_tensor or (dimensions is not None and len(found.shape) != dimensions):
            raise Unknown
        return found

    def optional(self, at: int | str) -> Operand | None:
        """A tensor, or None where it was left out."""
        found = self.operand(at)
        return None if found.dtype == NONE else self.tensor(at)

    def tensors(self, at: int | str) -> Sequence[Operand]:
        """A list of tensors; one that was not recorded in full raises `Unknown`."""
        found = self.argument(at)
        if isinstance(found, Operand) or not found:
            raise Unknown
        return found

    def all_tensors(self, first: int = 0) -> list[Operand]:
        """All plain tensor arguments from a place on."""
        return [one for one in self.arguments[first:] if isinstance(one, Operand) and one.is_tensor]

    def value(self, at: int | str, default: Any = None) -> Any:
        """A plain value; ``default`` where it was left out; `Unknown` where it was not recorded."""
        found = self.operand(at)
        if found.dtype == NONE:
            return default
        if found.dtype not in (SCALAR, SCALAR_LIST) or found.value is None:
            raise Unknown
        return found.value

    def sizes(self, at: int | str) -> tuple[int, ...]:
        """A list of sizes, none of them negative."""
        found = self.value(at)
        if not isinstance(found, list | tuple) or not all(isinstance(size, int) and size >= 0 for size in found):
            raise Unknown
        return tuple(found)

    def integers(
        self, at: int | str, count: int, default: Sequence[int] | None = None, least: int = 0
    ) -> tuple[int, ...]:
        """A list of integers not below ``least``, one of length 1 (or one number) repeated to ``count``."""
        found = self.value(at, default)
        numbers = tuple(found) if isinstance(found, list | tuple) else (found,)
        if len(numbers) == 1:
            numbers *= count
        if len(numbers) != count or not all(isinstance(number, int) and number >= least for number in numbers):
            raise Unknown
        return numbers

    def dtype(self, at: int | str, default: str) -> str:
        """The element type that an argument ``dtype`` names, by its number."""
        found = self.value(at)
        if found is None:
            return default
        dtype = dtype_of_number(found) if isinstance(found, int) else ""
        if not dtype:
            raise Unknown
        return dtype

    def result(self, computed: Callable[[], Operand], out: int | None = None) -> Operand:
        """The first recorded output, else the one that is computed.

        Args:
            out: the place of a tensor to write to (``out=``), which must have the shape of the result: else the
                arguments are not what they seem.
        """
        if self.outputs:
            return self.outputs[0]
        given = self.all_tensors(out) if out is not None else []
        if not given:
            return computed()
        if len(given) > 1 or given[0].shape != computed().shape:
            raise Unknown
        return given[0]


# A formula and the names of the arguments that it asks for ("" where it goes by places).
Formula = tuple[str, Callable[[Call], OperatorCost]]


def tensor_of(shape: Sequence[int], dtype: str) -> Operand:
    """A dense tensor."""
    return Operand(tuple(shape), dtype)


def size_bytes(operands: Iterable[Operand | None]) -> int:
    """Bytes of the tensors among these."""
    return sum(one.bytes for one in operands if one is not None)


def known_dtype(operand: Operand) -> str:
    """Its element type, which must be known."""
    if operand.dtype == UNKNOWN_DTYPE:
        raise Unknown
    return operand.dtype


def broadcast(shapes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The shape that tensors of these shapes take together; `Unknown` where they do not fit."""
    result: list[int] = []
    for shape in shapes:
        if len(shape) > len(result):
            result[:0] = [1] * (len(shape) - len(result))
        for at, size in enumerate(shape, len(result) - len(shape)):
            if size != 1 and result[at] not in (1, size):
                raise Unknown
            result[at] = size if size != 1 else result[at]
    return tuple(result)


def words(text: str) -> frozenset[str]:
    """Names with spaces between."""
    return frozenset(text.split())


def table_of(signature: str, formula: Callable[[Call], OperatorCost], names: str) -> dict[str, Formula]:
    """Several operators (names with spaces between) with one formula."""
    return dict.fromkeys(names.split(), (signature, formula))
