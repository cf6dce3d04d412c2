"""Parses HTTP/1.1 requests with httptools, without socket, clock or event loop.

:class:`Parser` turns bytes into events; :func:`read_head` decides what a request's line and headers mean.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import httptools

from ingot.errors import IngotError, InvalidArgument, TooLarge, Unsupported
from ingot.protocol.context import identity_of
from ingot.protocol.json_codec import HEADER_LENGTH, Headers
from ingot.protocol.keys import BoundedCache
from ingot.server.net import compression

MAX_HEAD_BYTES = 64 << 10
LIVE, READY = b"/v2/health/live", b"/v2/health/ready"
PREFLIGHT = b"preflight"
PAGE = "/ui"

_INFER = re.compile(r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer")
# RFC 9110, 7.2: a name, an IPv4 address or an IPv6 one in brackets, and a port; empty where there is no name. RFC 3986
# allows commas in names, but proxies join the values of repeated headers with them.
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[\w.~!$&'()*+;=%-]+)(:[0-9]*)?")
# Headers that decide how a body is read. A proxy may use one value of several, and this server another.
_ONCE = ("Content-Encoding", "Content-Type", HEADER_LENGTH)

HeaderList = Sequence[tuple[bytes, bytes]]
Infers = Callable[[bytes, bytes, HeaderList], "InferHead | None"]
"""Returns the parts of a method, a URL and headers that inference needs; None for another request."""
Admit = Callable[["RequestHead"], "RequestHead"]
"""Returns a head with its client, or with a fault if access is refused."""


@dataclass(frozen=True)
class InferHead:
    """The parts of path and headers that inference needs.

    ``header_length`` is text if it is not a number. ``sticky`` is the value of ``sticky_header``, and ``detail``
    belongs to the API that recognized the request.
    """

    model: str
    version: str
    header_length: int | str | None
    encoding: str
    response_encoding: str | None
    sticky: str = ""
    detail: Any = None

    @classmethod
    def of(cls, model: str, version: str, headers: Mapping[str, str]) -> InferHead:
        """Return the parts of a request for inference.

        Args:
            model: from the path.
            version: from the path, or empty.
            headers: the request's, with names in lower case.
        """
        return cls(
            model,
            version,
            _number(headers.get(HEADER_LENGTH.lower())),
            headers.get("content-encoding", ""),
            compression.wanted_encoding(headers.get("accept-encoding", "")),
        )


def infers(method: bytes, url: bytes, headers: HeaderList) -> InferHead | None:
    """Return the parts of a request for inference by the Open Inference Protocol; None for another request."""
    if method != b"POST" or b"infer" not in url:
        return None
    path = httptools.parse_url(url).path.decode("ascii")
    route = _INFER.fullmatch(urllib.parse.unquote(path)) if path.endswith("infer") else None
    return None if route is None else InferHead.of(route["model"], route["version"] or "", first_of(headers))


def first_of(headers: HeaderList) -> dict[str, str]:
    """Return the first value of each header."""
    first: dict[str, str] = {}
    for name, value in headers:
        first.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return first


class Fault(NamedTuple):
    """The error of a head that is refused, the status if it is not that of the error, and headers of the response."""

    error: IngotError
    status: int | None = None
    headers: Headers = ()


@dataclass(frozen=True)
class RequestHead:
    """One request's line and headers.

    Attributes:
        version: ``1.1`` or ``1.0``.
        keep_alive: whether the client keeps the connection.
        length: the body's, in bytes; None if it is chunked.
        expects: whether the client waits for ``100 Continue``.
        infer: of an inference request.
        probe: the path of a health check, or PREFLIGHT for a browser's question whether a page may send a request.
        fault: of a head that is refused.
        client: who sends the request, by its key; empty if the server asks for none.
        extra: headers of the response, for the web page that sends the request.
        identity: the id and the trace context that the client sent; see
            :func:`ingot.protocol.context.identity_of`.

    A head with neither ``infer``, ``probe`` nor ``fault`` is for FastAPI.
    """

    method: bytes
    url: bytes
    version: str
    headers: HeaderList
    keep_alive: bool
    length: int | None = 0
    expects: bool = False
    infer: InferHead | None = None
    probe: bytes | None = None
    fault: Fault | None = None
    client: str = ""
    extra: Headers = ()
    identity: tuple[bytes, bytes] = (b"", b"")

    @property
    def path(self) -> str:
        """The path, without the query."""
        return urllib.parse.unquote(self.url.partition(b"?")[0].decode("latin-1"))

    @property
    def plain(self) -> bool:
        """Whether its bytes have no meaning but ``length`` and ``infer`` or ``probe``."""
        unique = len(self.headers) == len(dict(self.headers))
        ours = bool(self.length) if self.infer is not None else self.probe is not None
        return ours and self.keep_alive and not self.expects and unique


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
        admit: checks the access of each head that is parsed; None admits all.
        infers: recognizes requests of inference.

    Attributes:
        between: whether the parser stands between two requests.
        in_head: whether it stands in a head.
    """

    def __init__(
        self,
        known: BoundedCache[bytes, RequestHead],
        max_length: int,
        admit: Admit | None = None,
        infers: Infers = infers,
    ):
        self.between = True
        self.in_head = False
        self._known = known
        self._max_length = max_length
        self._admit = admit
        self._infers = infers
        self._parser = httptools.HttpRequestParser(self)
        # The first of several pipelined requests can be answered even if a later one ends the connection.
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
            if self._unreported > MAX_HEAD_BYTES:
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
        head = read_head(
            parser.get_method(),
            self._url,
            parser.get_http_version(),
            headers,
            self._size,
            self._infers,
            keep_alive=parser.should_keep_alive(),
        )
        if head.fault is None and parser.should_upgrade():
            lengths = [value for name, value in headers if name in (b"content-length", b"transfer-encoding")]
            if all(value == b"0" for value in lengths):
                head = replace(head, infer=None, probe=None)
            else:
                head = replace(head, keep_alive=False, fault=_UPGRADING)
        head = replace(head, identity=identity_of(headers))
        if self._admit is not None and head.fault is None:
            head = self._admit(head)
        self._events.append(head)

    def on_body(self, body: bytes) -> None:
        self._progress = True
        self._events.append(body)

    def on_message_complete(self) -> None:
        self.between = True
        self._events.append(Signal.END)


def read_head(
    method: bytes,
    url: bytes,
    version: str,
    headers: HeaderList,
    size: int,
    infers: Infers = infers,
    *,
    keep_alive: bool,
) -> RequestHead:
    """Return the head of a request.

    Args:
        method: such as ``POST``.
        url: as the client spelled it.
        version: such as ``1.1``.
        headers: with names in lower case.
        size: of request line and headers, in bytes.
        infers: recognizes requests of inference.
        keep_alive: whether the client keeps the connection.

    Raises:
        httptools.HttpParserInvalidURLError: the URL cannot be parsed.
        UnicodeDecodeError: the URL is not ASCII.
    """
    fault = _fault(version, headers, size)
    if fault is not None:
        return RequestHead(method, url, version, headers, keep_alive=False, fault=fault)
    modern = version == "1.1"  # HTTP/1.0 has no interim responses, and does not keep connections here
    expects = modern and any(name == b"expect" and value.lower() == b"100-continue" for name, value in headers)
    probe = None
    length: int | None = 0
    infer = infers(method, url, headers)
    if infer is not None:
        length = _length(headers)
    elif method == b"GET" and url in (LIVE, READY):
        bodiless = not any(name in (b"content-length", b"transfer-encoding") for name, _ in headers)
        probe = url if bodiless else None
    return RequestHead(method, url, version, headers, keep_alive and modern, length, expects, infer=infer, probe=probe)


def _fault(version: str, headers: HeaderList, size: int) -> Fault | None:
    if size > MAX_HEAD_BYTES:
        return Fault(TooLarge(f"request line and headers have over {MAX_HEAD_BYTES >> 10} KiB"), 431)
    if version not in ("1.1", "1.0"):
        return Fault(Unsupported(f"this server speaks HTTP/1.1 and HTTP/1.0, not HTTP/{version}"), 505)
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        return Fault(InvalidArgument(f"the request must have exactly one 'Host' header; it has {len(hosts)}"))
    if hosts and _HOST.fullmatch(hosts[0]) is None:
        return Fault(
            InvalidArgument(f"the header 'Host' is {hosts[0].decode('latin-1')!r}; it must be a host or host:port")
        )
    names = [name for name, _ in headers]
    for once in _ONCE:
        if (count := names.count(once.lower().encode())) > 1:
            return Fault(InvalidArgument(f"the request has {count} headers '{once}'; send one"))
    if version == "1.0" and b"transfer-encoding" in names:  # RFC 9112, 6.1: the framing is faulty
        return Fault(InvalidArgument("HTTP/1.0 has no 'Transfer-Encoding'; send HTTP/1.1, or a 'Content-Length'"))
    codings = b", ".join(value for name, value in headers if name == b"transfer-encoding").lower()
    if codings not in (b"", b"chunked"):
        text = codings.decode("latin-1")
        return Fault(Unsupported(f"Transfer-Encoding '{text}' is not supported; send 'chunked', or a Content-Encoding"))
    return None


def _length(headers: HeaderList) -> int | None:
    """Return the declared length of a body; None if it is chunked."""
    first = first_of(headers)
    declared = first.get("content-length")
    return None if declared is None and "transfer-encoding" in first else int(declared or 0)


def _number(text: str | None) -> int | str | None:
    """Return the number that a header is, its text if it is not one, and None if it is absent."""
    return int(text) if text is not None and text.isdecimal() and len(text) <= 18 else text
