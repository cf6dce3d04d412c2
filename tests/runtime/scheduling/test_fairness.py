"""Clients share the engines: none waits for another one's backlog, and none fills the queue."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import IngotError, Unavailable
from ingot.runtime import Entry, Latency, Limits, Scheduler

SECONDS = {1: 0.001, 8: 0.004}


def scheduler(**limits: int) -> Scheduler:
    return Scheduler(Limits(max_batch=8, max_delay=0.0, **limits), batching=True, latency=Latency(SECONDS))


def entry(client: object, samples: int = 1, group: int = 0, now: float = 0.0, priority: int = 0) -> Entry:
    return Entry({}, samples, lambda outcome: None, now, (group,), math.inf, priority, nbytes=64, client=client)


def run(scheduler: Scheduler, now: float) -> list[Entry]:
    """Take a batch, and let it run."""
    batch = scheduler.take(now)
    if batch:
        scheduler.finish(batch, now + 0.004, 0.004)
    return batch


Backlogs = st.dictionaries(
    st.integers(0, 6), st.lists(st.tuples(st.integers(1, 8), st.integers(0, 2)), min_size=1, max_size=30), min_size=1
)


@pytest.mark.matrix
@given(backlogs=Backlogs, group=st.integers(0, 2))
def test_a_request_waits_at_most_for_a_batch_of_each_other_client(
    backlogs: dict[int, list[tuple[int, int]]], group: int
) -> None:
    """However many entries the others have waiting, and in whichever groups."""
    queue = scheduler()
    for client, backlog in backlogs.items():
        for samples, kind in backlog:
            queue.offer(entry(client, samples, kind), 0.0)
    light = entry("light", group=group)
    queue.offer(light, 0.0)
    # Clients with few samples, 2 here, are served in the order of arrival, and these may be of two groups.
    for batches in range(3 * len(backlogs) + 1):
        if light in run(queue, 0.004 * batches):
            break
    else:
        pytest.fail("the request was not served")


@pytest.mark.matrix
@given(backlogs=Backlogs)
def test_engines_run_while_entries_wait_and_each_entry_runs_once(backlogs: dict[int, list[tuple[int, int]]]) -> None:
    queue = scheduler()
    offered = [entry(client, *item) for client, backlog in backlogs.items() for item in backlog]
    for item in offered:
        queue.offer(item, 0.0)
    ran: list[Entry] = []
    while len(queue):
        batch = run(queue, 0.0) or run(queue, queue.wake or 0.0)  # it may linger for entries that fill the batch
        assert batch
        ran += batch
    assert Counter(map(id, ran)) == Counter(map(id, offered))


@pytest.mark.matrix
@given(backlog=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 2), st.integers(0, 1)), max_size=40))
def test_one_client_alone_is_served_as_without_clients(backlog: list[tuple[int, int, int]]) -> None:
    orders = []
    for client in (None, "alone"):
        queue = scheduler()
        entries = [entry(client, samples, group, priority=priority) for samples, group, priority in backlog]
        for item in entries:
            queue.offer(item, 0.0)
        order = []
        while batch := run(queue, 0.0):
            order.append([entries.index(item) for item in batch])
        orders.append(order)
    assert orders[0] == orders[1]


def test_two_clients_with_a_backlog_get_equal_shares_of_engine_time() -> None:
    queue = scheduler()
    for _ in range(40):
        queue.offer(entry("small", 1), 0.0)
    for _ in range(10):
        queue.offer(entry("large", 4), 0.0)
    served = Counter[object]()
    for _ in range(5):
        for item in run(queue, 0.0):
            served[item.client] += item.samples
    assert abs(served["small"] - served["large"]) <= 8
    assert sum(served.values()) == 40


def test_a_client_that_returns_does_not_make_up_for_its_absence() -> None:
    queue = scheduler()
    for _ in range(60):
        queue.offer(entry("steady", 4), 0.0)
    queue.offer(entry("other"), 0.0)
    for _ in range(20):
        run(queue, 0.0)
    for _ in range(40):
        queue.offer(entry("other", 4), 0.0)
    served = Counter(item.client for _ in range(10) for item in run(queue, 0.0))
    assert served["steady"] >= 8


def test_a_light_client_is_not_refused_for_the_backlog_of_another() -> None:
    """The wait that decides is that of its turn, and not that of the whole queue."""
    queue = scheduler()
    for _ in range(500):
        queue.offer(entry("heavy", 8), 0.0)
    running = queue.take(0.0)
    request = Entry({}, 1, lambda outcome: None, 0.0, (0,), 0.05, nbytes=64, client="light")
    queue.offer(request, 0.0)  # 500 batches of 4 ms are queued, and it allows 50 ms
    queue.finish(running, 0.004, 0.004)
    assert request in run(queue, 0.004) + run(queue, 0.008)


def test_batches_of_a_backlog_leave_time_for_others() -> None:
    """A client that allows 6 ms would otherwise always find a batch of 4 ms that runs, and need another 3 ms."""
    queue = scheduler()
    request = Entry({}, 1, lambda outcome: None, 0.0, (0,), 0.006, nbytes=64, client="light")
    queue.offer(request, 0.0)
    assert run(queue, 0.0) == [request]
    for _ in range(100):
        queue.offer(entry("heavy"), 0.01)
    assert len(run(queue, 0.01)) in range(4, 8)
    assert len(run(queue, 1.2)) == 8, "the other has sent nothing for a second"


def test_no_client_fills_the_queue_alone() -> None:
    queue = scheduler(max_queue=80)
    for _ in range(70):
        queue.offer(entry("heavy"), 0.0)
    refusal = queue.offer(entry("heavy"), 0.0)
    assert isinstance(refusal, Unavailable)
    assert "70 requests of this client wait, and the rest of the queue is kept" in str(refusal)
    for client in range(5):
        queue.offer(entry(client), 0.0)


def test_no_client_fills_the_queue_with_bytes_of_parts_that_are_still_to_be_queued() -> None:
    queue = scheduler(max_queue_bytes=9600)
    refused: list[IngotError] = []
    for _ in range(8):
        if (refusal := queue.offer_large(entry("heavy", 8), [8] * 99, 1200, 0.0)) is not None:
            refused.append(refusal)
    assert len(refused) == 1  # the last eighth is for others
    assert "requests of this client" in str(refused[0])
    queue.offer(entry("light"), 0.0)
    queue.release(1200 - 64, "heavy")
    queue.offer_large(entry("heavy", 8), [8] * 99, 1200, 0.0)


def test_a_low_priority_is_delayed_and_not_starved() -> None:
    queue = scheduler()
    low = entry("low", priority=-1)
    queue.offer(low, 0.0)
    now = 0.0
    for _ in range(5000):
        for _ in range(8):
            queue.offer(entry("high", now=now), now)
        if low in run(queue, now):
            break
        now += 0.004
    assert 10 <= now <= 10 + 8 * 0.004 + 1e-6
