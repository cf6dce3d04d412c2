"""A registry that sends a byte now and then does not hold a transfer. No test here waits: the clock is the test's."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from ingot.errors import Unavailable
from ingot.model_store.registry import Registry, Retries, connections
from tests.model_store.registry.fake import Fake
from tests.model_store.registry.proxy import Asked, Reply, serving
from tests.model_store.samples import archive

MODEL = archive(weights=(bytes(5000),))
ONCE = Retries(tries=1)  # a second connection would compete with the first for permitted bytes
SLOW = r"127\.0\.0\.1:\d+ \(at 127\.0\.0\.1\) sends less than 1 MiB a minute; check the network.*\(tried \d times\)"


class Clock:
    """Every look at it is ``step`` seconds after the last one, and allows the server one more byte."""

    def __init__(self, step: float):
        self._step = step
        self._now = 0.0
        self._allowed = threading.Semaphore(0)
        self._stopped = False

    def monotonic(self) -> float:
        self._now += self._step
        self._allowed.release()
        return self._now

    def stop(self) -> None:
        self._stopped = True
        self._allowed.release()

    def bytes(self, content: bytes) -> Iterator[bytes]:
        for index in range(len(content)):
            if not self._allowed.acquire(timeout=30) or self._stopped:
                return
            yield content[index : index + 1]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock(25.0)
    monkeypatch.setattr(connections, "time", clock)
    yield clock
    clock.stop()


@pytest.mark.parametrize("part", ["manifests", "blobs"])
def test_a_slow_body_ends_in_an_error_that_names_the_host(clock: Clock, part: str) -> None:
    fake = Fake()
    fake.put(MODEL, "1")

    def slowly(asked: Asked) -> Reply | None:
        if f"/{part}/" not in asked.path or asked.method != "GET":
            return None
        reply = fake.honest(asked)
        assert isinstance(reply.body, bytes)
        return Reply(reply.status, {**reply.headers, "Content-Length": str(len(reply.body))}, clock.bytes(reply.body))

    fake.before.append(slowly)
    with serving(answer=fake) as server, pytest.raises(Unavailable, match=SLOW):
        Registry(server.address, retries=ONCE).find("tiny:1")[0].verify()


def test_a_slow_head_does_too(clock: Clock) -> None:
    """The limit of each read, and the parser's of all headers together, would allow it for weeks."""

    def dribble() -> None:
        listener.settimeout(30)
        connection = listener.accept()[0]
        with connection, contextlib.suppress(OSError):  # when the client closes it
            connection.recv(65536)
            for byte in clock.bytes(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 10_000):
                connection.sendall(byte)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=dribble)
        thread.start()
        with pytest.raises(Unavailable, match=SLOW):
            Registry(f"oci://127.0.0.1:{listener.getsockname()[1]}", retries=ONCE).find("tiny:1")
        clock.stop()
        thread.join(30)
        assert not thread.is_alive()


def test_a_slow_first_byte_is_not_a_slow_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registries check large uploads before they respond; that wait has its own limit."""
    monkeypatch.setattr(connections, "time", Clock(55.0))
    fake = Fake()
    fake.put(MODEL, "1")
    with serving(answer=fake) as server:
        place = Registry(server.address, retries=ONCE)
        for _ in range(3):
            assert place.digest_of("tiny", "1") == MODEL.digest
