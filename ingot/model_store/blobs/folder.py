"""A folder of content-addressed files, each of which is complete or absent."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ingot.errors import InvalidArchive, InvalidArgument, write_error
from ingot.model_store.blobs.blobs import CHUNK_BYTES, Blobs, chunks, damaged
from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.blobs.files import open_plain, sync_folder
from ingot.model_store.blobs.transfer import Transfer


class BlobFolder:
    """A folder ``sha256/<hex>`` of immutable files, safe for many writers: a blob is complete or absent.

    Args:
        root: the folder.
        tmp: where files are written until they are complete; on the same file system. By default inside ``root``.
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
            raise write_error("no temporary folder can be made", error, "; set TMPDIR to one") from error
        weakref.finalize(folder, shutil.rmtree, folder.root, ignore_errors=True)
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
            raise InvalidArchive(f"blob {descriptor.digest} has {size} bytes, its manifest says {descriptor.size}")
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
                self._keep(stream, path, sha.hexdigest())
            self.finish()
        except OSError as error:
            raise write_error(f"{self.folder} cannot be written", error) from error
        return Descriptor(
            media_type=media_type, digest=f"sha256:{sha.hexdigest()}", size=size, annotations=dict(annotations or {})
        )

    def link(self, path: Path, media_type: str) -> Descriptor:
        """Adopt a file of another blob folder, without a copy if both are on one file system.

        Args:
            path: the file, named by its digest in hex. Its content is trusted to match.
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

        An interrupted copy is resumed.

        Raises:
            InvalidArchive: the source lacks the blob, or its content is damaged; nothing of it is kept.
            OSError: the folder cannot be written.
        """
        transfer = transfer or Transfer()
        if self.has(descriptor):
            transfer.skip(descriptor.size)
            return
        self._prepare()
        with self._part(descriptor) as (part, path):
            if self.has(descriptor):  # completed by another process meanwhile
                transfer.skip(descriptor.size)
                return
            if _fill(part, source, descriptor, transfer) != descriptor.hex:
                part.truncate(0)
                raise damaged(descriptor)
            self._keep(part, path, descriptor.hex)

    def doubting(self) -> BlobFolder:
        """Return this folder as one that verifies existing blobs, and copies damaged ones again."""
        return _DoubtingFolder(self.root, tmp=self._tmp, durable=self._durable)

    def finish(self) -> None:
        """Make the names of copied blobs durable."""
        if self._durable:
            sync_folder(self.folder)

    def _prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._tmp.mkdir(parents=True, exist_ok=True)

    def _keep(self, stream: BinaryIO, path: Path, digest: str) -> None:
        """Make a complete file appear under its digest."""
        stream.flush()
        os.fchmod(stream.fileno(), os.fstat(stream.fileno()).st_mode & 0o444)
        if self._durable:
            os.fsync(stream.fileno())
        path.replace(self.folder / digest)

    @contextmanager
    def _private_file(self) -> Iterator[tuple[BinaryIO, Path]]:
        """Yield a new file, which is removed unless it is kept. Its lock marks it as being written."""
        path = self._tmp / f"{secrets.token_hex(8)}.tmp"
        with path.open("x+b") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX)
                yield stream, path
            finally:
                path.unlink(missing_ok=True)

    @contextmanager
    def _part(self, descriptor: Descriptor) -> Iterator[tuple[BinaryIO, Path]]:
        """Yield the partial file of a blob, positioned at the end of what an earlier copy left in it.

        It remains if the copy is interrupted. While another process writes it, a private file is yielded.
        """
        path = self._tmp / f"{descriptor.hex}.part"
        with open_plain(path, "ab+") as stream:
            if not _lock(stream, path):
                with self._private_file() as private:
                    yield private
                return
            try:
                yield stream, path
            except OSError:  # free the space if the disk is full
                path.unlink(missing_ok=True)
                raise


class _DoubtingFolder(BlobFolder):
    """See :meth:`BlobFolder.doubting`."""

    def has(self, descriptor: Descriptor) -> bool:
        if not super().has(descriptor):
            return False
        try:
            for _ in chunks(self, descriptor):
                pass
        except (InvalidArchive, InvalidArgument):
            return False
        return True


def _lock(stream: BinaryIO, path: Path) -> bool:
    """Lock a file; return whether ``path`` still names it, as its last writer may have renamed it."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _fill(part: BinaryIO, source: Blobs, descriptor: Descriptor, transfer: Transfer) -> str:
    """Complete a partial file from the source, and return the digest of its whole content."""
    sha, start = _hash_begun(part, descriptor.size)
    transfer.skip(start)
    _pump(source, descriptor, start, part, sha, transfer)
    if start and sha.hexdigest() != descriptor.hex:  # the existing part may be damaged
        transfer.skip(-start)
        transfer.advance(start - descriptor.size)
        part.truncate(0)
        sha = hashlib.sha256()
        _pump(source, descriptor, 0, part, sha, transfer)
    return sha.hexdigest()


def _hash_begun(part: BinaryIO, size: int) -> tuple[hashlib._Hash, int]:
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


def _pump(
    source: Blobs, descriptor: Descriptor, start: int, out: BinaryIO, sha: hashlib._Hash, transfer: Transfer
) -> None:
    """Append a blob's bytes from ``start`` to a file.

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
                raise InvalidArchive(f"blob {descriptor.digest} is truncated: its source ended {left} bytes too early")
            sha.update(chunk)
            out.write(chunk)
            left -= len(chunk)
            transfer.advance(len(chunk))
    out.flush()
