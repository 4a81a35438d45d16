"""Parts of the recorder, each by itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from foretrace.capture import execution_trace, job_file, statistics
from foretrace.capture.kernels import Watch, overloads
from foretrace.capture.matching import Call, elements_of, match
from foretrace.capture.windows import Action, parse_windows


@given(st.lists(st.integers(1, 6), min_size=2, max_size=6), st.integers(0, 3))
def test_windows_say_what_each_step_is(lengths: list[int], warmup: int) -> None:
    bounds = np.cumsum(lengths).tolist()
    ranges = [range(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=False)]
    windows = parse_windows(ranges, warmup)
    again = parse_windows(str(windows), warmup)
    for step in range(bounds[-1] + 2):
        inside = any(step in one for one in ranges)
        action = windows.action(step)
        assert again.action(step) is action
        assert (action in (Action.RECORD, Action.RECORD_LAST)) == inside
        assert (action is Action.RECORD_LAST) == any(step == one[-1] for one in ranges)
        assert inside or (action is Action.WARM_UP) == any(step < one[0] <= step + warmup for one in ranges)


def test_a_number_of_steps_leaves_one_to_compare_with() -> None:
    assert str(parse_windows(3, warmup=1)) == str(parse_windows("3", warmup=1)) == "3:6"
    assert str(parse_windows(None)) == str(parse_windows("all")) == "all"


def test_a_watch_changes_neither_results_nor_gradients_nor_recorded_calls() -> None:
    seen = []

    def look(operator: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        seen.append(operator)
        raise RuntimeError("must not reach the program")

    table, at = torch.randn(10, 4, requires_grad=True), torch.tensor([1, 1, 7])
    watch = Watch(overloads({"aten::embedding", "aten::index", "aten::embedding_dense_backward"}), look)
    expected = torch.autograd.grad(torch.embedding(table, at).square().sum(), table)[0]
    watch.install()
    try:
        with torch.profiler.profile() as profiler:
            gradient = torch.autograd.grad(torch.embedding(table, at).square().sum(), table)[0]
            with torch.inference_mode():
                torch.ones(4)[at % 4]
    finally:
        watch.remove()
    assert torch.equal(gradient, expected)
    assert seen == ["aten::embedding", "aten::embedding_dense_backward", "aten::index"]
    assert watch.failures == 3
    assert sum(event.name == "aten::embedding" for event in profiler.events()) == 1
    torch.embedding(table, at)
    assert len(seen) == 3


def test_fake_and_meta_tensors_pass_a_watch() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    watch = statistics.StatisticsWatch()
    watch.install()
    try:
        out = torch.embedding(torch.empty(10, 4, device="meta"), torch.empty(3, dtype=torch.int64, device="meta"))
        with FakeTensorMode():
            fake = torch.embedding(torch.empty(10, 4), torch.empty(3, dtype=torch.int64))
    finally:
        watch.remove()
    assert out.shape == fake.shape == (3, 4)
    assert len(watch.calls) >= 1
    assert all(statistics.document(call) == {} for call in watch.calls)
    assert watch.failures == 0


@given(st.lists(st.sampled_from("abc"), max_size=12), st.sets(st.integers(0, 11)))
def test_calls_are_matched_in_order(names: list[str], lost: set[int]) -> None:
    """Calls that the trace lacks stay without a node, and no pair differs in name or stands out of order."""
    calls = [Call(name, 1, (), None) for name in names]
    nodes = [at for at in range(len(names)) if at not in lost]
    found = match(calls, nodes, [(1, names[at], ()) for at in nodes])
    assert all(names[call] == names[node] for call, node in found.items())
    assert [found[call] for call in sorted(found)] == sorted(found.values())
    if not lost & set(range(len(names))):
        assert found == {at: at for at in range(len(names))}


def test_elements_of_nested_lists() -> None:
    value = [[torch.ones(2), torch.ones(3)], (torch.ones(0), None, 5), torch.ones(2, 2)]
    assert elements_of(value) == (2, 3, 4)


@given(st.lists(st.integers(-1000, 10**12), min_size=1, max_size=200))
def test_summary_of_integers(values: list[int]) -> None:
    found = statistics.summary(np.array(values, np.int64))
    assert (found["min"], found["max"], found["distinct"]) == (min(values), max(values), len(set(values)))
    assert sum(found["histogram"]) == len(values)
    assert 0 < found["top_shares"]["0.01"] <= found["top_shares"]["0.1"] <= 1
    assert found["zipf_exponent"] >= 0


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.5])
def test_zipf_exponent_is_found_again(exponent: float) -> None:
    counts = (1e7 * np.arange(1, 1001) ** -exponent).astype(np.int64)
    assert statistics.zipf_exponent(counts) == pytest.approx(exponent, abs=0.01)


def test_offsets() -> None:
    closed = statistics.offsets_summary(np.array([0, 2, 6, 8]), 8)  # with the end of the last bag
    assert (closed["pooling_mean"], closed["monotone"], closed["first"]) == (2.666667, True, 0)
    assert statistics.offsets_summary(np.array([0, 3, 2]), 4)["monotone"] is False


@given(st.text(st.characters(blacklist_categories=["Cs"]), max_size=20))
def test_names_that_pytorch_does_not_escape_are_mended(name: str) -> None:
    node = '{"id": 2, "name": "%s", "ctrl_deps": 1, "inputs": {"values": []}, "outputs": {"values": []}, "attrs": []}'
    trace = execution_trace.parse(f'{{"schema": "1.1.1", "nodes": [{node % name}]}}'.encode())
    if '", "ctrl_deps"' not in name:
        assert trace.problem == "" or "\\" in name
        assert "\\" in name or [one.name for one in trace.nodes.values()] == [name]


def test_no_json_stays_as_it_is() -> None:
    trace = execution_trace.parse(b'{"nodes": [{"id"')
    assert trace.problem
    assert trace.with_additions() == b'{"nodes": [{"id"'


def test_additions_leave_the_rest_alone() -> None:
    attribute = '{"name": "rf_id", "type": "uint64", "value": 5}'
    node = '{"id": 2, "name": "a", "ctrl_deps": 1, "inputs": {"values": []}, "outputs": {"values": []}, "attrs": [%s]}'
    text = f'{{"schema": "1.1.1", "nodes": [{node % attribute}], "finish_ts": 3}}'
    trace = execution_trace.parse(text.encode())
    assert trace.with_additions() == text.encode()
    trace.attributes[5].append({"name": "n", "type": "string", "value": 'a "b" \\1'})
    trace.members["storages"] = []
    found = json.loads(trace.with_additions())
    assert found["nodes"][0]["attrs"][1]["value"] == 'a "b" \\1'
    assert (found["storages"], found["finish_ts"]) == ([], 3)


def test_environment_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("TORCH_API_TOKEN", "hidden")
    monkeypatch.setenv("HOME_ADDRESS", "hidden")
    found = job_file.relevant_environment()
    assert found["NCCL_DEBUG"] == "INFO"
    assert "hidden" not in found.values()


def test_a_process_that_was_left_behind_does_not_replace_a_later_run(tmp_path: Path) -> None:
    assert job_file.claim(tmp_path, "old", 0, True) == 0
    assert job_file.claim(tmp_path, "new", 0, True) == 0
    assert job_file.is_taken_over(tmp_path, "old")
    assert not job_file.is_taken_over(tmp_path, "new")
    job_file.merge(tmp_path, "new", 0, {"files": {"et": "rank0.et.json.gz"}}, {"groups": [1]})
    job_file.merge(tmp_path, "old", 1, {}, {"groups": [2]})
    document = json.loads((tmp_path / "job.json").read_text())
    assert (list(document["ranks"]), document["groups"]) == (["0"], [1])


def test_ranks_that_do_not_know_their_number_take_the_next_free_one(tmp_path: Path) -> None:
    job_file.claim(tmp_path, "run", 0, False)
    document = json.loads((tmp_path / "job.json").read_text())
    document["ranks"]["0"]["pid"] = -1  # another process
    (tmp_path / "job.json").write_text(json.dumps(document))
    assert job_file.claim(tmp_path, "run", 0, False) == 1
    assert job_file.claim(tmp_path, "run", 0, True) == 0
