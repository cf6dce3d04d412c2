"""Cross-origin requests of web pages, as the Fetch standard defines them."""

from __future__ import annotations

from ingot.server.access.exposure import ANY
from ingot.server.http.codec import HEADER_LENGTH, Headers
from ingot.server.http.parser import RequestHead

_MAX_AGE = 600  # seconds for which a browser may remember the answer to a preflight
_PREFLIGHT: Headers = (
    ("Access-Control-Allow-Methods", "GET, HEAD, POST"),
    ("Access-Control-Allow-Headers", f"authorization, content-encoding, content-type, {HEADER_LENGTH.lower()}"),
    ("Access-Control-Max-Age", str(_MAX_AGE)),
)
_EXPOSED = ("Access-Control-Expose-Headers", f"{HEADER_LENGTH}, Retry-After, WWW-Authenticate")


class Cors:
    """The web pages that may use a server.

    Args:
        origins: their origins; ``*`` for all.
        credentials: whether their requests may carry client certificates.
    """

    def __init__(self, origins: frozenset[str], *, credentials: bool):
        self._any = ANY in origins
        self._origins = {origin.encode("ascii") for origin in origins}
        self._credentials: Headers = (("Access-Control-Allow-Credentials", "true"),) if credentials else ()

    def headers(self, head: RequestHead) -> Headers | None:
        """Return the headers of a response; none if the request is of no page, None if its page is not allowed."""
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
