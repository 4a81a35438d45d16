"""Inferred waits between streams, against programs whose waits are known."""

from __future__ import annotations

import numpy as np
import pytest

from foretrace.link.device import device_work
from foretrace.link.waits import event_waits
from foretrace.trace import Category
from tests.link.synthetic import SCENARIOS, Known, Score


def found_in(known: Known) -> np.ndarray:
    work = device_work(known.timeline)
    waits = event_waits(work)
    return np.stack((work.event[waits.source], work.event[waits.target]), axis=1)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_programs_are_what_they_say(scenario) -> None:
    known, again = scenario(3), scenario(3)
    timeline, waits = known.timeline, known.waits
    assert np.array_equal(waits, again.waits)
    assert np.array_equal(timeline.start_ns, again.timeline.start_ns)
    assert (timeline.end_ns[waits[:, 0]] <= timeline.start_ns[waits[:, 1]]).all()
    lane = timeline.events["lane"]
    assert (lane[waits[:, 0]] != lane[waits[:, 1]]).all()
    assert np.isin(timeline.category[waits], (Category.KERNEL, Category.MEMCPY)).all()
    assert (timeline.launch_row[waits] >= 0).all()
    hidden = scenario(3, with_calls=False)
    assert "cudaStreamWaitEvent" not in hidden.timeline.names(np.arange(hidden.timeline.num_events))
    assert hidden.waits.shape == waits.shape


@pytest.mark.parametrize("with_calls", [True, False], ids=["calls", "no calls"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_hidden_waits_are_found(scenario, with_calls: bool) -> None:
    score = Score()
    for seed in range(3):
        known = scenario(seed, with_calls=with_calls)
        score.add(known, found_in(known))
    assert score.true > 20
    assert score.precision >= 0.95, score
    assert score.recall >= 0.95, score


@pytest.mark.slow
@pytest.mark.parametrize("with_calls", [True, False], ids=["calls", "no calls"])
def test_ten_thousand_hidden_waits_are_found(with_calls: bool) -> None:
    total, seed = Score(), 100
    while total.true < 10_000:
        for scenario in SCENARIOS:
            known = scenario(seed, with_calls=with_calls)
            total.add(known, found_in(known))
        seed += 1
    assert min(total.precision, total.recall) >= 0.95, total


def test_waits_of_a_single_step_are_found() -> None:
    score = Score()
    for scenario in SCENARIOS:
        known = scenario(7, steps=1)
        score.add(known, found_in(known))
    assert score.precision >= 0.95, score
    assert score.recall >= 0.9, score
