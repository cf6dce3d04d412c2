"""Attacks on HTTP/2 servers, by name, that the suites of frames and floods do not contain yet.

docs/concepts/reliability.md lists all named attacks with their tests.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ingot.server.http2 import frames
from ingot.server.http2.frames import ErrorCode
from tests.server.echo_peer import Peer, data, prefixed, request
from tests.server.grpc.test_frames import goaway, resets

# Each makes the server reset a stream whose call it has begun.
PROVOKED: dict[str, Callable[[Peer, int], bytes]] = {
    "a window that grows by nothing": lambda peer, stream: frames.window_update(stream, 0),
    "a window over 2^31": lambda peer, stream: frames.window_update(stream, (1 << 31) - 1),
    "data behind the end": lambda peer, stream: data(stream, b"x"),
    "headers behind the end": lambda peer, stream: peer.head(stream, flags=frames.END_HEADERS | frames.END_STREAM),
    "a priority of five bytes short": lambda peer, stream: frames.frame(frames.PRIORITY, 0, stream, bytes(4)),
    "a stream that depends on itself": lambda peer, stream: frames.frame(
        frames.PRIORITY, 0, stream, stream.to_bytes(4, "big") + b"\0"
    ),
}


@pytest.mark.one_case
@pytest.mark.parametrize("kind", PROVOKED)
async def test_cve_2025_8671_madeyoureset(kind: str) -> None:
    """MadeYouReset: invalid frames made servers reset streams but continue the calls, which no limit counted."""
    peer = Peer()
    for index in range(3000):
        stream = 1 + 2 * index
        peer.send(peer.call(stream, request(1, model="never")) + PROVOKED[kind](peer, stream))
    found = await peer.received()
    assert peer.wire.closed
    assert goaway(found) in (ErrorCode.ENHANCE_YOUR_CALM, ErrorCode.PROTOCOL_ERROR, ErrorCode.FRAME_SIZE_ERROR)
    assert len(peer.plane.tickets) < 1500
    assert all(ticket.cancelled for ticket in peer.plane.tickets)


@pytest.mark.parametrize("kind", PROVOKED)
async def test_cve_2025_8671_a_reset_call_is_cancelled(kind: str) -> None:
    """The call of a stream that the server resets ends with it, unless the frame has no effect at all."""
    peer = Peer()
    peer.send(peer.call(1, request(1, model="never")) + PROVOKED[kind](peer, 1))
    found = await peer.received()
    if resets(found) or peer.wire.closed:
        assert [ticket.cancelled for ticket in peer.plane.tickets] == [True]
    else:
        assert kind == "a stream that depends on itself"  # priorities are not used


async def test_cve_2019_9516_headers_without_names() -> None:
    """0-Length Headers Leak: servers kept memory for headers whose names and values are empty."""
    peer = Peer()
    for index in range(3000):
        peer.send(frames.frame(frames.HEADERS, frames.END_HEADERS, 1 + 2 * index, b"\x00\x00\x00" * 5000))
        if peer.wire.closed:
            break
    assert goaway(await peer.received()) in (ErrorCode.ENHANCE_YOUR_CALM, ErrorCode.PROTOCOL_ERROR)
    assert index < 1000


@pytest.mark.parametrize("size", [4, 20, 100])
async def test_vu_421644_continuation_flood(size: int) -> None:
    """CONTINUATION flood (CVE-2024-27316, -28182, -27983, -24549): headers that never end, in frames of some size."""
    peer = Peer()
    peer.send(peer.head(1, flags=0))
    sent = 0
    while not peer.wire.closed:
        peer.send(frames.frame(frames.CONTINUATION, 0, 1, b"\x00\x01a" + bytes((size - 4,)) + b"v" * (size - 4)))
        sent += size
        assert sent < 1 << 20
    assert goaway(await peer.received()) is ErrorCode.ENHANCE_YOUR_CALM
    assert peer.plane.requests == []


async def test_cve_2023_44487_rapid_reset_of_calls_that_run() -> None:
    """Rapid Reset: a client cancels each call at once, so that it never reaches the limit of open streams."""
    peer = Peer()
    for index in range(3000):
        stream = 1 + 2 * index
        peer.send(peer.head(stream) + data(stream, prefixed(request(1, model="never")), frames.END_STREAM))
        peer.send(frames.reset(stream, ErrorCode.CANCEL))
    assert goaway(await peer.received()) is ErrorCode.ENHANCE_YOUR_CALM
    assert len(peer.plane.tickets) < 1500
    assert all(ticket.cancelled for ticket in peer.plane.tickets)
