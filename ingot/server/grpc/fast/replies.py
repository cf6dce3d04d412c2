"""Header blocks of answers. They are literals, so there is no table of ours that a client's settings could change."""

from __future__ import annotations

import struct

from ingot.server.grpc.fast.frames import DATA, END_HEADERS, END_STREAM, HEADERS, frame

# RFC 7541, appendix A and section 6.
_STATUS_200 = b"\x88"
_STATUS = b"\x08"
_CONTENT_TYPE = b"\x0f\x10"
_ALLOW = b"\x0f\x07"
_CONTENT_LENGTH_0 = b"\x0f\x0d\x010"

_PLAIN = frozenset(range(0x20, 0x7F)) - {ord("%")}


def integer(value: int, prefix: int, first: int = 0) -> bytes:
    """Return an integer of HPACK (RFC 7541, section 5.1) after the bits of ``first``."""
    most = (1 << prefix) - 1
    if value < most:
        return bytes((first | value,))
    out = bytearray((first | most,))
    value -= most
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _text(value: bytes) -> bytes:
    return integer(len(value), 7) + value


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + _text(name) + _text(value)


OPENING = _STATUS_200 + _CONTENT_TYPE + _text(b"application/grpc")
_OK = _literal(b"grpc-status", b"0")

_HEAD_OF_OPENING = len(OPENING) << 8 | HEADERS
_HEAD_OF_OK = len(_OK) << 8 | HEADERS
_BEGIN = struct.Struct(f">IBI{len(OPENING)}sIBIBI")
_END = struct.Struct(f">IBI{len(_OK)}s")


def opening(stream_id: int) -> bytes:
    """Return the HEADERS frame that an answer begins with."""
    return frame(HEADERS, END_HEADERS, stream_id, OPENING)


def whole(stream_id: int, message: tuple[bytes, ...], size: int) -> list[bytes]:
    """Return a whole answer that is one message of ``size`` bytes, which fits into one frame."""
    begin = _BEGIN.pack(
        _HEAD_OF_OPENING, END_HEADERS, stream_id, OPENING, (size + 5) << 8 | DATA, 0, stream_id, 0, size
    )
    return [begin, *message, _END.pack(_HEAD_OF_OK, END_HEADERS | END_STREAM, stream_id, _OK)]


def ending(status: int, text: str = "", *, opened: bool, accepts: bool = False) -> bytes:
    """Return the header block that ends an answer.

    Args:
        status: gRPC's number.
        text: what the client is told.
        opened: whether the answer has begun; else this is all of it.
        accepts: whether to say which compressions are understood.
    """
    block = _OK if status == 0 else _literal(b"grpc-status", str(status).encode())
    if text:
        block += _literal(b"grpc-message", _percent_encoded(text))
    if accepts:
        block += _literal(b"grpc-accept-encoding", b"identity,deflate,gzip")
    return block if opened else OPENING + block


def refusal(status: int) -> bytes:
    """Return the header block of an answer to what is HTTP, but no gRPC."""
    block = _STATUS + _text(str(status).encode()) + _CONTENT_LENGTH_0
    return block + _ALLOW + _text(b"POST") if status == 405 else block


def _percent_encoded(text: str) -> bytes:
    raw = text.encode(errors="replace")
    return b"".join(bytes((byte,)) if byte in _PLAIN else b"%%%02X" % byte for byte in raw)


HTTP_1 = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\ncontent-length: 67\r\n\r\n"
    b"this port speaks gRPC over HTTP/2; plain HTTP is on the other port\n"
)
