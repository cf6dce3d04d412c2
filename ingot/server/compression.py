"""gzip and deflate: HTTP's ``Content-Encoding``, and the compressed messages of gRPC."""

from __future__ import annotations

import zlib

from ingot.errors import InvalidArgument
from ingot.server.limits import check_size

_WINDOW = {"gzip": 31, "deflate": 15}  # zlib's window bits: 16 more means a gzip header
ENCODINGS = frozenset(_WINDOW)


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Undo a ``Content-Encoding``, never making more than ``limit`` bytes.

    Raises:
        InvalidArgument: the encoding is unknown, or the body is not of it.
        TooLarge: the body grows over the limit.
    """
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding not in _WINDOW:
        raise InvalidArgument(f"Content-Encoding '{encoding}' is not known; use gzip or deflate")
    parts: list[bytes] = []
    size = 0
    while body or not parts:  # a gzip body may have several members
        part, body = inflate(body, encoding, limit, size)
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def inflate(data: bytes, encoding: str, limit: int, before: int = 0) -> tuple[bytes, bytes]:
    """Return what one compressed stream holds, and the bytes behind its end.

    Args:
        data: begins with the stream.
        encoding: one of :data:`ENCODINGS`.
        limit: the most bytes that may come out, with the ``before`` that came out of earlier streams.

    Raises:
        InvalidArgument: it is no such stream, or cut off.
        TooLarge: it grows over the limit; no more than that was made of it.
    """
    decoder = zlib.decompressobj(_WINDOW[encoding])
    try:
        out = decoder.decompress(data, limit + 1 - before)
    except zlib.error as error:
        raise InvalidArgument(f"the body is not valid {encoding}: {error}") from error
    check_size(before + len(out), limit)
    if not decoder.eof:
        raise InvalidArgument(f"the {encoding} body is truncated")
    return out, decoder.unused_data


def compress(body: bytes, encoding: str) -> bytes:
    """Apply a ``Content-Encoding``, ``gzip`` or ``deflate``, at the fastest level."""
    encoder = zlib.compressobj(1, zlib.DEFLATED, _WINDOW[encoding])
    return encoder.compress(body) + encoder.flush()


def wanted_encoding(accepted: str) -> str | None:
    """Return the encoding that a client asks for.

    Only ``Accept-Encoding`` with a single name is taken as a wish, as tritonclient's ``response_compression_algorithm``
    sends it. HTTP libraries send lists unasked, and compressing tensors costs more time than nearly any network saves.
    """
    name, _, weight = accepted.lower().replace(" ", "").partition(";q=")
    refused = bool(weight) and not weight.strip("0.")  # q=0 means: anything but this
    return name if name in _WINDOW and "," not in weight and not refused else None
