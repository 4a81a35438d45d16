"""Operators that read or write at places which another tensor names: only the elements that are touched are moved.

Places are read too. Sums into places count one operation for each element that is added.
"""

from __future__ import annotations

from math import prod

from foretrace.machine.call import Call, Formula, OperatorCost, broadcast, known_dtype, size_bytes, table_of, tensor_of
from foretrace.machine.dtypes import element_bytes
from foretrace.machine.operands import SCALAR, Operand, Unknown


def _lookup(places: list[Operand], result: Operand, source: Operand, category: str) -> OperatorCost:
    """Elements of ``source`` read at ``places``, and written to ``result``."""
    read = result.elements * element_bytes(known_dtype(source)) + size_bytes(places)
    return OperatorCost(0, read, result.bytes, category)


def _embedding(call: Call) -> OperatorCost:
    table, indices = call.tensor("weight", 2), call.tensor("indices")
    result = tensor_of((*indices.shape, table.shape[1]), known_dtype(table))
    return _lookup([indices], result, table, "embedding")


def _embedding_backward(call: Call) -> OperatorCost:
    """All of the table's gradient is written: zeros, and sums where rows were used."""
    gradient, indices = call.tensor("grad_output"), call.tensor("indices")
    if not gradient.shape:
        raise Unknown
    result = tensor_of((*call.integers("num_weights", 1), gradient.shape[-1]), known_dtype(gradient))
    return OperatorCost(gradient.elements, size_bytes((gradient, indices)), result.bytes, "embedding")


def _embedding_bag(call: Call) -> OperatorCost:
    """Rows that are summed up in bags: one operation for each element read, two with weights of samples."""
    table, indices, offsets = call.tensor("weight", 2), call.tensor("indices", 1), call.tensor("offsets", 1)
    weights = call.optional("per_sample_weights")
    bags = offsets.elements - (1 if call.value("include_last_offset", False) else 0)
    rows = tensor_of((indices.elements, table.shape[1]), known_dtype(table))
    result = tensor_of((max(bags, 0), table.shape[1]), table.dtype)
    read = rows.bytes + size_bytes((indices, offsets, weights))
    return OperatorCost(rows.elements * (2 if weights else 1), read, result.bytes, "embedding")


def _dimension(call: Call, source: Operand) -> int:
    found = call.value("dim")
    if not isinstance(found, int) or not -len(source.shape) <= found < len(source.shape):
        raise Unknown
    return found % len(source.shape)


def _index_select(call: Call) -> OperatorCost:
    source, index = call.tensor("self"), call.tensor("index")
    at = _dimension(call, source)
    shape = (*source.shape[:at], index.elements, *source.shape[at + 1 :])
    return _lookup([index], tensor_of(shape, known_dtype(source)), source, "indexing")


def _gather(call: Call) -> OperatorCost:
    source, index = call.tensor("self"), call.tensor("index")
    return _lookup([index], tensor_of(index.shape, known_dtype(source)), source, "indexing")


def _take(call: Call) -> OperatorCost:
    source, index = call.tensor(0), call.tensor(1)
    return _lookup([index], tensor_of(index.shape, known_dtype(source)), source, "indexing")


def _write(call: Call, places: list[Operand], given: Operand, count: int, is_sum: bool) -> OperatorCost:
    """``count`` elements written into ``self``, or added to it; out of place, into a copy of it."""
    target = call.tensor(0)
    size = element_bytes(known_dtype(target))
    read, written = size_bytes(places) + given.bytes + is_sum * count * size, count * size
    if not call.is_in_place:
        read, written = read + target.bytes, written + target.elements * size
    return OperatorCost(is_sum * count, read, written, "indexing")


def _scatter(call: Call) -> OperatorCost:
    """``scatter``, ``scatter_add``: an element of ``src`` (or one number) for each place."""
    index, source = call.tensor("index"), call.operand("src")
    if len(call.arguments) > 4 and call.operand(4).dtype == SCALAR and call.name == "scatter":  # a way to reduce
        raise Unknown
    moved = tensor_of(index.shape, known_dtype(source)) if source.is_tensor else source
    return _write(call, [index], moved, index.elements, call.name == "scatter_add")


def _index_write(call: Call) -> OperatorCost:
    """``index_add``, ``index_copy``, ``index_fill``: slices along a dimension."""
    target, index, source = call.tensor("self"), call.tensor("index"), call.operand("source")
    at = _dimension(call, target)
    count = prod(target.shape[:at]) * index.elements * prod(target.shape[at + 1 :])
    return _write(call, [index], source, count, call.name == "index_add")


def _indexed_shape(source: Operand, indices: list[Operand]) -> tuple[int, ...]:
    """Shape of ``source[indices]`` as far as its size goes; a mask leaves it open."""
    if len(indices) > len(source.shape):
        raise Unknown
    if any(one.dtype in ("bool", "uint8") for one in indices):
        raise Unknown
    places = broadcast(one.shape for one in indices if one.is_tensor)
    kept = [size for at, size in enumerate(source.shape) if at >= len(indices) or not indices[at].is_tensor]
    return (*places, *kept)


def _index(call: Call) -> OperatorCost:
    source = call.tensor(0)
    if call.outputs and isinstance(call.argument(1), Operand):  # the places were not recorded
        raise Unknown
    indices = list(call.tensors(1))
    result = call.result(lambda: tensor_of(_indexed_shape(source, indices), known_dtype(source)))
    return _lookup(indices, result, source, "indexing")


def _index_put(call: Call) -> OperatorCost:
    indices, values = list(call.tensors("indices")), call.tensor("values")
    is_sum = bool(call.value("accumulate", False))
    count = prod(_indexed_shape(call.tensor("self"), indices))
    return _write(call, indices, values, count, is_sum)


FORMULAS: dict[str, Formula] = {
    "embedding": ("weight indices", _embedding),
    **table_of("grad_output indices num_weights", _embedding_backward, "embedding_dense_backward"),
    **table_of(
        "weight indices offsets scale_grad_by_freq mode sparse per_sample_weights include_last_offset",
        _embedding_bag,
        "embedding_bag _embedding_bag _embedding_bag_forward_only",
    ),
    "index_select": ("self dim index", _index_select),
    "gather": ("self dim index", _gather),
    "take": ("", _take),
    **table_of("self dim index src", _scatter, "scatter scatter_add"),
    **table_of("self dim index source", _index_write, "index_add index_copy index_fill"),
    "index": ("", _index),
    **table_of("self indices values accumulate", _index_put, "index_put _index_put_impl"),
}
