"""The page in a real browser, and the timeline for Perfetto."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foretrace
from foretrace.formats.perfetto import split_lanes
from foretrace.report.page import analysis_page, diff_page
from foretrace.report.summary import analysis, findings, without_nan
from foretrace.report.tracks import breakdown_slices, write_timeline
from tests.formats.builder import kernel, op, small_trace, write

EVIL = "</script><img src=x onerror=\"document.title='hacked'\">"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not binary or not driver:
        if os.environ.get("CI"):
            pytest.fail("chromium and chromedriver must be installed where CI is set")
        pytest.skip("chromium or chromedriver is not installed")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1400,2000"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    yield started
    started.quit()


def job_with(tmp_path: Path, *extra: dict[str, Any]) -> foretrace.Job:
    for rank in range(2):
        trace = small_trace(rank, 2, late=100.0 * rank)
        trace["traceEvents"] += extra
        write(tmp_path / f"rank{rank}.json", trace)
    return foretrace.read(tmp_path)


def opened(browser: Any, path: Path, text: str) -> list[str]:
    """Load a page; returns the addresses it asked for besides itself."""
    path.write_text(text)
    browser.get_log("performance")
    browser.get(path.as_uri())
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    return [url for url in asked if url != path.as_uri() and not url.startswith(("data:", "blob:"))]


@pytest.mark.browser
def test_page_draws_sorts_and_escapes(tmp_path: Path, browser: Any) -> None:
    job = job_with(tmp_path, kernel(EVIL, 700, 50, 99), op(EVIL, 700, 50))
    text = analysis_page(job, analysis(job))
    assert len(text) < 8_000_000
    assert opened(browser, tmp_path / "report.html", text) == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert browser.title == "Foretrace: Where the time goes"
    assert browser.execute_script("return document.querySelectorAll('.plot svg.main-svg').length") >= 8
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0
    assert EVIL in browser.execute_script("return document.body.innerText")
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    column = "return [...document.querySelectorAll('table')].pop().querySelectorAll('th')[2].click()"
    values = (
        "return [...[...document.querySelectorAll('table')].pop().tBodies[0].rows].map(r => +r.cells[2].dataset.value)"
    )
    browser.execute_script(column)
    down = browser.execute_script(values)
    browser.execute_script(column)
    up = browser.execute_script(values)
    assert down == sorted(down, reverse=True) and up == sorted(up) and len(up) > 2


@pytest.mark.browser
def test_diff_page(tmp_path: Path, browser: Any) -> None:
    before = job_with(tmp_path)
    (tmp_path / "after").mkdir()
    after = job_with(tmp_path / "after", kernel(EVIL, 700, 50, 99))
    changes = without_nan(foretrace.analyze.diff(before, after).to_pylist())
    text = diff_page({"before": EVIL, "after": "b", "changes": changes})
    assert opened(browser, tmp_path / "diff.html", text) == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert browser.title == "Foretrace: What changed"


@pytest.mark.browser
def test_page_of_an_empty_job_and_of_many_ranks(tmp_path: Path, browser: Any) -> None:
    empty = foretrace.read(write(tmp_path / "empty.json", {"schemaVersion": 1, "traceEvents": []}))
    assert "no time to break down" in findings(analysis(empty))[0]
    opened(browser, tmp_path / "empty.html", analysis_page(empty, analysis(empty)))
    folder = tmp_path / "many"
    folder.mkdir()
    for rank in range(300):
        write(folder / f"rank{rank}.json", small_trace(rank, 300, late=float(rank % 7)))
    job = foretrace.read(folder)
    text = analysis_page(job, analysis(job))
    assert len(text) < 8_000_000
    opened(browser, tmp_path / "many.html", text)
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_perfetto_file_reads_back(tmp_path: Path) -> None:
    job = job_with(tmp_path, op("crosses", 300, 2000, tid=1))
    for name in ("timeline.json", "timeline.json.gz"):
        path = tmp_path / "out" / name
        path.parent.mkdir(exist_ok=True)
        write_timeline(job, analysis(job), path)
        data = path.read_bytes()
        events = json.loads(gzip.decompress(data) if name.endswith("gz") else data)["traceEvents"]
        again = foretrace.read(path).timelines[0]
        ours = [event for event in events if event.get("cat") == "foretrace"]
        assert {"compute", "exposed communication", "transfer", "waiting for the last rank"} <= {
            e["name"] for e in ours
        }
        assert again.num_events == sum(timeline.num_events for timeline in job) + len(ours)
        busy = sum(event["dur"] for event in events if event.get("cat") == "kernel")
        assert busy * 1000 == pytest.approx(sum(int(t.duration_ns[t.device_rows].sum()) for t in job))
        assert sum(event["ph"] == "s" for event in events) == 8
        assert_nested(events)


def assert_nested(events: list[dict[str, Any]]) -> None:
    """Slices of one track follow each other or nest: Perfetto drops others."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        stack: list[float] = []
        for start, end in sorted(slices, key=lambda pair: (pair[0], -pair[1])):
            while stack and stack[-1] <= start + 1e-6:
                stack.pop()
            assert not stack or end <= stack[-1] + 1e-6
            stack.append(end)


def test_lanes_are_split(tmp_path: Path) -> None:
    start, end = np.array([0, 5, 6, 20]), np.array([10, 15, 8, 30])
    assert split_lanes(start, end).tolist() == [0, 1, 0, 0]


def test_breakdown_track_adds_up(tmp_path: Path) -> None:
    timeline = job_with(tmp_path).timelines[1]
    slices = breakdown_slices(timeline)
    row = foretrace.analyze.breakdown(timeline).to_pylist()[0]
    assert sum(end - start for _, start, end, _ in slices) == row["span_ns"]
    assert sum(end - start for name, start, end, _ in slices if name.startswith("idle")) == row["idle_ns"]
