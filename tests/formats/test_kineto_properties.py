"""Properties of the reader: it agrees with ``json``, and mutated files give a result or a clear error."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import foretrace
from foretrace.formats import sources
from foretrace.trace import FormatError
from tests.formats.builder import call, kernel, op, small_trace, write

names = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
numbers = st.one_of(st.integers(0, 10**15), st.floats(0, 1e9, allow_nan=False).map(lambda value: round(value, 3)))
extras = st.dictionaries(
    st.text(max_size=8), st.recursive(st.none() | st.booleans() | numbers | names, st.lists, max_leaves=4), max_size=3
)


@st.composite
def events(draw: st.DrawFn) -> dict[str, Any]:
    phase = draw(st.sampled_from(["X", "X", "X", "X", "s", "f", "M", "i"]))
    cat = draw(st.sampled_from(["cpu_op", "kernel", "cuda_runtime", "user_annotation", "gpu_memcpy", "odd", "Kernel"]))
    event = {"ph": phase, "cat": cat, "name": draw(names), "pid": draw(st.integers(0, 9)), "ts": draw(numbers)}
    event |= {"tid": draw(st.one_of(st.integers(0, 9), names)), "args": draw(extras)}
    if phase == "X":
        event["dur"] = draw(st.one_of(st.integers(0, 10**6), st.floats(0, 1e5).map(lambda value: round(value, 3))))
    if phase in "sf":
        event["id"] = draw(st.integers(0, 2**40))
    order = draw(st.permutations(sorted(event)))
    return {key: event[key] for key in order}


@given(
    st.lists(events(), max_size=12), st.sampled_from([None, 0, 1, 4]), st.booleans(), st.sampled_from([None, 64, 300])
)
def test_reading_agrees_with_json(
    tmp_path_factory: pytest.TempPathFactory,
    trace: list[dict[str, Any]],
    indent: int | None,
    ascii_: bool,
    block: int | None,
) -> None:
    path = tmp_path_factory.mktemp("t") / "rank0.json"
    write(path, json.dumps({"traceEvents": trace}, indent=indent, ensure_ascii=ascii_).encode())
    with pytest.MonkeyPatch.context() as patch:
        if block:
            patch.setattr(sources, "BLOCK_BYTES", block)
        timeline = foretrace.read(path).timelines[0]
    complete = [event for event in trace if event["ph"] == "X"]
    timed = [event for event in complete if not (event["ts"] == 0 and event["dur"] == 0)]
    assert timeline.report.phases == Counter(event["ph"] for event in trace)
    assert timeline.report.events == Counter(event["cat"] for event in complete)
    wanted = [(event["name"], round(event["ts"] * 1000), round(event["dur"] * 1000)) for event in timed]
    zero = [
        e for e in complete if e["ts"] == 0 and e["dur"] == 0 and e["cat"] not in ("kernel", "gpu_memcpy", "Kernel")
    ]
    wanted += [(event["name"], 0, 0) for event in zero]
    rows = zip(timeline.events.texts("name"), timeline.start_ns.tolist(), timeline.duration_ns.tolist(), strict=True)
    assert sorted(rows) == sorted(wanted)


BASES: list[Any] = [
    small_trace(),
    small_trace(1, 2),
    [op("a", 1, 2), kernel("k", 3, 1.5, 4), call("cudaLaunchKernel", 2, 1, 4)],
    {
        "traceEvents": [{"ph": "C", "name": "c", "ts": 1, "args": {"v": 2}}, op("é\\n", 1, 1)],
        "baseTimeNanoseconds": 10**18,
    },
]


def mutants(seed: int, count: int) -> Any:
    """Files with flipped, lost, added, repeated and swapped bytes, some of them gzip."""
    rng = random.Random(seed)
    texts = [json.dumps(base, indent=indent).encode() for base in BASES for indent in (None, 1)]
    spice = [
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"\\",
        b"\x00",
        b"\xff",
        b"NaN",
        b"1e999",
        b"-",
        b"9" * 30,
        b"\\ud800",
    ]
    for number in range(count):
        text = bytearray(rng.choice(texts))
        zipped = number % 7 == 0
        if zipped:
            text = bytearray(gzip.compress(bytes(text), 1))
        for _ in range(rng.choice((1, 1, 2, 5))):
            at, length = rng.randrange(len(text) + 1), rng.choice((1, 1, 2, 8, 64))
            what = rng.randrange(6)
            if what == 0:
                text[at : at + length] = b""
            elif what == 1:
                text[at:at] = rng.choice(spice)
            elif what == 2:
                text[at : at + 1] = bytes([rng.randrange(256)])
            elif what == 3:
                text[at:at] = text[max(0, at - length) : at]
            elif what == 4:
                text[at:] = b""
            else:
                text[at : at + len(spice[0])] = rng.choice(spice)
        yield bytes(text)


def check_mutants(folder: Path, seed: int, count: int) -> Counter[str]:
    """Each gives a job whose breakdown adds up, or a one-line format error; anything else raises."""
    path = folder / "rank0.json"
    outcome: Counter[str] = Counter()
    for number, text in enumerate(mutants(seed, count)):
        path.write_bytes(text)
        try:
            job = foretrace.read(path)
            if number % 5 == 0:
                check_analysis(job)
            outcome["read"] += 1
        except FormatError as error:
            assert "\n" not in str(error) and str(path) in str(error)
            outcome["refused"] += 1
        except BaseException:
            (folder / "culprit.json").write_bytes(text)
            raise
    return outcome


def check_analysis(job: foretrace.Job) -> None:
    parts = foretrace.analyze.breakdown(job).to_pylist()[0]
    rank, span = parts.pop("rank"), parts.pop("span_ns")
    assert rank == job.ranks[0] and sum(parts.values()) == span and min(parts.values()) >= 0
    idle = sum(row["idle_ns"] for row in foretrace.analyze.idle_causes(job).to_pylist() if row["step"] == -1)
    assert idle == parts["idle_ns"]
    foretrace.analyze.operators(job)
    foretrace.analyze.kernels(job)
    foretrace.analyze.collective_summary(job)
    foretrace.analyze.launches(job)


def test_mutated_files(tmp_path: Path) -> None:
    outcome = check_mutants(tmp_path, seed=1, count=2_000)
    assert outcome["read"] > 1_000


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_hundred_thousand_mutated_files(tmp_path: Path) -> None:
    outcome = check_mutants(tmp_path, seed=2, count=100_000)
    assert outcome["read"] > 50_000


def test_shared_traces_agree_with_json(shared: Path) -> None:
    """Every Kineto file: counts by phase and category, and every start and duration."""
    files = sorted((shared / "traces").rglob("*.json.gz"))
    read = 0
    for file in files:
        trace = (
            json.loads(gzip.decompress(file.read_bytes()).split(b"\x00")[0], strict=False)
            if "pytorch-et" not in str(file)
            else {}
        )
        found = trace if isinstance(trace, list) else trace.get("traceEvents")
        if found is None:
            with pytest.raises(FormatError):
                foretrace.read(file)
            continue
        timeline = foretrace.read(file).timelines[0]
        complete = [event for event in found if event["ph"] == "X"]
        assert timeline.report.phases == Counter(event["ph"] for event in found), file
        assert timeline.report.events == Counter(event.get("cat", "") for event in complete), file
        kept = [event for event in complete if event["cat"] != "Trace"]
        assert timeline.num_events == len(kept), file
        duration = np.array([round(event["dur"] * 1000) for event in kept])
        np.testing.assert_array_equal(timeline.duration_ns, duration)
        base = 0 if isinstance(trace, list) else trace.get("baseTimeNanoseconds", 0)
        start = np.array([event["ts"] for event in kept])
        error = np.abs((timeline.start_ns - base) / 1000 - start)
        assert float(error.max()) <= np.spacing(start.max()), file  # json's floats lose nanoseconds, ours do not
        read += 1
    assert read >= 35
