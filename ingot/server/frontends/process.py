"""A front process: ``python -m ingot.server.frontends.process CONNECTION WRITTEN READ``, started by the main process.

The arguments are file descriptors: the connection, and the arenas that this process writes and reads. It ends on
a record of the main process, or when the connection ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys

import uvloop

from ingot.errors import IngotError
from ingot.ipc import records
from ingot.runtime import Metrics
from ingot.server.config import ServerConfig
from ingot.server.dataplane import attempt_async
from ingot.server.frontends import kinds, sums
from ingot.server.frontends.channel import Channel
from ingot.server.frontends.kinds import Kind
from ingot.server.frontends.remote import PING_SECONDS, EngineEnd, FrontPlane, RemoteCatalog
from ingot.server.listeners import Listeners
from ingot.server.observation import records as log_records
from ingot.server.tls import Tls

log = logging.getLogger(__name__)


class FrontProcess:
    """The listeners of a front process, and its connection to the main process."""

    def __init__(self, written: int, read: int):
        self._channel = Channel(written, read, self._receive, self._lost)
        self._stop: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._states: asyncio.Queue[bool] = asyncio.Queue()
        self._serving = False
        self._listeners: Listeners | None = None
        self._closing: asyncio.Task[None] | None = None
        self._config: asyncio.Future[ServerConfig] = asyncio.get_running_loop().create_future()

    async def run(self, connection: socket.socket) -> None:
        """Serve until the main process stops this one."""
        await self._channel.connect(connection)
        config = await self._config
        listeners = await attempt_async("a front process could not start", self._listen(config))
        if isinstance(listeners, IngotError):
            self._channel.send(Kind.FAILED, records.dump_error(listeners))
        else:
            self._channel.send(Kind.STARTED)
            reporting = asyncio.create_task(self._report(listeners))
            watching = asyncio.create_task(self._watch(listeners))
            drain = await self._stop
            reporting.cancel()
            watching.cancel()
            await listeners.stop(drain)
        if not self._stop.done():
            self._stop.set_result(0)
        self._channel.close()

    async def _listen(self, config: ServerConfig) -> Listeners:
        tls = Tls.load(config.tls_cert, config.tls_key, config.tls_client_ca)
        listeners = self._listeners = Listeners(self._plane, config, tls, shared=True)
        await listeners.start()
        return listeners

    async def _report(self, listeners: Listeners) -> None:
        while True:
            self._serving = await self._states.get()
            await listeners.set_serving(self._serving and self._plane.live)
            self._channel.send(Kind.SEEN)

    async def _watch(self, listeners: Listeners) -> None:
        """Let gRPC's health service report that the main process does not answer."""
        live = True
        while True:
            self._engine.ping()
            await asyncio.sleep(PING_SECONDS)
            if self._plane.live != live:
                live = not live
                await listeners.set_serving(self._serving and live)

    def _receive(self, kind: int, body: memoryview) -> None:
        if kind == Kind.HELLO:
            self._hello(records.loads(body)["config"], records.loads(body)["log_level"])
        elif kind == Kind.STATE:
            state = records.loads(body)
            for model in self._catalog.update(state["models"], state["aliases"]):
                self._plane.forget(model)
            self._plane.draining = state["draining"]
            self._states.put_nowait(state["serving"])
        elif kind == Kind.STOP:
            if not self._stop.done():
                self._stop.set_result(*kinds.SECONDS.unpack(body))
        elif kind == Kind.CLOSE:
            self._closing = asyncio.create_task(self._close())
        elif kind == Kind.COUNT:
            self._channel.send(Kind.COUNTS, records.dumps(sums.counts_of(self._catalog.metrics)))
        else:
            self._engine.receive(kind, body)

    async def _close(self) -> None:
        if self._listeners is not None:
            await self._listeners.close()
        self._channel.send(Kind.CLOSED)

    def _hello(self, config: dict[str, object], log_level: int) -> None:
        found = ServerConfig.of(config)
        log_records.configure(log_level, found.log_format)
        self._engine = EngineEnd(self._channel, found.max_bodies_mb << 20)
        self._catalog = RemoteCatalog(self._engine, Metrics())
        self._plane = FrontPlane(self._catalog, self._engine)
        self._config.set_result(found)

    def _lost(self) -> None:
        if not self._stop.done():
            os._exit(1)  # the main process has ended, so no request can be answered


async def _run(connection: int, written: int, read: int) -> None:
    front = FrontProcess(written, read)
    os.close(written)
    os.close(read)
    await front.run(socket.socket(fileno=connection))


def main() -> None:
    """Run a front process. Only the main process stops it, also if a signal goes to the whole process group."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(*map(int, sys.argv[1:])))


if __name__ == "__main__":
    main()
