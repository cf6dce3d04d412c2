"""A folder of content-addressed files, each of which is complete or absent."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ingot.errors import InvalidArchive, InvalidArgument, write_error
from ingot.model_store.blobs.blobs import CHUNK_BYTES, Blobs, chunks, damaged
from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.blobs.files import open_plain, sync_folder
from ingot.model_store.blobs.transfer import Transfer

STALLED_SECONDS = 60.0
"""How long another process that copies a blob may write nothing before this one copies it too; a registry must send 1
MiB in that time."""
_POLL_SECONDS = 0.05


_removals: list[weakref.finalize[..., Any]] = []


def remove_with(owner: object, remove: Callable[..., object], *arguments: Any) -> weakref.finalize[..., Any]:
    """Call ``remove``, which removes a temporary folder, once: with the owner, or at the end of this process."""
    removal = weakref.finalize(owner, remove, *arguments)
    _removals[:] = [each for each in _removals if each.alive] + [removal]
    return removal


def remove_scratch() -> None:
    """Remove all temporary folders of :func:`remove_with`, for a process that ends without the interpreter."""
    for removal in _removals:
        removal()


class BlobFolder:
    """A folder ``sha256/<hex>`` of immutable files, safe for many writers: a blob is complete or absent.

    Args:
        root: the folder.
        tmp: the folder for incomplete files, on the same file system; by default ``tmp`` in ``root``.
        durable: make blobs survive a power failure.
    """

    workers = 2  # one reads and hashes while the other waits for the disk

    def __init__(self, root: Path, *, tmp: Path | None = None, durable: bool = False):
        self.root = root
        self._tmp = tmp or root / "tmp"
        self._durable = durable

    @classmethod
    def scratch(cls) -> BlobFolder:
        """Return an empty temporary folder, which is removed with the last reference to it."""
        try:
            folder = cls(Path(tempfile.mkdtemp(prefix="ingot-")))
        except OSError as error:
            raise write_error("cannot create a temporary folder", error, "; set TMPDIR to a writable folder") from error
        remove_with(folder, shutil.rmtree, folder.root, True)
        return folder

    @property
    def folder(self) -> Path:
        """The folder of the files, each named by its digest in hex."""
        return self.root / "sha256"

    def path(self, descriptor: Descriptor) -> Path:
        return self.folder / descriptor.hex

    def open(self, descriptor: Descriptor, start: int = 0) -> BinaryIO:
        path = self.path(descriptor)
        try:
            stream = open_plain(path)
        except FileNotFoundError:
            raise InvalidArchive(f"blob {descriptor.digest} is missing") from None
        except OSError as error:
            raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error
        if (size := os.fstat(stream.fileno()).st_size) != descriptor.size:
            stream.close()
            raise InvalidArchive(f"blob {descriptor.digest} has {size} bytes, but its manifest says {descriptor.size}")
        stream.seek(start)
        return stream

    def has(self, descriptor: Descriptor) -> bool:
        """Return whether a file of this digest and size exists; its content is not checked."""
        try:
            return self.path(descriptor).stat().st_size == descriptor.size
        except FileNotFoundError:
            return False

    def put(
        self, content: bytes | Iterable[bytes], media_type: str, annotations: Mapping[str, str] | None = None
    ) -> Descriptor:
        """Store a blob and return its descriptor. Storing an existing blob changes nothing.

        Raises:
            InvalidArgument: the folder cannot be written.
            StorageFull: its disk is full.
        """
        sha, size = hashlib.sha256(), 0
        try:
            self._prepare()
            with self._private_file() as (stream, path):
                for chunk in (content,) if isinstance(content, bytes) else content:
                    sha.update(chunk)
                    size += len(chunk)
                    stream.write(chunk)
                self._publish(stream, path, sha.hexdigest())
            self.finish()
        except OSError as error:
            raise write_error(f"{self.folder} cannot be written", error) from error
        return Descriptor(
            media_type=media_type, digest=f"sha256:{sha.hexdigest()}", size=size, annotations=dict(annotations or {})
        )

    def link(self, path: Path, media_type: str) -> Descriptor:
        """Add a file from another blob folder, as a hard link if both are on the same file system.

        Args:
            path: the file, named by its hex digest. Its content is not verified.
            media_type: the blob's type.

        Raises:
            InvalidArgument: the folder cannot be written.
            StorageFull: its disk is full.
        """
        descriptor = Descriptor(media_type=media_type, digest=f"sha256:{path.name}", size=path.stat().st_size)
        target = self.path(descriptor)
        if target.exists():
            return descriptor
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(f"{self.folder} cannot be written", error) from error
        try:
            os.link(path, target)
        except FileExistsError:
            pass
        except OSError:  # another file system
            with path.open("rb") as stream:
                return self.put(iter(lambda: stream.read(CHUNK_BYTES), b""), media_type)
        return descriptor

    def copy(self, source: Blobs, descriptor: Descriptor, transfer: Transfer | None = None) -> None:
        """Copy a blob and check its digest. An existing file of this digest and size is kept.

        Resume a copy that was interrupted. If another process is copying the blob, wait for it.

        Raises:
            InvalidArchive: the source lacks the blob, or has a damaged one, which is then discarded.
            OSError: the folder cannot be written.
        """
        transfer = transfer or Transfer()
        if self.has(descriptor):
            transfer.skip(descriptor.size)
            return
        self._prepare()
        with self._part(descriptor, transfer) as (part, path):
            if self.has(descriptor):  # completed by another process meanwhile
                transfer.skip(descriptor.size)
                return
            if _complete(part, source, descriptor, transfer) != descriptor.hex:
                part.truncate(0)
                raise damaged(descriptor)
            self._publish(part, path, descriptor.hex)

    def verifying(self) -> BlobFolder:
        """Return a view of this folder that verifies existing blobs and copies damaged ones again."""
        return _VerifyingFolder(self.root, tmp=self._tmp, durable=self._durable)

    def finish(self) -> None:
        """Make the names of copied blobs durable."""
        if self._durable:
            sync_folder(self.folder)

    def _prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._tmp.mkdir(parents=True, exist_ok=True)

    def _publish(self, stream: BinaryIO, path: Path, digest: str) -> None:
        """Make a complete file read-only and rename it to its digest."""
        stream.flush()
        os.fchmod(stream.fileno(), os.fstat(stream.fileno()).st_mode & 0o444)
        if self._durable:
            os.fsync(stream.fileno())
        path.replace(self.folder / digest)

    @contextmanager
    def _private_file(self) -> Iterator[tuple[BinaryIO, Path]]:
        """Yield a new file, removed on exit unless :meth:`_publish` renamed it. Its lock marks it as being written."""
        path = self._tmp / f"{secrets.token_hex(8)}.tmp"
        with path.open("x+b") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX)
                yield stream, path
            finally:
                path.unlink(missing_ok=True)

    @contextmanager
    def _part(self, descriptor: Descriptor, transfer: Transfer) -> Iterator[tuple[BinaryIO, Path]]:
        """Yield the partial file of a blob, positioned after the bytes that an earlier copy wrote.

        The file is kept if the copy is interrupted. If another process is writing it, wait, and yield a private file
        if that process has completed it, or has stalled.
        """
        path = self._tmp / f"{descriptor.hex}.part"
        with open_plain(path, "ab+") as stream:
            if not _wait_for_lock(stream, path, transfer):
                with self._private_file() as private:
                    yield private
                return
            try:
                yield stream, path
            except OSError:  # free the space if the disk is full
                path.unlink(missing_ok=True)
                raise


class _VerifyingFolder(BlobFolder):
    """See :meth:`BlobFolder.verifying`."""

    def has(self, descriptor: Descriptor) -> bool:
        if not super().has(descriptor):
            return False
        try:
            for _ in chunks(self, descriptor):
                pass
        except (InvalidArchive, InvalidArgument):
            return False
        return True


def _wait_for_lock(stream: BinaryIO, path: Path, transfer: Transfer) -> bool:
    """Lock a file; return False if another process has renamed or removed it, or holds the lock and writes nothing.

    Raises:
        Cancelled: the transfer was cancelled.
    """
    size, since = -1, 0.0
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return _is_at(stream, path)
        if (found := os.fstat(stream.fileno()).st_size) != size:
            size, since = found, time.monotonic()
        if not _is_at(stream, path) or time.monotonic() - since > STALLED_SECONDS:
            return False
        transfer.pause(_POLL_SECONDS)
        transfer.check()


def _is_at(stream: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _complete(part: BinaryIO, source: Blobs, descriptor: Descriptor, transfer: Transfer) -> str:
    """Complete a partial file from the source, and return the digest of its whole content."""
    sha, start = _hash_existing(part, descriptor.size)
    transfer.skip(start)
    _append(source, descriptor, start, part, sha, transfer)
    if start and sha.hexdigest() != descriptor.hex:  # the existing part may be damaged
        transfer.skip(-start)
        transfer.advance(start - descriptor.size)
        part.truncate(0)
        sha = hashlib.sha256()
        _append(source, descriptor, 0, part, sha, transfer)
    return sha.hexdigest()


def _hash_existing(part: BinaryIO, size: int) -> tuple[hashlib._Hash, int]:
    """Return the digest state and length of a file's existing content; empty the file if it is too long."""
    sha = hashlib.sha256()
    start = os.fstat(part.fileno()).st_size
    if not 0 < start <= size:
        part.truncate(0)
        return sha, 0
    part.seek(0)
    while chunk := part.read(CHUNK_BYTES):
        sha.update(chunk)
    return sha, start


def _append(
    source: Blobs, descriptor: Descriptor, start: int, out: BinaryIO, sha: hashlib._Hash, transfer: Transfer
) -> None:
    """Append to a file the bytes of a blob that follow offset ``start``.

    Raises:
        InvalidArchive: the source ends before the blob does.
    """
    left = descriptor.size - start
    with source.open(descriptor, start) as stream:
        while left:
            try:
                chunk = stream.read(min(CHUNK_BYTES, left))
            except OSError as error:  # an error of the source, not of the destination
                raise InvalidArgument(f"blob {descriptor.digest} cannot be read: {error.strerror}") from error
            if not chunk:
                raise InvalidArchive(
                    f"blob {descriptor.digest} is truncated: {left} of {descriptor.size} bytes missing"
                )
            sha.update(chunk)
            out.write(chunk)
            left -= len(chunk)
            transfer.advance(len(chunk))
    out.flush()
