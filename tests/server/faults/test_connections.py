"""Thousands of idle connections must cost little, and an active one must be served."""

from __future__ import annotations

import contextlib
import re
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.faults.http1 import Connection, body_of, request
from tests.server.http2_peer import Peer
from tests.server.outside import (
    Service,
    affine,
    affine_of,
    allow_many_files,
    floats,
    message,
    row,
    unpacked,
    wait_until,
)

COUNTS = [2000, pytest.param(10_000, marks=pytest.mark.long)]

# Most bytes of the server that an idle connection may hold. gRPC's core takes a dozen KiB for each.
MOST_BYTES = {"http": 20_000, "fast": 20_000, "grpcio": 60_000}


@pytest.fixture
def room(request: pytest.FixtureRequest) -> Iterator[contextlib.ExitStack]:
    """An exit stack, if this machine lets one process open so many files."""
    count: int = request.getfixturevalue("count")
    if allow_many_files() < count + 500:
        pytest.skip(f"this machine allows a process fewer than {count + 500} open files")
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.mark.matrix
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


@pytest.mark.usefixtures("still_answers")
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_server_out_of_file_descriptors_logs_it_and_recovers(service: Service, protocol: str) -> None:
    address = service.http_address if protocol == "http" else service.grpc_address
    logged = service.log.stat().st_size
    with httpx.Client(base_url=f"http://{service.http}", trust_env=False, timeout=30) as client:
        before = out_of_files(client)
        with few_files(service, 30), contextlib.ExitStack() as stack:
            for _ in range(100):  # of which 30 are taken, and some more as there are gaps
                stack.enter_context(socket.create_connection(address, 10))
            wait_until(lambda: "out of file descriptors" in service.log.read_text()[logged:])
            assert out_of_files(client) > before
            stack.close()
            wait_until(lambda: "descriptors are available again" in service.log.read_text()[logged:])
            service.check()
    assert service.log.read_text()[logged:].count("out of file descriptors") == 1


def out_of_files(client: httpx.Client) -> float:
    found = re.search(r"^ingot_out_of_files_seconds_total (\S+)$", client.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


@contextlib.contextmanager
def few_files(service: Service, more: int) -> Iterator[None]:
    """Let the server open so many more files than it has."""
    pid = service.process.pid
    most = max(int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir())
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most + 1 + more, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
