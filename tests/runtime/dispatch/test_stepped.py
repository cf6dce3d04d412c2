from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ingot.errors import DeadlineExceeded, InternalError, Unavailable
from ingot.runtime import Limits, Metrics, Outcome, Request
from ingot.runtime.dispatch import stepped
from ingot.runtime.dispatch.fair_threads import FairThreads
from ingot.runtime.dispatch.stepped import Stepped
from ingot.steps import Apply, OpenedSteps, Values, text_classification
from ingot.tensors import Array, DType, Signature, TensorSpec
from tests.runtime.waiting import wait_until
from tests.steps.bert import tokenizer_file

SIGNATURE = Signature(
    (TensorSpec("input_ids", DType.INT64, ("batch",)),), (TensorSpec("logits", DType.FP32, ("batch", 2)),), "batch"
)
SMALL = {"logits": np.ones((1, 2), np.float32)}
LARGE = {"logits": np.ones((5000, 2), np.float32)}


class Tensors:
    """Accepts requests of tensors, and keeps them until the test answers them."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.cancelled = 0
        self.done = False

    def submit(self, request: Request) -> Tensors:
        self.requests.append(request)
        return self

    def cancel(self) -> None:
        self.cancelled += 1


class Case:
    """Steps of which the first waits for ``gate``, in one thread, and the answers of their requests.

    ``size`` is that of texts: short ones are prepared in the event loop, which must not wait.
    """

    def __init__(self, prepare: Apply | None = None, limits: Limits = Limits(), size: int = 600) -> None:  # noqa: B008 - it is frozen
        self.size = size
        self.tensors = Tensors()
        self.gate = threading.Event()
        self.started = 0
        self.prepared: list[bytes] = []
        self.threads: list[str] = []
        self.answers: list[Outcome] = []

        def first(values: Values) -> Values:
            self.started += 1
            assert self.gate.wait(30)
            self.prepared.append(values["text"][0].strip())
            self.threads.append(threading.current_thread().name)
            found = {"input_ids": np.zeros(1, np.int32)} if prepare is None else prepare(values)
            return {"attention_mask": np.ones((1, 1), np.int64), **found}

        def last(values: Values) -> Values:
            self.threads.append(threading.current_thread().name)
            logits = values["logits"]
            labels, counts = np.full(logits.shape, b"A", object), np.zeros(len(logits), np.int32)
            return {"label": labels, "score": logits, "tokens": counts, "cut_tokens": counts}

        config = text_classification(tokenizer_file(), ["A", "B"]).steps
        steps = OpenedSteps(config, SIGNATURE, (("tokenize", first),), (("classify", last),))
        self.stepped = Stepped("m", "1", steps, self.tensors, limits, Metrics())

    def ask(self, text: bytes = b"a", *, timeout: float | None = None, client: str | None = None) -> Any:
        raw: dict[str, Array] = {"text": np.array([text.ljust(self.size)], object)}
        return self.stepped.submit(Request(raw, self.answers.append, timeout, client=client))

    async def quiet(self) -> None:
        await asyncio.wait_for(self.stepped.wait_quiet(), 30)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with contextlib.closing(FairThreads(1, "first-steps")) as threads:
        monkeypatch.setattr(stepped, "preparing", threads)
        yield


class Panic(BaseException):
    pass


def panic(values: Values) -> Values:
    raise Panic("at line 1")


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (panic, "a step of model 'm' failed: Panic: at line 1"),
        (lambda values: {"input_ids": np.array([b"a"], object)}, "a step of model 'm' failed: ValueError"),
    ],
    ids=["panic", "tensors"],
)
@pytest.mark.parametrize("size", [1, 600], ids=["in the loop", "in a thread"])
async def test_each_failure_of_a_step_is_an_answer(prepare: Apply, message: str, size: int) -> None:
    case = Case(prepare, size=size)
    case.gate.set()
    case.ask()
    await case.quiet()
    [answer] = case.answers
    assert isinstance(answer, InternalError)
    assert message in str(answer)
    assert case.stepped.waiting == 0
    assert not case.tensors.requests


async def test_a_cancelled_request_is_not_prepared_and_its_tensors_are_cancelled() -> None:
    case = Case()
    running, queued = case.ask(b"running"), case.ask(b"queued")
    await wait_until(lambda: case.started)
    queued.cancel()
    case.gate.set()
    await wait_until(lambda: case.tensors.requests)
    running.cancel()
    await case.quiet()
    await wait_until(lambda: not case.stepped.waiting)
    assert case.prepared == [b"running"]
    assert case.tensors.cancelled == 1
    case.tensors.requests[0].reply(SMALL)
    assert case.answers == []


async def test_short_texts_are_prepared_in_the_event_loop_after_their_submission() -> None:
    case = Case(size=1)
    case.gate.set()
    case.ask(b"short")
    cancelled = case.ask(b"left")
    assert case.threads == []
    cancelled.cancel()
    case.ask(b"long" * 200)
    await wait_until(lambda: len(case.tensors.requests) == 2)
    assert case.prepared == [b"short", b"long" * 200]
    assert case.threads[0] == threading.current_thread().name
    assert case.threads[1].startswith("first-steps")
    assert case.stepped.waiting == 0


async def test_a_full_queue_and_a_clients_share() -> None:
    case = Case(limits=Limits(max_queue=8))
    asked = [case.ask(client="a") for _ in range(7)]
    with pytest.raises(Unavailable, match="7 requests of this client wait, and the rest of the queue is kept for"):
        case.ask(client="a")
    asked.append(case.ask(client="b"))
    with pytest.raises(Unavailable, match=r"the queue is full \(8 requests wait\)"):
        case.ask(client="c")
    for raw in asked:
        raw.cancel()
    case.gate.set()
    await wait_until(lambda: not case.stepped.waiting)
    case.ask(client="a")
    await wait_until(lambda: case.tensors.requests)


async def test_a_deadline_is_kept_before_and_after_the_graph() -> None:
    case = Case()
    case.ask(b"running")
    case.ask(b"late", timeout=0.01)
    await wait_until(lambda: case.answers)
    [late] = case.answers
    assert isinstance(late, DeadlineExceeded)
    assert str(late) == "model 'm' did not answer within 0.01 s"
    case.gate.set()
    await wait_until(lambda: not case.stepped.waiting)
    assert case.prepared == [b"running"]
    case.ask(timeout=30)
    await wait_until(lambda: len(case.tensors.requests) == 2)
    left = case.tensors.requests[1].timeout
    assert left is not None
    assert 0 < left < 30


async def test_requests_that_wait_fail_when_the_graph_cannot_run() -> None:
    case = Case()
    case.ask(b"running")
    case.ask(b"queued")
    await wait_until(lambda: case.started)
    case.stepped.fail(Unavailable("model 'm' is stuck"))
    assert [str(answer) for answer in case.answers] == ["model 'm' is stuck"] * 2
    await case.quiet()
    case.gate.set()
    await wait_until(lambda: not case.stepped.waiting)
    assert not case.tensors.requests
    assert case.prepared == [b"running"]


async def test_draining_waits_for_answers_and_large_outputs_are_finished_in_another_thread() -> None:
    case = Case()
    case.gate.set()
    case.ask(b"small")
    case.ask(b"large")
    await wait_until(lambda: len(case.tensors.requests) == 2)
    case.gate.clear()
    case.ask(b"queued")  # what ends does not wait for its thread
    draining = asyncio.create_task(case.stepped.wait_quiet())
    case.tensors.requests[0].reply(SMALL)
    case.tensors.requests[1].reply(LARGE)
    await wait_until(lambda: len(case.answers) == 2)
    assert case.threads[-2] == threading.current_thread().name
    assert case.threads[-1].startswith("ingot-last-steps")
    assert not draining.done()
    case.gate.set()
    await wait_until(lambda: len(case.tensors.requests) == 3)
    case.tensors.requests[2].reply(SMALL)
    await asyncio.wait_for(draining, 30)
    answer = case.answers[1]
    assert isinstance(answer, dict)
    assert answer["score"] is LARGE["logits"]
