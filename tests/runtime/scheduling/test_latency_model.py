from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.runtime import Latency
from ingot.runtime.scheduling.latency_model import Latencies

PAYS = {1: 0.004, 2: 0.0045, 4: 0.005, 8: 0.006, 16: 0.009, 32: 0.015}

Seconds = st.floats(1e-6, 1.0)
Profile = st.dictionaries(st.integers(1, 200), Seconds, max_size=8)
Calls = st.lists(st.tuples(st.integers(1, 300), Seconds), max_size=60)


@pytest.mark.matrix
@given(profile=Profile, calls=Calls, sure=st.booleans())
def test_more_rows_are_never_expected_to_take_less(
    profile: dict[int, float], calls: list[tuple[int, float]], sure: bool
) -> None:
    latency = Latency(profile, sure=sure)
    for samples, seconds in calls:
        latency.learn(samples, seconds)
    expected = [latency(samples) for samples in range(1, 400)]
    assert all(before <= after * (1 + 1e-9) for before, after in pairwise(expected))
    assert 1 <= latency.best(64) <= 64
    assert len(latency.known) <= 8 + 10


@pytest.mark.matrix
@given(profile=Profile, calls=Calls, seconds=Seconds)
def test_a_batch_that_fits_a_time_does_not_exceed_it(
    profile: dict[int, float], calls: list[tuple[int, float]], seconds: float
) -> None:
    latency = Latency(profile)
    for samples, taken in calls:
        latency.learn(samples, taken)
    samples = latency.within(seconds)
    if samples and latency.known:
        assert latency(samples) <= seconds * (1 + 1e-9)
        assert latency(samples + 2) >= seconds * (1 - 1e-9)


def test_a_stall_changes_little() -> None:
    latency = Latency(PAYS)
    latency.learn(8, 60.0)
    assert latency(8) < 1.1 * PAYS[8]
    assert latency.best(32) == 32


def test_a_machine_that_is_often_disturbed_is_known_by_its_usual_speed() -> None:
    latency = Latency(PAYS)
    noise = random.Random(1)
    for _ in range(2000):
        latency.learn(8, PAYS[8] * noise.uniform(0.95, 1.05) * (50 if noise.random() < 0.05 else 1))
    assert latency(8) == pytest.approx(PAYS[8], rel=0.1)


def test_a_machine_that_slows_down_does_so_at_sizes_that_are_not_seen() -> None:
    latency = Latency(PAYS)
    for _ in range(100):
        latency.learn(32, 3 * PAYS[32])
    assert latency(32) == pytest.approx(3 * PAYS[32], rel=0.05)
    assert latency(1) > 1.5 * PAYS[1]


def test_a_size_that_was_measured_wrong_is_corrected_by_itself() -> None:
    latency = Latency({**PAYS, 32: 0.04})
    for _ in range(200):
        for samples in (1, 8, 32):
            latency.learn(samples, PAYS[samples])
    for samples in (1, 8, 32):
        assert latency(samples) == pytest.approx(PAYS[samples], rel=0.05)


def test_an_unlucky_first_call_at_a_size_does_not_end_its_use() -> None:
    latency = Latency({1: 0.004})
    for samples, seconds in ((2, 0.5), (4, 0.5), (8, 0.5), (16, 0.5), (32, 0.5)):
        assert latency.best(32) >= samples
        latency.learn(samples, seconds)
        for _ in range(3):
            latency.learn(samples, PAYS[samples])
    assert latency.best(32) == 32
    assert latency(32) == pytest.approx(PAYS[32], rel=0.1)


def test_without_measurements_the_largest_batch_is_best() -> None:
    latency = Latency()
    assert (latency(7), latency.best(64), latency.within(0.001) >= 64) == (0.0, 64, True)
    latency.learn(64, 0.03)
    latency.learn(1, 0.004)
    assert latency(1) == pytest.approx(0.004)
    assert latency(64) == pytest.approx(0.03)


def test_growth_stops_where_it_does_not_pay() -> None:
    latency = Latency({1: 0.03})
    for _ in range(100):
        samples = latency.best(64)
        latency.learn(samples, 0.03 * samples)
    tried = []
    for _ in range(2000):
        samples = latency.best(64)
        tried.append(samples)
        latency.learn(samples, 0.03 * samples)
    assert set(tried) <= {1, 2}
    assert tried.count(2) < 0.02 * len(tried)


def test_a_model_whose_batches_no_longer_pay_is_found_out() -> None:
    latency = Latency(PAYS)
    for call in range(4000):
        samples = latency.best(32) if call % 10 else 1
        latency.learn(samples, 0.004 * samples**1.1)
    assert latency.best(32) <= 2
    assert latency(1) == pytest.approx(0.004, rel=0.05)


def test_a_call_that_took_no_time_teaches_nothing() -> None:
    latency = Latency(PAYS)
    latency.learn(1, 0.0)
    assert latency(1) == PAYS[1]


def test_rows_of_another_weight_are_guessed_in_proportion_and_then_learnt() -> None:
    short = Latency({1: 0.01, 8: 0.02})
    latencies = Latencies(short, weight=1000)
    assert latencies.of(1050) is short
    long = latencies.of(4000)
    assert long(1) == pytest.approx(0.04)
    long.learn(1, 0.08)  # the cost of attention grows faster than its input
    assert long(8) == pytest.approx(0.16)
    assert latencies.of(8000)(1) == pytest.approx(0.16)
    assert short(1) == 0.01


def test_there_are_few_classes_of_weights() -> None:
    latencies = Latencies(Latency(PAYS))
    assert len({id(latencies.of(weight)) for weight in range(1, 1_000_000, 7)}) < 90


def test_a_measurement_that_was_disturbed_is_corrected_by_the_first_call() -> None:
    latency = Latency({1: 0.1})
    latency.learn(1, 0.03)
    assert latency(1) == pytest.approx(0.03)


@pytest.mark.parametrize("disturbed", [{1: 0.04}, {2: 0.01}, {4: 0.04}, {8: 0.03, 16: 0.03}, {32: 0.06}])
def test_a_disturbed_measurement_costs_no_more_than_the_first_calls(disturbed: dict[int, float]) -> None:
    latency = Latency({**PAYS, **disturbed})
    for _ in range(10):
        samples = latency.best(32)
        latency.learn(samples, PAYS[samples])
    assert latency.best(32) == 32


@pytest.mark.parametrize("disturbed", [5, 20, 40])
def test_a_size_that_seemed_slow_in_all_of_its_first_calls_is_tried_again_soon(disturbed: int) -> None:
    latency = Latency({1: PAYS[1], 2: PAYS[2]})
    for call in range(120):
        samples = latency.best(32)
        latency.learn(samples, PAYS[samples] * (2.5 if call < disturbed and samples > 2 else 1))
    assert latency.best(32) == 32
