"""One front process: its start, supervision and end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from ingot.errors import InternalError
from ingot.ipc import arena
from ingot.runtime import Model
from ingot.server.dataplane import DataPlane
from ingot.server.frontends import kinds
from ingot.server.frontends.kinds import Kind
from ingot.server.frontends.session import EngineSession

# A front imports and listens, which takes a second or two of a free core.
_START_SECONDS = 120.0
# Seconds after the drain time before a front is killed, and for its process to end by itself.
_LATE_SECONDS = 1.0
_END_SECONDS = 5.0
# Seconds for a front to close its ports.
_CLOSE_SECONDS = 2.0


class Child:
    """A front process, from its start to its end.

    Args:
        plane: the server's behaviour.
        numbered: returns the model that a front names by its number.
        arena_bytes: the most shared memory in each direction.
        render: returns the metrics of all processes.
    """

    def __init__(
        self,
        plane: DataPlane,
        numbered: Callable[[int], Model],
        arena_bytes: int,
        render: Callable[[], Awaitable[bytes]],
    ):
        self.ended = asyncio.Event()
        self.listens = False
        ours, theirs = socket.socketpair()
        arenas = arena.create(arena_bytes), arena.create(arena_bytes)
        with contextlib.ExitStack() as on_error, contextlib.closing(theirs):
            on_error.callback(ours.close)
            try:
                self._process = _start(theirs.fileno(), arenas[1], arenas[0])
                self.session = EngineSession(plane, numbered, arenas, render, self.ended.set)
            finally:
                for handle in arenas:
                    os.close(handle)
            on_error.pop_all()
        self._connection = ours

    async def start(self, hello: bytes, state: bytes) -> None:
        """Wait until it listens.

        Raises:
            IngotError: it cannot listen, or it ended.
        """
        # Both before it is connected, and so before any other record.
        self.session.channel.send(Kind.HELLO, hello)
        seen = self.session.ask(Kind.STATE, Kind.SEEN, state)
        await self.session.channel.connect(self._connection)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await asyncio.gather(seen, self.session.started)
                self.listens = True
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self.ended.is_set() or (task is not None and task.cancelling()):
                raise
            code = await self.wait()
            raise InternalError(f"a front process ended with exit code {code} before it listened") from None
        except TimeoutError as error:
            raise InternalError(f"a front process does not listen after {_START_SECONDS:g} s") from error

    async def close(self) -> None:
        """Let it close its ports, and serve the connections that it has."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.session.ask(Kind.CLOSE, Kind.CLOSED), _CLOSE_SECONDS)

    async def stop(self, drain: float) -> None:
        """Let it finish its requests within ``drain`` seconds, then end it."""
        self.session.channel.send(Kind.STOP, kinds.SECONDS.pack(drain))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), drain + _LATE_SECONDS)
        self.kill()
        await self.wait()

    def kill(self) -> None:
        """End it at once, if it has not ended."""
        self._process.kill()

    async def wait(self) -> int:
        """Return its exit code; a process that closed its connection but does not end is killed."""
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
        stdout=subprocess.DEVNULL,  # stdout belongs to the command
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        process_group=0,  # Ctrl-C is for the main process, which lets its fronts finish
    )
