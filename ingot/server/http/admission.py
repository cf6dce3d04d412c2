"""The access of HTTP requests, decided by their heads before a body is read."""

from __future__ import annotations

import urllib.parse

import httptools

from ingot.errors import InvalidArgument, PermissionDenied
from ingot.server.access.gate import INFER, METRICS, Gate
from ingot.server.access.grants import Refusal
from ingot.server.access.peers import Peer
from ingot.server.http.cors import Cors
from ingot.server.http.parser import LIVE, PREFLIGHT, READY, Fault, RequestHead

_OPEN = (LIVE.decode(), READY.decode())
_TWICE = Refusal(InvalidArgument("the request has several headers 'Authorization'; send one"), "malformed")


class Admission:
    """Checks the access of requests.

    Args:
        gate: the rules; None admits all.
        cors: the web pages that may send requests; None leaves browsers without permission.
    """

    def __init__(self, gate: Gate | None, cors: Cors | None = None):
        self.gate = gate
        self.by_certificate = gate is not None and gate.by_certificate
        self._cors = cors

    def admit(self, head: RequestHead, peer: Peer) -> RequestHead:
        """Return a head with its client, or with a fault if it is refused; and with the headers for a web page."""
        if self._cors is not None:
            extra, asked = self._cors.headers(head), self._cors.preflight(head)
            if asked is not None:  # browsers send it without a key
                return _of_other_page(head) if extra is None else head._replace(probe=PREFLIGHT, extra=extra + asked)
            if extra:
                head = head._replace(extra=extra)
        return head if self.gate is None else self._admit(self.gate, head, peer)

    def _admit(self, gate: Gate, head: RequestHead, peer: Peer) -> RequestHead:
        scope = "" if head.probe is not None else INFER if head.infer is not None else _scope(head.url)
        if not scope:
            return head
        values = [value for name, value in head.headers if name == b"authorization"]
        # Of several, a proxy may use another one than this server.
        single = values[0] if values else None
        outcome = _TWICE if len(values) > 1 else gate.check(single, scope, peer)
        if isinstance(outcome, Refusal):
            gate.count(outcome, "http", head.url.partition(b"?")[0].decode("latin-1"), peer)
            fault = Fault(outcome.error, headers=(("WWW-Authenticate", outcome.challenge),))
            return head._replace(infer=None, probe=None, fault=fault)
        return head._replace(client=outcome.client)


def _of_other_page(head: RequestHead) -> RequestHead:
    error = PermissionDenied("the origin of this web page is not one of those that --cors-origin names")
    return head._replace(fault=Fault(error))


def _scope(url: bytes) -> str:
    """Return the right that a request for FastAPI needs, by the path that it is routed by; empty if none is needed."""
    path = urllib.parse.unquote(httptools.parse_url(url).path.decode("ascii"))
    path = path.removesuffix("\n")  # which the routes' patterns ignore
    return METRICS if path == "/metrics" else "" if path in _OPEN else INFER
