"""Batches of entries of different sizes: the calls of least time, in which none waits for long."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.runtime import Entry, Latency, Limits, Scheduler
from ingot.runtime.scheduling.division import Work

# A call takes 2 ms, and 0.1 ms for each token.
TOKENS = {work: 0.002 + 1e-4 * work for work in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)}
WORK = Work()


def scheduler(seconds: dict[int, float] | None = None, max_batch: int = 64) -> Scheduler:
    """Return one that never waits for more."""
    latency, limits = Latency(TOKENS if seconds is None else seconds), Limits(max_batch=max_batch, max_delay=0)
    return Scheduler(limits, batching=True, latency=latency, sample_bytes=24, work=WORK)


def text(
    length: int,
    samples: int = 1,
    client: object = None,
    deadline: float = math.inf,
    priority: int = 0,
    most: int = 1000,
) -> Entry:
    nbytes = 24 * length * samples
    return Entry(
        {},
        samples,
        lambda outcome: None,
        0.0,
        deadline=deadline,
        priority=priority,
        nbytes=nbytes,
        most=most,
        client=client,
        sizes=(length,),
        work=WORK((length,), samples),
    )


def offered(made: Scheduler, *entries: Entry) -> Scheduler:
    for entry in entries:
        made.offer(entry, 0.0)
    return made


def lengths(batch: list[Entry]) -> list[int]:
    return [entry.sizes[0] for entry in batch]


def ran(made: Scheduler, now: float = 0.0) -> list[Entry]:
    """Take a batch, and let it run for its expected time."""
    batch = made.take(now)
    if batch:
        made.finish(batch, now, made.expected(batch))
    return batch


def test_a_long_text_is_in_no_batch_with_short_ones() -> None:
    made = offered(scheduler(), *(text(length) for length in (10, 200, 11, 10)))
    assert lengths(ran(made)) == [10, 11, 10]
    assert lengths(ran(made)) == [200]


def test_short_texts_pass_over_a_long_one_once() -> None:
    made = offered(scheduler(), text(200), text(10))
    assert lengths(ran(made)) == [10]
    offered(made, text(10), text(10))
    assert lengths(ran(made)) == [200]
    assert lengths(ran(made)) == [10, 10]


def test_none_passes_over_one_that_would_be_late_or_has_a_higher_priority() -> None:
    made = offered(scheduler(), text(200, deadline=0.024), text(10))
    assert lengths(ran(made)) == [200]
    made = offered(scheduler(), text(200, priority=1), text(10))
    assert lengths(ran(made)) == [200]


def test_the_client_with_the_least_share_is_next_though_others_have_shorter_texts() -> None:
    made = scheduler(max_batch=8)
    offered(made, *(text(10, client="heavy") for _ in range(30)))
    assert set(lengths(ran(made))) == {10}
    offered(made, text(200, client="light"))
    assert set(lengths(ran(made))) == {10}
    assert lengths(ran(made)) == [200]


def test_all_lengths_share_a_call_where_its_fixed_time_is_long() -> None:
    made = scheduler({work: 0.1 + 1e-6 * work for work in (1, 1024, 65536)})
    assert lengths(ran(offered(made, *(text(length) for length in (10, 200, 11, 50))))) == [10, 200, 11, 50]


def test_a_batch_has_no_more_samples_than_the_memory_of_its_longest_text_allows() -> None:
    made = scheduler({work: 0.1 + 1e-6 * work for work in (1, 1024, 65536)})
    offered(made, text(10), text(12, most=3), text(12), text(11), text(11))
    assert len(ran(made)) == 3
    assert len(ran(made)) == 2


def test_calls_of_padded_work_are_learnt() -> None:
    made = offered(scheduler(), text(10), text(12))
    batch = made.take(0.0)
    assert made.expected(batch) == pytest.approx(0.002 + 1e-4 * 24)
    for _ in range(50):
        made.finish(batch, 0.0, 0.008)
        offered(made, *map(text, lengths(batch)))
        batch = made.take(0.0)
    assert made.latency(24) == pytest.approx(0.008, rel=0.2)


def test_small_calls_that_were_measured_on_a_busy_machine_are_found_out() -> None:
    """Though most entries are joined to larger calls meanwhile."""
    exact = Latency(TOKENS)
    made = scheduler({1: 0.02, 8: 0.02, 32: 0.02, 64: 0.021, 256: 0.028})
    for number in range(4000):
        while len(made) < 40:
            made.offer(text(10 + 7 * number % 90), 0.0)
            number += 1
        batch = made.take(0.0)
        made.finish(batch, 0.0, exact(len(batch) * max(lengths(batch))))
    assert made.latency(16) < 0.006


def test_a_request_is_divided_by_the_time_that_its_padding_takes() -> None:
    made = scheduler()
    sizes = [(10,), (200,), (10,), (11,), (12,)]
    assert made.divide(sizes, (), 64) == [[0, 2], [3], [4], [1]]  # a token takes as long as a part costs the server
    fast = scheduler({work: 0.004 + 1e-6 * work for work in (1, 1024, 65536)})
    assert fast.divide(sizes, (), 64) == [[0, 2, 3, 4], [1]]


Texts = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=120)


@pytest.mark.matrix
@given(texts=Texts, takes=st.lists(st.integers(0, 2), max_size=120), max_batch=st.integers(1, 40))
@settings(deadline=None)
def test_each_runs_once_and_the_oldest_is_in_this_batch_or_the_next(
    texts: list[tuple[int, int, int]], takes: list[int], max_batch: int
) -> None:
    made = scheduler(max_batch=max_batch)
    entries = [text(length, samples) for length, samples, _ in texts]
    done: list[Entry] = []
    passed: list[Entry] = []

    def run() -> bool:
        oldest = next(iter(made.waiting()), None)
        batch = ran(made)
        assert len(batch) == 1 or sum(entry.samples for entry in batch) <= max_batch
        assert oldest is None or batch
        if oldest is not None and oldest not in batch:
            assert oldest not in passed
            passed.append(oldest)
        done.extend(batch)
        return bool(batch)

    for index, entry in enumerate(entries):
        made.offer(entry, 0.0)
        for _ in range(takes[index] if index < len(takes) else 0):
            run()
    while run():
        pass
    assert sorted(map(id, done)) == sorted(map(id, entries))
    assert len(made) == made.nbytes == 0


@pytest.mark.matrix
@given(texts=Texts)
@settings(deadline=None)
def test_no_client_waits_for_more_than_a_batch_of_each_other(texts: list[tuple[int, int, int]]) -> None:
    made = scheduler(max_batch=8)
    for length, samples, client in texts:
        made.offer(text(length, samples, client), 0.0)
    light = text(100, client="light")
    made.offer(light, 0.0)
    for batches in range(4 * 5):
        if light in ran(made, 0.001 * batches):
            return
    pytest.fail("the request was not served")
