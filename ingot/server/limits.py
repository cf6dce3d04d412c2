"""Bounds on what a client can make the server hold."""

from __future__ import annotations

import zlib

from ingot.errors import InvalidArgument, TooLarge

_WINDOW = {"gzip": 31, "deflate": 15}  # zlib's window bits: 16 more means a gzip header


def check_size(size: int, limit: int) -> None:
    """Refuse a body over the limit.

    Raises:
        TooLarge: names both sizes and the setting.
    """
    if size > limit:
        raise TooLarge(f"the request body has {size} bytes, over the limit of {limit}; see --max-body-mb")


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
    decoder = zlib.decompressobj(_WINDOW[encoding])
    try:
        result = decoder.decompress(body, limit + 1)
    except zlib.error as error:
        raise InvalidArgument(f"the body is not valid {encoding}: {error}") from error
    check_size(len(result), limit)
    if not decoder.eof:
        raise InvalidArgument(f"the {encoding} body is truncated")
    return result


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
