"""NVIDIA's client under load, over gRPC: blocking, asynchronous and as a stream."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from ingot.tensors import Array
from tests.server.outside import Service, affine_of, large, row, wait_until

pytestmark = pytest.mark.usefixtures("still_answers")

CALLS = 300


@pytest.fixture
def client(service: Service) -> Iterator[triton.InferenceServerClient]:
    opened = triton.InferenceServerClient(service.grpc)
    yield opened
    opened.close()


def tensor(x: Array) -> list[Any]:
    described = triton.InferInput("x", list(x.shape), "FP32")
    described.set_data_from_numpy(x)
    return [described]


def numbered(number: int) -> list[Any]:
    return tensor(np.array([row(number)], np.float32))


def check(number: int, result: Any) -> None:
    assert result.as_numpy("y").tolist() == [affine_of(row(number))]


class Answers:
    """Collects the results that the client's callbacks receive."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[int, Any, Any]] = queue.Queue()

    def callback(self, number: int = -1) -> Any:
        return lambda result, error: self._queue.put((number, result, error))

    def next(self) -> tuple[int, Any, Any]:
        return self._queue.get(timeout=60)


def test_many_at_once_by_callbacks(client: triton.InferenceServerClient) -> None:
    answers = Answers()
    for number in range(CALLS):
        client.async_infer("affine", numbered(number), answers.callback(number), client_timeout=60)
    seen = set()
    for _ in range(CALLS):
        number, result, error = answers.next()
        assert error is None
        check(number, result)
        seen.add(number)
    assert len(seen) == CALLS


@pytest.mark.matrix
def test_4_mib_from_many_threads(client: triton.InferenceServerClient) -> None:
    right: list[bool] = []

    def ask(number: int) -> None:
        answer = client.infer("increment", tensor(large(number))).as_numpy("y")
        right.append(np.array_equal(answer, large(number) + 1))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert right == [True] * 8


def test_deadlines_and_cancellations(service: Service, client: triton.InferenceServerClient) -> None:
    held = tensor(np.ones((1, 3), np.float32))
    with service.gate.closed():
        with pytest.raises(InferenceServerException, match="DEADLINE_EXCEEDED"):
            client.infer("held", held, client_timeout=0.02)
        answers = Answers()
        before = service.count("ingot_requests_total", model="held", code="cancelled")
        calls = [client.async_infer("held", held, answers.callback()) for _ in range(10)]
        wait_until(lambda: service.count("ingot_in_flight_requests", model="held") >= len(calls))
        for call in calls:
            call.cancel()
        errors = [answers.next()[2] for _ in calls]
        assert all(error is not None and "cancel" in str(error).lower() for error in errors)
        wait_until(lambda: service.count("ingot_requests_total", model="held", code="cancelled") - before >= len(calls))


@pytest.mark.matrix
@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed(client: triton.InferenceServerClient, algorithm: str) -> None:
    answer = client.infer("affine", numbered(7), compression_algorithm=algorithm)
    check(7, answer)
    big = client.infer("increment", tensor(large(1)), compression_algorithm=algorithm).as_numpy("y")
    assert np.array_equal(big, large(1) + 1)


@pytest.mark.matrix
async def test_asynchronous(service: Service) -> None:
    async with triton_aio.InferenceServerClient(service.grpc) as client:

        async def ask(number: int) -> None:
            check(number, await client.infer("affine", numbered(number)))

        await asyncio.gather(*(ask(number) for number in range(CALLS)))
        answer = await client.infer("increment", tensor(large(4)))
        assert np.array_equal(answer.as_numpy("y"), large(4) + 1)


def test_a_stream_answers_in_order_and_reports_errors_in_band(client: triton.InferenceServerClient) -> None:
    answers = Answers()
    client.start_stream(answers.callback())
    for number in range(CALLS):
        model = "nope" if number == 100 else "affine"
        client.async_stream_infer(model, numbered(number), request_id=str(number))
    for number in range(CALLS):
        _, result, error = answers.next()
        if number == 100:
            assert "nope" in str(error)
        else:
            assert error is None
            assert result.get_response().id == str(number)
            check(number, result)
    client.stop_stream()


@pytest.mark.matrix
def test_a_stream_of_4_mib(client: triton.InferenceServerClient) -> None:
    answers = Answers()
    client.start_stream(answers.callback())
    for number in range(4):
        client.async_stream_infer("increment", tensor(large(number)))
    for number in range(4):
        _, result, error = answers.next()
        assert error is None
        assert np.array_equal(result.as_numpy("y"), large(number) + 1)
    client.stop_stream()


def test_a_stream_that_is_cut_leaves_nothing(service: Service, client: triton.InferenceServerClient) -> None:
    answers = Answers()
    client.start_stream(answers.callback())
    with service.gate.closed():
        for _ in range(5):
            client.async_stream_infer("held", tensor(np.ones((1, 3), np.float32)))
        wait_until(lambda: service.count("ingot_in_flight_requests", model="held") > 0)
        client.stop_stream(cancel_requests=True)
        wait_until(lambda: service.count("ingot_in_flight_requests", model="held") == 0)
