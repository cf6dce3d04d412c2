"""Samples of different sizes are divided among calls so that these take the least time together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.runtime.scheduling.division import Sample, Sizes, Work, divide, joint

PLAIN = Work()


def cost(calls: list[list[int]], samples: list[Sample], fixed: float) -> float:
    total = 0.0
    for call in calls:
        sizes: Sizes = samples[call[0]][0]
        for place in call:
            sizes = joint(sizes, samples[place][0])
        total += fixed + PLAIN(sizes, sum(samples[place][1] for place in call))
    return total


def of_lengths(*lengths: int) -> list[Sample]:
    return [((length,), 1) for length in lengths]


def divided(samples: list[Sample], fixed: float, most: int = 64, cap: int = 1 << 20) -> list[list[int]]:
    return divide(samples, PLAIN, lambda work: fixed + work, most, cap)


def test_a_long_text_pads_short_ones_only_where_a_call_costs_more() -> None:
    lengths = of_lengths(5, 200, 6, 190, 5)
    assert divided(lengths, 20) == [[0, 2, 4], [1, 3]]
    assert divided(lengths, 1000) == [[0, 1, 2, 3, 4]]
    assert divided(lengths, 0.5) == [[0, 4], [2], [3], [1]]


def test_calls_have_no_more_samples_and_work_than_allowed() -> None:
    lengths = of_lengths(*[10] * 20)
    assert [len(call) for call in divided(lengths, 100, most=8)] == [8, 8, 4]
    assert [len(call) for call in divided(lengths, 100, cap=50)] == [5, 5, 5, 5]
    assert divided(of_lengths(10, 300), 100, cap=50) == [[0], [1]]  # which has more by itself


def test_buckets_decide_what_is_equal() -> None:
    work = Work(lambda sizes: (-(-sizes[0] // 64) * 64,))
    assert divide(of_lengths(3, 60, 65), work, lambda work: 10 + work, 64, 1 << 20) == [[0, 1], [2]]


def test_pictures_are_padded_in_both_dimensions() -> None:
    samples: list[Sample] = [((10, 100), 1), ((100, 10), 1), ((10, 99), 1)]
    assert divided(samples, 500) == [[0, 2], [1]]


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Yield all divisions of sorted items into runs."""
    for cuts in itertools.product((False, True), repeat=len(items) - 1):
        calls = [[items[0]]]
        for cut, item in zip(cuts, items[1:], strict=True):
            if cut:
                calls.append([item])
            else:
                calls[-1].append(item)
        yield calls


@pytest.mark.matrix
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 3)), min_size=1, max_size=8),
    st.floats(0, 200),
    st.integers(1, 8),
    st.integers(1, 300),
)
@settings(deadline=None)
def test_no_division_takes_less_time(found: list[tuple[int, int]], fixed: float, most: int, cap: int) -> None:
    samples: list[Sample] = [((length,), count) for length, count in found]
    calls = divided(samples, fixed, most, cap)
    assert sorted(itertools.chain(*calls)) == [*range(len(samples))]  # each runs once

    def allowed(call: list[int]) -> bool:
        count = sum(samples[place][1] for place in call)
        return len(call) == 1 or (count <= most and count * max(samples[place][0][0] for place in call) <= cap)

    assert all(map(allowed, calls))
    if len({length for length, _ in found}) == len(found):  # equal ones are joined first, as far as they fit
        ordered = sorted(range(len(samples)), key=lambda place: samples[place][0])
        least = min(cost(each, samples, fixed) for each in partitions(ordered) if all(map(allowed, each)))
        assert cost(calls, samples, fixed) == pytest.approx(least)
