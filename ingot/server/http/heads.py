"""What the head of a request that is served here, and not by FastAPI, says of it."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ingot.server.http import exchange

_INFER = re.compile(r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer")
_PROBES: Mapping[bytes, exchange.Probe] = {b"/v2/health/live": exchange.live, b"/v2/health/ready": exchange.ready}


class Head(NamedTuple):
    """One request's line and headers.

    ``length`` is the body's, None where it is chunked. A health check has a ``probe``; all others are inference.
    """

    asked: exchange.Asked
    length: int | None
    expects: bool = False
    probe: exchange.Probe | None = None


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
            exchange.Asked.of(route["model"], route["version"] or "", first),
            None if chunked else int(length or 0),
            first.get("expect", "").lower() == "100-continue",
        )
    if method == b"GET" and (probe := _PROBES.get(path)) is not None:
        if any(name in (b"content-length", b"transfer-encoding") for name, _ in headers):
            return None
        return Head(exchange.NOTHING, 0, probe=probe)
    return None
