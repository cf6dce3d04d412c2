"""Header blocks: HPACK with bounds, the rules for request headers, and a cache of decoded blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from hpack import Decoder, HPACKDecodingError, HPACKError, OversizedHeaderListError
from hpack.hpack import decode_integer
from hpack.table import HeaderTable

from ingot.server.http2.frames import ErrorCode, Fault

# The limit announced to clients, and the one that ends a connection: both sides' tables would no longer agree.
HEADER_LIST = 16 << 10
_HEADER_LIST_END = 64 << 10
_REMEMBERED = 64
_REMEMBERED_BYTES = 1024
# Changes of the table's size in one block (RFC 7541, section 4.2).
_MOST_RESIZES = 2
# So many decoded bytes, or headers, cost as much as a control frame. hpack decodes Huffman code in Python, so each
# such byte is charged again: a token of 5 KiB with every call stays free.
_BYTES_A_FRAME, _HEADERS_A_FRAME, _HUFFMAN_BYTE = 2048, 64, 1

_FORBIDDEN = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_UPPERCASE = re.compile(rb"[A-Z]")
_NO_VALUE = re.compile(rb"[\0\r\n]")
_LENGTH = re.compile(rb"[0-9]{1,18}")


def fault_of(headers: Iterable[tuple[bytes, bytes]], fields: dict[bytes, bytes]) -> str:
    """Fill ``fields`` and return the error of malformed headers, or "" (RFC 9113, sections 8.1.1 to 8.3)."""
    for name, value in headers:
        if name[:1] == b":":
            if name not in _PSEUDO:
                return f"the pseudo-header {name!r} is not allowed in a request"
            if name in fields:
                return f"the pseudo-header {name!r} occurs twice"
            if any(other[:1] != b":" for other in fields):
                return f"the pseudo-header {name!r} comes after others"
        elif name in _FORBIDDEN or (name == b"te" and value != b"trailers") or not name or _UPPERCASE.search(name):
            return f"the header {name!r} is not allowed in HTTP/2"
        if _NO_VALUE.search(value):
            return f"the header {name!r} has a value with a line break or a NUL"
        if name == b"content-length" and (not _LENGTH.fullmatch(value) or fields.get(name, value) != value):
            return "content-length is not one number"
        fields[name] = value
    if not fields.get(b":method") or not fields.get(b":path") or not fields.get(b":scheme"):
        return "a pseudo-header is missing"
    return ""


def check_trailers(headers: Iterable[tuple[bytes, bytes]], stream_id: int) -> None:
    """Check the trailers of a request, which are otherwise ignored.

    Raises:
        Fault: they are malformed.
    """
    for name, _ in headers:
        if name[:1] == b":" or _UPPERCASE.search(name):
            raise Fault(ErrorCode.PROTOCOL_ERROR, f"the header {name!r} is not allowed in trailers", stream_id)


class _Table(HeaderTable):
    """HPACK's table of one connection, which records changes."""

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


class HeaderDecoder:
    """Decodes the header blocks of one connection.

    Clients send the same bytes with each call, and they mean the same until HPACK's table changes, so what ``parse``
    made of them is cached. ``cost``: the charge for the last block, in frames; 0 if it was cached.
    """

    __slots__ = ("_decoder", "_known", "_parse", "_table", "cost")

    def __init__(self, parse: Callable[[list[tuple[bytes, bytes]]], Any]):
        self._parse = parse
        self.cost = 0
        self._table = _Table()
        self._decoder = Decoder(_HEADER_LIST_END)
        self._decoder.header_table = self._table
        self._known: dict[bytes, Any] = {}

    def __call__(self, block: bytes) -> Any:
        """Return the result of ``parse`` for a block.

        Raises:
            Fault: it cannot be decoded.
        """
        known = self._known.get(block)
        if known is not None:
            self.cost = 0
            return known
        head = self._parse(self.decode(block))
        if not self._table.changed and len(block) <= _REMEMBERED_BYTES:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[block] = head
        return head

    def decode(self, block: bytes) -> list[tuple[bytes, bytes]]:
        """Return the headers of a block.

        Raises:
            Fault: it is not HPACK, or the headers exceed the limit.
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
        # Where neither the block nor the headers are large, the Huffman code is not counted.
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
