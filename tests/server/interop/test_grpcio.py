"""gRPC's own client for Python, blocking and asynchronous."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from ingot.protocol import open_inference_pb2 as pb
from tests.server.outside import INFER, Service, affine, affine_of, floats, large, request_of, row, wait_until

pytestmark = pytest.mark.usefixtures("still_answers")

CALLS = 600
SIZES = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
GZIP = grpc.Compression.Gzip


@pytest.fixture
def channel(service: Service) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(service.grpc, SIZES) as opened:
        yield opened


def infer(channel: Any) -> Any:
    return channel.unary_unary(INFER, pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString)


def came_too_late(error: Any) -> bool:
    """Whether a call's time was up; or the server saw that it would be, as other calls are ahead of it."""
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return "the answer would take longer than" in error.details()
    return bool(error.code() is grpc.StatusCode.DEADLINE_EXCEEDED)


def held() -> pb.ModelInferRequest:
    return request_of(np.ones((1, 3), np.float32), "held")


@pytest.mark.matrix
def test_many_calls_at_once_each_get_their_own_answer(channel: grpc.Channel) -> None:
    calls = [infer(channel).future(affine(row(number)), timeout=60) for number in range(CALLS)]
    for number, call in enumerate(calls):
        assert floats(call.result()) == affine_of(row(number))


@pytest.mark.matrix
def test_messages_of_4_mib_both_ways(channel: grpc.Channel) -> None:
    calls = [infer(channel).future(request_of(large(number), "increment"), timeout=60) for number in range(8)]
    for number, call in enumerate(calls):
        assert np.array_equal(np.frombuffer(call.result().raw_output_contents[0], np.float32), large(number)[0] + 1)


def test_a_deadline_that_is_too_short_ends_the_call_alone(service: Service, channel: grpc.Channel) -> None:
    with service.gate.closed():
        late = [infer(channel).future(held(), timeout=0.02) for _ in range(4)]
        others = [infer(channel).future(affine(row(number)), timeout=60) for number in range(50)]
        for number, call in enumerate(others):
            assert floats(call.result()) == affine_of(row(number))
        for call in late:
            assert came_too_late(call.exception())
    assert floats(infer(channel)(held(), timeout=60)) == [2, 2, 2]


@pytest.mark.matrix
def test_cancelled_calls_are_not_run(service: Service, channel: grpc.Channel) -> None:
    before = service.count("ingot_requests_total", model="held", code="cancelled")
    rows = service.count("ingot_batch_size_sum", model="held")
    with service.gate.closed():
        calls = [infer(channel).future(held())]
        wait_until(service.gate.waited_at)  # otherwise it may be batched with the others, which would then run with it
        calls += [infer(channel).future(held()) for _ in range(19)]
        wait_until(lambda: service.count("ingot_in_flight_requests", model="held") == len(calls))
        for call in calls:
            call.cancel()
        wait_until(lambda: service.count("ingot_requests_total", model="held", code="cancelled") - before == len(calls))
    assert floats(infer(channel)(held(), timeout=60)) == [2, 2, 2]
    assert service.count("ingot_batch_size_sum", model="held") - rows <= 2  # one was running when it was cancelled


@pytest.mark.matrix
def test_compressed_messages(channel: grpc.Channel) -> None:
    ask = infer(channel)
    for number in range(50):
        reply = ask(affine(row(number)), timeout=60, compression=GZIP)
        assert floats(reply) == affine_of(row(number))
    assert np.array_equal(
        np.frombuffer(
            ask(request_of(large(3), "increment"), timeout=60, compression=GZIP).raw_output_contents[0], np.float32
        ),
        large(3)[0] + 1,
    )


def test_metadata_of_all_kinds_is_taken(channel: grpc.Channel) -> None:
    metadata = [("x-trace", "1"), ("x-blob-bin", bytes(range(256))), ("x-long", "y" * 4000), ("x-trace", "again")]
    for _ in range(3):  # the second time, most of it comes from the compression's table
        assert floats(infer(channel)(affine([1, 2, 3]), timeout=60, metadata=metadata)) == [3, 5, 7]


def test_many_channels_at_once(service: Service) -> None:
    # With the same options, channels of one process share a connection.
    channels = [grpc.insecure_channel(service.grpc, (("grpc.client_channel_id", number),)) for number in range(50)]
    try:
        calls = [infer(opened).future(affine(row(number)), timeout=60) for number, opened in enumerate(channels)]
        for number, call in enumerate(calls):
            assert floats(call.result()) == affine_of(row(number))
    finally:
        for opened in channels:
            opened.close()


@pytest.mark.matrix
def test_asynchronous_calls_with_deadlines_and_cancellations_among_them(service: Service) -> None:
    async def ask(channel: grpc.aio.Channel, number: int) -> None:
        if number % 10 == 3:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await infer(channel)(held(), timeout=0.01)
            assert came_too_late(caught.value)
        elif number % 10 == 7:
            call = infer(channel)(affine(row(number)), timeout=60)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        else:
            assert floats(await infer(channel)(affine(row(number)), timeout=60)) == affine_of(row(number))

    async def work() -> None:
        async with grpc.aio.insecure_channel(service.grpc, options=SIZES) as channel:
            await asyncio.gather(*(ask(channel, number) for number in range(CALLS)))
            x = large(5)
            reply = await infer(channel)(request_of(x, "increment"), timeout=60)
            assert np.array_equal(np.frombuffer(reply.raw_output_contents[0], np.float32), x[0] + 1)

    with service.gate.closed():
        asyncio.run(work())
