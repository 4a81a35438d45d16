"""Costs against two independent sources: AMD's TraceLens on recorded traces, and PyTorch's own FLOP counter."""

from __future__ import annotations

import ast
import csv
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import foretrace
from foretrace.machine import (
    CATEGORIES,
    Operand,
    element_bytes,
    kineto_arguments,
    normalize_dtype,
    operator_cost,
    timeline_costs,
)
from foretrace.machine.arities import arities
from foretrace.machine.operator_cost import formulas, resolve
from foretrace.trace import Timeline
from tests.machine.calls import cost_of, meta, nbytes, operands_of

aten = torch.ops.aten

# -- TraceLens -------------------------------------------------------------------------------------------------------

PAIRS = [
    f"{device}-{model}"
    for device in ("h100", "mi300")
    for model in ("Qwen_Qwen1.5-0.5B-Chat", "gaunernst_bert-small-uncased")
]
TABLES = ("GEMM", "SDPA_fwd", "Normalization", "BinaryElementwise", "UnaryElementwise", "Reduce_fwd")
ARGUMENTS = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")
# Rows of each pair of tables that must be there, so that an empty folder is no success.
ROWS = {"Qwen_Qwen1.5-0.5B-Chat": 26, "gaunernst_bert-small-uncased": 9}


class Row:
    """One row of TraceLens: an operator with its arguments, and what TraceLens says."""

    def __init__(self, row: dict[str, str], table: str) -> None:
        self.name, self.table, self.count = row["name"], table, int(row["name_count"])
        self.texts = [json.dumps(_tuples(ast.literal_eval(row[f"{name}_first"]))) for name in ARGUMENTS]
        self.flops = round(float(row["GFLOPS_first"]) * 1e9)
        self.moved_bytes = float(row["Data Moved (MB)_first"]) * 2**20


def _tuples(value: Any) -> Any:
    return [_tuples(one) for one in value] if isinstance(value, list | tuple) else value


def rows_of(shared: Path, pair: str) -> Iterator[Row]:
    csv.field_size_limit(1 << 30)
    for table in TABLES:
        path = shared / "reference" / "tracelens" / pair / f"{table}.csv"
        if path.exists():
            with path.open(newline="") as file:
                yield from (Row(row, table) for row in csv.DictReader(file))


@pytest.mark.parametrize("pair", PAIRS)
def test_every_row_of_tracelens_from_its_own_columns(shared: Path, pair: str) -> None:
    compared: Counter[str] = Counter()
    for row in rows_of(shared, pair):
        cost = operator_cost(row.name, kineto_arguments(*row.texts))
        assert cost is not None, row.name
        assert cost.flops == row.flops, (row.name, row.texts)
        assert cost.moved_bytes == pytest.approx(row.moved_bytes, rel=0.01), (row.name, row.texts)
        if row.table != "Reduce_fwd":  # TraceLens writes one element for any reduction, we write what is left
            assert cost.moved_bytes == round(row.moved_bytes), (row.name, row.texts)
        compared[row.table] += 1
    print(pair, dict(compared))
    assert compared.total() == ROWS[pair.split("-", 1)[1]]


@pytest.mark.parametrize("pair", PAIRS)
def test_every_row_of_tracelens_from_the_trace(shared: Path, pair: str) -> None:
    timeline = foretrace.read(shared / "traces" / "h100-mi300-pairs" / f"{pair}.json.gz").timelines[0]
    found = costs_by_call(timeline)
    compared: Counter[str] = Counter()
    operators = 0
    for row in rows_of(shared, pair):
        costs = found[row.name, *(canonical(text) for text in row.texts)]
        assert len(costs) >= row.count, (row.name, row.texts)
        for flops, moved_bytes in costs:
            assert flops == row.flops, (row.name, row.texts)
            assert moved_bytes == pytest.approx(row.moved_bytes, rel=0.01), (row.name, row.texts)
        compared[row.table] += 1
        operators += len(costs)
    print(pair, dict(compared), f"{operators} operators")
    assert compared.total() == ROWS[pair.split("-", 1)[1]]
    assert operators > compared.total()


def canonical(text: str) -> str:
    return json.dumps(json.loads(text))


def costs_by_call(timeline: Timeline) -> dict[tuple[str, ...], list[tuple[int, int]]]:
    """FLOPs and bytes of all operators with a cost, by name and arguments."""
    table = timeline_costs(timeline)
    columns = ("input_shapes", "input_types", "input_strides", "concrete_inputs")
    texts = dict(
        zip(
            timeline.operators["event"].tolist(),
            zip(*(timeline.operators.texts(name) for name in columns), strict=True),
            strict=True,
        )
    )
    found: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    numbers = (table["event"], table["flops"], table["read_bytes"] + table["written_bytes"])
    for event, flops, moved in zip(*(column.tolist() for column in numbers), strict=True):
        if all(texts[event]):
            key = (timeline.strings[timeline.events["name"][event]], *map(canonical, texts[event]))
            found.setdefault(key, []).append((flops, moved))
    return found


# -- PyTorch's FLOP counter ------------------------------------------------------------------------------------------

size = st.integers(1, 17)


def counted(packet: Any, *args: Any, **kwargs: Any) -> int:
    """FLOPs as `torch.utils.flop_counter` counts them."""
    return int(flop_registry[packet](*args, **kwargs, out_val=packet(*args, **kwargs)))


@given(size, size, size, size)
def test_gemm_against_the_flop_counter(b: int, m: int, k: int, n: int) -> None:
    one, other = meta(m, k), meta(k, n)
    for packet, args, added in (
        (aten.mm, (one, other), 0),
        (aten.addmm, (meta(n), one, other), m * n),
        (aten.bmm, (meta(b, m, k), meta(b, k, n)), 0),
        (aten.baddbmm, (meta(b, 1, n), meta(b, m, k), meta(b, k, n)), b * m * n),
        (aten._int_mm, (meta(m + 17, k, dtype=torch.int8), meta(k, n, dtype=torch.int8)), 0),
    ):
        if packet is aten._int_mm:
            operands = operands_of(packet.default, args, {})
            cost = operator_cost("aten::_int_mm", operands)
            assert cost is not None and cost.flops == 2 * (m + 17) * k * n
            continue
        cost, result = cost_of(packet.default, *args)
        assert cost is not None and cost.category == "gemm"
        assert cost.flops - added == counted(packet, *args), packet
        assert (cost.read_bytes, cost.written_bytes) == (nbytes(args), nbytes(result))


convolutions = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "groups": st.integers(1, 3),
        "channels": st.tuples(st.integers(1, 3), st.integers(1, 3)),  # for each group
        "spatial": st.lists(st.integers(5, 9), min_size=1, max_size=3),
        "kernel": st.integers(1, 3),
        "stride": st.integers(1, 3),
        "padding": st.integers(0, 2),
        "dilation": st.integers(1, 2),
        "transposed": st.booleans(),
        "with_bias": st.booleans(),
    }
)


def convolution(case: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments of ``aten::convolution``."""
    count, groups, (inner, outer) = len(case["spatial"]), case["groups"], case["channels"]
    given = meta(case["batch"], inner * groups, *case["spatial"])
    kernel = (case["kernel"],) * count
    shape = (inner * groups, outer, *kernel) if case["transposed"] else (outer * groups, inner, *kernel)
    bias = meta(outer * groups) if case["with_bias"] else None
    steps = ([case[name]] * count for name in ("stride", "padding", "dilation"))
    return (given, meta(*shape), bias, *steps, case["transposed"], [0] * count, groups)


@given(convolutions)
def test_convolution_against_the_flop_counter(case: dict[str, Any]) -> None:
    args = convolution(case)
    try:
        result = aten.convolution(*args)
    except RuntimeError:  # nothing is left of the input
        assert operator_cost("aten::convolution", operands_of(aten.convolution.default, args, {})) in (None,)
        return
    for with_outputs in (False, True):
        cost, _ = cost_of(aten.convolution.default, *args, with_outputs=with_outputs)
        assert cost is not None
        assert cost.flops - (result.numel() if case["with_bias"] else 0) == counted(aten.convolution, *args)
        assert (cost.read_bytes, cost.written_bytes) == (nbytes(args), nbytes(result))


@given(convolutions, st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_gradients_of_convolutions_against_the_flop_counter(case: dict[str, Any], mask: tuple[bool, ...]) -> None:
    args = convolution({**case, "with_bias": False})
    given, weight = args[:2]
    try:
        gradient = aten.convolution(*args)
    except RuntimeError:
        return
    bias_sizes = [gradient.shape[1]]
    arguments = (gradient, given, weight, bias_sizes, *args[3:], list(mask))
    cost, results = cost_of(aten.convolution_backward.default, *arguments)
    assert cost is not None
    by_weight = counted(aten.convolution, *args)
    assert cost.flops == (mask[0] + mask[1]) * by_weight + mask[2] * gradient.numel()
    if case["groups"] == 1 and not case["transposed"]:  # for others the flop counter counts something else
        products = counted(aten.convolution_backward, *arguments)
        assert cost.flops - mask[2] * gradient.numel() == products
    assert cost.written_bytes == sum(nbytes(one) for one, wanted in zip(results, mask, strict=True) if wanted)


def test_flop_counter_multiplies_grouped_gradients_by_the_number_of_groups() -> None:
    """The reason why grouped gradients are compared with the forward instead."""
    given, weight = meta(2, 8, 9, 9), meta(8, 2, 3, 3)
    steps = ([1, 1], [1, 1], [1, 1], False, [0, 0], 4)
    forward = counted(aten.convolution, given, weight, None, *steps)
    gradient = counted(aten.convolution_backward, meta(2, 8, 9, 9), given, weight, [8], *steps, [False, True, False])
    assert gradient == 4 * forward


@given(size, st.integers(1, 4), size, size, st.integers(1, 16), st.integers(1, 16))
def test_attention_against_the_flop_counter(b: int, h: int, m: int, n: int, d: int, e: int) -> None:
    query, key, value = meta(b, h, m, d), meta(b, h, n, d), meta(b, h, n, e)
    operands = [Operand(tuple(one.shape), "float32") for one in (query, key, value)]
    expected = flop_registry[aten._scaled_dot_product_flash_attention](query, key, value, out_val=query)
    plain, none = Operand.of(0.0), Operand()
    off = Operand.of(False)
    calls = {
        "scaled_dot_product_attention": [none, plain, off],
        "_scaled_dot_product_flash_attention": [plain, off, off],
        "_scaled_dot_product_flash_attention_for_cpu": [plain, off, none],
        "_scaled_dot_product_efficient_attention": [none, off, plain, off],
        "_scaled_dot_product_cudnn_attention": [none, off, plain, off, off],
        "_scaled_dot_product_attention_math": [none, plain, Operand.of(True)],
    }
    for name, rest in calls.items():
        cost = operator_cost(f"aten::{name}", [*operands, *rest])
        assert cost is not None and cost.category == "attention"
        assert cost.flops == expected, name
        assert (cost.read_bytes, cost.written_bytes) == (nbytes([query, key, value]), 4 * b * h * m * e)
    gradient = meta(b, h, m, e)
    expected = flop_registry[aten._scaled_dot_product_flash_attention_backward](
        gradient, query, key, value, out_val=query
    )
    out = Operand((b, h, m, e), "float32")
    rest = [out, Operand((b, h, m), "float32"), none, none, Operand.of(m), Operand.of(n), plain, off]
    cost = operator_cost("aten::_scaled_dot_product_flash_attention_backward", [out, *operands, *rest])
    assert cost is not None and cost.flops == expected
    assert cost.written_bytes == nbytes([query, key, value])


def test_a_model_step_against_the_flop_counter() -> None:
    """Leaves of a forward and backward pass, each as PyTorch dispatches it, against the counter of the whole."""
    from torch.utils._python_dispatch import TorchDispatchMode

    total = 0

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal total
            cost = operator_cost(func._schema.name, operands_of(func, args, kwargs or {}))
            if cost is not None and cost.category in ("gemm", "attention", "convolution"):
                total += cost.flops
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    image = torch.randn(2, 3, 16, 16)
    first, second = torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.Linear(8, 24, bias=False)
    with Recorder(), FlopCounterMode(display=False) as counter:
        tokens = first(image).flatten(2).transpose(1, 2)
        query, key, value = second(tokens).view(2, 196, 3, 2, 4).permute(2, 0, 3, 1, 4)
        ((query @ key.transpose(-1, -2)).softmax(-1) @ value).sum().backward()
    assert total == counter.get_total_flops() > 0


# -- attention -------------------------------------------------------------------------------------------------------


def attention(
    queries: int, keys: int, *, heads: int = 4, key_heads: int = 4, causal: bool = True, name: str = ""
) -> int:
    shape = lambda h, n: Operand((2, h, n, 8), "bfloat16")  # noqa: E731
    operands = [shape(heads, queries), shape(key_heads, keys), shape(key_heads, keys)]
    if name:
        operands = [Operand((2, one.shape[2], one.shape[1], 8), "bfloat16") for one in operands]
        rest = [Operand.of(0.0), Operand.of(0.1), Operand.of(causal), Operand.of(-1), Operand.of(-1)]
        cost = operator_cost(name, [*operands, *rest])
    else:
        rest = [Operand(), Operand.of(0.0), Operand.of(causal), Operand(), Operand.of(True)]
        cost = operator_cost("aten::scaled_dot_product_attention", [*operands, *rest])
    assert cost is not None
    return cost.flops


@given(st.integers(1, 40), st.integers(1, 40))
def test_causal_masks_count_the_pairs_below_the_diagonal(queries: int, keys: int) -> None:
    """Half of each pair on the diagonal: within half a pair a row of what a loop counts."""
    per_pair = 2 * 2 * 4 * 16
    top = sum(min(row + 1, keys) for row in range(queries))
    last = sum(max(min(row + 1 + keys - queries, keys), 0) for row in range(queries))
    diagonal = min(queries, keys)
    assert attention(queries, keys) == per_pair * (top - diagonal / 2)
    flash = attention(queries, keys, name="flash_attn::_flash_attn_forward")
    assert flash == per_pair * (last - diagonal / 2)
    if queries == keys:
        assert 2 * attention(queries, keys) == attention(queries, keys, causal=False) == 2 * flash


def test_shared_heads_of_keys_save_bytes_and_no_operations() -> None:
    def call(key_heads: int) -> Any:
        query, key = Operand((2, 8, 16, 64), "float16"), Operand((2, key_heads, 16, 64), "float16")
        flags = [Operand.of(0.0), Operand.of(False), Operand.of(False)]
        return operator_cost("aten::_scaled_dot_product_flash_attention", [query, key, key, *flags])

    assert call(8).flops == call(2).flops
    assert call(8).read_bytes - call(2).read_bytes == 2 * 2 * 6 * 16 * 64 * 2
    assert call(3) is None  # 8 heads cannot share 3


def test_attention_that_shapes_do_not_tell() -> None:
    packed = Operand((100, 8, 64), "float16")
    lengths = Operand((5,), "int32")
    rest = [Operand.of(60), Operand.of(60), Operand.of(0.0), Operand.of(True), Operand.of(False)]
    assert operator_cost("aten::_flash_attention_forward", [packed, packed, packed, lengths, lengths, *rest]) is None
    assert operator_cost("flash_attn::_flash_attn_varlen_forward", [packed] * 3 + [lengths] * 2) is None
    query = Operand((2, 8, 16, 64), "float16")
    unrecorded = Operand(dtype="scalar")
    name = "aten::_scaled_dot_product_flash_attention"
    assert operator_cost(name, [query, query, query, Operand.of(0.0), unrecorded]) is None
    # The overload for 8-bit tensors has other arguments in these places.
    scales = [Operand()] * 3
    flags = [Operand.of(0.0), Operand.of(True), Operand.of(False), Operand()]
    assert operator_cost(name, [query, query, query, *scales, *flags]) is None
    windowed = [Operand.of(0.0), Operand.of(0.1), Operand.of(True), Operand.of(128), Operand.of(0)]
    assert operator_cost("flash_attn::_flash_attn_forward", [query] * 3 + windowed) is None


# -- bytes: what PyTorch really returns ------------------------------------------------------------------------------

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
dtypes = st.sampled_from(DTYPES)


@st.composite
def broadcastable(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    tensors = []
    for _ in range(2):
        kept = shape[draw(st.integers(0, len(shape))) :]
        own = [length if draw(st.booleans()) else 1 for length in kept]
        tensors.append(meta(*own, dtype=draw(dtypes)))
    return tensors[0], tensors[1]


BINARY = ["add", "mul", "div", "maximum", "eq", "lt", "logical_and", "pow", "atan2", "fmod"]


@given(broadcastable(), st.sampled_from(BINARY))
def test_binary_operators_read_what_there_is_and_write_what_pytorch_does(
    tensors: tuple[torch.Tensor, torch.Tensor], name: str
) -> None:
    packet = getattr(aten, name)
    overload = getattr(
        packet, {"pow": "Tensor_Tensor"}.get(name, "Tensor" if "Tensor" in packet.overloads() else "default")
    )
    try:
        cost, result = cost_of(overload, *tensors)
    except (RuntimeError, NotImplementedError):
        return
    if name == "pow" and {one.dtype for one in tensors} == {torch.bool}:  # PyTorch has none, but says it had
        return
    assert cost is not None and cost.category == "elementwise_binary"
    assert cost.flops == result.numel()
    assert (cost.read_bytes, cost.written_bytes) == (nbytes(tensors), nbytes(result))


@given(dtypes, st.sampled_from([True, 2, 2.5]), st.booleans(), st.sampled_from(["mul", "div", "eq", "pow"]))
def test_numbers_take_part_in_the_type_of_the_result(
    dtype: torch.dtype, number: Any, as_tensor: bool, name: str
) -> None:
    if name == "pow" and number is True:  # without memory, PyTorch gives another type than with
        number = 1
    tensor = meta(3, 4, dtype=dtype)
    other = torch.tensor(number, device="meta") if as_tensor else number
    form = {"pow": "Tensor_"}.get(name, "") + ("Tensor" if as_tensor else "Scalar")
    try:
        cost, result = cost_of(getattr(getattr(aten, name), form), tensor, other)
    except (RuntimeError, NotImplementedError):
        return
    assert cost is not None
    assert (cost.flops, cost.written_bytes) == (12, nbytes(result))
    assert cost.read_bytes == nbytes(tensor) + nbytes(other)


UNARY = ["neg", "exp", "sqrt", "relu", "silu", "gelu", "sigmoid", "tanh", "rsqrt", "abs", "cos", "sign", "square"]
UNARY += ["logical_not", "isnan", "reciprocal"]


@given(st.lists(st.integers(0, 6), max_size=4), dtypes, st.sampled_from(UNARY))
def test_unary_operators(shape: list[int], dtype: torch.dtype, name: str) -> None:
    tensor = meta(*shape, dtype=dtype)
    try:
        cost, result = cost_of(getattr(aten, name).default, tensor)
    except (RuntimeError, NotImplementedError):
        return
    assert cost is not None and cost.category == "elementwise_unary"
    assert (cost.flops, cost.read_bytes, cost.written_bytes) == (result.numel(), nbytes(tensor), nbytes(result))


REDUCTIONS = ["sum.dim_IntList", "mean.dim", "amax", "amin", "var.correction", "std.correction", "logsumexp"]
REDUCTIONS += ["any.dims", "all.dims"]


@given(
    st.lists(st.integers(1, 5), max_size=4), st.sampled_from(REDUCTIONS), st.booleans(), dtypes, st.data()
)  # fmt: skip
def test_reductions_along_dimensions(
    shape: list[int], name: str, keepdim: bool, dtype: torch.dtype, data: st.DataObject
) -> None:
    dimensions = data.draw(st.lists(st.integers(-len(shape), len(shape) - 1), max_size=2) if shape else st.just([]))
    packet, _, form = name.partition(".")
    tensor = meta(*shape, dtype=dtype)
    try:
        cost, result = cost_of(getattr(getattr(aten, packet), form or "default"), tensor, dimensions, keepdim=keepdim)
    except (RuntimeError, IndexError, NotImplementedError):
        return
    assert cost is not None and cost.category == "reduction"
    assert cost.flops % max(tensor.numel(), 1) == 0
    assert (cost.read_bytes, cost.written_bytes) == (nbytes(tensor), nbytes(result))


f32, i64 = torch.float32, torch.int64
_X = meta(4, 6, 8, 8)
_INDEX = meta(5, dtype=i64)
WHOLE = [  # operators that read every tensor they are given once, and write all that they return
    (aten.sum.default, (_X,), {}),
    (aten.sum.default, (meta(3, dtype=torch.int32),), {}),
    (aten.sum.default, (meta(3, dtype=torch.bfloat16),), {"dtype": f32}),
    (aten.sum.dim_IntList, (meta(3, 2, dtype=torch.bfloat16), [1]), {"dtype": torch.float64}),
    (aten.mean.default, (_X,), {}),
    (aten.prod.dim_int, (_X, 1), {}),
    (aten.max.default, (_X,), {}),
    (aten.max.dim, (_X, 1), {}),
    (aten.max.other, (_X, meta(8)), {}),
    (aten.argmax.default, (_X, 2), {}),
    (aten.argmax.default, (_X,), {}),
    (aten.any.default, (_X,), {}),
    (aten.norm.ScalarOpt_dim, (_X, 2, [1, 2]), {}),
    (aten.linalg_vector_norm.default, (_X, 2, [0]), {}),
    (aten.linalg_vector_norm.default, (_X,), {}),
    (aten.var_mean.correction, (_X, [1]), {"correction": 0}),
    (aten.cumsum.default, (_X, 0), {}),
    (aten.cumsum.default, (meta(4, dtype=torch.bool), 0), {}),
    (aten._softmax.default, (_X, 1, False), {}),
    (aten._log_softmax.default, (meta(8, 9, dtype=torch.bfloat16), 1, False), {}),
    (aten._softmax_backward_data.default, (_X, _X, 1, f32), {}),
    (aten._log_softmax_backward_data.default, (_X, _X, 1, f32), {}),
    (aten.cat.default, ([_X, _X, _X], 1), {}),
    (aten.stack.default, ([_INDEX, _INDEX],), {}),
    (aten.clone.default, (_X,), {}),
    (aten._to_copy.default, (_X,), {"dtype": torch.bfloat16}),
    (aten._to_copy.default, (_X,), {}),
    (aten.constant_pad_nd.default, (_X, [1, 2, 0, -1]), {}),
    (aten.repeat.default, (_X, [2, 1, 1, 3]), {}),
    (aten.flip.default, (_X, [0]), {}),
    (aten.roll.default, (_X, [1]), {}),
    (aten.tril.default, (_X,), {}),
    (aten.slice_backward.default, (meta(3, 8), [9, 8], 0, 0, 3, 1), {}),
    (aten.where.self, (meta(4, 1, dtype=torch.bool), meta(4, 3), meta(3)), {}),
    (aten.where.ScalarOther, (meta(4, 1, dtype=torch.bool), meta(4, 3), 0), {}),
    (aten.clamp.default, (_X, 0, None), {}),
    (aten.clamp.Tensor, (_X, meta(8), None), {}),
    (aten.addcmul.default, (_X, _X, meta(8)), {"value": 2}),
    (aten.lerp.Scalar, (_X, _X, 0.5), {}),
    (aten.lerp.Tensor, (_X, _X, meta(8)), {}),
    (aten.masked_fill.Scalar, (_X, meta(8, 8, dtype=torch.bool), 0), {}),
    (aten.gelu_backward.default, (_X, _X), {"approximate": "tanh"}),
    (aten.threshold_backward.default, (_X, _X, 0), {}),
    (aten.max_pool2d_with_indices.default, (_X, [3, 3], [2, 2], [1, 1]), {}),
    (aten.max_pool2d_with_indices.default, (_X, [3, 3], [2, 2], [0, 0], [1, 1], True), {}),
    (aten.max_pool2d_with_indices.default, (_X, [2, 2]), {}),
    (aten.avg_pool2d.default, (_X, [2], [2]), {}),
    (aten._adaptive_avg_pool2d.default, (_X, [2, 2]), {}),
    (aten.native_dropout.default, (_X, 0.1, True), {}),
    (aten.native_dropout_backward.default, (_X, meta(4, 6, 8, 8, dtype=torch.bool), 1.1), {}),
    (aten.mse_loss.default, (_X, _X), {}),
    (aten.mse_loss.default, (_X, _X, 0), {}),
    (aten.mse_loss_backward.default, (meta(), _X, _X, 1), {}),
    (aten.binary_cross_entropy_with_logits.default, (_X, _X, None, meta(8)), {}),
    (aten._foreach_add.List, ([_X, _INDEX], [_X, _INDEX]), {}),
    (aten._foreach_mul.Scalar, ([_X, _X], 2.0), {}),
    (aten._foreach_sqrt.default, ([_X],), {}),
    (aten._foreach_norm.Scalar, ([_X, _X],), {}),
    (aten._foreach_addcdiv.Scalar, ([_X], [_X], [_X], 0.5), {}),
    (aten._foreach_lerp.Scalar, ([_X], [_X], 0.5), {}),
    (aten.addmv.default, (meta(4), meta(4, 5), meta(5)), {}),
    (aten.mv.default, (meta(4, 5), meta(5)), {}),
    (aten.dot.default, (meta(5), meta(5)), {}),
    (aten.addbmm.default, (meta(4, 6), meta(3, 4, 5), meta(3, 5, 6)), {}),
    (aten.matmul.default, (meta(2, 1, 4, 5), meta(3, 5, 6)), {}),
    (aten.matmul.default, (meta(5), meta(3, 5, 6)), {}),
    (aten.linear.default, (meta(2, 3, 5), meta(7, 5), meta(7)), {}),
    (aten.addr.default, (meta(4, 5), meta(4), meta(5)), {}),
]


@pytest.mark.parametrize(("overload", "args", "kwargs"), WHOLE, ids=lambda value: str(value) if callable(value) else "")
def test_operators_that_touch_everything_once(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for with_outputs in (False, True):
        cost, result = cost_of(overload, *args, with_outputs=with_outputs, **kwargs)
        assert cost is not None and cost.category in CATEGORIES
        assert (cost.read_bytes, cost.written_bytes) == (nbytes(list(args)), nbytes(result))


def test_all_formulas_are_reached_by_some_name_of_pytorch_or_are_of_others() -> None:
    """No formula stands under a misspelled name. Those of older PyTorch and of other libraries are listed."""
    old = {"cudnn_convolution_backward"}
    for name in formulas():
        if ":" in name or name in old or name == "record_param_comms":
            continue
        assert any(hasattr(aten, form) for form in (name, name + "_", name.removeprefix("_"))), name


# -- views, places, in-place -----------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), dtypes, st.sampled_from(["add", "mul"]))
def test_in_place_operators_move_as_much_and_keep_their_type(shape: list[int], dtype: torch.dtype, name: str) -> None:
    name_of = str(dtype).removeprefix("torch.")
    one, other = Operand(tuple(shape), name_of), Operand(tuple(shape), name_of)
    assert operator_cost(f"aten::{name}", [one, other]) == operator_cost(f"aten::{name}_", [one, other])
    wider = Operand(tuple(shape), "float64")
    cost = operator_cost(f"aten::{name}_", [one, wider])
    assert cost is not None and cost.written_bytes == math.prod(shape) * element_bytes(name_of)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_expanded_operands_are_read_once(shape: list[int], data: st.DataObject) -> None:
    kept = [data.draw(st.booleans()) for _ in shape]
    small = meta(*(length if keep else 1 for length, keep in zip(shape, kept, strict=True)))
    whole = meta(*shape)
    broadcast, _ = cost_of(aten.add.Tensor, whole, small)
    expanded, _ = cost_of(aten.add.Tensor, whole, small.expand(shape))
    assert broadcast == expanded


@given(st.permutations(range(3)), st.lists(st.integers(1, 5), min_size=3, max_size=3), size, size, size)
def test_the_order_of_batch_dimensions_does_not_matter(
    order: list[int], batch: list[int], m: int, k: int, n: int
) -> None:
    def cost(sizes: list[int]) -> Any:
        return operator_cost("aten::matmul", [Operand((*sizes, m, k), "float16"), Operand((*sizes, k, n), "float16")])

    assert cost(batch) == cost([batch[at] for at in order])
    flat = math.prod(batch)
    whole = operator_cost("aten::bmm", [Operand((flat, m, k), "float16"), Operand((flat, k, n), "float16")])
    assert cost(batch) == whole


def test_windows_that_overlap_are_read_once() -> None:
    windows = torch.empty(100, device="meta").unfold(0, 10, 1)
    cost, _ = cost_of(aten.clone.default, windows)
    assert cost is not None and (cost.read_bytes, cost.written_bytes) == (400, 91 * 10 * 4)


def test_places_move_only_what_they_touch() -> None:
    table, index = Operand((1000, 64), "bfloat16"), Operand((3, 5), "int64")
    rows = 15 * 64 * 2
    cost = operator_cost("aten::embedding", [table, index, Operand.of(-1), Operand.of(False), Operand.of(False)])
    assert cost is not None and (cost.flops, cost.read_bytes, cost.written_bytes) == (0, rows + 120, rows)
    flat = Operand((15,), "int64")
    cost = operator_cost("aten::index_select", [table, Operand.of(0), flat])
    assert cost is not None and (cost.read_bytes, cost.written_bytes) == (rows + 120, rows)
    source = Operand((15, 64), "bfloat16")
    cost = operator_cost("aten::index_add_", [table, Operand.of(0), flat, source, Operand.of(1)])
    assert cost is not None and (cost.flops, cost.read_bytes, cost.written_bytes) == (15 * 64, 2 * rows + 120, rows)
    cost = operator_cost("aten::index_put_", [table, [flat], source, Operand.of(False)])
    assert cost is not None and (cost.flops, cost.read_bytes, cost.written_bytes) == (0, rows + 120, rows)
    mask = Operand((1000,), "bool")
    assert operator_cost("aten::index_put_", [table, [mask], Operand((), "bfloat16"), Operand.of(False)]) is None
    places = Operand((15, 1), "int64", (1, 0))
    cost = operator_cost("aten::gather", [table, Operand.of(0), places, Operand.of(False)])
    assert cost is not None and cost.read_bytes == 15 * 2 + 120
    bags = [table, flat, Operand((4,), "int64")]
    rest = [Operand.of(False), Operand.of(0), Operand.of(False), Operand(), Operand.of(True), Operand.of(-1)]
    cost = operator_cost("aten::embedding_bag", [*bags, *rest])
    assert cost is not None and (cost.flops, cost.written_bytes) == (15 * 64, 3 * 64 * 2)


def test_views_cost_nothing_and_copies_what_they_copy() -> None:
    tensor = Operand((4, 6), "float32", (6, 1))
    for name in ("view", "transpose", "expand", "detach", "t_", "unsqueeze_", "empty_like"):
        cost = operator_cost(f"aten::{name}", [tensor])
        assert cost is not None and (cost.flops, cost.moved_bytes, cost.category) == (0, 0, "view")
    turned = Operand((6, 4), "float32", (1, 6))
    dense = operator_cost("aten::contiguous", [tensor, Operand.of(0)])
    copied = operator_cost("aten::contiguous", [turned, Operand.of(0)])
    assert dense is not None and copied is not None
    assert (dense.category, copied.category, copied.moved_bytes) == ("view", "copy", 192)
    assert operator_cost("aten::contiguous", [Operand((6, 4), "float32"), Operand.of(0)]) is None  # no strides
    flags = [Operand.of(False), Operand.of(False), Operand()]
    converted = operator_cost("aten::to", [tensor, Operand.of(15), *flags])
    kept = operator_cost("aten::to", [tensor, Operand.of(6), *flags])
    assert converted is not None and kept is not None
    assert (converted.moved_bytes, kept.category) == (24 * 6, "view")
    assert operator_cost("aten::to", [tensor, Operand(), Operand.of(6), *flags]) is None  # maybe to another device


# -- normalization, optimizers, collectives --------------------------------------------------------------------------


def test_normalizations() -> None:
    rows, channels = Operand((3, 7, 64), "float32"), Operand((64,), "float32")
    shape = Operand.of([64])
    n = 3 * 7 * 64
    cost = operator_cost("aten::layer_norm", [rows, shape, channels, channels])
    assert cost is not None and (cost.flops, cost.moved_bytes) == (5 * n + 6 * 64, 8 * n + 6 * 64 * 4)
    cost = operator_cost("aten::rms_norm", [rows, shape, channels, Operand()])
    assert cost is not None and (cost.flops, cost.moved_bytes) == (4 * n + 3 * 21, 8 * n + 64 * 4)
    image, per_channel = Operand((2, 5, 8, 8), "float32"), Operand((5,), "float32")
    n = 2 * 5 * 64
    for training, flops, vectors in ((True, 5 * n + 6 * 5, 6), (False, 2 * n + 4 * 5, 4)):
        cost = operator_cost("aten::native_batch_norm", [image, *[per_channel] * 4, Operand.of(training)])
        assert cost is not None and (cost.flops, cost.moved_bytes) == (flops, 8 * n + vectors * 5 * 4)
    statistics = Operand((3, 7, 1), "float32")
    mask = Operand.of([True, True, False])
    operands = [rows, rows, shape, statistics, statistics, channels, channels, mask]
    cost = operator_cost("aten::native_layer_norm_backward", operands)
    assert cost is not None and cost.written_bytes == (21 * 64 + 64) * 4
    assert operator_cost("aten::native_layer_norm_backward", [*operands[:-1], Operand()]) is None


def test_fused_optimizers_read_and_write_their_state() -> None:
    parameters = [Operand((64, 32), "float32"), Operand((32,), "float32")]
    n, steps = 64 * 32 + 32, [Operand((), "float32")] * 2
    settings_of = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    flags = [Operand.of(value) for value in settings_of.values()] + [Operand.of(False)] * 2
    lists = [parameters, parameters, parameters, parameters, [], steps]
    cost = operator_cost("aten::_fused_adamw_", [*lists, *flags, Operand(), Operand()])
    assert cost is not None and cost.category == "optimizer"
    assert (cost.flops, cost.read_bytes, cost.written_bytes) == (14 * n, 4 * n * 4 + 8, 3 * n * 4)
    adam = operator_cost("aten::_fused_adam_", [*lists, *flags, Operand(), Operand()])
    assert adam is not None and adam.flops == 15 * n
    sgd = [Operand.of(value) for value in (0.0, 0.9, 0.1, 0.0, False, False, False)]
    cost = operator_cost("aten::_fused_sgd_", [parameters, parameters, parameters, *sgd, Operand(), Operand()])
    assert cost is not None and (cost.flops, cost.read_bytes, cost.written_bytes) == (5 * n, 3 * n * 4, 2 * n * 4)
    # A list of more than 30 tensors is not recorded by Kineto.
    assert operator_cost("aten::_fused_adamw_", [parameters, [], *lists[2:], *flags, Operand(), Operand()]) is None


def test_collectives_move_their_buffers() -> None:
    small, large = Operand((4, 8), "bfloat16"), Operand((32, 8), "bfloat16")
    for name, operands, expected in (
        ("c10d::allreduce_", [[small, small]], (128, 128)),
        ("c10d::_allgather_base_", [large, small], (64, 512)),
        ("c10d::_reduce_scatter_base_", [small, large], (512, 64)),
        ("c10d::send", [[small]], (64, 0)),
        ("c10d::recv_", [[small]], (0, 64)),
        ("nccl:all_reduce", [small], (64, 64)),
        ("_c10d_functional::all_gather_into_tensor", [small, Operand.of(8), Operand.of("0")], (64, 512)),
        ("_c10d_functional::reduce_scatter_tensor", [large, Operand.of("sum"), Operand.of(8)], (512, 64)),
    ):
        cost = operator_cost(name, operands)
        assert cost is not None and cost.category == "collective"
        assert (cost.flops, cost.read_bytes, cost.written_bytes) == (0, *expected)


# -- what is not known -----------------------------------------------------------------------------------------------


def test_unknown_operators_and_annotations() -> None:
    tensor = Operand((4, 4), "float32")
    for name in ("aten::no_such_operator", "add", "linear", "my::mm", "AddmmBackward0", "", "aten::", "aten::__", "_"):
        assert operator_cost(name, [tensor, tensor]) is None
    assert resolve("aten::add_") == ("add", True)
    assert resolve("aten::add.out") == ("add", False)


def test_a_factor_of_zero_leaves_the_added_matrix_alone() -> None:
    """Megatron's scores: ``baddbmm`` into an empty buffer with beta 0."""
    buffer, one, other = (Operand(shape, "float16") for shape in ((32, 64, 64), (32, 64, 16), (32, 16, 64)))
    product = operator_cost("aten::bmm", [one, other])
    assert operator_cost("aten::baddbmm", [buffer, one, other, Operand.of(0.0), Operand.of(0.125)]) == product
    unrecorded = Operand(dtype="scalar")
    assert operator_cost("aten::baddbmm", [buffer, one, other, unrecorded, unrecorded]) is None
    bias = Operand((64,), "float16")
    added = operator_cost("aten::addmm", [bias, Operand((64, 16), "float16"), Operand((16, 64), "float16"), unrecorded])
    assert added is not None and added.flops == 2 * 64 * 16 * 64 + 64 * 64


def test_torchscript_records_its_whole_stack() -> None:
    """The operator's own arguments are the last ones."""
    weight, bias, one, other = (Operand(shape, "float32") for shape in ((9, 7), (9,), (82, 2048), (2048, 30)))
    assert operator_cost("aten::matmul", [weight, bias, one, other]) == operator_cost("aten::matmul", [one, other])
    assert operator_cost("aten::matmul", [bias, one, other]) is None  # the last might be where to write to
    assert operator_cost("aten::relu", [weight, one]) is None
    assert operator_cost("aten::sum", [weight] * 9) is None  # of two or four arguments


def test_sizes_of_damaged_files_are_not_believed() -> None:
    huge = Operand((2**40, 2**40), "float32")
    assert operator_cost("aten::relu", [huge]) is None
    assert operator_cost("aten::mm", [Operand((4, 5), "float32"), Operand((4, 5), "float32")]) is None
    assert operator_cost("aten::mm", [Operand((4, 5), "unknown"), Operand((5, 4), "unknown")]) is None


anything = st.one_of(
    st.builds(
        Operand,
        st.lists(st.sampled_from([0, 1, 2, 3, 8]), max_size=4).map(tuple),
        st.sampled_from(["float32", "bfloat16", "int64", "bool", "unknown", "complex64", "float8_e4m3fn"]),
        st.none() | st.lists(st.integers(0, 8), max_size=4).map(tuple),
    ),
    st.builds(
        Operand.of,
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.lists(st.integers(-2, 3)),
    ),
    st.just(Operand(dtype="scalar")),
    st.just(Operand(dtype="scalar list")),
)


@settings(max_examples=500)
@given(
    st.sampled_from(sorted(formulas())), st.booleans(), st.lists(anything | st.lists(anything, max_size=3), max_size=16)
)
def test_no_arguments_break_a_formula(name: str, in_place: bool, operands: list[Any]) -> None:
    full = name if ":" in name or name == "record_param_comms" else f"aten::{name}"
    cost = operator_cost(full + "_" * in_place, operands)
    assert cost is None or min(cost.flops, cost.read_bytes, cost.written_bytes) >= 0
    assert cost is None or cost.category in CATEGORIES


# -- tables about PyTorch --------------------------------------------------------------------------------------------


def overloads(name: str) -> Iterator[Any]:
    for form in (name, name + "_"):
        packet = getattr(aten, form, None)
        for overload in packet.overloads() if packet is not None else ():
            schema = getattr(packet, overload)._schema
            if any(str(one.type) in ("Tensor", "List[Tensor]", "Optional[Tensor]") for one in schema.arguments):
                yield schema


def test_numbers_of_arguments_are_those_of_pytorch() -> None:
    for name, (own, most) in arities().items():
        assert name in formulas()
        schemas = list(overloads(name))
        counts = {len(schema.arguments) for schema in schemas if not any(one.is_out for one in schema.arguments)}
        if counts and name not in ("zeros", "ones", "full", "rand", "randn"):
            named = {len(s.arguments) for s in schemas if any(str(one.type) == "str" for one in s.arguments)}
            assert counts - named <= set(own), name
            assert max(len(schema.arguments) for schema in schemas) <= most, name


SAME = {  # names of ours that bring several of PyTorch's together
    "one": {"mat1", "batch1", "mat"},
    "other": {"mat2", "batch2", "vec"},
    "mask": {"attn_mask", "attn_bias", "bias"},
    "grad_out": {"grad_out_", "grad_output", "dout"},
    "grad_output": {"grad"},
    "cum_seq_q": {"cu_seqlens_q"},
    "input": {"self"},
    "src": {"value", "src"},
    "source": {"value"},
    "save_invstd": {"save_var"},
}


def test_places_of_arguments_are_those_of_pytorch() -> None:
    """Every formula that asks by name finds what it asks for, in each overload of that many arguments."""
    checked = 0
    for name, (signature, _) in formulas().items():
        if not signature or ":" in name:
            continue
        names = signature.split()
        best = 0
        for schema in overloads(name):
            theirs = [one.name for one in schema.arguments]
            if len(theirs) >= len(names):
                fits = sum(
                    mine == other or other in SAME.get(mine, ()) for mine, other in zip(names, theirs, strict=False)
                )
                best = max(best, fits)
        if best or list(overloads(name)):
            assert best == len(names), (name, names, [[one.name for one in s.arguments] for s in overloads(name)])
            checked += 1
    assert checked > 70


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("float", "float32"),
        ("double", "float64"),
        ("long int", "int64"),
        ("long", "int64"),
        ("unsigned char", "uint8"),
        ("c10::BFloat16", "bfloat16"),
        ("c10::Half", "float16"),
        ("c10::complex<float>", "complex64"),
        ("c10::Float8_e4m3fn", "float8_e4m3fn"),
        ("Tensor(c10::Half)", "float16"),
        ("Tensor(nullptr (uninitialized))", ""),
        ("torch.bfloat16", "bfloat16"),
        ("BFloat16", "bfloat16"),
        ("Long", "int64"),
        ("Scalar", ""),
        ("", ""),
    ],
)
def test_spellings_of_element_types(text: str, expected: str) -> None:
    assert normalize_dtype(text) == expected
    if expected:
        assert element_bytes(text) == getattr(torch, expected).itemsize
    else:
        with pytest.raises(ValueError, match="no element type"):
            element_bytes(text)
