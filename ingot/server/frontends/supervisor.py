"""Starts front processes on the same two ports, restarts those that end, sends them the models' state, stops them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time

from ingot.errors import IngotError
from ingot.ipc import records
from ingot.runtime import Repository
from ingot.server.config import ServerConfig
from ingot.server.dataplane import DataPlane
from ingot.server.frontends import sums
from ingot.server.frontends.child import Child
from ingot.server.frontends.kinds import Kind
from ingot.server.frontends.state import ModelState
from ingot.server.listening import reserve

log = logging.getLogger(__name__)

# Seconds between the end of a front and the next start: doubled each time, until one has run for a while.
_FIRST_WAIT = 0.1
_LONGEST_WAIT = 5.0
_LONG_LIFE = 30.0
# How often the models' state is checked for changes, and how long fronts may take to confirm one, also at the end.
_WATCH_SECONDS = 0.25
_NOTICE_SECONDS = 5.0
_LAST_NOTICE_SECONDS = 1.0
_COUNT_SECONDS = 1.0


class FrontProcesses:
    """The listeners of a server in front processes; see :class:`ingot.server.listeners.Ports`.

    Args:
        plane: the server's behaviour.
        repository: its models.
        config: addresses and limits; each front gets a share of the memory limit.
    """

    def __init__(self, plane: DataPlane, repository: Repository, config: ServerConfig):
        self.http_port = config.http_port
        self.grpc_port = config.grpc_port
        self._plane = plane
        self._repository = repository
        self._metrics = repository.metrics
        self._config = config
        self._bodies_mb = max(1, config.max_bodies_mb // max(1, config.frontends))
        self._serving = False
        self._sent = b""
        self._past: sums.Counts = ()
        self._holders: list[socket.socket] = []
        self._children: list[Child] = []
        self._metrics.fronts.set_function(lambda: sum(child.listens for child in self._children))
        self._tasks: list[asyncio.Task[None]] = []
        plane.render = self._render  # for the management listener, which is in this process

    async def start(self) -> None:
        async with contextlib.AsyncExitStack() as on_error:
            on_error.push_async_callback(self.stop, 0)
            for protocol in ("HTTP", "gRPC"):
                name = f"{protocol.lower()}_port"
                holder = reserve(protocol, self._config.host, getattr(self, name))
                self._holders.append(holder)
                setattr(self, name, holder.getsockname()[1])
            self._sent = self._state()
            starting = [asyncio.create_task(self._launch()) for _ in range(self._config.frontends)]
            try:
                children = await asyncio.gather(*starting)
            finally:
                await asyncio.gather(*starting, return_exceptions=True)
            on_error.pop_all()
        self._tasks = [asyncio.create_task(self._keep(child)) for child in children]
        self._tasks.append(asyncio.create_task(self._watch()))

    async def set_serving(self, serving: bool) -> None:
        self._serving = serving
        await self._send_state()

    async def refresh(self) -> None:
        await self._send_state()

    async def stop(self, drain: float) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # First all ports: a client that one front asks to leave would connect to another.
        await asyncio.gather(*(child.close() for child in self._children))
        await asyncio.gather(*(child.stop(drain) for child in self._children))
        for holder in self._holders:
            holder.close()
        self._tasks, self._children, self._holders = [], [], []

    async def _launch(self) -> Child:
        child = Child(self._plane, self._repository.numbered, self._bodies_mb << 20, self._render)
        self._children.append(child)
        async with contextlib.AsyncExitStack() as on_error:
            on_error.push_async_callback(child.wait)
            on_error.callback(child.kill)
            on_error.callback(self._children.remove, child)
            await child.start(self._hello(), self._state())
            on_error.pop_all()
        return child

    async def _keep(self, child: Child) -> None:
        """Restart a front whenever it ends by itself."""
        wait = _FIRST_WAIT
        while True:
            began = time.monotonic()
            await child.ended.wait()
            self._children.remove(child)
            self._past = sums.add(self._past, sums.lasting(child.session.counts))
            self._metrics.front_restarts.inc()
            log.error("a front process ended with exit code %d; another is started", await child.wait())
            wait = _FIRST_WAIT if time.monotonic() - began > _LONG_LIFE else min(2 * wait, _LONGEST_WAIT)
            while True:
                await asyncio.sleep(wait)
                try:
                    child = await self._launch()
                    break
                except (IngotError, OSError) as error:
                    log.error("a front process cannot be started: %s", error)
                    wait = min(2 * wait, _LONGEST_WAIT)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            if self._state() != self._sent:
                await self._send_state()

    async def _send_state(self) -> None:
        """Send the state of the models to every front, and wait until all confirm it."""
        state = self._sent = self._state()
        confirmations = [child.session.ask(Kind.STATE, Kind.SEEN, state) for child in self._children]
        with contextlib.suppress(TimeoutError):
            seconds = _LAST_NOTICE_SECONDS if self._plane.draining else _NOTICE_SECONDS
            await asyncio.wait_for(asyncio.gather(*confirmations), seconds)

    def _state(self) -> bytes:
        return records.dumps(
            {
                "serving": self._serving,
                "draining": self._plane.draining,
                "aliases": self._repository.aliases,
                "models": [ModelState.of(model).dumps() for model in self._repository],
            }
        )

    def _hello(self) -> bytes:
        ports = {"http_port": self.http_port, "grpc_port": self.grpc_port}
        config = {**self._config.content, **ports, "max_bodies_mb": self._bodies_mb}
        level = logging.getLogger().getEffectiveLevel()
        return records.dumps({"config": config, "log_level": level})

    async def _render(self) -> bytes:
        """Return the metrics of all processes; for a front that does not reply in time, its last ones."""
        with contextlib.suppress(TimeoutError):
            asking = [child.session.ask(Kind.COUNT, Kind.COUNTS) for child in self._children]
            await asyncio.wait_for(asyncio.gather(*asking), _COUNT_SECONDS)
        # Only those that still run: the counts of one that ended meanwhile are already in the sums.
        counts = [child.session.counts for child in self._children]
        return sums.render(sums.add(sums.counts_of(self._metrics), self._past, *counts))
