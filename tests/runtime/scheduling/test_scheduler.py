from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import Unavailable
from ingot.runtime import Entry, Latency, Limits, Scheduler
from ingot.runtime.scheduling.entry import group_of
from ingot.tensors import DType, Signature, TensorSpec


def entry(samples: int = 1, group: int = 0, width: int = 1) -> Entry:
    return Entry({"x": np.zeros((samples, width), np.float32)}, samples, lambda outcome: None, 0.0, (group,))


Offers = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 2), st.booleans()), max_size=60)


@pytest.mark.matrix
@given(offers=Offers, max_batch=st.integers(1, 16), takes=st.lists(st.integers(0, 5), max_size=60))
def test_every_entry_runs_once_in_order_within_the_limits(
    offers: list[tuple[int, int, bool]], max_batch: int, takes: list[int]
) -> None:
    scheduler = Scheduler(Limits(max_batch=max_batch), batching=True)
    entries = [entry(samples, group) for samples, group, _ in offers]
    ran: list[Entry] = []

    def take() -> list[Entry]:
        batch = scheduler.take(0.0)
        assert len({item.group for item in batch}) <= 1
        assert sum(item.samples for item in batch) <= max_batch or len(batch) == 1
        ran.extend(batch)
        return batch

    for index, item in enumerate(entries):
        scheduler.offer(item, 0.0)
        for _ in range(takes[index] if index < len(takes) else 0):
            take()
    waiting = [item for item in entries if item not in ran]
    left = [item for item, (_, _, leaves) in zip(entries, offers, strict=True) if leaves and item in waiting]
    for item in left:
        scheduler.discard(item)
    while take():
        pass
    assert len(scheduler) == 0
    assert sorted(map(id, ran)) == sorted(id(item) for item in entries if item not in left)
    for group in range(3):
        order = [item for item in ran if item.group == (group,)]
        sizes = {item.samples for item in order}
        if len(sizes) == 1:  # entries of one size and group are never overtaken
            assert order == [item for item in entries if item in order]


def test_the_oldest_entry_is_in_the_next_batch() -> None:
    scheduler = Scheduler(Limits(max_batch=4), batching=True)
    first, other, third = entry(3, group=1), entry(1, group=2), entry(1, group=1)
    for item in (first, other, third):
        scheduler.offer(item, 0.0)
    assert scheduler.take(0.0) == [first, third]
    assert scheduler.take(0.0) == [other]


def test_without_batching_each_runs_alone() -> None:
    scheduler = Scheduler(Limits(), batching=False)
    items = [entry() for _ in range(3)]
    for item in items:
        scheduler.offer(item, 0.0)
    assert [scheduler.take(0.0) for _ in range(4)] == [[item] for item in items] + [[]]


def test_the_wait_is_that_of_the_batches_ahead() -> None:
    scheduler = Scheduler(Limits(max_batch=4), batching=True, latency=Latency({1: 0.1, 4: 0.1}))
    assert scheduler.wait(0.0) == 0
    scheduler.offer(entry(), 0.0)
    running = scheduler.take(0.0)
    assert scheduler.wait(0.0) == pytest.approx(0.1)
    for _ in range(6):
        scheduler.offer(entry(), 0.02)
    assert scheduler.wait(0.02) == pytest.approx(0.28)  # the rest of one batch, and two more
    scheduler.finish(running, 0.1, 0.1)
    scheduler.take(0.1)
    scheduler.take(0.1)
    assert scheduler.wait(0.1) == pytest.approx(0.2)


def test_a_full_queue_refuses_and_recovers() -> None:
    scheduler = Scheduler(Limits(max_queue=2), batching=True)
    scheduler.offer(entry(), 0.0)
    scheduler.offer(entry(), 0.0)
    refusal = scheduler.offer(entry(), 0.0)
    assert isinstance(refusal, Unavailable)
    assert "queue is full" in str(refusal)
    scheduler.take(0.0)
    scheduler.offer(entry(), 0.0)


def test_a_departing_request_makes_room() -> None:
    scheduler = Scheduler(Limits(max_queue=2, max_queue_bytes=100), batching=True)
    leaving = [entry(), entry(width=20)]
    for item in leaving:
        scheduler.offer(item, 0.0)
    for item in leaving:
        scheduler.discard(item)
        scheduler.discard(item)  # twice is harmless
    assert len(scheduler) == 0
    scheduler.offer(entry(width=20), 0.0)
    scheduler.offer(entry(), 0.0)


def test_text_counts_with_its_length() -> None:
    words = np.array([[b"x" * 1000]], dtype=object)
    assert Entry({"x": words}, 1, lambda outcome: None, 0.0).nbytes > 1000


def test_the_queue_is_bounded_in_bytes_too() -> None:
    scheduler = Scheduler(Limits(max_queue_bytes=1000), batching=True)
    scheduler.offer(entry(width=10_000), 0.0)
    assert isinstance(scheduler.offer(entry(), 0.0), Unavailable)
    assert len(scheduler.take(0.0)) == 1
    for _ in range(250):
        scheduler.offer(entry(), 0.0)
    assert isinstance(scheduler.offer(entry(), 0.0), Unavailable)


def test_what_may_share_a_batch() -> None:
    signature = Signature(
        (TensorSpec("x", DType.FP32, ("batch", "seq")), TensorSpec("scale", DType.FP32, (1,))),
        (TensorSpec("y", DType.FP32, ("batch", "seq")),),
        "batch",
    )

    def group(samples: int, seq: int, scale: float) -> tuple[object, ...]:
        return group_of(signature, {"x": np.zeros((samples, seq)), "scale": np.array([scale])})

    assert group(1, 5, 2.0) == group(7, 5, 2.0)
    assert group(1, 5, 2.0) != group(1, 6, 2.0)
    assert group(1, 5, 2.0) != group(1, 5, 3.0)  # an input without a batch belongs to the whole batch


def test_batches_shrink_when_memory_lacks_and_grow_again_after_a_while() -> None:
    scheduler = Scheduler(Limits(max_batch=16), batching=True)

    def size(now: float) -> int:
        for _ in range(16):
            scheduler.offer(entry(), now)
        batch = scheduler.take(now)
        scheduler.finish(batch, now)
        while left := scheduler.take(now):
            scheduler.finish(left, now)
        return len(batch)

    assert size(0.0) == 16
    assert scheduler.memory.lower(16, 0.0) == 10
    assert [size(now) for now in (0.0, 9.0)] == [8, 8]
    assert scheduler.memory.lower(16, 9.0) == 10  # it ran at the same time, and shows nothing new
    assert [size(now) for now in (18.0, 19.0)] == [8, 16]
    assert scheduler.memory.lower(16, 19.0) == 20  # larger ones are tried later each time
    assert [size(now) for now in (38.0, 39.0)] == [8, 16]
    assert scheduler.memory.lower(16, 40.0) == 40
    assert scheduler.memory.lower(8, 40.0) == 80
    assert [size(now) for now in (119.0, 120.0, 200.0)] == [4, 8, 16]
    assert scheduler.memory.lower(16, 2000.0) == 10  # after a long time without failures


def test_without_memory_for_any_batch_samples_run_alone() -> None:
    scheduler = Scheduler(Limits(max_batch=4), batching=True)
    for samples in (4, 2, 2):
        scheduler.memory.lower(samples, 0.0)
    for _ in range(2):
        scheduler.offer(entry(), 1.0)
    assert len(scheduler.take(1.0)) == 1


def test_a_third_lane_starts_with_a_full_batch_only() -> None:
    scheduler = Scheduler(Limits(max_batch=4), batching=True, engines=3, lanes=3)
    running = []
    for _ in range(2):
        scheduler.offer(entry(), 0.0)
        running.append(scheduler.take(0.0))
    assert [len(batch) for batch in running] == [1, 1]
    for _ in range(3):
        scheduler.offer(entry(), 0.0)
        assert scheduler.take(0.0) == []
    scheduler.offer(entry(), 0.0)
    full = scheduler.take(0.0)
    assert len(full) == 4
    scheduler.offer(entry(), 0.0)
    assert scheduler.take(0.0) == []
    for batch in (running[0], running[1]):
        scheduler.finish(batch, 0.0)
    assert len(scheduler.take(0.0)) == 1


def test_engines_without_lanes_all_start_at_once() -> None:
    scheduler = Scheduler(Limits(max_batch=4), batching=True, engines=3)
    for _ in range(3):
        scheduler.offer(entry(), 0.0)
        assert len(scheduler.take(0.0)) == 1
