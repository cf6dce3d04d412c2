"""Blob uploads: in one request, or in chunks that resume when a connection breaks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from urllib.parse import quote

from ingot.errors import InvalidArchive, InvalidArgument, Transient
from ingot.model_store.blobs.blobs import CHUNK_BYTES, Blobs, damaged
from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.blobs.transfer import Transfer
from ingot.model_store.registry.auth import Scope
from ingot.model_store.registry.client import Client, Content, RegistryResponse, Request

_RECEIVED = re.compile(r"(?:bytes=)?0-(\d{1,19})")
_BINARY = "application/octet-stream"
# The registry lost the upload, or disagrees about its end: start over.
_LOST = (404, 416)


class Upload:
    """One blob's upload to ``https://host/v2/<name>/blobs/uploads/``.

    Args:
        client: the registry.
        scope: the repository; its ``source`` is another repository of the registry that has the blob, or empty.
        source: where the blob is read.
        descriptor: the blob.
        transfer: counts sent bytes; resent bytes are retracted first.
        chunk_bytes: size of requests; None sends the blob whole, which every registry supports.
    """

    def __init__(
        self,
        client: Client,
        scope: Scope,
        source: Blobs,
        descriptor: Descriptor,
        *,
        transfer: Transfer,
        chunk_bytes: int | None = None,
    ):
        self._client = client
        self._scope = scope
        self._source = source
        self._descriptor = descriptor
        self._transfer = transfer
        self._chunk_bytes = chunk_bytes
        self._sha = hashlib.sha256()
        self._hashed = 0
        self._sent = 0

    def run(self) -> None:
        """Send the blob.

        Raises:
            InvalidArchive: the source's content does not match the digest; the registry does not receive its end.
            Unavailable: the registry fails.
        """
        self._client.retries.run(self._attempt)

    def _attempt(self) -> None:
        started = self._begin()
        if started.status == 201:  # mounted from the other repository
            self._take_back(0)
            self._transfer.skip(self._descriptor.size)
            return
        location = self._location(started)
        if self._chunk_bytes is None:
            headers = {"Content-Length": str(self._descriptor.size), "Content-Type": _BINARY}
            self._finish(location, headers, lambda: self._bytes(0, self._descriptor.size))
            return
        least = started.headers.get("OCI-Chunk-Min-Length", "")
        size = max(self._chunk_bytes, int(least) if least.isdecimal() and len(least) < 12 else 0)
        self._finish(self._send_chunks(location, size), {"Content-Length": "0"}, b"")

    def _begin(self) -> RegistryResponse:
        url = self._client.url(f"{self._scope.name}/blobs/uploads/")
        if self._scope.source:
            url += f"?mount={quote(self._descriptor.digest, safe='')}&from={quote(self._scope.source, safe='')}"
        return self._client.call(Request("POST", url, self._scope))

    def _finish(self, location: str, headers: dict[str, str], content: Content) -> None:
        url = f"{location}{'&' if '?' in location else '?'}digest={quote(self._descriptor.digest, safe='')}"
        answer = self._client.once(Request("PUT", url, self._scope, headers=headers, content=content), allow=_LOST)
        if answer.status in _LOST:
            raise Transient(f"{self._client.address} lost the upload of blob {self._descriptor.digest}")

    def _send_chunks(self, location: str, size: int) -> str:
        """Send all content and return the URL for finishing the upload."""
        at, failed = 0, 0
        self._take_back(0)
        while at < self._descriptor.size:
            end = min(at + size, self._descriptor.size)
            try:
                answer = self._client.once(self._chunk(location, at, end), allow=_LOST)
                received = _received(answer, end)
                if answer.status in _LOST or received <= at:
                    raise Transient(f"{self._client.address} lost a part of blob {self._descriptor.digest}")
                at, failed = self._go_on_at(received), 0  # a registry may keep less than it was sent
            except Transient as error:
                failed += 1
                self._client.retries.wait(failed, error)
                answer = self._client.call(Request("GET", location, self._scope), allow=(400, *_LOST))
                if answer.status not in (202, 204):
                    raise
                at = self._go_on_at(_received(answer, 0))
            location = self._location(answer, location)
        return location

    def _chunk(self, location: str, at: int, end: int) -> Request:
        headers = {
            "Content-Length": str(end - at),
            "Content-Range": f"{at}-{end - 1}",
            "Content-Type": _BINARY,
        }
        return Request("PATCH", location, self._scope, headers=headers, content=lambda: self._bytes(at, end))

    def _location(self, answer: RegistryResponse, before: str | None = None) -> str:
        location = answer.headers.get("Location")
        if location is None and before is not None:
            return before
        if not location:
            raise InvalidArgument(f"{self._client.address} returned no upload location: it is not a registry")
        return self._client.target(answer.url, location)

    def _bytes(self, start: int, end: int) -> Iterator[bytes]:
        """Yield a part of the blob; its last chunk only if the digest matches."""
        self._take_back(start)
        if start == 0:
            self._sha, self._hashed = hashlib.sha256(), 0
        with self._source.open(self._descriptor, start) as stream:
            while self._sent < end:
                chunk = stream.read(min(CHUNK_BYTES, end - self._sent))
                if not chunk:
                    left = self._descriptor.size - self._sent
                    raise InvalidArchive(
                        f"blob {self._descriptor.digest} is truncated: {left} of {self._descriptor.size} bytes missing"
                    )
                self._sha.update(chunk[max(0, self._hashed - self._sent) :])
                self._sent += len(chunk)
                self._transfer.advance(len(chunk))
                self._hashed = max(self._hashed, self._sent)
                if self._sent == self._descriptor.size and self._sha.hexdigest() != self._descriptor.hex:
                    raise damaged(self._descriptor)
                yield chunk

    def _go_on_at(self, received: int) -> int:
        """Return where the upload continues, by the bytes that the registry reports to have.

        Raises:
            InvalidArgument: they are more than were sent.
        """
        if received > self._sent:
            raise InvalidArgument(f"{self._client.address} reports more bytes than were sent")
        self._take_back(received)
        return received

    def _take_back(self, at: int) -> None:
        """Go back to a byte, and retract the bytes after it from the progress."""
        back, self._sent = self._sent - at, at
        if back:
            self._transfer.advance(-back)


def _received(answer: RegistryResponse, otherwise: int) -> int:
    """Return the number of received bytes if the registry reports it. For zero bytes it also reports ``0-0``."""
    match = _RECEIVED.fullmatch(answer.headers.get("Range", ""))
    return int(match[1]) + 1 if match and int(match[1]) else otherwise
