"""The head of a call: header blocks decoded, checked, and remembered while the same bytes mean the same."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from hpack import Decoder, HPACKDecodingError, HPACKError, OversizedHeaderListError
from hpack.hpack import decode_integer
from hpack.table import HeaderTable

from ingot.server.grpc.fast.frames import ErrorCode, Fault

# What is told to clients, and where a connection ends: the table that both sides keep would be out of step.
HEADER_LIST = 16 << 10
_HEADER_LIST_END = 64 << 10
_REMEMBERED = 64
_REMEMBERED_BYTES = 1024
# Of a name that nobody knows, what an error quotes. Heads live as long as their calls.
_QUOTED = 64
# Changes of the table's size in one block (RFC 7541, section 4.2).
_MOST_RESIZES = 2
# So many decoded bytes, or so many headers, cost as much as a frame of another kind. hpack decodes Huffman's code in
# Python, so each byte of that counts as so many more: a token of 5 KiB with every call stays free.
_BYTES_A_FRAME, _HEADERS_A_FRAME, _HUFFMAN_BYTE = 2048, 64, 1

_FORBIDDEN = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_UPPERCASE = re.compile(rb"[A-Z]")
_NO_VALUE = re.compile(rb"[\0\r\n]")
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


class Head:
    """What the headers of a call say.

    ``refusal`` is the HTTP status for what is no gRPC, else 0. ``timeout`` is in seconds; ``untimely`` says that one
    was sent which means none.
    """

    __slots__ = ("encoding", "fault", "length", "oversized", "path", "refusal", "timeout", "untimely")

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]):
        fields: dict[bytes, bytes] = {}
        self.fault = _fault(headers, fields)
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


def _fault(headers: Iterable[tuple[bytes, bytes]], fields: dict[bytes, bytes]) -> str:
    """Fill ``fields``, and return what makes the headers malformed (RFC 9113, section 8.1.1 to 8.3)."""
    for name, value in headers:
        if name[:1] == b":":
            if name not in _PSEUDO:
                return f"the pseudo-header {name!r} belongs in no request"
            if name in fields:
                return f"the pseudo-header {name!r} stands twice"
            if any(other[:1] != b":" for other in fields):
                return f"the pseudo-header {name!r} comes after others"
        elif name in _FORBIDDEN or (name == b"te" and value != b"trailers") or not name or _UPPERCASE.search(name):
            return f"the header {name!r} does not belong into HTTP/2"
        if _NO_VALUE.search(value):
            return f"the header {name!r} has a value with a line break or a NUL"
        if name == b"content-length" and (not _LENGTH.fullmatch(value) or fields.get(name, value) != value):
            return "content-length is no number, or two"
        fields[name] = value
    if not fields.get(b":method") or not fields.get(b":path") or not fields.get(b":scheme"):
        return "a pseudo-header is missing"
    return ""


def _refusal(fields: dict[bytes, bytes]) -> int:
    if fields.get(b":method") != b"POST":
        return 405
    kind = fields.get(b"content-type", b"")
    return 0 if kind[:16] == b"application/grpc" and kind[16:17] in b"+;" else 415


def check_trailers(headers: Iterable[tuple[bytes, bytes]], stream_id: int) -> None:
    """Check the headers behind a request, which mean nothing to us.

    Raises:
        Fault: they are malformed.
    """
    for name, _ in headers:
        if name[:1] == b":" or _UPPERCASE.search(name):
            raise Fault(ErrorCode.PROTOCOL_ERROR, f"the header {name!r} does not belong into trailers", stream_id)


class _Table(HeaderTable):
    """HPACK's table of one connection, which tells that it has changed."""

    changed = False
    resizes = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.changed = True
        super().add(name, value)

    def resize(self, size: int) -> None:
        self.changed = True
        self.resizes += 1
        if self.resizes > _MOST_RESIZES:
            raise HPACKDecodingError(f"a block changes the table's size more than {_MOST_RESIZES} times")
        HeaderTable.maxsize.fset(self, size)  # type: ignore[attr-defined] # mypy takes it for a plain property

    maxsize = property(lambda self: self._maxsize, resize)


class Heads:
    """The header blocks of one connection.

    Clients send the same bytes with each call; while HPACK's table is as it was, they mean the same.

    ``cost`` is what reading the last block took, in frames; 0 if it was known.
    """

    __slots__ = ("_decoder", "_known", "_table", "cost")

    def __init__(self) -> None:
        self.cost = 0
        self._table = _Table()
        self._decoder = Decoder(_HEADER_LIST_END)
        self._decoder.header_table = self._table
        self._known: dict[bytes, Head] = {}

    def __call__(self, block: bytes) -> Head:
        """Return the head that a block is.

        Raises:
            Fault: it cannot be decoded.
        """
        known = self._known.get(block)
        if known is not None:
            self.cost = 0
            return known
        head = Head(self.decode(block))
        if not self._table.changed and len(block) <= _REMEMBERED_BYTES:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[block] = head
        return head

    def decode(self, block: bytes) -> list[tuple[bytes, bytes]]:
        """Return the headers of a block.

        Raises:
            Fault: it is not HPACK, or the headers are far too many.
        """
        self._table.changed = False
        self._table.resizes = 0
        try:
            headers: list[tuple[bytes, bytes]] = list(self._decoder.decode(block, raw=True))
        except OversizedHeaderListError as error:
            raise Fault(ErrorCode.ENHANCE_YOUR_CALM, "the headers are too large") from error
        except HPACKError as error:
            raise Fault(ErrorCode.COMPRESSION_ERROR, f"the headers cannot be decoded: {error}") from error
        finally:
            if self._table.changed:
                self._known.clear()
        size = sum(len(name) + len(value) for name, value in headers)
        # Where neither the block nor the headers are large, its Huffman code is not worth counting.
        if size + _HUFFMAN_BYTE * len(block) >= _BYTES_A_FRAME:
            size += _HUFFMAN_BYTE * _huffman_bytes(block)
        self.cost = size // _BYTES_A_FRAME + len(headers) // _HEADERS_A_FRAME
        return headers


def _huffman_bytes(block: bytes) -> int:
    """Return how many bytes of a block are Huffman's code (RFC 7541, section 6). hpack must have accepted the block."""
    rest, count = memoryview(block), 0
    while rest:
        kind = rest[0]
        prefix = 7 if kind & 0x80 else 6 if kind & 0x40 else 5 if kind & 0x20 else 4
        index, used = decode_integer(rest, prefix)
        rest = rest[used:]
        strings = 0 if prefix in (7, 5) else 1 if index else 2  # an indexed header and a table size have none
        for _ in range(strings):
            packed = rest[0] & 0x80
            length, used = decode_integer(rest, 7)
            count += length if packed else 0
            rest = rest[used + length :]
    return count
