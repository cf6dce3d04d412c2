"""Properties of the scheduler's policy over random events, with a simulated clock and engines."""

from __future__ import annotations

import gc
import math
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.errors import DeadlineExceeded, IngotError, Unavailable
from ingot.runtime import Entry, Latency, Limits, Outcome, Scheduler
from ingot.runtime.scheduling.limits import PATIENCE
from ingot.runtime.scheduling.scheduler import LINGER

# Seconds by samples: one model for which batching pays, and one for which it does not.
PAYS = {1: 0.004, 2: 0.0045, 4: 0.005, 8: 0.006, 16: 0.009, 32: 0.015, 64: 0.03}
FLAT = {1: 0.03, 2: 0.06, 4: 0.12, 8: 0.24}
DONE: Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = {}


@dataclass(frozen=True)
class Arrival:
    after: float
    samples: int = 1
    group: int = 0
    timeout: float = math.inf
    priority: int = 0
    leaves: float = math.inf


class World:
    """Runs a scheduler over arrivals with engines that take exactly ``latency``, and records their outcomes."""

    def __init__(self, scheduler: Scheduler, latency: Latency, engines: int = 1):
        self.scheduler = scheduler
        self.now = 0.0
        self.entries: list[Entry] = []
        self.outcomes: dict[int, list[tuple[float, Outcome]]] = {}
        self.refused: dict[int, IngotError] = {}
        self.batches: list[tuple[float, list[Entry]]] = []
        self._latency = latency
        self._idle = engines
        self._running: list[tuple[float, list[Entry]]] = []
        self._lingering = 0.0

    def offer(self, arrival: Arrival) -> int:
        number = len(self.entries)
        self.outcomes[number] = []

        def reply(outcome: Outcome) -> None:
            self.outcomes[number].append((self.now, outcome))

        entry = Entry(
            {},
            arrival.samples,
            reply,
            self.now,
            (arrival.group,),
            self.now + arrival.timeout,
            arrival.priority,
            nbytes=arrival.samples * 64,
        )
        self.entries.append(entry)
        if (refusal := self.scheduler.offer(entry, self.now)) is not None:
            self.refused[number] = refusal
        return number

    def pump(self) -> None:
        while self._idle:
            batch = self.scheduler.take(self.now)
            late, self.scheduler.late = self.scheduler.late, []
            for entry in late:
                entry.reply(DeadlineExceeded("its time was up"))
            if not batch:
                return
            self._idle -= 1
            self.batches.append((self.now, list(batch)))
            self._running.append((self.now + self._latency(sum(entry.samples for entry in batch)), batch))

    def run_until(self, end: float) -> None:
        """Let time pass: calls of engines end, and the scheduler is called again at its wake-up time."""
        self.pump()
        while True:
            moments = [until for until, _ in self._running]
            if self._idle and self.scheduler.wake is not None:
                moments.append(self.scheduler.wake)
            moment = min(moments, default=math.inf)
            if moment > end or moment == math.inf:
                break
            self.now = max(moment, self.now)
            for item in [item for item in self._running if item[0] <= self.now]:
                self._running.remove(item)
                self._idle += 1
                self.scheduler.finish(item[1], self.now, self._latency(sum(entry.samples for entry in item[1])))
                for entry in item[1]:
                    entry.reply(DONE)
            self.pump()
        self.now = max(self.now, min(end, 1e9))

    def play(self, arrivals: list[Arrival]) -> None:
        leaving: list[tuple[float, int]] = []
        for arrival in arrivals:
            end = self.now + arrival.after
            for moment, number in sorted(leaving):
                if moment <= end:
                    self.run_until(moment)
                    self.leave(number)
                    leaving.remove((moment, number))
            self.run_until(end)
            number = self.offer(arrival)
            if arrival.leaves < math.inf:
                leaving.append((self.now + arrival.leaves, number))
        for moment, number in sorted(leaving):
            self.run_until(moment)
            self.leave(number)
        self.run_until(math.inf)

    def leave(self, number: int) -> None:
        if not self.outcomes[number]:  # a request that has an answer or a refusal is not cancelled
            self.scheduler.discard(self.entries[number])


def world(
    profile: Mapping[int, float] = PAYS, engines: int = 1, batching: bool = True, **limits: float | None
) -> World:
    scheduler = Scheduler(Limits(**limits), batching=batching, latency=Latency(profile), engines=engines)  # type: ignore[arg-type]
    return World(scheduler, Latency(profile), engines)


SOON = st.floats(0, 0.05)
ANY = st.builds(
    Arrival,
    after=st.one_of(st.just(0.0), SOON),
    samples=st.integers(1, 40),
    group=st.integers(0, 3),
    timeout=st.one_of(st.just(math.inf), st.floats(0.001, 0.3)),
    priority=st.integers(0, 2),
    leaves=st.one_of(st.just(math.inf), SOON),
)
PROFILES = st.sampled_from([PAYS, FLAT, {}])


@pytest.mark.matrix
@given(arrivals=st.lists(ANY, max_size=40), profile=PROFILES, engines=st.integers(1, 3), batching=st.booleans())
@settings(deadline=None)
def test_whatever_happens_each_is_answered_once_and_nothing_is_left(
    arrivals: list[Arrival], profile: Mapping[int, float], engines: int, batching: bool
) -> None:
    it = world(profile, engines, batching)
    it.play(arrivals)
    for number, entry in enumerate(it.entries):
        assert len(it.outcomes[number]) == (0 if number in it.refused or _never_ran(it, entry) else 1)
    scheduler = it.scheduler
    assert len(scheduler) == 0
    assert scheduler.take(it.now) == []
    assert scheduler.wake is None
    big = Entry({}, 1, lambda outcome: None, it.now, nbytes=scheduler.limits.max_queue_bytes)
    scheduler.offer(big, it.now)  # earlier bytes are not counted any more
    assert scheduler.take(it.now) == [big]


def _never_ran(it: World, entry: Entry) -> bool:
    return entry.done and not any(entry in batch for _, batch in it.batches)


@pytest.mark.matrix
@given(arrivals=st.lists(ANY, max_size=40), profile=PROFILES, max_batch=st.integers(1, 40))
@settings(deadline=None)
def test_a_batch_has_one_group_within_the_limit_and_no_cancelled_requests(
    arrivals: list[Arrival], profile: Mapping[int, float], max_batch: int
) -> None:
    it = world(profile, max_batch=max_batch)
    left: set[int] = set()
    discard = it.scheduler.discard

    def leave(entry: Entry) -> None:
        discard(entry)
        left.add(id(entry))

    taken: list[bool] = []
    take = it.scheduler.take

    def checked(now: float) -> list[Entry]:
        batch = take(now)
        taken.extend(id(entry) in left for entry in batch)
        return batch

    it.scheduler.discard = leave  # type: ignore[method-assign]
    it.scheduler.take = checked  # type: ignore[method-assign]
    it.play(arrivals)
    assert not any(taken)
    for _, batch in it.batches:
        assert len({entry.group for entry in batch}) == 1
        assert len(batch) == 1 or sum(entry.samples for entry in batch) <= max_batch


@pytest.mark.matrix
@given(arrivals=st.lists(ANY, max_size=40))
@settings(deadline=None)
def test_none_in_a_batch_is_late_because_the_batch_was_grown(arrivals: list[Arrival]) -> None:
    it = world()
    it.play(arrivals)
    exact = Latency(PAYS)
    for began, batch in it.batches:
        if len(batch) > 1:
            end = began + exact(sum(entry.samples for entry in batch))
            assert all(end <= entry.deadline + 1e-6 for entry in batch)


@pytest.mark.matrix
@given(
    gaps=st.lists(st.one_of(st.just(0.0), st.floats(0, 0.01)), min_size=1, max_size=150),
    timeout=st.floats(0.031, 0.5),
    engines=st.integers(1, 3),
    profile=st.sampled_from([PAYS, FLAT]),
)
@settings(deadline=None)
def test_admitted_requests_of_equal_deadlines_are_in_time_if_calls_take_their_expected_time(
    gaps: list[float], timeout: float, engines: int, profile: Mapping[int, float]
) -> None:
    it = world(profile, engines)
    it.play([Arrival(gap, timeout=timeout) for gap in gaps])
    for number, entry in enumerate(it.entries):
        if number not in it.refused:
            ((moment, outcome),) = it.outcomes[number]
            assert outcome is DONE
            assert moment <= entry.deadline + 1e-6


@pytest.mark.matrix
@given(arrivals=st.lists(ANY, max_size=40))
@settings(deadline=None)
def test_each_batch_begins_with_the_most_urgent(arrivals: list[Arrival]) -> None:
    it = world()
    it.play(arrivals)
    began = {id(entry): moment for moment, batch in it.batches for entry in batch}
    for moment, batch in it.batches:
        waited = [entry for entry in it.entries if entry.arrived < moment < began.get(id(entry), -1)]
        assert all(batch[0].place < entry.place for entry in waited)
        assert [entry.place for entry in batch] == sorted(entry.place for entry in batch)


@pytest.mark.matrix
@given(arrivals=st.lists(ANY, max_size=40), max_delay=st.one_of(st.none(), st.floats(0, 0.001)))
@settings(deadline=None)
def test_an_idle_engine_waits_for_a_tenth_of_a_batch_at_the_most(
    arrivals: list[Arrival], max_delay: float | None
) -> None:
    it = world(max_delay=max_delay)
    waits: list[float] = []
    take = it.scheduler.take

    def watched(now: float) -> list[Entry]:
        batch = take(now)
        if it.scheduler.wake is not None:
            waits.append(it.scheduler.wake - now)
        return batch

    it.scheduler.take = watched  # type: ignore[method-assign]
    it.play(arrivals)
    assert all(0 < wait <= LINGER * PAYS[64] + 1e-9 for wait in waits)
    assert max_delay is None or all(wait <= max_delay + 1e-9 for wait in waits)


def test_none_waits_for_more_where_batches_do_not_pay() -> None:
    it = world(FLAT)
    for _ in range(20):
        for _ in range(8):
            it.offer(Arrival(0))
        it.run_until(it.now + 1)
        assert it.scheduler.wake is None
    assert {len(batch) for _, batch in it.batches} <= {1, 2}  # two are tried now and then


def test_those_that_are_about_to_follow_are_waited_for() -> None:
    it = world(max_batch=32)
    for _ in range(3):
        for _ in range(32):
            it.offer(Arrival(0))
        it.run_until(it.now + 1)
    for _ in range(16):
        it.offer(Arrival(0))
    it.pump()
    assert it.scheduler.wake is not None
    began = len(it.batches)
    it.now += 0.0005
    for _ in range(16):
        it.offer(Arrival(0))
    it.pump()
    assert len(it.batches) == began + 1
    assert len(it.batches[-1][1]) == 32


def test_a_batch_is_small_enough_for_the_next_request_to_be_in_time() -> None:
    it = world({1: 0.01, 8: 0.02, 64: 0.05})
    for _ in range(60):  # their time limit is known by now
        for _ in range(20):
            it.offer(Arrival(0, timeout=0.06))
        it.run_until(it.now + 0.02)
    for moment, batch in it.batches[-10:]:
        assert Latency({1: 0.01, 8: 0.02, 64: 0.05})(len(batch)) <= 0.0301, moment


def test_only_earlier_work_delays_an_urgent_request() -> None:
    it = world(FLAT)
    it.offer(Arrival(0))
    it.pump()
    for _ in range(20):
        it.offer(Arrival(0))
    assert it.offer(Arrival(0, timeout=0.1)) not in it.refused
    assert it.offer(Arrival(0, timeout=0.1)) not in it.refused
    assert isinstance(it.refused[it.offer(Arrival(0, timeout=0.1))], Unavailable)
    assert it.offer(Arrival(0, timeout=0.1, priority=1)) not in it.refused


@pytest.mark.matrix
def test_refused_requests_do_not_shrink_batches() -> None:
    it = world(PAYS)
    for _ in range(200):
        it.offer(Arrival(0))
    it.pump()
    cap = it.scheduler.cap
    for _ in range(1000):
        assert isinstance(it.refused[it.offer(Arrival(0, timeout=0.005))], Unavailable)
    assert it.scheduler.cap == cap


def test_other_engines_share_the_wait() -> None:
    for engines, admitted in ((1, 2), (2, 4), (4, 8)):
        it = world(FLAT, engines)
        for _ in range(2):
            it.scheduler.latency.learn(2, FLAT[2])  # otherwise a batch of two is tried again to verify its time
        for _ in range(engines):
            it.offer(Arrival(0))
        it.pump()
        numbers = [it.offer(Arrival(0, timeout=0.1)) for _ in range(20)]
        assert sum(number not in it.refused for number in numbers) == admitted


def test_a_request_without_a_deadline_is_not_overtaken_forever() -> None:
    it = world(FLAT)
    patient = it.offer(Arrival(0))
    while not it.outcomes[patient] and it.now < 10:
        for _ in range(3):
            it.offer(Arrival(0, timeout=0.1))
        it.run_until(it.now + 0.01)
    assert it.outcomes[patient][0][0] < PATIENCE + 0.2


@pytest.mark.matrix
def test_no_group_waits_forever_behind_a_busy_one() -> None:
    it = world(PAYS)
    rare = -1
    for step in range(300):
        for _ in range(40):
            it.offer(Arrival(0))
        if step == 10:
            rare = it.offer(Arrival(0, group=1))
        it.run_until(it.now + 0.005)
    assert it.outcomes[rare][0][0] < PATIENCE + 0.5


def test_a_call_that_hangs_turns_away_what_it_would_make_late() -> None:
    it = world(PAYS)
    it.offer(Arrival(0))
    it.scheduler.take(0.0)
    it.now = 0.05
    assert it.offer(Arrival(0, timeout=0.1)) not in it.refused
    it.now = 5.0
    assert isinstance(it.refused[it.offer(Arrival(0, timeout=0.1))], Unavailable)
    assert it.offer(Arrival(0)) not in it.refused


def test_batches_that_seemed_too_slow_are_tried_again() -> None:
    slow = Latency({1: 0.2})
    scheduler = Scheduler(Limits(), batching=True, latency=slow)
    it = World(scheduler, Latency({1: 0.01}))
    assert isinstance(it.refused[it.offer(Arrival(0, timeout=0.1))], DeadlineExceeded)
    answered = 0
    for _ in range(40):
        it.run_until(it.now + 1.1)
        number = it.offer(Arrival(0, timeout=0.1))
        it.run_until(it.now)
        answered += number not in it.refused
    assert answered == 40
    assert scheduler.latency(1) < 0.1
    assert it.offer(Arrival(0, timeout=0.1)) not in it.refused


def test_an_idle_engine_runs_a_request_that_may_just_be_in_time() -> None:
    it = World(Scheduler(Limits(), batching=False, latency=Latency({1: 0.04})), Latency({1: 0.04}))
    in_time = 0
    for number in range(200):
        it._latency = Latency({1: 0.075 if number % 2 else 0.04})  # of a machine that does something else now and then
        moment, offered = it.now, it.offer(Arrival(0, timeout=0.05))
        it.run_until(moment + 0.1)
        in_time += any(answered <= moment + 0.05 for answered, _ in it.outcomes[offered])
    assert in_time > 80


@pytest.mark.matrix
def test_a_cancelled_request_leaves_no_inputs_in_the_queue() -> None:
    scheduler = Scheduler(Limits(), batching=True)
    scheduler.offer(Entry({}, 1, lambda outcome: None, 0.0), 0.0)
    array = np.zeros(1000, np.float32)
    gone = weakref.ref(array)
    entry = Entry({"x": array}, 1, lambda outcome: None, 0.0)
    scheduler.offer(entry, 0.0)
    scheduler.discard(entry)
    del array
    gc.collect()
    assert gone() is None


def test_cancelling_a_running_request_changes_nothing() -> None:
    scheduler = Scheduler(Limits(), batching=True)
    entry = Entry({"x": np.zeros(4, np.float32)}, 1, lambda outcome: None, 0.0)
    scheduler.offer(entry, 0.0)
    batch = scheduler.take(0.0)
    scheduler.discard(entry)
    assert entry.inputs["x"].size == 4  # the engine reads it
    scheduler.finish(batch, 1.0, 1.0)
    assert len(scheduler) == 0


def test_late_requests_are_returned_with_the_batch() -> None:
    scheduler = Scheduler(Limits(), batching=True)
    late = [Entry({}, 1, lambda outcome: None, 0.0, deadline=deadline) for deadline in (0.5, 0.6)]
    staying = Entry({}, 1, lambda outcome: None, 0.0)
    for entry in (*late, staying):
        scheduler.offer(entry, 0.0)
    assert scheduler.take(1.0) == [staying]
    assert scheduler.late == late
    assert len(scheduler) == 0


def _seconds(work: Callable[[], None]) -> float:
    best = math.inf
    for _ in range(3):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


@pytest.mark.matrix
def test_thousands_of_groups_cost_as_little_as_one() -> None:
    def work(groups: int) -> Callable[[], None]:
        def run() -> None:
            scheduler = Scheduler(Limits(max_queue=8192), batching=True, latency=Latency(PAYS))
            for number in range(4000):
                entry = Entry({}, 1, lambda outcome: None, 0.0, (number % groups,), 1e6, nbytes=64)
                scheduler.offer(entry, 0.0)
            for _ in range(4000 if groups == 4000 else 1):
                while batch := scheduler.take(0.0):
                    scheduler.finish(batch, 0.0, PAYS[1])

        return run

    # A scan of all groups at each offer or batch would take hundreds of times as long.
    assert _seconds(work(4000)) < 60 * _seconds(work(1))


@pytest.mark.matrix
def test_requests_that_come_and_go_while_the_engine_hangs_leave_nothing_behind() -> None:
    scheduler = Scheduler(Limits(), batching=True, latency=Latency(PAYS))
    scheduler.offer(Entry({}, 1, lambda outcome: None, 0.0, deadline=1.0, nbytes=0), 0.0)
    for number in range(20_000):
        entry = Entry({}, 1, lambda outcome: None, 0.0, (number,), 1e6 - number, nbytes=0)
        scheduler.offer(entry, 0.0)
        scheduler.discard(entry)
    gc.collect()
    assert sum(type(item) is Entry for item in gc.get_objects()) < 500
    assert len(scheduler) == 1


@pytest.mark.parametrize("samples", [100, 1000])
def test_an_entry_larger_than_a_batch_runs_alone(samples: int) -> None:
    it = world(max_batch=8)
    for size in (1, samples, 1):
        it.offer(Arrival(0, samples=size))
    it.run_until(math.inf)
    assert [samples] in [[entry.samples for entry in batch] for _, batch in it.batches]


def test_an_entry_larger_than_a_batch_waits_for_no_more_rows_than_go_before_it() -> None:
    it = world({1: 0.01, 8: 0.0135, 16: 0.0165, 32: 0.0235, 64: 0.04}, max_batch=32)
    it.offer(Arrival(0))
    it.pump()
    it.offer(Arrival(0, timeout=0.05))
    large = it.offer(Arrival(0, samples=40, timeout=0.055))  # a full batch before it would make it late
    it.run_until(math.inf)
    assert large not in it.refused
    ((moment, outcome),) = it.outcomes[large]
    assert outcome is DONE
    assert moment == pytest.approx(0.047625)


def test_a_guess_refuses_nothing() -> None:
    """A sample of megabytes does not take a million times as long as one of four bytes, as a call has a fixed cost."""
    scheduler = Scheduler(Limits(), batching=True, latency=Latency({1: 1e-5}), sample_bytes=4)
    large = [Entry({}, 1, lambda outcome: None, 0.0, ("large",), 5.0, nbytes=4 << 20) for _ in range(8)]
    for entry in large:
        scheduler.offer(entry, 0.0)
    batch = scheduler.take(0.0)
    assert batch
    scheduler.finish(batch, 0.1, 0.1)
    late = Entry({}, 1, lambda outcome: None, 0.1, ("large",), 0.15, nbytes=4 << 20)
    # One call has shown its duration.
    assert isinstance(scheduler.offer(late, 0.1), Unavailable | DeadlineExceeded)
