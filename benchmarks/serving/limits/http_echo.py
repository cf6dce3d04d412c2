"""A bare HTTP transport: finds where requests end, and answers each with a given number of bytes.

``python -m benchmarks.serving.limits.http_echo PORT BYTES``. It is what a front in Python on uvloop could reach if
parsing, checking and answering were free.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop


class Echo(asyncio.Protocol):
    """One connection. ``answer`` is the whole response."""

    def __init__(self, answer: bytes):
        self._answer = answer
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            at = self._received.find(b"Content-Length: ")
            length = int(self._received[at + 16 : self._received.find(b"\r", at)])
            if len(self._received) < end + 4 + length:
                return
            self._received = self._received[end + 4 + length :]
            self._transport.write(self._answer)


async def serve(port: int, size: int) -> None:
    """Answer until the process is ended."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: {size}\r\n\r\n"
    answer = head.encode() + bytes(size)
    server = await asyncio.get_running_loop().create_server(lambda: Echo(answer), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))
