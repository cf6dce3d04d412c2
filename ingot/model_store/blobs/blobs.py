"""Content-addressed blobs: the interfaces of sources and destinations, and checked reading."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import BinaryIO, Protocol

from ingot.errors import InvalidArchive
from ingot.model_store.blobs.descriptor import MAX_DOCUMENT_BYTES, Descriptor
from ingot.model_store.blobs.transfer import Transfer

CHUNK_BYTES = 1 << 20


class Blobs(Protocol):
    """A source of blobs. Its content is untrusted until the digest is checked."""

    def open(self, descriptor: Descriptor, start: int = 0) -> BinaryIO:
        """Open a blob at a byte; raises InvalidArchive if it is missing or its size differs from the descriptor."""
        ...


class BlobSink(Blobs, Protocol):
    """A source of blobs that blobs can be copied to."""

    workers: int
    """Number of blobs to copy in parallel."""

    def copy(self, source: Blobs, descriptor: Descriptor, transfer: Transfer | None = None) -> None:
        """Copy a blob from another source and check its digest. Existing blobs are skipped."""
        ...

    def finish(self) -> None:
        """Make copies durable; called once, before anything refers to them."""
        ...


def read(blobs: Blobs, descriptor: Descriptor) -> bytes:
    """Return a small blob (a document or a graph) with its digest checked.

    Raises:
        InvalidArchive: the blob is missing, or its content does not match the digest.
    """
    return b"".join(chunks(blobs, descriptor))


def read_document(blobs: Blobs, descriptor: Descriptor) -> bytes:
    """Return the bytes of a JSON document; refuse one that exceeds the limit of registries."""
    if descriptor.size > MAX_DOCUMENT_BYTES:
        raise InvalidArchive(f"document {descriptor.digest} has {descriptor.size} bytes, over the 4 MiB limit")
    return read(blobs, descriptor)


def chunks(blobs: Blobs, descriptor: Descriptor) -> Iterator[bytes]:
    """Yield a blob's bytes; the digest is checked at the end, so consume all of it.

    Raises:
        InvalidArchive: the blob is missing, or its content does not match the digest.
    """
    sha = hashlib.sha256()
    with blobs.open(descriptor) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            sha.update(chunk)
            yield chunk
    if sha.hexdigest() != descriptor.hex:
        raise damaged(descriptor)


class CheckedReader:
    """A blob as a file that raises InvalidArchive at its last byte if the content is damaged.

    Args:
        blobs: the source.
        descriptor: the blob.
        transfer: counts the bytes that are read.
    """

    def __init__(self, blobs: Blobs, descriptor: Descriptor, transfer: Transfer):
        self._stream = blobs.open(descriptor)
        self._descriptor = descriptor
        self._transfer = transfer
        self._sha = hashlib.sha256()
        self._left = descriptor.size

    def read(self, size: int = -1) -> bytes:
        chunk = self._stream.read(size)
        self._sha.update(chunk)
        self._left -= len(chunk)
        self._transfer.advance(len(chunk))
        if self._left == 0 and self._sha.hexdigest() != self._descriptor.hex:
            raise damaged(self._descriptor)
        return chunk

    def __enter__(self) -> CheckedReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def damaged(descriptor: Descriptor) -> InvalidArchive:
    """Return the error for a blob whose content does not match its digest."""
    title = next(iter(descriptor.annotations.values()), descriptor.media_type)
    return InvalidArchive(f"blob {descriptor.digest} ({title}) is damaged: its content has another digest")
