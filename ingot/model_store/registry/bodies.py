"""Response bodies, read with limits on size and time."""

from __future__ import annotations

import contextlib
import json
import time

import httpx

from ingot.errors import InvalidArgument, Transient
from ingot.model_store.blobs.descriptor import MAX_DOCUMENT_BYTES
from ingot.model_store.references import RegistryAddress

DOCUMENT_SECONDS = 120.0
MAX_TEXT = 300
"""Number of characters shown of a registry's own messages."""
_MAX_ERROR_BYTES = 16 << 10


def read_document(response: httpx.Response, address: RegistryAddress) -> bytes:
    """Return a response's body.

    Raises:
        InvalidArgument: it exceeds the size of a document.
        Transient: it takes too long.
    """
    content, end = bytearray(), time.monotonic() + DOCUMENT_SECONDS
    for chunk in response.iter_raw():
        content += chunk
        if len(content) > MAX_DOCUMENT_BYTES:
            raise InvalidArgument(
                f"{address} answers with more than {MAX_DOCUMENT_BYTES >> 20} MiB where a document is expected"
            )
        if time.monotonic() > end:
            raise Transient(f"{address} takes too long to answer")
    return bytes(content)


def _begin(response: httpx.Response, limit: int) -> bytes:
    """Return the beginning of a response's body, ignoring network errors."""
    content, end = bytearray(), time.monotonic() + DOCUMENT_SECONDS
    with contextlib.suppress(httpx.TransportError):
        for chunk in response.iter_raw():
            content += chunk
            if len(content) > limit or time.monotonic() > end:
                break
    return bytes(content)


def discard(response: httpx.Response) -> None:
    """Read a short remainder, so that the connection can be reused, and close the response."""
    _begin(response, _MAX_ERROR_BYTES)
    response.close()


def error_of(response: httpx.Response) -> tuple[str, str]:
    """Return an error's code, such as ``DIGEST_INVALID``, and its shortened message."""
    text, code = _begin(response, _MAX_ERROR_BYTES).decode(errors="replace"), ""
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
        first = json.loads(text)["errors"][0]
        code = str(first.get("code", ""))
        text = str(first.get("message") or code)
    return code, " ".join(text.split())[:MAX_TEXT]


def retry_after(response: httpx.Response) -> float:
    """Return the seconds that a response asks to wait; 0 if it has a date or nothing."""
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isdecimal() and len(text) < 10 else 0.0
