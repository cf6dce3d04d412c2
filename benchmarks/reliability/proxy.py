"""A TCP proxy that delays, splits and cuts connections at random."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading

DELAY = 0.02  # seconds at most, for each piece
PIECE = 2000  # bytes at most
CUT = 0.002  # the chance that a piece is the last


class Proxy:
    """Forwards connections to a port of this machine from another one, in a thread, until the block ends."""

    def __init__(self, to: int):
        self.port = 0
        self._to = to
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        if not self._started.wait(10):
            raise RuntimeError("the proxy did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        server = self._loop.run_until_complete(asyncio.start_server(self._connect, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._to)
            ways = [self._forward(reader, to_writer), self._forward(to_reader, writer)]
            tasks = [asyncio.ensure_future(way) for way in ways]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            to_writer.transport.abort()
        writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(random.randint(1, PIECE)):
                if random.random() < CUT:
                    return
                await asyncio.sleep(random.random() * DELAY if random.random() < 0.3 else 0)
                writer.write(data)
                await writer.drain()
