"""What clients may send to the fast gRPC server: ``make fuzz``, or ``python -m fuzz.http2 [-max_total_time=60]``.

An input is the bytes behind a connection's preface, cut into pieces at its own bytes. Nothing raises, what a connection
holds stays bounded, and a connection that is not closed answers a call that follows, unless the input ends inside a
frame or a block of headers.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ingot.protocol", "ingot.server.grpc", "ingot.server.http2"]):
    from ingot.server.http2 import frames
    from ingot.server.http2.frames import ErrorCode
    from tests.server.echo_peer import LIMIT, Peer, data, prefixed, request

_MOST_HELD = 4 * LIMIT + (1 << 20)


def target(content: bytes) -> None:
    """Feed one input to a connection."""
    asyncio.run(_feed(content))


async def _feed(content: bytes) -> None:
    peer = Peer()
    step = 1 + content[0] if content else 1
    for start in range(0, len(content), step):
        peer.send(content[start : start + step])
    await peer.received()
    connection, http2 = peer.connection, peer.connection.http2
    held = sum(stream.held for stream in http2.sender.streams.values()) + http2.sender.queued + len(http2._rest)
    if held > _MOST_HELD:
        raise AssertionError(f"{held} bytes are held after {len(content)} came")
    if not peer.wire.closed and not http2._rest and not http2._block_of and not http2.control.leaving:
        ping = frames.frame(frames.PING, 0, 0, b"answer!!")
        peer.send(ping)
        found = await peer.received()
        if not peer.wire.closed and not any(kind == frames.PING and flags for kind, flags, _, _ in found):
            raise AssertionError("a connection that is open does not answer a PING")
    connection.connection_lost(None)
    await peer.received()
    if http2.sender.streams:
        raise AssertionError("a connection that is closed holds streams")


async def _seeds() -> list[bytes]:
    peer = Peer()
    health = "/grpc.health.v1.Health/Watch"
    return [
        peer.call(1, request(1, 2)) + peer.call(3, request(3, request_id="a")),
        peer.head(1) + data(1, prefixed(request(1))[:20]) + data(1, prefixed(request(1))[20:], frames.END_STREAM),
        peer.head(1, path=health) + data(1, prefixed(b"")) + frames.reset(1, ErrorCode.CANCEL),
        frames.settings({frames.INITIAL_WINDOW_SIZE: 1}) + peer.call(1, request(1)) + frames.window_update(1, 9),
        peer.head(1, flags=0) + frames.frame(frames.CONTINUATION, 4, 1),
        frames.goaway(0, ErrorCode.NO_ERROR) + frames.frame(frames.PRIORITY, 0, 1, bytes(5)),
        peer.head(1, grpc_timeout="1S", grpc_encoding="gzip") + data(1, prefixed(b"x", 1), frames.END_STREAM),
    ]


def main() -> None:
    corpus = Path(tempfile.mkdtemp(prefix="ingot-fuzz-")) / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(asyncio.run(_seeds())):
        (corpus / str(number)).write_bytes(seed)
    atheris.Setup([*sys.argv, str(corpus), "-max_len=4000"], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
