"""Copies, fills and random numbers, and views, which cost nothing.

A copy that may change the type counts one operation for each element (it is the identity, elementwise; TraceLens counts
the same); what only moves elements to other places (``cat``, ``repeat``, ``roll``), fills and random numbers count
none. Operators that copy or not, as the case may be (``to``, ``contiguous``, ``reshape``), are told where the case is
clear from what is recorded; else the copy below them is.
"""

from __future__ import annotations

from math import prod

from foretrace.machine.call import Call, Formula, OperatorCost, known_dtype, size_bytes, table_of, tensor_of
from foretrace.machine.operands import Operand, Unknown

NOTHING = OperatorCost(0, 0, 0, "view")


def _identity(source: Operand, result: Operand) -> OperatorCost:
    return OperatorCost(result.elements, source.bytes, result.bytes, "copy")


def _copy(call: Call) -> OperatorCost:
    """``copy_(self, src)``: the source may be broadcast and of another type."""
    result = call.tensor(0)
    return _identity(call.tensor(1), tensor_of(result.shape, known_dtype(result)))


def _clone(call: Call) -> OperatorCost:
    source = call.tensor(0)
    return _identity(source, tensor_of(source.shape, known_dtype(source)))


def _to_copy(call: Call) -> OperatorCost:
    source = call.tensor(0)
    return _identity(source, call.result(lambda: tensor_of(source.shape, call.dtype(1, known_dtype(source)))))


def _to(call: Call) -> OperatorCost:
    """By the number of arguments: (type), (device, type) or (type, layout, device, ...) to convert to.

    A change of device cannot be seen where the type stays; only the first form has none.
    """
    source, count = call.tensor(0), len(call.arguments)
    if count not in (5, 6, 8):
        raise Unknown
    dtype_at, copy_at = {5: (1, 3), 6: (2, 4), 8: (1, 6)}[count]
    if call.operand(dtype_at).is_tensor:
        raise Unknown
    dtype = call.dtype(dtype_at, known_dtype(source))
    if dtype == source.dtype and not call.value(copy_at, False):
        if count != 5:
            raise Unknown
        return NOTHING
    return _identity(source, tensor_of(source.shape, dtype))


def _is_contiguous(tensor: Operand) -> bool:
    if tensor.strides is None:
        raise Unknown
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size != 1 and stride != expected:
            return tensor.elements == 0
        expected *= size
    return True


def _contiguous(call: Call) -> OperatorCost:
    if call.value(1, 0) != 0:  # another memory format
        raise Unknown
    return NOTHING if _is_contiguous(call.tensor(0)) else _clone(call)


def _reshape(call: Call) -> OperatorCost:
    """A view if the tensor is dense in order; otherwise it may be either."""
    if not _is_contiguous(call.tensor(0)):
        raise Unknown
    return NOTHING


def _moved(read: Operand | list[Operand], result: Operand) -> OperatorCost:
    return OperatorCost(0, size_bytes([read] if isinstance(read, Operand) else read), result.bytes, "copy")


def _cat(call: Call) -> OperatorCost:
    """``cat`` and ``stack``: as many elements out as in."""
    tensors = list(call.tensors(0))
    size_bytes(tensors)
    if len({tensor.dtype for tensor in tensors}) > 1 and not call.outputs:
        raise Unknown
    result = call.result(lambda: tensor_of((sum(tensor.elements for tensor in tensors),), tensors[0].dtype))
    return _moved(tensors, result)


def _rearranged(call: Call) -> OperatorCost:
    """As many elements out as in."""
    source = call.tensor(0)
    return _moved(source, tensor_of(source.shape, known_dtype(source)))


def _repeat(call: Call) -> OperatorCost:
    source = call.tensor(0)

    def computed() -> Operand:
        return tensor_of((source.elements * prod(call.sizes(1)),), known_dtype(source))

    return _moved(source, call.result(computed))


def _pad(call: Call) -> OperatorCost:
    source = call.tensor(0)

    def computed() -> Operand:
        margins = call.value(1)
        if not isinstance(margins, list | tuple) or not all(isinstance(size, int) for size in margins):
            raise Unknown
        if len(margins) > 2 * len(source.shape):
            raise Unknown
        shape = list(source.shape)
        for at in range(len(margins) // 2):
            shape[-1 - at] += margins[2 * at] + margins[2 * at + 1]
        if min(shape, default=0) < 0:
            raise Unknown
        return tensor_of(shape, known_dtype(source))

    return _moved(source, call.result(computed))


def _gradient_of_view(call: Call) -> OperatorCost:
    """A gradient put into zeros of the size that the view was taken from."""
    gradient = call.tensor(0)
    return _moved(gradient, call.result(lambda: tensor_of(call.sizes(1), known_dtype(gradient))))


def _fill(call: Call) -> OperatorCost:
    """``fill_``, ``zero_``: the old values are not read."""
    result, value = call.tensor(0), call.operand(1)
    return OperatorCost(0, value.bytes, result.elements * _element_bytes(result), "fill")


def _element_bytes(tensor: Operand) -> int:
    return tensor_of((1,), known_dtype(tensor)).bytes


def _like(call: Call) -> OperatorCost:
    """``zeros_like`` and its kind: a new tensor of the same shape."""
    source = call.tensor(0)
    at = 2 if call.name == "full_like" else 1
    result = call.result(lambda: tensor_of(source.shape, call.dtype(at, known_dtype(source))))
    return OperatorCost(0, 0, result.bytes, "fill")


def _new(call: Call) -> OperatorCost:
    """``zeros``, ``full`` and their kind, of a given size and type."""
    at = 2 if call.name == "full" else 1

    def computed() -> Operand:
        dtype = call.dtype(at, "")
        if not dtype:
            raise Unknown
        return tensor_of(call.sizes(0), dtype)

    return OperatorCost(0, 0, call.result(computed).bytes, "random" if "rand" in call.name else "fill")


def _random(call: Call) -> OperatorCost:
    """``normal_``, ``uniform_``, ``bernoulli_`` and others; a tensor of probabilities is read."""
    result = call.tensor(0)
    if not call.is_in_place:
        probabilities, result = result, call.result(lambda: tensor_of(result.shape, known_dtype(result)))
        return OperatorCost(0, probabilities.bytes, result.bytes, "random")
    return OperatorCost(0, call.operand(1).bytes, result.elements * _element_bytes(result), "random")


def _random_like(call: Call) -> OperatorCost:
    source = call.tensor(0)
    result = call.result(lambda: tensor_of(source.shape, call.dtype(1, known_dtype(source))))
    return OperatorCost(0, 0, result.bytes, "random")


def _item(call: Call) -> OperatorCost:
    """One number brought to the host."""
    source = call.tensor(0)
    if source.elements != 1:
        raise Unknown
    return OperatorCost(0, source.bytes, source.bytes, "copy")


def _view(call: Call) -> OperatorCost:
    return NOTHING


_VIEWS = (
    "view as_strided _reshape_alias expand expand_as transpose t permute slice select narrow squeeze unsqueeze detach "
    "alias split split_with_sizes chunk unbind view_as unfold diagonal movedim swapaxes swapdims unflatten "
    "_unsafe_view lift_fresh resolve_conj resolve_neg conj _conj real imag view_as_real view_as_complex record_stream "
    "result_type empty empty_like empty_strided new_empty new_empty_strided set requires_grad is_same_size "
    "broadcast_tensors numpy_T mT mH adjoint unsafe_split unsafe_chunk tensor_split hsplit vsplit atleast_1d "
    "atleast_2d atleast_3d _nested_tensor_size _fused_sdp_choice _has_compatible_shallow_copy_type can_cast stride "
    "size sym_size is_pinned"
)
FORMULAS: dict[str, Formula] = {
    **table_of("", _view, _VIEWS),
    "copy": ("", _copy),
    "clone": ("", _clone),
    "_to_copy": ("", _to_copy),
    "to": ("", _to),
    "contiguous": ("", _contiguous),
    **table_of("", _reshape, "reshape flatten"),
    **table_of("", _cat, "cat stack concat hstack vstack"),
    **table_of("", _rearranged, "roll flip tril triu rot90 pin_memory _pin_memory"),
    **table_of("", _repeat, "repeat tile"),
    "constant_pad_nd": ("", _pad),
    **table_of("", _gradient_of_view, "slice_backward select_backward"),
    **table_of("", _fill, "fill zero"),
    **table_of("", _like, "zeros_like ones_like full_like"),
    **table_of("", _new, "zeros ones full rand randn"),
    **table_of("", _random, "normal uniform bernoulli random exponential geometric log_normal cauchy"),
    **table_of("", _random_like, "rand_like randn_like"),
    **table_of("", _item, "item _local_scalar_dense"),
}
