"""A request leaves no cycles that keep its bytes until the garbage collector runs."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from ingot.server.http.listener import HttpListener
from ingot.server.plane.dataplane import DataPlane
from ingot.serving import Repository
from tests import onnx_models
from tests.server.echo_peer import Peer, request
from tests.server.http.test_fast_path import BODY, PLAIN

COUNT = 100


@pytest.fixture
def plane(folder: Path) -> Iterator[DataPlane]:
    repository = Repository()
    repository.add(str(onnx_models.affine(folder))).load()
    yield DataPlane(repository)
    repository.close(60)


async def left_by(ask: Callable[[], Awaitable[None]]) -> int:
    """Return how many objects some requests leave to the garbage collector, once all is warm.

    It is the least of three rounds, as threads of earlier tests may end in one of them and leave theirs.
    """
    left = []
    gc.disable()
    try:
        for _ in range(4):
            for _ in range(COUNT):
                await ask()
            left.append(gc.collect())
        return min(left[1:])
    finally:
        gc.enable()


async def over_http(plane: DataPlane, message: bytes, status: bytes) -> int:
    listener = HttpListener(plane, 1 << 20, 1 << 20)
    port = await listener.start("127.0.0.1", 0)
    loop = asyncio.get_running_loop()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.setblocking(False)

            async def ask() -> None:
                await loop.sock_sendall(connection, message)
                assert (await loop.sock_recv(connection, 65536)).startswith(b"HTTP/1.1 " + status)

            return await left_by(ask)
    finally:
        await listener.stop(5)


@pytest.mark.parametrize(
    ("message", "status"),
    [(PLAIN + BODY, b"200"), (PLAIN + b"{" * len(BODY), b"400"), (PLAIN.replace(b"affine", b"nobody") + BODY, b"404")],
    ids=["answered", "refused", "not found"],
)
@pytest.mark.one_case
@pytest.mark.matrix
def test_a_request_over_http_leaves_no_garbage(plane: DataPlane, message: bytes, status: bytes) -> None:
    assert asyncio.run(asyncio.wait_for(over_http(plane, message, status), 60)) < COUNT // 2


async def over_grpc(plane: DataPlane, timeout: str, answered: bool) -> int:
    peer = Peer(plane=plane)
    message = request(1, 2, 3, model="affine")
    numbers = iter(range(1, 1 << 20, 2))
    await peer.received()  # its greeting

    async def ask() -> None:
        peer.send(peer.call(next(numbers), message, **({"grpc_timeout": timeout} if timeout else {})))
        while not peer.wire.written:
            await asyncio.sleep(0)
        assert (b"\x40\x40" in peer.wire.written) == answered  # 3, FP32
        peer.wire.written.clear()

    return await left_by(ask)


@pytest.mark.parametrize(("timeout", "answered"), [("", True), ("10S", True), ("1n", False)])
@pytest.mark.matrix
def test_a_call_over_grpc_leaves_no_garbage(plane: DataPlane, timeout: str, answered: bool) -> None:
    assert asyncio.run(asyncio.wait_for(over_grpc(plane, timeout, answered), 60)) < COUNT // 2


async def given_up(plane: DataPlane) -> int:
    """Requests whose client resets its stream before they are answered."""
    peer = Peer(plane=plane)
    message = request(1, 2, 3, model="affine")
    numbers = iter(range(1, 1 << 20, 2))
    await peer.received()  # its greeting

    async def ask() -> None:
        number = next(numbers)
        peer.send(peer.call(number, message) + (4).to_bytes(3) + b"\3\0" + number.to_bytes(4) + (8).to_bytes(4))
        for _ in range(5):
            await asyncio.sleep(0)
        peer.wire.written.clear()

    return await left_by(ask)


@pytest.mark.matrix
def test_a_call_that_was_given_up_leaves_no_garbage(plane: DataPlane) -> None:
    assert asyncio.run(asyncio.wait_for(given_up(plane), 60)) < COUNT // 2
