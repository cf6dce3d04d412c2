"""A fault affects only its request: not the others of its batch, nor its connection, nor the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest

from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol.requests import InferRequest, Template
from ingot.server.grpc.service import Service
from ingot.server.http.connection import Connection, Connections
from ingot.server.http.exchange import HttpState
from ingot.server.plane.dataplane import DataPlane
from ingot.serving import Repository
from tests import onnx_models


@pytest.fixture
def plane(folder: Path) -> Iterator[DataPlane]:
    repository = Repository()
    repository.add(str(onnx_models.affine(folder))).load()
    yield DataPlane(repository)
    repository.close(60)


class FailingOnce:
    def __init__(self) -> None:
        self.offered = 0

    def offer(self, *_: Any) -> None:
        self.offered += 1
        if self.offered == 1:
            raise OSError("no recorder")


def test_a_recorder_that_fails_hurts_none_of_the_batch(plane: DataPlane, caplog: pytest.LogCaptureFixture) -> None:
    plane.recorder = FailingOnce()  # type: ignore[assignment]

    async def ask(value: float) -> Any:
        x = np.full((1, 3), value, np.float32)
        return await plane.infer(InferRequest(Template("affine"), {"x": x}), "http")

    async def test() -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(*map(ask, range(3)), return_exceptions=True), 60)

    answers = asyncio.run(test())
    assert [answer.outputs[0][2].tolist() for answer in answers] == [[[1, 1, 1]], [[3, 3, 3]], [[5, 5, 5]]]
    assert "could not be recorded" in caplog.text
    assert 'ingot_requests_total{code="ok",model="affine",protocol="http",version="1"} 3.0' in (
        plane.metrics.render().decode()
    )


class Endless:
    """A data plane that never answers."""

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self.reader = None
        self.repository = SimpleNamespace(get=lambda name, version: SimpleNamespace(decoupled=False))

    async def infer(self, *_: Any) -> Any:
        self.begun += 1
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.ended += 1


@pytest.mark.parametrize("count", [1, 64, 65, 66, 100])
async def test_a_stream_whose_client_leaves_leaves_nothing_running(count: int) -> None:
    """Neither queued requests, nor the next one that does not fit."""
    plane: Any = Endless()

    async def requests() -> AsyncIterator[pb.ModelInferRequest]:
        for _ in range(count):
            yield pb.ModelInferRequest(model_name="affine")

    answers = Service(plane).model_stream_infer(requests())
    waiting = asyncio.ensure_future(anext(answers))
    for _ in range(20):
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    for _ in range(20):
        await asyncio.sleep(0)
    assert plane.begun == plane.ended > 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_request_that_cannot_be_started_ends_its_connection() -> None:
    """Its client would treat the next response as its own."""
    exchange: Any = mock.MagicMock()
    exchange.start.side_effect = ZeroDivisionError
    connection = Connection(HttpState(DataPlane(Repository()), 1, 1), Connections())
    connection.connection_made(mock.MagicMock(is_closing=lambda: False))
    connection._queue += [exchange, exchange]
    with pytest.raises(ZeroDivisionError):
        connection._advance()
    cast(Any, connection.transport).abort.assert_called_once()
    assert len(connection._queue) == 1
