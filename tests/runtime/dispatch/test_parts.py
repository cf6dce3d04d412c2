"""A request whose samples differ in length runs in parts, and its answer is that of each sample alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.errors import IngotError, InvalidArgument
from ingot.runtime import Latency, Limits, Outcome, Request, Scheduler
from ingot.runtime.dispatch import pending
from ingot.runtime.dispatch.dispatcher import Dispatcher
from ingot.runtime.dispatch.padding import PaddingPolicy
from ingot.tensors import Array
from ingot.tensors.padding import Padder, scattered
from tests.runtime.dispatch.test_padding import PADDINGS, SIGNATURE, masked_sum
from tests.runtime.fake_engines import FunctionEngine


def served(engine: FunctionEngine, fixed: float = 0.002, max_batch: int = 64) -> tuple[Dispatcher, Scheduler]:
    policy = PaddingPolicy(Padder(SIGNATURE, PADDINGS), (5,))
    latency = Latency({work: fixed + 1e-4 * work for work in (1, 4, 16, 64, 256, 1024)})
    scheduler = Scheduler(
        Limits(max_batch=max_batch), batching=True, latency=latency, sample_bytes=12, work=policy.work
    )
    return Dispatcher("m", "1", [engine], SIGNATURE, scheduler, padding=policy, inline=False), scheduler


def request(lengths: list[int]) -> tuple[dict[str, Array], Array]:
    """Return rows of ids padded to the longest, as the step ``tokenize`` pads them, and their lengths."""
    shape = len(lengths), max(lengths)
    mask = (np.arange(shape[1]) < np.array(lengths)[:, None]).astype(np.float32)
    ids = np.where(mask > 0, np.arange(1, 1 + shape[0] * shape[1]).reshape(shape), 7)
    return {"ids": ids, "mask": mask}, np.array(lengths, np.int32)


def answers(made: Dispatcher, *requests: Request) -> None:
    async def work() -> None:
        for each in requests:
            made.submit(each)
        await asyncio.wait_for(made.wait_quiet(), 30)

    asyncio.run(work())


def ask(made: Dispatcher, *asked: list[int]) -> list[Outcome]:
    found: dict[int, Outcome] = {}
    requests = []
    for number, lengths in enumerate(asked):
        inputs, counts = request(lengths)
        reply = lambda outcome, number=number: found.__setitem__(number, outcome)  # noqa: E731
        requests.append(Request(inputs, reply, lengths=counts))
    answers(made, *requests)
    return [found[number] for number in range(len(asked))]


def check(lengths: list[int], outcome: Outcome) -> None:
    assert isinstance(outcome, Mapping)
    inputs, _ = request(lengths)
    whole = masked_sum(inputs)
    assert np.array_equal(outcome["sum"], whole["sum"])
    # Where a row has padding, the answer has zeros.
    assert np.array_equal(outcome["each"], np.where(inputs["mask"] > 0, whole["each"], 0)[:, : max(lengths)])


def test_rows_run_among_others_of_their_length_and_are_answered_in_their_order() -> None:
    engine = FunctionEngine(masked_sum, SIGNATURE)
    made, scheduler = served(engine)
    asked = [[3, 90, 4, 80, 3], [91, 3], [50]]
    for lengths, outcome in zip(asked, ask(made, *asked), strict=True):
        check(lengths, outcome)
    assert sum(engine.calls) == 8
    told = made.statistics({})
    assert told.padded < told.elements * 1.25
    assert (len(scheduler), scheduler.nbytes, made.in_flight) == (0, 0, 0)
    made.close()


@pytest.mark.matrix
@given(
    st.lists(st.lists(st.integers(1, 100), min_size=1, max_size=70), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.002, 1.0]),
    st.sampled_from([1, 4, 64]),
)
@settings(deadline=None)
def test_each_row_is_answered_once_whatever_the_lengths(asked: list[list[int]], fixed: float, most: int) -> None:
    engine = FunctionEngine(masked_sum, SIGNATURE)
    made, scheduler = served(engine, fixed, most)
    for lengths, outcome in zip(asked, ask(made, *asked), strict=True):
        check(lengths, outcome)
    assert sum(engine.calls) == sum(map(len, asked))
    assert (len(scheduler), scheduler.nbytes, made.in_flight) == (0, 0, 0)
    made.close()


def test_a_part_that_fails_is_the_error_of_its_request_and_of_no_other() -> None:
    def picky(inputs: Mapping[str, Array]) -> dict[str, Array]:
        if inputs["ids"].shape[1] == 90:
            raise InvalidArgument("90 is too long")
        return masked_sum(inputs)

    made, scheduler = served(FunctionEngine(picky, SIGNATURE))
    failed, right = ask(made, [3, 90, 4], [5, 40])
    assert isinstance(failed, IngotError)
    assert "90 is too long" in str(failed)
    check([5, 40], right)
    assert (len(scheduler), scheduler.nbytes, made.in_flight) == (0, 0, 0)
    made.close()


@pytest.mark.source  # replaces a function of a compiled module
def test_large_outputs_are_joined_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def joined(parts: Sequence[Array], positions: Sequence[Sequence[int]], axis: int) -> Array:
        threads.append(threading.current_thread())
        return scattered(parts, positions, axis)

    monkeypatch.setattr(pending, "scattered", joined)
    made, _ = served(FunctionEngine(masked_sum, SIGNATURE))
    lengths = [3, 100] * 6000
    small, large = ask(made, [3, 90], lengths)
    check([3, 90], small)
    check(lengths, large)
    others = [thread for thread in threads if thread is not threading.main_thread()]
    assert (len(threads), len(others)) == (4, 2)  # two outputs of each request
    assert made.in_flight == 0
    made.close()
