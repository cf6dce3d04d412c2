"""What the head of a request that is served here, and not by FastAPI, says of it."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ingot.errors import IngotError, InvalidArgument, TooLarge, Unsupported
from ingot.server.http import exchange
from ingot.server.http.protocol import MAX_HEAD_BYTES

_INFER = re.compile(r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer")
_PROBES: Mapping[bytes, exchange.Probe] = {b"/v2/health/live": exchange.live, b"/v2/health/ready": exchange.ready}


# RFC 9110, 7.2: a name, an IPv4 address or an IPv6 one in brackets, and a port; empty where there is no name. RFC 3986
# allows commas in names, but proxies join the values of repeated headers with them.
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[\w.~!$&'()*+;=%-]*)(:[0-9]*)?")
# Headers that decide how a body is read. A proxy may use one value of several, and this server another.
_ONCE = ("Content-Encoding", "Content-Type", "Inference-Header-Content-Length")


class Head(NamedTuple):
    """One request's line and headers.

    ``length`` is the body's, None where it is chunked. A health check has a ``probe``; all others are inference.
    """

    asked: exchange.RequestHead
    length: int | None
    expects: bool = False
    probe: exchange.Probe | None = None


class Fault(NamedTuple):
    """What is wrong with a head, and the status if it is not that of the error."""

    error: IngotError
    status: int | None = None


def fault(version: str, headers: Sequence[tuple[bytes, bytes]], size: int) -> Fault | None:
    """Return what is wrong with a head that could be parsed, or None.

    Args:
        version: such as ``1.1``.
        headers: with names in lower case.
        size: of request line and headers, in bytes.
    """
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


def read(method: bytes, path: bytes, headers: Iterable[tuple[bytes, bytes]]) -> Head | None:
    """Return what a head says, or None if the request is one for FastAPI.

    Args:
        method: such as ``POST``.
        path: without query, as the client spelled it; ASCII.
        headers: with names in lower case.
    """
    if method == b"POST" and path.endswith(b"infer"):
        text = path.decode("ascii")
        route = _INFER.fullmatch(urllib.parse.unquote(text) if "%" in text else text)
        if route is None:
            return None
        first: dict[str, str] = {}
        for name, value in headers:
            first.setdefault(name.decode("latin-1"), value.decode("latin-1"))
        length = first.get("content-length")
        chunked = length is None and "transfer-encoding" in first
        return Head(
            exchange.RequestHead.of(route["model"], route["version"] or "", first),
            None if chunked else int(length or 0),
            first.get("expect", "").lower() == "100-continue",
        )
    if method == b"GET" and (probe := _PROBES.get(path)) is not None:
        if any(name in (b"content-length", b"transfer-encoding") for name, _ in headers):
            return None
        return Head(exchange.NOTHING, 0, probe=probe)
    return None
