"""Bodies of responses, read no further than what they can be worth."""

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
"""Characters of a registry's own words that are shown."""
_MAX_ERROR_BYTES = 16 << 10


def read_document(response: httpx.Response, address: RegistryAddress) -> bytes:
    """Return a response's body.

    Raises:
        InvalidArgument: it is longer than a document can be.
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
    """Return the beginning of a response's body, whatever comes of the rest."""
    content, end = bytearray(), time.monotonic() + DOCUMENT_SECONDS
    with contextlib.suppress(httpx.TransportError):
        for chunk in response.iter_raw():
            content += chunk
            if len(content) > limit or time.monotonic() > end:
                break
    return bytes(content)


def discard(response: httpx.Response) -> None:
    """Read what little there is, so that the connection can be used again, and close the response."""
    _begin(response, _MAX_ERROR_BYTES)
    response.close()


def error_of(response: httpx.Response) -> tuple[str, str]:
    """Return the code of an error, such as ``DIGEST_INVALID``, and what is said of it, cut to what a person reads."""
    text, code = _begin(response, _MAX_ERROR_BYTES).decode(errors="replace"), ""
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
        first = json.loads(text)["errors"][0]
        code = str(first.get("code", ""))
        text = str(first.get("message") or code)
    return code, " ".join(text.split())[:MAX_TEXT]


def retry_after(response: httpx.Response) -> float:
    """Return how many seconds a response asks to wait; 0 where it names a date or nothing."""
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isdecimal() and len(text) < 10 else 0.0
