"""Blob downloads: a stream that resumes by itself when a connection breaks."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

import httpx

from ingot.errors import InvalidArchive, NotFound, Transient
from ingot.model_store.blobs.blobs import CHUNK_BYTES
from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.registry.auth import Scope
from ingot.model_store.registry.client import Client, Request

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

PROGRESS_BYTES = 1 << 20
"""Bytes between two failures after which retries start over."""
_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")


def open_download(client: Client, url: str, scope: Scope, descriptor: Descriptor, start: int = 0) -> BinaryIO:
    """Return a blob's bytes from ``start``. Network errors are raised while it is read.

    Raises:
        InvalidArchive: the registry lacks the blob, or has one of another size.
        Unavailable: the registry cannot be reached.
    """
    return io.BufferedReader(_Download(client, url, scope, descriptor=descriptor, start=start), CHUNK_BYTES)


class _Download(io.RawIOBase):
    def __init__(self, client: Client, url: str, scope: Scope, *, descriptor: Descriptor, start: int):
        self._client = client
        self._url = url
        self._scope = scope
        self._descriptor = descriptor
        self._at = min(start, descriptor.size)
        self._failed = 0
        self._failed_at = self._at
        self._ranged = True  # False once the registry has returned another range than the requested one
        self._rest = memoryview(b"")
        self._response: httpx.Response | None = None
        self._chunks: Iterator[bytes] = iter(())
        if self._at < descriptor.size:
            self._reconnect()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        if not self._rest and self._at < self._descriptor.size:
            self._rest = memoryview(self._next())
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._rest))
        target[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def close(self) -> None:
        self._disconnect()
        super().close()

    def _next(self) -> bytes:
        """Return the next bytes, from another connection if this one broke."""
        while True:
            try:
                with self._client.errors():
                    chunk = next(self._chunks, b"")
                if not chunk:
                    raise Transient(f"{self._client.address} ended blob {self._descriptor.digest} too early")
                break
            except Transient as error:
                self._fail(error)
                self._reconnect()
        self._at += len(chunk)
        if self._at > self._descriptor.size:
            raise self._wrong_size("more")
        if self._at == self._descriptor.size:
            self._finish()
        return chunk

    def _finish(self) -> None:
        """Read the end of the response, so that its connection can be reused."""
        try:
            with self._client.errors():
                surplus = next(self._chunks, b"")
        except Transient:  # everything was received
            surplus = b""
        self._disconnect()
        if surplus:
            raise self._wrong_size("more")

    def _fail(self, error: Transient) -> None:
        """Wait before the next attempt, or raise after too many without progress."""
        self._disconnect()
        if self._at - self._failed_at >= PROGRESS_BYTES:
            self._failed = 0
        self._failed += 1
        self._failed_at = self._at
        self._client.retries.wait(self._failed, error)

    def _reconnect(self) -> None:
        while True:
            try:
                self._connect()
                return
            except Transient as error:
                self._fail(error)

    def _connect(self) -> None:
        response = self._request(self._at if self._ranged else 0)
        if self._at and self._ranged and not self._continues(response):
            # Proxies and object stores exist that answer a range wrongly each time.
            self._disconnect()
            self._ranged = False
            response = self._request(0)
        if response.status_code in (206, 416) and not self._continues(response):
            raise InvalidArchive(
                f"{self._client.address} returned a part of blob {self._descriptor.digest} for a request of all of it"
            )
        skipped = 0 if response.status_code == 206 else self._at
        length = response.headers.get("Content-Length", "")
        if length.isdecimal() and int(length) != self._descriptor.size - self._at + skipped:
            raise self._wrong_size(f"{int(length) + self._at - skipped}")
        self._skip(skipped)

    def _request(self, start: int) -> httpx.Response:
        headers = {"Range": f"bytes={start}-"} if start else {}
        try:
            response = self._client.open(Request("GET", self._url, self._scope, headers=headers), allow=(416,))
        except NotFound as error:
            raise InvalidArchive(f"blob {self._descriptor.digest} is missing: {error}") from error
        self._response, self._chunks = response, response.iter_raw()
        return response

    def _continues(self, response: httpx.Response) -> bool:
        """Return whether a response has all bytes from the current one, or all bytes of the blob.

        Raises:
            InvalidArchive: the registry says that the blob has another size.
        """
        if response.status_code != 206:
            return response.status_code != 416
        match = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if match is not None and match[3] not in ("*", str(self._descriptor.size)):
            raise self._wrong_size(match[3])
        return match is not None and (int(match[1]), int(match[2])) == (self._at, self._descriptor.size - 1)

    def _skip(self, count: int) -> None:
        """Skip bytes that were received already, for registries that ignore ranges."""
        with self._client.errors():
            while count:
                chunk = next(self._chunks, b"")
                if not chunk:
                    raise Transient(f"{self._client.address} ended blob {self._descriptor.digest} too early")
                if len(chunk) > count:
                    self._chunks = itertools.chain((chunk[count:],), self._chunks)
                count -= min(count, len(chunk))

    def _wrong_size(self, count: str) -> InvalidArchive:
        self._disconnect()
        return InvalidArchive(
            f"blob {self._descriptor.digest} has {count} bytes in {self._client.address}, "
            f"but its manifest says {self._descriptor.size}"
        )

    def _disconnect(self) -> None:
        if self._response is not None:
            self._response.close()
        self._response, self._chunks = None, iter(())
