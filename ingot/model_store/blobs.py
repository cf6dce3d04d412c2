"""Content-addressed blobs: a folder of them, and the read-only view of those inside an archive file."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import secrets
import shutil
import stat
import tarfile
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Protocol

from ingot.errors import InvalidArchive, InvalidArgument, NotFound
from ingot.model_store.manifest import MAX_DOCUMENT_BYTES, Descriptor

_CHUNK = 1 << 20


class Blobs(Protocol):
    """Any source of blobs. What it gives is not trusted until its digest has been checked."""

    def open(self, descriptor: Descriptor) -> BinaryIO:
        """Open a blob; raises InvalidArchive when it is missing or of another size than ``descriptor`` says."""
        ...


def read(blobs: Blobs, descriptor: Descriptor) -> bytes:
    """Return a small blob (a document or a graph) with its digest checked.

    Raises:
        InvalidArchive: the blob is missing, or its content does not match the digest.
    """
    return b"".join(chunks(blobs, descriptor))


def read_document(blobs: Blobs, descriptor: Descriptor) -> bytes:
    """Return a JSON document's bytes, refusing one that is larger than any registry would take."""
    if descriptor.size > MAX_DOCUMENT_BYTES:
        raise InvalidArchive(f"document {descriptor.digest} says it has {descriptor.size} bytes, over the 4 MiB limit")
    return read(blobs, descriptor)


def chunks(blobs: Blobs, descriptor: Descriptor) -> Iterator[bytes]:
    """Yield a blob's bytes; the last step checks the digest, so consume it whole.

    Raises:
        InvalidArchive: the blob is missing, or its content does not match the digest.
    """
    sha = hashlib.sha256()
    with blobs.open(descriptor) as stream:
        while chunk := stream.read(_CHUNK):
            sha.update(chunk)
            yield chunk
    if sha.hexdigest() != descriptor.hex:
        title = next(iter(descriptor.annotations.values()), descriptor.media_type)
        raise InvalidArchive(f"blob {descriptor.digest} ({title}) is damaged: its content has another digest")


class BlobFolder:
    """A folder ``sha256/<hex>`` of immutable files. Safe for many writers: a blob appears whole or not at all."""

    def __init__(self, root: Path, *, durable: bool = False):
        self.root = root
        self._durable = durable

    @classmethod
    def scratch(cls) -> BlobFolder:
        """Return an empty folder that is removed when nothing refers to it any more."""
        try:
            folder = cls(Path(tempfile.mkdtemp(prefix="ingot-")))
        except OSError as error:
            raise InvalidArgument(f"no temporary folder can be made: {error.strerror}; set TMPDIR to one") from error
        weakref.finalize(folder, shutil.rmtree, folder.root, ignore_errors=True)
        return folder

    @property
    def folder(self) -> Path:
        """Where the files are, each called by its digest in hex."""
        return self.root / "sha256"

    def path(self, descriptor: Descriptor) -> Path:
        return self.folder / descriptor.hex

    def open(self, descriptor: Descriptor) -> BinaryIO:
        path = self.path(descriptor)
        try:
            stream = path.open("rb")
        except FileNotFoundError:
            raise InvalidArchive(f"blob {descriptor.digest} is missing") from None
        except OSError as error:
            raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error
        if (size := os.fstat(stream.fileno()).st_size) != descriptor.size:
            stream.close()
            raise InvalidArchive(f"blob {descriptor.digest} has {size} bytes, its manifest says {descriptor.size}")
        return stream

    def put(
        self, content: bytes | Iterable[bytes], media_type: str, annotations: Mapping[str, str] | None = None
    ) -> Descriptor:
        """Store a blob and return its descriptor. Storing what is there already changes nothing.

        Raises:
            InvalidArgument: the folder cannot be written.
        """
        folder = self.folder
        sha, size = hashlib.sha256(), 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_file(
                folder / "blob", mode=0o444, durable=self._durable, name=lambda: sha.hexdigest()
            ) as stream:
                for chunk in (content,) if isinstance(content, bytes) else content:
                    sha.update(chunk)
                    size += len(chunk)
                    stream.write(chunk)
        except OSError as error:
            raise InvalidArgument(f"{folder} cannot be written: {error.strerror or error}") from error
        return Descriptor(
            media_type=media_type, digest=f"sha256:{sha.hexdigest()}", size=size, annotations=dict(annotations or {})
        )

    def link(self, path: Path, media_type: str) -> Descriptor:
        """Take over a file of another folder of blobs, without a copy where both lie on one file system.

        Args:
            path: the file, which is called by its digest in hex. What it holds is trusted to have that digest.
            media_type: what it is.

        Raises:
            InvalidArgument: the folder cannot be written.
        """
        descriptor = Descriptor(media_type=media_type, digest=f"sha256:{path.name}", size=path.stat().st_size)
        target = self.path(descriptor)
        if target.exists():
            return descriptor
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, target)
        except FileExistsError:
            pass
        except OSError:  # another file system
            with path.open("rb") as stream:
                return self.put(iter(lambda: stream.read(_CHUNK), b""), media_type)
        return descriptor

    def copy(self, source: Blobs, descriptor: Descriptor) -> None:
        """Copy a blob from another source, checking it on the way; one that is here already is checked, and healed."""
        try:
            for _ in chunks(self, descriptor):
                pass
        except InvalidArchive:
            self.put(chunks(source, descriptor), descriptor.media_type)


class TarBlobs:
    """The blobs of an archive file: an OCI layout in an uncompressed tar, read in place.

    Only what an OCI layout consists of is accepted: ``oci-layout``, ``index.json`` and ``blobs/sha256/<hex>``, each a
    regular file, once. Nothing is extracted by name, so no path in the file can reach outside.
    """

    MAX_MEMBERS = 200_000

    def __init__(self, path: Path):
        self.path = path
        self._spans: dict[str, tuple[int, int]] = {}
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                raise InvalidArgument(f"{path} is not a regular file")
            file_size = status.st_size
            with tarfile.open(path, "r:") as tar:
                for count, member in enumerate(tar):
                    if count >= self.MAX_MEMBERS:
                        raise InvalidArchive(f"{path} has over {self.MAX_MEMBERS} members")
                    self._add(member, file_size)
        except FileNotFoundError:
            raise NotFound(f"there is no file {path}") from None
        except IsADirectoryError:
            raise InvalidArgument(f"{path} is a folder, not an archive file") from None
        except OSError as error:
            raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error
        except (tarfile.TarError, EOFError, ValueError, RecursionError, MemoryError, OverflowError) as error:
            # The last three are what tarfile makes of long chains and lying sizes of extension headers.
            raise InvalidArchive(f"{path} is not an Ingot archive, or is damaged") from error
        for needed in ("oci-layout", "index.json"):
            if needed not in self._spans:
                raise InvalidArchive(f"{path} is not an Ingot archive, or is truncated: it has no {needed}")

    def _add(self, member: tarfile.TarInfo, file_size: int) -> None:
        name = member.name.removeprefix("./")
        if member.isdir() and name in ("", ".", "blobs", "blobs/sha256"):
            return
        digest = name.removeprefix("blobs/sha256/")
        is_blob = digest != name and len(digest) == 64 and set(digest) <= set("0123456789abcdef")
        if not (is_blob or name in ("oci-layout", "index.json")):
            raise InvalidArchive(f"{self.path} holds '{name}', which is no part of an archive")
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.sparse is not None:
            raise InvalidArchive(f"{self.path} holds '{name}' as a link or special file; only plain files may be")
        if name in self._spans:
            raise InvalidArchive(f"{self.path} holds '{name}' twice")
        if not 0 <= member.size <= file_size - member.offset_data:
            raise InvalidArchive(f"{self.path} is truncated: it ends inside '{name}'")
        self._spans[name] = (member.offset_data, member.size)

    def open_member(self, name: str) -> BinaryIO:
        start, size = self._spans[name]
        return io.BufferedReader(_Span(self.path, start, size), _CHUNK)

    def document(self, name: str) -> bytes:
        """Return ``oci-layout`` or ``index.json``."""
        if self._spans[name][1] > MAX_DOCUMENT_BYTES:
            raise InvalidArchive(f"{self.path}: {name} is larger than 4 MiB")
        with self.open_member(name) as stream:
            return stream.read()

    def open(self, descriptor: Descriptor) -> BinaryIO:
        name = f"blobs/sha256/{descriptor.hex}"
        if name not in self._spans:
            raise InvalidArchive(f"{self.path}: blob {descriptor.digest} is missing")
        if (size := self._spans[name][1]) != descriptor.size:
            raise InvalidArchive(
                f"{self.path}: blob {descriptor.digest} has {size} bytes, its manifest says {descriptor.size}"
            )
        return self.open_member(name)


class _Span(io.RawIOBase):
    """A read-only stretch of a file, as a file."""

    def __init__(self, path: Path, start: int, size: int):
        self._file = path.open("rb", buffering=0)
        self._file.seek(start)
        self._left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        view = memoryview(buffer)[: self._left]
        count = self._file.readinto(view) or 0
        if not count and self._left:
            raise InvalidArchive(f"{self._file.name} was cut short while it was read")
        self._left -= count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


@contextlib.contextmanager
def atomic_file(
    path: Path, *, mode: int = 0o666, durable: bool = False, name: Callable[[], str] | None = None
) -> Iterator[BinaryIO]:
    """Yield a file that appears as ``path`` when the block ends well, and not at all when it does not.

    Args:
        path: what the file is to be called; what is there already is replaced.
        mode: its permissions, less the process's umask.
        durable: make it survive a power cut.
        name: tells its name inside ``path.parent`` instead, once the content is known.

    Raises:
        OSError: the folder cannot be written.
    """
    temporary = path.with_name(f".tmp-{secrets.token_hex(8)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        temporary.replace(path.with_name(name()) if name else path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename, too
        finally:
            os.close(folder)
