"""Tables of costs: over traces that PyTorch writes here and now, over recorded ones, and over small ones by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import foretrace
import foretrace.machine.cost_tables as cost_tables
from foretrace.formats.pytorch_et import read_operators
from foretrace.machine import Operand, operator_cost, timeline_costs, trace_argument, trace_costs
from foretrace.machine.operands import Unknown, kineto_arguments, split_types
from foretrace.trace import StringTable, Table, Timeline
from foretrace.trace.operators import OperatorTrace
from tests.formats.builder import op
from tests.machine.calls import NUMBERS

# -- traces that PyTorch writes here and now -------------------------------------------------------------------------


def record(folder: Path, run: Callable[[], None]) -> tuple[Timeline, OperatorTrace]:
    """The same run as Kineto and as execution trace."""
    observer = ExecutionTraceObserver().register_callback(str(folder / "et.json"))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, execution_trace_observer=observer) as profiler:
        run()
    profiler.export_chrome_trace(str(folder / "kineto.json"))
    return foretrace.read(folder / "kineto.json").timelines[0], read_operators(folder / "et.json")


def totals(table: Table, category: str = "") -> tuple[int, int, int]:
    """FLOPs, bytes read and bytes written of the outermost operators."""
    chosen = table["is_outermost"].copy()
    if category:
        chosen &= table["category"] == table.strings["category"].find(category)
    return tuple(int(table[name][chosen].sum()) for name in ("flops", "read_bytes", "written_bytes"))  # type: ignore[return-value]


def test_a_profiled_step_has_the_operations_that_the_flop_counter_counts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, second = torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.Linear(8, 24, bias=False)
    image = torch.randn(2, 3, 16, 16)

    def run() -> None:
        tokens = first(image).flatten(2).transpose(1, 2)
        query, key, value = second(tokens).view(2, 196, 3, 2, 4).permute(2, 0, 3, 1, 4)
        ((query @ key.transpose(-1, -2)).softmax(-1) @ value).sum().backward()

    with FlopCounterMode(display=False) as counter:
        run()
    timeline, trace = record(tmp_path, run)
    for table in (timeline_costs(timeline), trace_costs(trace)):
        products = totals(table, "gemm")[0] + totals(table, "convolution")[0]
        assert products == counter.get_total_flops() > 0
    # Both records of one run say the same about all that both know.
    for category in ("gemm", "convolution", "softmax", "reduction"):
        assert totals(timeline_costs(timeline), category) == totals(trace_costs(trace), category)


def test_attention_of_a_profiled_step(tmp_path: Path) -> None:
    query = torch.randn(2, 4, 32, 16, requires_grad=True)

    def run() -> None:
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).square().sum().backward()

    timeline, trace = record(tmp_path, run)
    forward = 2 * 4 * 32 * 32 * 16 * 4 // 2
    for table in (timeline_costs(timeline), trace_costs(trace)):
        flops, read, written = totals(table, "attention")
        assert flops == forward + forward * 5 // 2
        size = query.numel() * 4
        assert (read, written) == ((3 + 5) * size, (1 + 3) * size)


def test_numbers_of_types_are_those_that_pytorch_records(tmp_path: Path) -> None:
    tensor = torch.zeros(4, dtype=torch.int32)

    def run() -> None:
        for dtype in NUMBERS:
            tensor.to(dtype)

    timeline, _ = record(tmp_path, run)
    table = timeline_costs(timeline)
    names = timeline.names(table["event"])
    written = [size for name, size in zip(names, table["written_bytes"].tolist(), strict=True) if name == "aten::to"]
    assert written == [4 * dtype.itemsize for dtype in NUMBERS]
    operators = timeline.operators
    rows = [at for at, name in enumerate(timeline.names(operators["event"])) if name == "aten::_to_copy"]
    recorded = [int(json.loads(operators.texts("concrete_inputs")[at])[1]) for at in rows]
    assert recorded == list(NUMBERS.values())


def test_a_fused_optimizer_is_told_by_the_execution_trace(tmp_path: Path) -> None:
    model = torch.nn.Linear(32, 16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(4, 32)).sum().backward()
    timeline, trace = record(tmp_path, optimizer.step)
    n = 32 * 16 + 16
    flops, read, written = totals(trace_costs(trace), "optimizer")
    assert flops >= 14 * n and written >= 3 * n * 4 and read >= 4 * n * 4
    assert totals(timeline_costs(timeline), "optimizer") == (0, 0, 0)  # Kineto records no types in lists
    assert totals(timeline_costs(timeline, list_dtype="float32"), "optimizer") == (flops, read, written)


# -- recorded traces -------------------------------------------------------------------------------------------------


def test_both_records_of_a_megatron_step_agree(shared: Path) -> None:
    folder = shared / "traces" / "megatron-tp8-a100"
    of_timeline = timeline_costs(foretrace.read(folder / "kineto" / "rank0.json.gz").timelines[0])
    of_trace = trace_costs(read_operators(folder / "et" / "rank0.json.gz"))
    assert totals(of_timeline, "gemm") == totals(of_trace, "gemm")
    flops = totals(of_trace, "gemm")[0]
    assert flops > 10**13
    print(f"{flops / 1e12:.2f} TFLOP in a step")


def test_resnet_50_has_the_operations_that_its_layers_have(shared: Path) -> None:
    """4.09 billion products an image in all convolutions, forward; backward twice as many but for the first layer."""
    trace = read_operators(shared / "traces" / "pytorch-et" / "resnet-1gpu-1.1.1.json.gz")
    table = trace_costs(trace)
    names = np.array(trace.names(table["node"]))
    layers = []  # (in, out, kernel, size of the result)
    layers.append((3, 64, 7, 112))
    inner = 64
    for width, size, blocks in ((64, 56, 3), (128, 28, 4), (256, 14, 6), (512, 7, 3)):
        for block in range(blocks):
            before = size if block or width == 64 else 2 * size
            layers += [(inner, width, 1, before), (width, width, 3, size), (width, 4 * width, 1, size)]
            if not block:
                layers.append((inner, 4 * width, 1, size))
            inner = 4 * width
    forward = [2 * 32 * a * b * k * k * size * size for a, b, k, size in layers]
    steps = np.count_nonzero(names == "aten::cudnn_convolution") / len(layers)
    assert steps == 3
    assert table["flops"][names == "aten::cudnn_convolution"].sum() == steps * sum(forward)
    assert table["flops"][names == "aten::convolution_backward"].sum() == steps * (2 * sum(forward) - forward[0])


@pytest.mark.parametrize("name", ["h100-Qwen_Qwen1.5-0.5B-Chat", "mi300-gaunernst_bert-small-uncased"])
def test_outermost_operators_hold_all_leaves_once(shared: Path, name: str) -> None:
    """FLOPs of GEMMs by their outermost operators (``linear``) are those of the products that were dispatched."""
    timeline = foretrace.read(shared / "traces" / "h100-mi300-pairs" / f"{name}.json.gz").timelines[0]
    table = timeline_costs(timeline)
    names = np.array(timeline.names(table["event"]))
    leaves = np.isin(names, ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"))
    assert totals(table, "gemm")[0] == table["flops"][leaves].sum() > 0


# -- by hand ---------------------------------------------------------------------------------------------------------


def shapes(*dims: Any, types: list[str], concrete: list[str] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"Input Dims": list(dims), "Input type": types}
    return found if concrete is None else {**found, "Concrete Inputs": concrete}


def read_events(folder: Path, events: list[dict[str, Any]]) -> Timeline:
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return foretrace.read(path).timelines[0]


LINEAR = shapes([4, 8], [16, 8], [16], types=["float"] * 3)
ADDMM = shapes([16], [4, 8], [8, 16], [], [], types=["float"] * 3 + ["Scalar"] * 2, concrete=["", "", "", "1", "1"])


def test_rows_categories_and_nesting(tmp_path: Path) -> None:
    timeline = read_events(
        tmp_path,
        [
            op("aten::linear", 0, 100, **LINEAR),
            op("aten::t", 1, 10, **shapes([16, 8], types=["float"])),
            op("aten::addmm", 20, 50, **ADDMM),
            op("mine::op", 200, 100, **LINEAR),
            op("aten::addmm", 220, 50, **ADDMM),
            op("aten::relu", 225, 10, **shapes([4, 16], types=["float"])),
            op("aten::relu", 0, 400, tid=2, **shapes([4, 16], types=["float"])),
            {**op("aten::relu", 500, 10, **shapes([4, 16], types=["float"])), "cat": "user_annotation"},
        ],
    )
    table = timeline_costs(timeline)
    assert table["event"].tolist() == [0, 1, 2, 4, 5, 6]
    assert table["event"].dtype == table["flops"].dtype == np.int64
    assert table.texts("category") == ["gemm", "view", "gemm", "gemm", *["elementwise_unary"] * 2]
    assert table["flops"].tolist() == [1088, 0, 1088, 1088, 64, 64]
    assert table["is_outermost"].tolist() == [True, False, False, True, False, True]
    expected = operator_cost("aten::linear", [Operand(shape, "float32") for shape in ((4, 8), (16, 8), (16,))])
    assert expected is not None
    assert (table["read_bytes"][0], table["written_bytes"][0]) == (expected.read_bytes, expected.written_bytes)
    assert timeline_costs(read_events(tmp_path, [op("aten::none", 0, 1)])).num_rows == 0


def test_each_distinct_call_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counting(name: str, *args: Any) -> Any:
        calls.append(name)
        return operator_cost(name, *args)

    monkeypatch.setattr(cost_tables, "operator_cost", counting)
    events = [op("aten::relu", 10 * at, 5, **shapes([at % 7], types=["float"])) for at in range(700)]
    table = timeline_costs(read_events(tmp_path, events))
    assert len(calls) == 7
    assert table["flops"].tolist() == [at % 7 for at in range(700)]
    calls.clear()
    trace = hand_made([("aten::relu", -1, [("I", "Tensor(float)", f"[{at % 7}]", "", "[1]")]) for at in range(70)])
    assert trace_costs(trace)["flops"].tolist() == [at % 7 for at in range(70)]
    assert len(calls) == 7


def test_collectives_are_told_by_their_metadata(tmp_path: Path) -> None:
    def collective(ts: float, dtype: str, inside: int, outside: int) -> dict[str, Any]:
        metadata = {
            "Collective name": "_allgather_base",
            "dtype": dtype,
            "In msg nelems": inside,
            "Out msg nelems": outside,
        }
        return op("record_param_comms", ts, 10, **shapes([[9]], types=["TensorList"]), **metadata)

    events = [collective(0, "BFloat16", 100, 800), collective(20, "Nonsense", 1, 8), collective(40, "Byte", 0, 0)]
    events.append({**events[0], "cat": "kernel", "name": "ncclDevKernel", "ts": 100})
    table = timeline_costs(read_events(tmp_path, events))
    assert table["event"].tolist() == [0, 2]
    assert table.texts("category") == ["collective"] * 2
    assert (table["read_bytes"].tolist(), table["written_bytes"].tolist()) == ([200, 0], [1600, 0])
    assert table["flops"].tolist() == [0, 0]


def test_types_in_lists_are_assumed_only_when_asked_for(tmp_path: Path) -> None:
    short = shapes([[4], [6]], [], types=["TensorList", "Scalar"], concrete=["", "0"])
    cut = shapes([], [], types=["TensorList", "Scalar"], concrete=["", "0"])  # more than 30 tensors
    timeline = read_events(tmp_path, [op("aten::cat", 0, 1, **short), op("aten::cat", 5, 1, **cut)])
    assert timeline_costs(timeline).num_rows == 0
    table = timeline_costs(timeline, list_dtype="c10::Half")
    assert (table["event"].tolist(), table["read_bytes"].tolist()) == ([0], [20])
    with pytest.raises(ValueError, match="no element type"):
        timeline_costs(timeline, list_dtype="Tensor")


Argument = tuple[str, str, str, str, str]


def hand_made(nodes: list[tuple[str, int, list[Argument]]]) -> OperatorTrace:
    """A trace of (name, parent, arguments), an argument being ("I" or "O", type, shape, strides, value)."""
    strings = StringTable()
    columns: dict[str, list[Any]] = {name: [] for name in ("node", "is_output", "type", "shape", "strides", "value")}
    for at, (_, _, arguments) in enumerate(nodes):
        for kind, *texts in arguments:
            columns["node"].append(at)
            columns["is_output"].append(kind == "O")
            for name, text in zip(("type", "shape", "strides", "value"), texts, strict=True):
                columns[name].append(strings.intern(text))
    names = strings.intern_all([name for name, _, _ in nodes])
    table = {name: np.array(values, np.int32 if name != "is_output" else np.bool_) for name, values in columns.items()}
    parents = np.array([parent for _, parent, _ in nodes], np.int32)
    return OperatorTrace(
        Table({"name": names, "parent": parents}, {"name": strings}),
        Table(table, dict.fromkeys(("type", "shape", "strides", "value"), strings)),
        Table({}),
        strings,
    )


def test_an_operator_trace_by_hand() -> None:
    half, out = "Tensor(c10::Half)", ("O", "Tensor(float)", "[4, 16]", "", "[9]")
    one, other = ("I", half, "[4, 8]", "", "[1]"), ("I", half, "[8, 16]", "[1, 8]", "[2]")
    trace = hand_made(
        [
            ("my annotation", -1, []),
            ("aten::matmul", 0, [one, other, out]),
            ("aten::mm", 1, [one, other, out]),
            ("aten::mm", 0, [one, ("I", half, "[8, 16]", "[1, 8]", "[77]"), ("O", half, "[4, 16]", "", "[9]")]),
            (
                "aten::add_",
                0,
                [("I", "Tensor(nullptr (uninitialized))", "[]", "", ""), one, ("I", "Int", "[]", "", "1")],
            ),
            ("aten::cat", 0, [("I", "GenericList[Tensor(float),Tensor(float)]", "[[4],[2]]", "", ""), out]),
            ("aten::mm", 0, [one, ("I", half, "[broken", "", "[2]"), out]),
        ]
    )
    table = trace_costs(trace)
    assert table["node"].tolist() == [1, 2, 3, 5]
    assert table["flops"].tolist() == [1024, 1024, 1024, 0]
    assert table["written_bytes"].tolist() == [256, 256, 128, 256]  # as recorded, not as computed
    assert table["read_bytes"].tolist() == [320, 320, 320, 24]
    assert table["is_outermost"].tolist() == [True, False, True, True]
    assert trace_costs(hand_made([])).num_rows == 0


# -- arguments -------------------------------------------------------------------------------------------------------


def test_arguments_as_kineto_writes_them() -> None:
    found = kineto_arguments(
        "[[4,8],[],[[2],[3]],[],[],[2,2]]",
        '["c10::BFloat16","Scalar","TensorList","ScalarList","","some_type"]',
        "[[8,1],[],[[1],[1]],[],[],[2,1]]",
        '["","0.5","","[True, False]","",""]',
    )
    assert found == [
        Operand((4, 8), "bfloat16", (8, 1)),
        Operand.of(0.5),
        (Operand((2,), "unknown", (1,)), Operand((3,), "unknown", (1,))),
        Operand.of([True, False]),
        Operand(),
        Operand((2, 2), "unknown", (2, 1)),
    ]
    older = kineto_arguments("[[4],[]]", '["float","GenericList"]', "", "")
    assert older == [Operand((4,), "float32"), Operand(dtype="scalar list")]


@given(st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=5), st.lists(st.integers(-3, 3))), max_size=4))
def test_damaged_arguments_are_unknown(values: list[Any]) -> None:
    text = json.dumps(values)
    for texts in ((text, text, text, text), (text, '["float","float"]', "", ""), (text[:-1], text, "", "")):
        try:
            found = kineto_arguments(*texts)
        except Unknown:
            continue
        assert len(found) == len(json.loads(texts[0]))
    for kind in ("Tensor(float)", "GenericList[Tensor(float)]", "GenericList[Int]", "Int", "None", "Tensor(x)"):
        try:
            argument = trace_argument(kind, text, text, text[1:])
        except Unknown:
            continue
        assert isinstance(argument, Operand | tuple)


def test_arguments_as_execution_traces_write_them() -> None:
    assert trace_argument("Tensor(c10::BFloat16)", "[2,3]", "[3,1]", "[1,2]") == Operand((2, 3), "bfloat16", (3, 1))
    assert trace_argument("Tensor(nullptr (uninitialized))", "[]", "", "") == Operand()
    assert trace_argument("GenericList[Int,Int]", "[[],[]]", "", "[1,2]") == Operand.of([1, 2])
    assert trace_argument("Double", "[]", "", "-0.010000") == Operand.of(-0.01)
    assert trace_argument("Bool", "[]", "", "false") == Operand.of(False)
    nested = "GenericList[GenericList[Tensor(float),Tensor(c10::complex<float>)],Tensor(nullptr (uninitialized))]"
    assert split_types(nested)[1] == "Tensor(nullptr (uninitialized))"
    assert trace_argument(nested, "[[[1],[2]],[]]", "", "") == (
        Operand((1,), "float32"),
        Operand((2,), "complex64"),
        Operand(),
    )
