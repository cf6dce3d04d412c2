"""A bare gRPC transport: HTTP/2 frames only, each stream answered with a given number of bytes.

``python -m benchmarks.serving.limits.h2_echo PORT BYTES``. Headers are not decoded and windows are not kept (it opens
its own wide, and h2load's are), so it speaks to h2load alone: the limit of a front in Python on uvloop, no server.
"""

from __future__ import annotations

import asyncio
import struct
import sys
from typing import cast

import uvloop

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING = 0, 1, 4, 6
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_WIDE = (1 << 31) - 1 - 65535
# :status 200; content-type: application/grpc; then grpc-status: 0, as literals that are not indexed.
_HEAD = b"\x88" + b"\x0f\x10" + b"\x10application/grpc"
_TRAILERS = b"\x00" + b"\x0bgrpc-status" + b"\x010"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return an HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


class Echo(asyncio.Protocol):
    """One connection. ``size`` is the length of every answer's message."""

    def __init__(self, size: int):
        self._received = b""
        message = struct.pack(">BI", 0, size) + bytes(size)
        self._frames = (
            (_HEADERS, _END_HEADERS, _HEAD),
            (_DATA, 0, message),
            (_HEADERS, _END_HEADERS | _END_STREAM, _TRAILERS),
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        wide = struct.pack(">HI", 4, (1 << 31) - 1)
        self._transport.write(frame(_SETTINGS, 0, 0, wide) + frame(8, 0, 0, struct.pack(">I", _WIDE)))

    def data_received(self, data: bytes) -> None:
        received = self._received + data
        at = len(_PREFACE) if received.startswith(_PREFACE) else 0
        answers = []
        while at + 9 <= len(received):
            high, low, kind, flags, stream = struct.unpack_from(">BHBBI", received, at)
            end = at + 9 + (high << 16 | low)
            if end > len(received):
                break
            if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
                answers += [frame(answer, given, stream, payload) for answer, given, payload in self._frames]
            elif kind in (_SETTINGS, _PING) and not flags & _ACK:
                answers.append(frame(kind, _ACK, 0, received[at + 9 : end] if kind == _PING else b""))
            at = end
        self._received = received[at:]
        if answers:
            self._transport.write(b"".join(answers))


async def serve(port: int, size: int) -> None:
    """Answer until the process is ended."""
    server = await asyncio.get_running_loop().create_server(lambda: Echo(size), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))
