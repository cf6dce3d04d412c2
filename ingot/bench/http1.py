"""HTTP/1.1 for the load generator: one request at a time on each connection, and responses that are only counted."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable

from ingot.bench.plan import Plan
from ingot.bench.sockets import Socket

_MOST_HEADS = 1024
# As much of an error's body is kept for its message.
_MOST_ERROR = 4096


class HttpConnection:
    """A connection, which is also the place of the request that is in flight on it.

    Attributes:
        socket: the connection to the server.
        due: when the request in flight was due.
        sent: when it was sent.
    """

    __slots__ = (
        "_answered",
        "_buffer",
        "_chunked",
        "_closing",
        "_error",
        "_heads",
        "_missing",
        "due",
        "sent",
        "socket",
    )

    def __init__(self, plan: Plan, security: ssl.SSLContext | None, answered: Callable[[HttpConnection, str], None]):
        self.socket = Socket(plan, security)
        self._answered = answered
        # The heads of responses, as they repeat: status, length of the body (-1 if in chunks), whether to close.
        self._heads: dict[bytes, tuple[int, int, bool]] = {}
        self._buffer = b""
        self._missing = 0
        self._chunked = False
        self._closing = False
        self._error = ""
        self.due = self.sent = 0.0

    @property
    def places(self) -> list[HttpConnection]:
        """Where requests can be in flight."""
        return [self]

    @property
    def usable(self) -> bool:
        return not self._closing

    def begin(self, request: bytes) -> None:
        """Send a request. Raises OSError if the connection is lost."""
        self.socket.send(request)

    def flush(self) -> None:
        """Send what waits."""
        self.socket.flush()

    def readable(self) -> None:
        """Read what has arrived. Raises OSError if the connection is lost, ValueError if it is not HTTP."""
        data = self.socket.receive()
        if self._missing > 0:
            self._body(data)
        elif data:
            self._buffer += data
            if self._chunked:
                self._chunks()
            else:
                self._head()

    def _head(self) -> None:
        buffer = self._buffer
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = buffer[:end]
        known = self._heads.get(head)
        if known is None:
            known = _parsed(head)
            if 200 > known[0] >= 100:  # 100 Continue: the response follows
                self._buffer = buffer[end + 4 :]
                return self._head()
            if len(self._heads) > _MOST_HEADS:
                self._heads.clear()
            self._heads[head] = known
        status, length, self._closing = known
        if status != 200:
            self._error = f"HTTP {status}"
        if length < 0:
            self._chunked, self._buffer = True, buffer[end + 4 :]
            return self._chunks()
        self._missing, self._buffer = length, b""
        return self._body(buffer[end + 4 :])

    def _body(self, data: bytes) -> None:
        self._missing -= len(data)
        if self._error and len(self._buffer) < _MOST_ERROR:
            self._buffer += data
        if self._missing < 0:
            raise ValueError("the server sent more than one response to a request")
        if not self._missing:
            self._done(self._buffer)

    def _chunks(self) -> None:
        content = b""
        rest = self._buffer
        while True:
            line, end, rest = rest.partition(b"\r\n")
            if not end:
                return
            size = int(line.split(b";")[0], 16)
            if not size:
                break
            if len(rest) < size + 2:
                return
            content, rest = content + rest[:size], rest[size + 2 :]
        if not rest.endswith(b"\r\n"):
            return
        self._chunked = False
        self._done(content)

    def _done(self, body: bytes) -> None:
        error, self._error, self._buffer = self._error, "", b""
        self._answered(self, f"{error}: {_message(body)}" if error else "")


def _parsed(head: bytes) -> tuple[int, int, bool]:
    version, _, rest = head.partition(b" ")
    if not version.startswith(b"HTTP/1."):
        raise ValueError("the server does not speak HTTP/1.1")
    length: int | None = None
    closing = version == b"HTTP/1.0"
    for line in head.lower().split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name == b"content-length":
            length = int(value)
        elif name == b"transfer-encoding":
            length = -1
        elif name == b"connection":
            closing = value.strip() == b"close"
    status = int(rest[:3])
    if length is None and status >= 200:
        raise ValueError("the server sent a response without a length")
    return status, length or 0, closing


def _message(body: bytes) -> str:
    """Return the message of an error's body, in one line."""
    try:
        text = str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        text = body.decode(errors="replace")
    return " ".join(text.split())[:200]
