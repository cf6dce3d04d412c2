"""Thousands of connections that do nothing must cost little, and the one that does something must be served."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.server.faults.http1 import Connection, body_of, request
from tests.server.http2 import Peer
from tests.server.outside import Service, affine, affine_of, allow_many_files, floats, message, row, unpacked

COUNTS = [2000, pytest.param(10_000, marks=pytest.mark.long)]

# Most bytes of the server that an idle connection may hold. gRPC's core takes a dozen KiB for each.
MOST_BYTES = {"http": 20_000, "fast": 20_000, "grpcio": 60_000}


@pytest.fixture
def room(request: pytest.FixtureRequest) -> Iterator[contextlib.ExitStack]:
    """Holds open what is entered, if this machine lets one process have so many files."""
    count: int = request.getfixturevalue("count")
    if allow_many_files() < count + 500:
        pytest.skip(f"this machine allows a process fewer than {count + 500} open files")
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.mark.usefixtures("still_answers", "others")
@pytest.mark.parametrize("count", COUNTS)
def test_idle_connections_of_http(service: Service, room: contextlib.ExitStack, count: int) -> None:
    before = service.resident()
    idle = [room.enter_context(Connection(service.http_address, 60)) for _ in range(count)]
    for number in range(0, count, 20):
        idle[number].send(request(body_of(row(number))))
        assert idle[number].answer().values == affine_of(row(number))
    assert service.resident() - before < MOST_BYTES["http"] * count + (50 << 20)
    # Every one of them can still be used.
    for number in range(0, count, 20):
        idle[number].send(request(body_of(row(number + 1))))
    for number in range(0, count, 20):
        assert idle[number].answer().values == affine_of(row(number + 1))


@pytest.mark.usefixtures("still_answers", "others")
@pytest.mark.parametrize("count", COUNTS)
def test_idle_connections_of_grpc(service: Service, room: contextlib.ExitStack, count: int) -> None:
    before = service.resident()
    idle = [room.enter_context(Peer(service.grpc_address, timeout=60)) for _ in range(count)]
    for number in range(0, count, 20):
        idle[number].send(idle[number].call(1, message(affine(row(number)))))
        assert floats(unpacked(idle[number].answer(1)[1])) == affine_of(row(number))
    assert service.resident() - before < MOST_BYTES[service.kind] * count + (50 << 20)
    for number in range(0, count, 20):
        idle[number].send(idle[number].call(3, message(affine(row(number + 1)))))
    for number in range(0, count, 20):
        assert floats(unpacked(idle[number].answer(3)[1])) == affine_of(row(number + 1))
