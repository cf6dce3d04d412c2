"""The state of one HTTP/2 stream."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol, TypeVar


class Stream:
    """A request and its answer.

    ``ended``: the client has sent the whole request. ``closed``: nothing more may be sent. ``credit``: the difference
    between the client's window and its initial window. ``received``: bytes of our window not yet returned to the
    client. ``total``: bytes of the request so far. ``length``: the request's content-length.
    """

    # Class attributes, because most streams never set most of them.
    ended = False
    opened = False
    closed = False
    credit = 0
    received = 0
    total = 0
    outgoing: deque[bytes | memoryview] | None = None
    ending: bytes | None = None

    def __init__(self, stream_id: int, length: int | None):
        self.id = stream_id
        self.length = length


S = TypeVar("S", bound=Stream)


class Handler(Protocol[S]):
    """A connection's callbacks. ``data`` and ``whole`` receive the bytes of DATA frames; none of them may block."""

    def parse(self, headers: list[tuple[bytes, bytes]]) -> Any:
        """Return the head of a request. It is cached, so it must not change afterwards."""

    def create(self, stream_id: int, head: Any) -> S:
        """Return the stream of a new request."""

    def begin(self, stream: S) -> None:
        """Handle the head of a request."""

    def data(self, stream: S, data: bytes) -> None:
        """Handle a part of a request; the last part if ``stream.ended``."""

    def ended(self, stream: S) -> None:
        """Handle the end of a request without data."""

    def sent(self, stream: S) -> None:
        """Note that queued bytes of a stream were sent."""

    def stopped(self, stream: S) -> None:
        """Stop the work for a stream that was reset."""

    def released(self, stream: S) -> None:
        """Free what a finished stream holds."""

    def wake(self) -> None:
        """Schedule a write: the sender has output, and had none before."""

    def close(self) -> None:
        """Write the remaining output and close the connection."""

    def drained(self) -> None:
        """Close soon: the last stream of a connection that is shutting down is finished."""

    def not_http2(self, data: bytes) -> None:
        """Close a connection that began with ``data`` instead of the preface."""

    def faulted(self, code: int) -> None:
        """Count an error of the client."""
