from __future__ import annotations

import gc
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.errors import EngineLost, TooLarge
from ingot.runtime.gpu.pipeline import Lane, OnDevice, Pipeline
from ingot.tensors import Array
from tests.runtime.gpu.fake_device import Doubling, FakeDevice, UnorderedAccess, span_of


@pytest.fixture(scope="module", autouse=True)
def _only_objects_of_these_tests() -> None:
    """A collection looks at those alone; with all of a long test run it takes half a second."""
    gc.collect()
    gc.freeze()  # for good: thawing would undo what tests/conftest.py has frozen


class Run:
    """A pipeline on a fake device, driven by one thread: a batch begins as soon as a lane is free."""

    def __init__(self, device: FakeDevice, depth: int, seconds: float = 1, limit: int = 1 << 30):
        self.device = device
        self.pipeline = Pipeline(device, limit)
        self.launch = Doubling(device, self.pipeline.compute, seconds)
        self.idle = deque(Lane(self.pipeline, self.launch, ["x"]) for _ in range(depth))
        self.flying: deque[tuple[Lane, Array]] = deque()
        self.kept: list[tuple[Array, Array]] = []
        self.ends: list[float] = []

    def submit(self, values: Array, *, keep: bool = False) -> None:
        """Assemble a batch in pinned memory and start it, if need be after the oldest has ended."""
        if not self.idle:
            self.finish(keep=keep)
        staged = self.pipeline.pool.empty(values.shape, values.dtype)
        self.device.touch(span_of(staged), writes=True)
        staged[...] = values
        lane = self.idle.popleft()
        lane.start({"x": staged})
        self.flying.append((lane, values))

    def submit_all(self, count: int) -> None:
        for number in range(count):
            self.submit(batch(number))

    def finish(self, *, keep: bool = False) -> None:
        lane, values = self.flying.popleft()
        (result,) = lane.finish()
        self.ends.append(self.device.now)
        self.device.touch(span_of(result), writes=False)
        np.testing.assert_array_equal(result, 2 * values)
        if keep:
            self.kept.append((result, values))
        self.idle.append(lane)

    def close(self) -> None:
        while self.flying:
            self.finish()
        for result, values in self.kept:  # no later batch may have written to it
            np.testing.assert_array_equal(result, 2 * values)
        for lane in self.idle:
            lane.close()
        self.pipeline.close()


def batch(number: int, samples: int = 4) -> Array:
    return np.full((samples, 3), number, np.float32) + np.arange(3, dtype=np.float32)


@pytest.mark.parametrize("slowest", range(3))
def test_batches_take_as_long_as_their_slowest_stage(slowest: int) -> None:
    stages = [1.0, 1.0, 1.0]
    stages[slowest] = 4.0
    device = FakeDevice((stages[0], stages[2]))
    run = Run(device, 3, stages[1])
    run.submit_all(20)
    run.close()
    assert device.now == sum(stages) + 19 * 4.0
    one_by_one = Run(FakeDevice((stages[0], stages[2])), 1, stages[1])
    one_by_one.submit_all(20)
    one_by_one.close()
    assert one_by_one.device.now == 20 * sum(stages)


STAGE = st.sampled_from([0.0, 0.25, 1.0, 3.0])


@pytest.mark.matrix
@settings(max_examples=60, deadline=None)
@given(
    depth=st.integers(1, 5),
    stages=st.tuples(STAGE, STAGE, STAGE),
    batches=st.lists(st.tuples(st.integers(0, 9), st.booleans(), STAGE), min_size=1, max_size=25),
    limit=st.sampled_from([0, 1 << 14, 1 << 30]),
)
def test_no_memory_is_used_early_and_no_result_comes_out_of_order(
    depth: int, stages: tuple[float, float, float], batches: Sequence[tuple[int, bool, float]], limit: int
) -> None:
    device = FakeDevice((stages[0], stages[2]))
    run = Run(device, depth, stages[1], limit)
    for number, (samples, keep, seconds) in enumerate(batches):
        run.launch.seconds = seconds
        run.submit(batch(number, samples * samples * 50), keep=keep)
    run.close()
    assert run.ends == sorted(run.ends)
    longest = [stages[0], max(seconds for _, _, seconds in batches), stages[2]]
    period = max(*longest, sum(longest) / depth)
    assert device.now <= sum(longest) + (len(batches) - 1) * period + 1e-9
    del run
    gc.collect()
    assert not device.pinned


class Faulty(FakeDevice):
    """Leaves out the calls of one kind, as a wrong pipeline would."""

    def __init__(self, fault: str):
        super().__init__()
        self.fault = fault
        self.streams: list[int] = []

    def stream(self) -> int:
        self.streams.append(super().stream())
        return self.streams[-1]

    def wait(self, stream: int, event: int) -> None:
        if self.fault != ("copy in", "compute", "copy out")[self.streams.index(stream)]:
            super().wait(stream, event)

    def synchronize(self, event: int) -> None:
        if self.fault != "end":
            super().synchronize(event)


class Careless(Doubling):
    """Frees outputs as soon as they are enqueued."""

    def __call__(self, inputs: Mapping[str, Array], addresses: Mapping[str, int]) -> list[OnDevice]:
        return [
            OnDevice(output.address, output.shape, output.dtype, None) for output in super().__call__(inputs, addresses)
        ]


@pytest.mark.parametrize("fault", ["compute", "copy out", "end"])
def test_a_missing_wait_is_found(fault: str) -> None:
    run = Run(Faulty(fault), 3)
    with pytest.raises(UnorderedAccess):
        run.submit_all(8)


def test_an_output_that_is_freed_before_its_copy_is_found() -> None:
    run = Run(FakeDevice(), 3)
    launch = Careless(run.device, run.pipeline.compute)
    run.idle = deque(Lane(run.pipeline, launch, ["x"]) for _ in range(3))
    with pytest.raises(UnorderedAccess):
        run.submit_all(8)


def test_a_staging_buffer_that_is_written_too_early_is_found() -> None:
    run = Run(FakeDevice(), 1)
    staged = run.pipeline.pool.empty((4, 3), np.dtype(np.float32))
    run.idle[0].start({"x": staged})
    with pytest.raises(UnorderedAccess):
        run.device.touch(span_of(staged), writes=True)


def test_a_copy_to_ordinary_memory_does_not_stop_other_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's driver waits for the batch in such a copy."""
    for limit, locked in ((0, False), (1 << 30, True)):
        run, seen = Run(FakeDevice(), 3, limit=limit), list[bool]()
        copy_out = run.device.copy_out

        def watched(*how: int, run: Run = run, seen: list[bool] = seen, copy_out: Any = copy_out) -> None:
            seen.append(run.pipeline.order.locked())
            copy_out(*how)

        monkeypatch.setattr(run.device, "copy_out", watched)
        run.submit_all(8)
        run.close()
        assert seen == [locked] * 8


def test_a_batch_ends_before_the_copies_of_later_ones() -> None:
    class Recording(FakeDevice):
        def record(self, event: int, stream: int) -> None:
            if stream == run.pipeline.copy_out:
                recorded.append(run.pipeline.order.locked())
            super().record(event, stream)

    recorded = list[bool]()
    run = Run(Recording(), 2)
    run.submit(batch(1))
    run.device.pinnable = 0
    run.submit(batch(2, 100))  # which is copied to ordinary memory, while others may launch
    assert recorded == [True, False]
    run.close()


def test_steady_traffic_stalls_nothing() -> None:
    run = Run(FakeDevice(), 3)
    for number in range(8):
        run.submit(batch(number), keep=number % 3 == 0)
    warm, held = run.device.stalls, run.pipeline.pool.nbytes
    run.kept.clear()
    run.submit_all(100)
    assert run.device.stalls == warm
    assert run.pipeline.pool.nbytes == held
    run.close()


def test_results_are_not_copied_twice_and_their_memory_is_used_again() -> None:
    run = Run(FakeDevice(), 1)
    lane = run.idle[0]
    (first,) = lane.run({"x": batch(1)})
    place, part = span_of(first), first[1:2]
    assert place[0] in run.device.pinned
    (second,) = lane.run({"x": batch(2)})
    assert span_of(second) != place
    del first, second
    gc.collect()
    assert part.tolist() == [[2, 4, 6]]
    del part
    gc.collect()
    (third,) = lane.run({"x": batch(3)})
    assert span_of(third)[0] in run.device.pinned
    assert len(run.device.pinned) <= 3
    np.testing.assert_array_equal(third, 2 * batch(3))


def test_inputs_that_are_pinned_already_are_not_copied_before() -> None:
    run = Run(FakeDevice(), 1)
    (first,) = run.idle[0].run({"x": batch(1)})
    assert run.pipeline.pool.placed(first) is first
    turned = first.T
    placed = run.pipeline.pool.placed(turned)
    assert placed is not turned
    np.testing.assert_array_equal(placed, turned)


def test_without_pinned_memory_results_are_right() -> None:
    run = Run(FakeDevice(pinnable=0), 2)
    run.submit_all(5)
    run.close()
    assert not run.device.pinned


def test_a_batch_without_memory_fails_alone() -> None:
    device = FakeDevice(memory=1 << 16)
    run = Run(device, 2)
    run.submit(batch(1))
    lane = run.idle.popleft()
    with pytest.raises(TooLarge):
        lane.start({"x": batch(2, 1 << 14)})
    run.idle.append(lane)
    for number in range(3, 9):
        run.submit(batch(number))
    run.close()


def test_a_failed_launch_leaves_no_work_that_uses_its_memory() -> None:
    device = FakeDevice()
    run = Run(device, 2)
    run.submit(batch(1))
    staged = run.pipeline.pool.empty((4, 3), np.dtype(np.float32))
    staged[...] = batch(2)
    run.launch.failing = TooLarge("no memory")
    lane = run.idle.popleft()
    with pytest.raises(TooLarge):
        lane.start({"x": staged})
    run.launch.failing = None
    device.touch(span_of(staged), writes=True)  # it may be used again at once
    staged[...] = batch(3)
    (result,) = lane.run({"x": staged})
    np.testing.assert_array_equal(result, 2 * batch(3))
    run.idle.append(lane)
    run.close()


def test_closing_returns_all_memory() -> None:
    device = FakeDevice()
    free = device.memory, device.pinnable
    run = Run(device, 3)
    for number in range(6):
        run.submit(batch(number, 100 * number))
    while run.flying:
        run.finish()
    (held,) = run.idle[0].run({"x": batch(7)})
    for address in list(device.blocks):  # those of the engine's arena are the engine's
        if any(address in free for free in run.launch.arena._free.values()):
            device.free(address, run.pipeline.compute)
    run.close()
    assert len(device.pinned) == 1
    np.testing.assert_array_equal(held, 2 * batch(7))
    del held
    gc.collect()
    assert not device.pinned
    assert device.pinnable == free[1]


def test_a_failed_device_fails_its_batches_and_can_be_closed() -> None:
    device = FakeDevice()
    run = Run(device, 2)
    run.submit(batch(1))
    device.fail("error 700")
    with pytest.raises(EngineLost, match="error 700"):
        run.finish()
    with pytest.raises(EngineLost):
        run.idle[0].start({"x": batch(2)})
    for lane in run.idle:
        lane.close()
    run.pipeline.close()


def test_lanes_run_in_threads() -> None:
    device = FakeDevice()
    pipeline = Pipeline(device)
    launch = Doubling(device, pipeline.compute)
    lanes = [Lane(pipeline, launch, ["x"]) for _ in range(4)]
    numbers, order = itertools.count(), Lock()

    def serve(lane: Lane) -> int:
        count = 0
        while True:
            with order:
                number = next(numbers)
            if number >= 200:
                return count
            values = batch(number, 1 + number % 7)
            (result,) = lane.run({"x": values})
            device.touch(span_of(result), writes=False)
            np.testing.assert_array_equal(result, 2 * values)
            count += 1

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(serve, lanes)) == 200
    for lane in lanes:
        lane.close()
    pipeline.close()
