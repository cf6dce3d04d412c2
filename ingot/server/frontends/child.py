"""One front process, as the engine's process starts, watches and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from ingot.errors import InternalError
from ingot.runtime import Model
from ingot.server.dataplane import DataPlane
from ingot.server.frontends import arena, records
from ingot.server.frontends.desk import EngineSession
from ingot.server.frontends.records import Kind

# A front imports and listens; it takes a second or two of a free core.
_START_SECONDS = 120.0
# What a front gets after the drain time, before it is killed, and what its process may take to end by itself.
_LATE_SECONDS = 1.0
_END_SECONDS = 5.0


class Child:
    """A front process, from its start to its end.

    Args:
        plane: the server's behaviour.
        models: in the order in which fronts number them.
        arena_bytes: how large the shared memory may become, in each direction.
        render: gives the metrics of all processes.
    """

    def __init__(
        self, plane: DataPlane, models: Sequence[Model], arena_bytes: int, render: Callable[[], Awaitable[bytes]]
    ):
        self.ended = asyncio.Event()
        self.listens = False
        ours, theirs = socket.socketpair()
        arenas = arena.create(arena_bytes), arena.create(arena_bytes)
        try:
            self._process = _start(theirs.fileno(), arenas[1], arenas[0])
            self.desk = EngineSession(plane, models, arenas, render, self.ended.set)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            for handle in arenas:
                os.close(handle)
        self._connection = ours

    async def start(self, hello: bytes, state: bytes) -> None:
        """Wait until it listens.

        Raises:
            IngotError: it cannot, or it ended.
        """
        # Both before it is connected, and so before anything else that it may be told meanwhile.
        self.desk.channel.send(Kind.HELLO, hello)
        seen = self.desk.ask(Kind.STATE, Kind.SEEN, state)
        await self.desk.channel.connect(self._connection)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await asyncio.gather(seen, self.desk.started)
                self.listens = True
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self.ended.is_set() or (task is not None and task.cancelling()):
                raise
            code = await self.wait()
            raise InternalError(f"a front process ended with exit code {code} before it listened") from None
        except TimeoutError as error:
            raise InternalError(f"a front process does not listen after {_START_SECONDS:g} s") from error

    async def stop(self, drain: float) -> None:
        """Let it finish its requests within ``drain`` seconds, and end it."""
        self.desk.channel.send(Kind.STOP, records.SECONDS.pack(drain))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), drain + _LATE_SECONDS)
        self.kill()
        await self.wait()

    def kill(self) -> None:
        """End it at once, if it has not ended."""
        self._process.kill()

    async def wait(self) -> int:
        """Return its exit code; one that has given up its connection and goes on is killed."""
        try:
            return await asyncio.to_thread(self._process.wait, _END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return await asyncio.to_thread(self._process.wait)


def _start(*handles: int) -> subprocess.Popen[bytes]:
    path = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "ingot.server.frontends.process", *map(str, handles)],
        pass_fds=handles,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # a command's output is its own
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        process_group=0,  # Ctrl-C is for the engine's process, which lets its fronts finish
    )
