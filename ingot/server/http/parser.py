"""HTTP/1.1 requests out of bytes, by httptools: no socket, no clock, no event loop."""

from __future__ import annotations

import re
from enum import Enum

import httptools

from ingot.errors import InvalidArgument
from ingot.server.http import heads
from ingot.server.http.heads import Fault, RequestHead
from ingot.server.limits import BoundedCache

# Java's client offers HTTP/2 with its first request. The offer is ignored, but httptools reads no body after it.
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
# Where the header cannot be renamed: the body would be read as the next request.
_UPGRADING = Fault(
    InvalidArgument("a request with a body also has the header 'Upgrade'; send it without: this server speaks HTTP/1.1")
)


class Signal(Enum):
    """An event without content. All but END make the bytes that follow unreadable."""

    END = "the request is complete"
    MALFORMED = "the bytes are not HTTP"
    WRONG_VERSION = "the bytes are another version of HTTP"
    TOO_LARGE = "a head, trailers or the extension of a chunk exceed the limit"


Event = RequestHead | bytes | Signal
"""The head of a request, a part of its body, or a signal."""


class Parser:
    """Turns the bytes of one connection into events.

    Args:
        known: heads that were parsed before, by their bytes; shared by all connections.
        max_length: the longest body of a head that is remembered.

    Attributes:
        between: whether the parser stands between two requests.
        in_head: whether it stands in a head.
    """

    def __init__(self, known: BoundedCache[bytes, RequestHead], max_length: int):
        self.between = True
        self.in_head = False
        self._known = known
        self._max_length = max_length
        self._parser = httptools.HttpRequestParser(self)
        # A response to the first of several requests in a row can be sent though one of them ends the connection.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._events: list[Event] = []
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._size = 0  # of the head, as far as httptools has reported it
        self._unreported = 0  # bytes in a row that httptools keeps without reporting
        self._progress = False

    def receive(self, data: bytes) -> list[Event]:
        """Return the events that the next bytes complete."""
        self._progress = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # the request is complete; the offer is ignored
        except httptools.HttpParserError as error:
            wrong_version = "Invalid HTTP version" in str(error)
            self._events.append(Signal.WRONG_VERSION if wrong_version else Signal.MALFORMED)
        else:
            self._unreported = 0 if self.between or self._progress else self._unreported + len(data)
            if self._unreported > heads.MAX_HEAD_BYTES:
                self._events.append(Signal.TOO_LARGE)
        events, self._events = self._events, []
        return events

    def learn(self, data: bytes) -> list[Event]:
        """Return the events of what seems to be one whole head, and remember it if it is exactly that."""
        events = self.receive(_UPGRADE.sub(b"\r\nx-upgrade:", data))
        head = events[0] if events else None
        if isinstance(head, RequestHead) and head.plain and (head.length or 0) <= self._max_length:
            exactly = [head] if head.length else [head, Signal.END]
            if events == exactly:
                self._known.keep(data, head)
        return events

    # Called by httptools:

    def on_message_begin(self) -> None:
        self.between, self.in_head, self._progress = False, True, True
        self._url, self._headers, self._size = b"", [], 0

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._size += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._size += len(name) + len(value) + 4  # a colon, a blank and the end of the line
        self._headers.append((name.lower(), value.rstrip(b" \t")))  # blanks that httptools leaves

    def on_headers_complete(self) -> None:
        self.in_head, self._progress = False, True
        parser, headers = self._parser, self._headers
        head = heads.read(
            parser.get_method(),
            self._url,
            parser.get_http_version(),
            headers,
            self._size,
            keep_alive=parser.should_keep_alive(),
        )
        if head.fault is None and parser.should_upgrade():
            lengths = [value for name, value in headers if name in (b"content-length", b"transfer-encoding")]
            if all(value == b"0" for value in lengths):
                head = head._replace(infer=None, probe=None)
            else:
                head = head._replace(keep_alive=False, fault=_UPGRADING)
        self._events.append(head)

    def on_body(self, body: bytes) -> None:
        self._progress = True
        self._events.append(body)

    def on_message_complete(self) -> None:
        self.between = True
        self._events.append(Signal.END)
