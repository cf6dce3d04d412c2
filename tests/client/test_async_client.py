"""The asynchronous client, streams, and retries of both clients."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ingot
from benchmarks.serving.processes import free_ports
from ingot import RunningServer
from ingot.client.retries import Retries
from ingot.errors import (
    DeadlineExceeded,
    IngotError,
    InvalidArgument,
    NotFound,
    TooManyRequests,
    Unavailable,
    Unreached,
)
from tests import onnx_models
from tests.server.gates import Gate, hold
from tests.server.outside import wait_until
from tests.server.test_decoupled import UNTIL_FIVE, serve
from tests.server.test_sequences import cancelled, metric

X = np.array([[1, 2, 3]], np.float32)
N = {"n": np.zeros((1, 1), np.int64)}
both = pytest.mark.parametrize("protocol", ["http", "grpc"])


def address(server: RunningServer, protocol: str) -> str:
    return server.http_url if protocol == "http" else server.grpc_url


@pytest.mark.matrix
@both
async def test_many_requests_at_once(server: RunningServer, protocol: str) -> None:
    async with ingot.AsyncClient(address(server, protocol), connections=10) as client:
        assert await client.ready()
        assert not await client.ready("nope")
        assert (await client.metadata("affine"))["outputs"][0]["name"] == "y"
        answers = await asyncio.gather(*(client.infer("affine", {"x": X + n}) for n in range(50)))
        assert all(np.array_equal(each["y"], 2 * (X + n) + 1) for n, each in enumerate(answers))
        assert (await client.infer("affine", {"x": X}, outputs=["z"], binary=False))["z"].tolist() == [[-1, -2, -3]]
        with pytest.raises(NotFound, match="Request for unknown model: 'nope'"):
            await client.infer("nope", {})
        with pytest.raises(InvalidArgument, match="inputs is None"):
            await client.infer("affine", None)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="this client is closed"):
        await client.ready()


@pytest.fixture(scope="module")
def stepper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serve(tmp_path_factory.mktemp("models"), max_steps=10**9) as server:
        yield server


@both
@pytest.mark.matrix
def test_a_stream_of_answers(stepper: RunningServer, protocol: str) -> None:
    async def ask() -> list[int]:
        async with ingot.AsyncClient(address(stepper, protocol)) as client:
            return [answer["y"].item() async for answer in client.stream("stepper", N)]

    assert asyncio.run(ask()) == UNTIL_FIVE
    with ingot.Client(address(stepper, protocol)) as client:
        answers = list(client.stream("stepper", N, outputs=["y"]))
        assert [answer["y"].tolist() for answer in answers] == [[[value]] for value in UNTIL_FIVE]
        assert {(*answer, answer["y"].dtype.name) for answer in answers} == {("y", "int64")}
        with pytest.raises(NotFound if protocol == "http" else IngotError, match="unknown model"):
            list(client.stream("nope", N))
        with pytest.raises(IngotError, match="INT32"):
            list(client.stream("stepper", {"n": np.zeros((1, 1), np.int32)}))


@both
@pytest.mark.matrix
def test_a_stream_that_is_left_ends_on_the_server(tmp_path: Path, protocol: str) -> None:
    with serve(tmp_path, repeat_until=None, max_steps=10**9) as server:
        url = address(server, protocol)
        with ingot.Client(url) as client:
            answers = client.stream("stepper", N)
            assert [next(answers)["y"].item() for _ in range(3)] == UNTIL_FIVE[:3]
            answers.close()  # type: ignore[attr-defined]
        wait_until(lambda: metric(server.http_url, "ingot_sequences{") == 0)

        async def ask() -> None:
            async with ingot.AsyncClient(url) as client:
                async for answer in client.stream("stepper", N):
                    if answer["y"].item() > 100:
                        break

        asyncio.run(ask())
        wait_until(lambda: metric(server.http_url, "ingot_sequences{") == 0)


@both
@pytest.mark.matrix
def test_a_cancelled_task_cancels_its_request(tmp_path: Path, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = onnx_models.affine(tmp_path, "held")
    with Gate(tmp_path) as gate:
        hold(gate.path, monkeypatch.setattr)
        server = ingot.serve(str(model), http_port=0, grpc_port=0)

        async def ask() -> None:
            async with ingot.AsyncClient(address(server, protocol)) as client:
                gate.shut()
                task = asyncio.create_task(client.infer("held", {"x": X}))
                await asyncio.to_thread(wait_until, gate.waited_at)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await asyncio.to_thread(wait_until, lambda: cancelled(server.http_url) == 1)
                gate.open()

        with server:
            asyncio.run(ask())


@both
@pytest.mark.matrix
def test_refused_requests_are_sent_again_later(tmp_path: Path, protocol: str) -> None:
    model = str(onnx_models.affine(tmp_path))
    with ingot.serve(model, http_port=0, grpc_port=0, max_rate=4) as server:
        url = address(server, protocol)

        async def ask(retries: int, timeout: float = 60.0) -> list[object]:
            async with ingot.AsyncClient(url, timeout, retries=retries, connections=1) as client:
                asked = (client.infer("affine", {"x": X}) for _ in range(12))
                return list(await asyncio.gather(*asked, return_exceptions=True))

        refused = [each for each in asyncio.run(ask(0)) if isinstance(each, TooManyRequests)]
        assert refused
        assert {each.retry_after for each in refused} == {1.0}
        assert not [each for each in asyncio.run(ask(20)) if isinstance(each, Exception)]
        begun = time.monotonic()
        late = (TooManyRequests, DeadlineExceeded)  # the latter on a busy machine
        assert any(isinstance(each, late) for each in asyncio.run(ask(20, timeout=0.5)))
        assert time.monotonic() - begun < 10  # it does not wait when the time is too short
        with ingot.Client(url, retries=20) as client:
            assert all(client.infer("affine", {"x": X}) for _ in range(8))


@both
@pytest.mark.matrix
def test_a_server_that_is_not_there_yet(tmp_path: Path, protocol: str) -> None:
    model = str(onnx_models.affine(tmp_path))
    ports = dict(zip(("http", "grpc"), free_ports(2), strict=True))
    servers: list[RunningServer] = []
    start = threading.Timer(
        0.5, lambda: servers.append(ingot.serve(model, http_port=ports["http"], grpc_port=ports["grpc"]))
    )
    start.start()
    try:
        with ingot.Client(f"{protocol}://127.0.0.1:{ports[protocol]}", retries=12) as client:
            assert client.infer("affine", {"x": X})["y"].tolist() == [[3, 5, 7]]
    finally:
        start.join()
        for server in servers:
            server.close()


def test_which_errors_are_tried_again() -> None:
    refused, unreached = Unavailable("full"), Unreached("refused")
    refused.retry_after = 2.0
    assert 2 <= Retries(1, 60).wait(refused) <= 2.5
    tries = Retries(3, 60)
    waits = [tries.wait(unreached) for _ in range(3)]
    assert [round(wait / 0.1 / 2**number, 0) for number, wait in enumerate(waits)] == [1, 1, 1]
    for retries, error in (
        (Retries(0, 60), refused),
        (tries, unreached),  # which has been tried three times
        (Retries(3, 1), refused),
        (Retries(3, 60), DeadlineExceeded("late")),
        (Retries(3, 60, repeatable=False), refused),
    ):
        with pytest.raises(type(error)):
            retries.wait(error)
    assert Retries(3, 60, repeatable=False).wait(unreached) < 0.2
    with pytest.raises(InvalidArgument, match="retries is -1"):
        ingot.Client("http://localhost:1", retries=-1)
