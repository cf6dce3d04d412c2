"""HTTP/1.1 for the load generator: one request at a time on each connection, and responses that are only counted."""

from __future__ import annotations

import json
import re
import ssl
import time
from collections.abc import Callable

from ingot.bench.plan import Plan
from ingot.bench.sockets import Socket

# As much of an error's body is kept for its message.
_MOST_ERROR = 4096
_MOST_HEAD = 64 << 10
_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


class HttpConnection:
    """A connection, which is also the place of the request that is in flight on it.

    Attributes:
        socket: the connection to the server.
        due: when the request in flight was due.
        sent: when it was sent.
        first: when the first piece of its answer arrived, if that is a stream; 0 before.
        tokens: of its answer, if that is a stream.
    """

    __slots__ = (
        "_answered",
        "_buffer",
        "_chunked",
        "_closing",
        "_content",
        "_error",
        "_left",
        "_missing",
        "_streams",
        "_tail",
        "_trailing",
        "due",
        "first",
        "sent",
        "socket",
        "tokens",
    )

    def __init__(self, plan: Plan, security: ssl.SSLContext | None, answered: Callable[[HttpConnection, str], None]):
        self.socket = Socket(plan, security)
        self._answered = answered
        self._buffer = b""
        self._missing = 0
        self._chunked = self._trailing = False
        self._left = 0
        self._content = b""
        self._closing = False
        self._error = ""
        self._streams = plan.streams
        self._tail = b""
        self.due = self.sent = self.first = 0.0
        self.tokens = 0

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
        while True:
            head, end, self._buffer = self._buffer.partition(b"\r\n\r\n")
            if not end:
                self._buffer = head
                _check_end(head)
                return
            status, length, self._closing = _parsed(head.lower() + b"\r\n")
            if not 100 <= status < 200:  # 100 Continue: the response follows
                break
        if status != 200:
            self._error = f"HTTP {status}"
        rest = self._buffer
        if length < 0:
            self._chunked = True
            self._chunks()
        else:
            self._missing, self._buffer = length, b""
            self._body(rest)

    def _body(self, data: bytes) -> None:
        self._missing -= len(data)
        if self._error and len(self._buffer) < _MOST_ERROR:
            self._buffer += data
        if self._missing < 0:
            raise ValueError("the server sent more than one response to a request")
        if not self._missing:
            self._done(self._buffer)

    def _chunks(self) -> None:
        """Read chunks; of the content, only the beginning of an error's is kept."""
        buffer, at, size = self._buffer, 0, len(self._buffer)
        while True:
            if self._left:  # of a chunk, with the end of its line
                if self._error and len(self._content) < _MOST_ERROR:
                    self._content += buffer[at : min(size, at + max(0, self._left - 2))]
                elif self._streams:
                    self._events(buffer[at : min(size, at + max(0, self._left - 2))])
                taken = min(self._left, size - at)
                at, self._left = at + taken, self._left - taken
            end = -1 if self._left else buffer.find(b"\r\n", at)
            if end < 0:
                self._buffer = buffer[at:]
                _check_end(self._buffer)
                return
            line, at = buffer[at:end], end + 2
            if not self._trailing:
                length = int(line.partition(b";")[0], 16)
                if length < 0:
                    raise ValueError("the server sent a chunk of negative size")
                self._left, self._trailing = (length + 2, False) if length else (0, True)
            elif not line:  # the end of the fields after the last chunk
                self._chunked = self._trailing = False
                self._done(self._content)
                return

    def _events(self, part: bytes) -> None:
        """Note the time of the first event, and keep the last ones, which have the number of tokens."""
        self.first = self.first or time.perf_counter()
        self._tail = (self._tail + part)[-_MOST_ERROR:]

    def _done(self, body: bytes) -> None:
        error, self._error, self._buffer, self._content = self._error, "", b"", b""
        tail, self._tail = self._tail, b""
        if error:
            error = f"{error}: {_message(body)}"
        elif self._streams:
            error = self._end(tail)
        self._answered(self, error)
        self.first = 0.0

    def _end(self, tail: bytes) -> str:
        """Read the number of tokens; return the error of a stream that has none, or that did not end."""
        *_, last = tail.rstrip().split(b"data: ")
        if last != b"[DONE]":
            return f"the stream ended early: {_message(last)}"
        if (found := _TOKENS.findall(tail)) == []:
            return "the stream has no usage: the server does not support stream_options.include_usage"
        self.tokens = int(found[-1])
        return ""


def _check_end(line: bytes) -> None:
    """Raise ValueError if a head or line without an end has become too long."""
    if len(line) > _MOST_HEAD:
        raise ValueError(f"the server sent more than {_MOST_HEAD >> 10} KiB without the end of a head or line")


def _parsed(head: bytes) -> tuple[int, int, bool]:
    """Return a response's status, the length of its body (-1 if in chunks), and whether the server closes.

    Args:
        head: in lower case, with the end of its last line.
    """
    if not head.startswith(b"http/1."):
        raise ValueError("the server does not speak HTTP/1.1")
    status = int(head[9:12])
    closing = b"\r\nconnection: close\r\n" in head or head.startswith(b"http/1.0")
    start = head.find(b"\r\ncontent-length:")
    if start >= 0:
        length = head[start + 17 : head.find(b"\r", start + 17)].strip()
        if not length.isdigit():
            raise ValueError("the server sent a response whose length is not a number")
        return status, int(length), closing
    if b"\r\ntransfer-encoding:" in head:
        return status, -1, closing
    if status >= 200:
        raise ValueError("the server sent a response without a length")
    return status, 0, closing


def _message(body: bytes) -> str:
    """Return the message of an error's body, in one line."""
    try:
        text = str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        text = body.decode(errors="replace")
    return " ".join(text.split())[:200]
