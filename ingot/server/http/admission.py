"""The access of HTTP requests, decided by their heads before a body is read: keys, and the pages that send them."""

from __future__ import annotations

import ipaddress
import urllib.parse
from collections.abc import Callable
from dataclasses import replace

import httptools

from ingot.config.exposure import ANY
from ingot.errors import InvalidArgument, PermissionDenied
from ingot.protocol.context import REQUEST_ID
from ingot.protocol.json_codec import HEADER_LENGTH, Headers
from ingot.server.access.gate import INFER, Gate
from ingot.server.access.grants import Refusal
from ingot.server.access.peers import Peer
from ingot.server.http.parser import PREFLIGHT, Fault, RequestHead
from ingot.server.plane.operations import scope_of_path

_TWICE = Refusal(InvalidArgument("the request has several headers 'Authorization'; send one"), "malformed")
_MAX_AGE = 600  # seconds for which a browser may remember the answer to a preflight
_ALLOWED = f"authorization, content-encoding, content-type, {HEADER_LENGTH.lower()}, traceparent, x-request-id"
_PREFLIGHT: Headers = (
    ("Access-Control-Allow-Methods", "GET, HEAD, POST"),
    (
        "Access-Control-Allow-Headers",
        _ALLOWED,
    ),
    ("Access-Control-Max-Age", str(_MAX_AGE)),
)
_EXPOSED = (
    "Access-Control-Expose-Headers",
    f"{HEADER_LENGTH}, Retry-After, traceparent, WWW-Authenticate, {REQUEST_ID}",
)


class Cors:
    """The web pages that may use a server, as the Fetch standard defines them.

    Args:
        origins: their origins; ``*`` for all.
        credentials: whether their requests may carry client certificates.
    """

    def __init__(self, origins: frozenset[str], *, credentials: bool):
        self._any = ANY in origins
        self._origins = {origin.encode("ascii") for origin in origins}
        self._credentials: Headers = (("Access-Control-Allow-Credentials", "true"),) if credentials else ()

    def headers(self, head: RequestHead) -> Headers | None:
        """Return the headers of a response, empty if no web page sends the request; None if its page is not allowed."""
        origins = [value for name, value in head.headers if name == b"origin"]
        if not origins:
            return ()
        if self._any:
            return (("Access-Control-Allow-Origin", ANY), _EXPOSED)
        if len(origins) > 1 or origins[0] not in self._origins:
            return None
        allowed = ("Access-Control-Allow-Origin", origins[0].decode("ascii"))
        return (allowed, ("Vary", "Origin"), *self._credentials, _EXPOSED)

    def preflight(self, head: RequestHead) -> Headers | None:
        """Return the headers of the response to a preflight; None if the request is not one."""
        names = {name for name, _ in head.headers}
        if head.method != b"OPTIONS" or not {b"origin", b"access-control-request-method"} <= names:
            return None
        has_body = names & {b"content-length", b"transfer-encoding"}
        return None if has_body else _PREFLIGHT


class Hosts:
    """The names by which clients may address a server.

    A web page can make its own name resolve to this machine (DNS rebinding). Browsers then take the server for a part
    of the page, but send that name. Addresses, localhost and a missing name cannot be such a name.

    Args:
        names: in lower case.
    """

    def __init__(self, names: frozenset[str]):
        self._names = names | {"", "localhost"}

    def fault(self, head: RequestHead) -> Fault | None:
        """Return the fault of a request to another name; None if its name is allowed."""
        given = [value for name, value in head.headers if name == b"host"]
        if not head.url.startswith((b"/", b"*")):  # the whole URL, as for a proxy
            given.append(httptools.parse_url(head.url).host or b"")
        return next((_misdirected(value) for value in given if not self._allows(value)), None)

    def _allows(self, value: bytes) -> bool:
        host = value.decode("latin-1").lower()
        if host.startswith("["):  # an IPv6 address
            return True
        host = host.partition(":")[0].removesuffix(".")
        return host in self._names or host.endswith(".localhost") or _is_address(host)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _misdirected(value: bytes) -> Fault:
    name = value.decode("latin-1")
    return Fault(PermissionDenied(f"'{name}' is not a name of this server; add it to --allowed-host if it is"), 421)


class Admission:
    """Checks the access of requests.

    Args:
        gate: the rules; None admits all.
        cors: the web pages that may send requests; None leaves browsers without permission.
        hosts: the names of the server; None for any name.
        sticky_header: names the client whose requests all go to one version; in lower case, empty for none.
        scope_of: returns the right that a request to a path needs; empty for none.
    """

    def __init__(
        self,
        gate: Gate | None,
        cors: Cors | None = None,
        hosts: Hosts | None = None,
        sticky_header: str = "",
        scope_of: Callable[[str], str] = scope_of_path,
    ):
        self.gate = gate
        self.by_certificate = gate is not None and gate.by_certificate
        self._cors = cors
        self._hosts = hosts
        self._sticky_header = sticky_header.encode()
        self._scope_of = scope_of

    def admit(self, head: RequestHead, peer: Peer) -> RequestHead:
        """Return a head with its client, or with a fault if it is refused; and with the headers for a web page."""
        if self._hosts is not None and (fault := self._hosts.fault(head)) is not None:
            return replace(head, infer=None, probe=None, fault=fault)
        if self._cors is not None:
            extra, asked = self._cors.headers(head), self._cors.preflight(head)
            if asked is not None:  # browsers send it without a key
                return _of_other_page(head) if extra is None else replace(head, probe=PREFLIGHT, extra=extra + asked)
            if extra:
                head = replace(head, extra=extra)
        if self._sticky_header and head.infer is not None:
            found = next((value for name, value in head.headers if name == self._sticky_header), b"")
            head = replace(head, infer=replace(head.infer, sticky=found.decode("latin-1")))
        return head if self.gate is None else self._admit(self.gate, head, peer)

    def _admit(self, gate: Gate, head: RequestHead, peer: Peer) -> RequestHead:
        scope = "" if head.probe is not None else INFER if head.infer is not None else self._scope(head.url)
        if not scope:
            return head
        values = [value for name, value in head.headers if name == b"authorization"]
        # Of several headers, a proxy may read another one than this server.
        single = values[0] if values else None
        outcome = _TWICE if len(values) > 1 else gate.check(single, scope, peer)
        if isinstance(outcome, Refusal):
            gate.count(outcome, "http", head.url.partition(b"?")[0].decode("latin-1"), peer)
            fault = Fault(outcome.error, headers=(("WWW-Authenticate", outcome.challenge),))
            return replace(head, infer=None, probe=None, fault=fault)
        return replace(head, client=outcome.client)

    def _scope(self, url: bytes) -> str:
        """Return the right that a request for FastAPI needs, by the path that it is routed by."""
        path = urllib.parse.unquote(httptools.parse_url(url).path.decode("ascii"))
        return self._scope_of(path.removesuffix("\n"))  # which the routes' patterns ignore


def _of_other_page(head: RequestHead) -> RequestHead:
    error = PermissionDenied("the origin of this web page is not one of those that --cors-origin names")
    return replace(head, fault=Fault(error))
