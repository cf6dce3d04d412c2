"""The headers of a gRPC call."""

from __future__ import annotations

import re
from typing import Final

from ingot.protocol.context import identity_of
from ingot.server.http2.headers import HEADER_LIST, fault_of

# Most bytes of the client's text that an error quotes, as heads live as long as their calls.
_QUOTED = 64

_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


class Head:
    """The headers of a call.

    ``fault``: the error of malformed headers, or "". ``refusal``: the HTTP status for a request that is not gRPC,
    otherwise 0. ``timeout``: in seconds. ``untimely``: the client sent an invalid timeout. ``client`` and ``epoch``:
    who sends the call by its key, and the gate's epoch when that was decided. ``identity``: the id and the trace
    context that the client sent. ``sticky``: the value of
    ``sticky_header``.
    """

    __slots__ = (
        "authorization",
        "client",
        "encoding",
        "epoch",
        "fault",
        "identity",
        "length",
        "oversized",
        "path",
        "refusal",
        "sticky",
        "timeout",
        "untimely",
    )

    def __init__(self, headers: list[tuple[bytes, bytes]], sticky_header: bytes = b""):
        fields: dict[bytes, bytes] = {}
        self.fault = fault_of(headers, fields)
        self.path: Final = fields.get(b":path", b"")
        self.refusal = _refusal(fields)
        self.oversized = sum(len(name) + len(value) + 32 for name, value in headers) > HEADER_LIST
        self.encoding = fields.get(b"grpc-encoding", b"identity")[:_QUOTED]
        timeout = fields.get(b"grpc-timeout")
        found = None if timeout is None else _TIMEOUT.fullmatch(timeout)
        self.untimely = timeout is not None and found is None
        self.timeout = int(found[1]) * _UNITS[found[2]] if found else None
        length = fields.get(b"content-length")
        self.length = int(length) if length is not None else None
        self.authorization = fields.get(b"authorization")
        if self.authorization is not None and sum(name == b"authorization" for name, _ in headers) > 1:
            self.authorization = b""  # which is refused: a proxy may use another of them
        self.sticky = fields.get(sticky_header, b"").decode("latin-1") if sticky_header else ""
        self.identity = identity_of(headers)
        self.client = ""
        self.epoch = 0


def _refusal(fields: dict[bytes, bytes]) -> int:
    if fields.get(b":method") != b"POST":
        return 405
    kind = fields.get(b"content-type", b"")
    return 0 if kind[:16] == b"application/grpc" and kind[16:17] in b"+;" else 415
