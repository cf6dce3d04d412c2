"""A server of FastAPI's routes alone, without the connections that answer inference directly."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ingot.config.exposure import listed
from ingot.protocol.keys import BoundedCache
from ingot.server.access.gate import Gate
from ingot.server.http.admission import Admission, Cors
from ingot.server.http.connection import Connection, Connections
from ingot.server.http.exchange import HttpState
from ingot.server.http.listener import HttpListener
from ingot.server.http.parser import PREFLIGHT, Parser, RequestHead
from ingot.server.plane.dataplane import DataPlane
from ingot.serving import Repository


class AppConnection(Connection):
    """Passes all requests to the application."""

    def __init__(self, shared: HttpState, connections: Connections):
        super().__init__(shared, connections)
        self._known = BoundedCache(1)  # remains empty, so that no head is looked up
        self._parser = Parser(BoundedCache(1), 0, None if shared.admission is None else self._admit)

    def _begin(self, head: RequestHead) -> None:
        super()._begin(replace(head, infer=None, probe=head.probe if head.probe == PREFLIGHT else None))


class AppListener(HttpListener):
    def _connect(self) -> Connection:
        return AppConnection(self._shared, self._connections)


@contextlib.contextmanager
def serve_app(
    sources: Sequence[str], max_body_bytes: int, auth: Path | None = None, origins: str = ""
) -> Iterator[str]:
    """Serve models from a thread; yields the address."""
    repository = Repository()
    for source in sources:
        repository.add(source).load()
    started = threading.Event()
    urls: list[str] = []
    stop = asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        gate = None if auth is None else Gate(auth, repository.metrics)
        cors = Cors(listed(origins), credentials=False) if origins else None
        admission = Admission(gate, cors) if gate or cors else None
        server = AppListener(DataPlane(repository), max_body_bytes, 1 << 30, None, admission)
        urls.append(f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}")
        loops.append(asyncio.get_running_loop())
        started.set()
        await stop.wait()
        await server.stop(60)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(60)
    try:
        yield urls[0]
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(120)
        repository.close()
