"""gzip and deflate: HTTP's ``Content-Encoding``, and the compressed messages of gRPC."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from ingot.errors import InvalidArgument
from ingot.server.limits import check_size

_WINDOW = {"gzip": 31, "deflate": 15}  # zlib's window bits: 16 more means a gzip header
ENCODINGS = frozenset(_WINDOW)
_MAX_MEMBERS = 64
_SLICE = 64 << 10
PIECE = 64 << 10  # what comes out at once, at most


def known(encoding: str) -> str:
    """Return the name of a ``Content-Encoding`` as :data:`ENCODINGS` has it; empty if the body is as it is.

    Raises:
        InvalidArgument: the encoding is unknown.
    """
    name = encoding.strip().lower()
    name = "gzip" if name == "x-gzip" else name  # RFC 9110, 8.4.1.3
    if name in ("", "identity"):
        return ""
    if name not in _WINDOW:
        raise InvalidArgument(f"Content-Encoding '{name}' is not known; use gzip or deflate")
    return name


def unfolded(body: bytes, encoding: str, limit: int, members: int = _MAX_MEMBERS) -> Iterator[bytes]:
    """Yield what a compressed body holds, in pieces of at most 64 KiB, none of them empty.

    Args:
        body: one compressed stream, or several on end, as gzip allows ("members").
        encoding: one of :data:`ENCODINGS`.
        limit: the most bytes that may come out.
        members: the most streams.

    Raises:
        InvalidArgument: the body is not of the encoding, cut off, or has more streams.
        TooLarge: the body grows over the limit.
    """
    # Slices, as zlib copies what of its input it leaves: of the whole body, that would be once for each member.
    view = memoryview(body)
    start = size = 0
    for _ in range(members):
        decoder = zlib.decompressobj(_WINDOW[encoding])
        while not decoder.eof:
            piece = view[start : start + _SLICE]
            if not piece:
                raise InvalidArgument(f"the {encoding} body is truncated")
            try:
                out = decoder.decompress(piece, min(PIECE, limit + 1 - size))
            except zlib.error as error:
                raise InvalidArgument(f"the body is not valid {encoding}: {error}") from error
            start += len(piece) - len(decoder.unused_data) - len(decoder.unconsumed_tail)
            size += len(out)
            check_size(size, limit)
            if out:
                yield out
        if start == len(view):
            return
    raise InvalidArgument(f"the {encoding} body goes on behind the end of stream {members}; send it as one stream")


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
