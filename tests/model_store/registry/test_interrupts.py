"""Ctrl-C while a registry stalls: the transfer ends at once, even if its threads are blocked."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from ssl import PROTOCOL_TLS_SERVER, SSLContext

import pytest

from ingot.model_store import Store
from ingot.model_store.registry import Registry
from tests.model_store.registry.fake import Fake
from tests.model_store.registry.proxy import Asked, Reply, serving
from tests.model_store.samples import archive

STALLED_SECONDS = 50
MODEL = archive(weights=(b"w" * 3_000_000,))
LARGE = MODEL.variants[0].weights[0]


class Stall:
    """Interrupts the main thread, as Ctrl-C does, and does not answer until it is released."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.met = 0
        self.ended = False

    def __call__(self) -> None:
        self.met += 1
        if self.met == 1:
            threading.Timer(0.3, _interrupt).start()  # by then the main thread waits for the others
        self.ended |= not self.over.wait(STALLED_SECONDS)


def _interrupt() -> None:
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, signal.SIGINT)


@pytest.fixture
def stall() -> Iterator[Stall]:
    stall = Stall()
    yield stall
    stall.over.set()


@pytest.fixture
def fake() -> Fake:
    fake = Fake()
    fake.put(MODEL, "1")
    return fake


@pytest.fixture(params=["http", "https"])
def address(request: pytest.FixtureRequest, fake: Fake, stall: Stall, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    context, scheme = None, "oci"
    if request.param == "https":
        certificate = str(request.getfixturevalue("certificate"))
        monkeypatch.setenv("SSL_CERT_FILE", certificate)
        context, scheme = SSLContext(PROTOCOL_TLS_SERVER), "oci+https"
        context.load_cert_chain(certificate)
    with serving(answer=fake, context=context) as server:
        yield server.address.replace("oci", scheme)
        stall.over.set()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_a_pull_whose_answer_does_not_begin(address: str, fake: Fake, stall: Stall, store: Store) -> None:
    def answer(asked: Asked) -> Reply | None:
        if LARGE.digest in asked.path and not stall.over.is_set():
            stall()
        return None

    fake.before.append(answer)
    place = Registry(address)
    found, _ = place.find("tiny:1")
    with pytest.raises(KeyboardInterrupt):
        store.push(found, "tiny:1")
    assert stall.met == 1
    assert not stall.ended
    assert store.tags("tiny") == {}
    stall.over.set()
    store.push(found, "tiny:1")
    store.get("tiny:1").verify()


def test_a_pull_whose_answer_does_not_end(address: str, fake: Fake, stall: Stall, store: Store) -> None:
    def begun() -> Iterator[bytes]:
        yield b"w" * 1_000_000
        stall()

    def answer(asked: Asked) -> Reply | None:
        if LARGE.digest in asked.path and not stall.met:
            return Reply(200, {"Content-Length": str(LARGE.size)}, begun())
        return None

    fake.before.append(answer)
    found, _ = Registry(address).find("tiny:1")
    with pytest.raises(KeyboardInterrupt):
        store.push(found, "tiny:1")
    assert stall.met == 1
    assert not stall.ended
    store.push(found, "tiny:1")
    store.get("tiny:1").verify()


def test_a_push_that_is_not_answered(address: str, fake: Fake, stall: Stall) -> None:
    def answer(asked: Asked) -> Reply | None:
        if asked.method == "PUT" and len(asked.body) == LARGE.size:
            stall()
        return None

    del fake.blobs[LARGE.digest]
    fake.before.append(answer)
    with pytest.raises(KeyboardInterrupt):
        Registry(address).push(MODEL, "tiny:2")
    assert stall.met == 1
    assert not stall.ended
    assert "2" not in fake.manifests


def test_a_wait_that_the_registry_asks_for(address: str, fake: Fake, store: Store) -> None:
    asked_for: list[str] = []

    def answer(asked: Asked) -> Reply | None:
        if LARGE.digest not in asked.path:
            return None
        asked_for.append(asked.path)
        if len(asked_for) == 1:
            threading.Timer(0.3, _interrupt).start()
        return Reply(429, {"Retry-After": str(STALLED_SECONDS)})

    fake.before.append(answer)
    found, _ = Registry(address).find("tiny:1")
    with pytest.raises(KeyboardInterrupt):
        store.push(found, "tiny:1")
    assert len(asked_for) == 1


def test_a_list_of_tags(address: str, fake: Fake, stall: Stall) -> None:
    def answer(asked: Asked) -> Reply | None:
        if asked.method == "HEAD":
            stall()
        return None

    fake.before.append(answer)
    with pytest.raises(KeyboardInterrupt):
        Registry(address).tags("tiny")
    assert not stall.ended
