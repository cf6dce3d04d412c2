"""Archive files: an OCI layout in an uncompressed tar, read in place."""

from __future__ import annotations

import io
import re
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from ingot.errors import InvalidArchive, InvalidArgument, NotFound
from ingot.model_store.blobs.blobs import CHUNK_BYTES
from ingot.model_store.blobs.descriptor import MAX_DOCUMENT_BYTES, Descriptor

_BUFFER_BYTES = 4096
MAX_MEMBERS = 200_000
_MAX_HEADER_BYTES = 1 << 20
"""Limit for the headers of one member, including long names and extended attributes."""
_MAX_HEADERS_BYTES = MAX_MEMBERS * 2048
"""Limit for the headers of all members: an extended header each, with a margin."""
_MAX_RECORDS = 256
"""Extended attributes of one member; bsdtar writes about ten."""
_MAX_ALL_RECORDS = MAX_MEMBERS * 16
_EXTENDED = frozenset((tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE))
_NEEDED = frozenset((b"path", b"linkpath", b"size", b"hdrcharset"))
_MAX_DIGITS = 64  # as many as a digest has characters
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (_MAX_DIGITS + 1))


class TarSource(Protocol):
    """A random-access file: on disk, or an object in a bucket."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        ...

    def size(self) -> int:
        """Return its length in bytes.

        Raises:
            NotFound: there is no such file.
            InvalidArgument: it is not a file, or cannot be read.
        """
        ...

    def open(self) -> io.RawIOBase:
        """Open it from its beginning, unbuffered and seekable."""
        ...


@dataclass(frozen=True)
class LocalFile:
    """A file on disk."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    def size(self) -> int:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            raise NotFound(f"there is no file {self.path}") from None
        except OSError as error:
            raise InvalidArgument(f"{self.path} cannot be read: {error.strerror}") from error
        if stat.S_ISDIR(status.st_mode):
            raise InvalidArgument(f"{self.path} is a folder, not an archive file")
        if not stat.S_ISREG(status.st_mode):
            raise InvalidArgument(f"{self.path} is not a regular file")
        return status.st_size

    def open(self) -> io.RawIOBase:
        try:
            return self.path.open("rb", buffering=0)
        except OSError as error:
            raise InvalidArgument(f"{self.path} cannot be read: {error.strerror}") from error


class TarBlobs:
    """The blobs of an archive file: an OCI layout in an uncompressed tar, read in place.

    Only the parts of an OCI layout are accepted: ``oci-layout``, ``index.json`` and ``blobs/sha256/<hex>``, each a
    regular file without duplicates. Nothing is extracted by name, so no path in the file can reach outside.
    """

    def __init__(self, source: TarSource):
        self._source = source
        self.name = name = source.name
        self._spans: dict[str, tuple[int, int]] = {}
        file_size = source.size()
        try:
            # Headers are small and far apart: a large buffer would read most of the weights between them.
            with io.BufferedReader(source.open(), _BUFFER_BYTES) as stream:
                for count, member in enumerate(members(stream, name)):
                    if count >= MAX_MEMBERS:
                        raise InvalidArchive(f"{name} has over {MAX_MEMBERS} members")
                    self._add(member, file_size)
        except OSError as error:
            raise InvalidArgument(f"{name} cannot be read: {error.strerror or error}") from error
        except (tarfile.TarError, EOFError, ValueError, RecursionError, MemoryError, OverflowError) as error:
            # The last three are raised for long chains and false sizes of extension headers.
            raise InvalidArchive(f"{name} is not an Ingot archive, or is damaged") from error
        for needed in ("oci-layout", "index.json"):
            if needed not in self._spans:
                raise InvalidArchive(f"{name} is not an Ingot archive, or is truncated: it has no {needed}")

    def _add(self, member: tarfile.TarInfo, file_size: int) -> None:
        name = member.name.removeprefix("./")
        if member.isdir() and name in ("", ".", "blobs", "blobs/sha256"):
            return
        digest = name.removeprefix("blobs/sha256/")
        is_blob = digest != name and len(digest) == 64 and set(digest) <= set("0123456789abcdef")
        if not (is_blob or name in ("oci-layout", "index.json")):
            raise InvalidArchive(f"{self.name} holds '{name}', which is not part of an archive")
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.sparse is not None:
            raise InvalidArchive(f"{self.name} holds '{name}' as a link or special file; only regular files may be")
        if name in self._spans:
            raise InvalidArchive(f"{self.name} holds '{name}' twice")
        if not 0 <= member.size <= file_size - member.offset_data:
            raise InvalidArchive(f"{self.name} is truncated: it ends inside '{name}'")
        self._spans[name] = (member.offset_data, member.size)

    @property
    def on_disk(self) -> bool:
        """Whether reading it needs no network."""
        return isinstance(self._source, LocalFile)

    @property
    def path(self) -> Path | None:
        """The file on disk; None for an object in a bucket."""
        return self._source.path if isinstance(self._source, LocalFile) else None

    def open_member(self, name: str, skip: int = 0) -> BinaryIO:
        start, size = self._spans[name]
        return span(self._source, start + skip, size - skip)

    def document(self, name: str) -> bytes:
        """Return ``oci-layout`` or ``index.json``."""
        if self._spans[name][1] > MAX_DOCUMENT_BYTES:
            raise InvalidArchive(f"{self.name}: {name} is larger than 4 MiB")
        with self.open_member(name) as stream:
            return stream.read()

    def open(self, descriptor: Descriptor, start: int = 0) -> BinaryIO:
        name = f"blobs/sha256/{descriptor.hex}"
        if name not in self._spans:
            raise InvalidArchive(f"{self.name}: blob {descriptor.digest} is missing")
        if (size := self._spans[name][1]) != descriptor.size:
            raise InvalidArchive(
                f"{self.name}: blob {descriptor.digest} has {size} bytes, but its manifest says {descriptor.size}"
            )
        return self.open_member(name, start)


def members(stream: BinaryIO, name: str) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an uncompressed tar, in order and without their extended attributes.

    Args:
        stream: the file, at its beginning.
        name: its name in messages.

    Raises:
        InvalidArchive: its headers exceed the limits.
        tarfile.TarError, EOFError, ValueError, RecursionError, OverflowError: it is not a tar, or is damaged.
    """
    headers = _Headers(stream, name)
    with tarfile.open(fileobj=headers, mode="r:") as tar:  # type: ignore[call-overload] # as much of a file as tarfile uses
        while (member := tar.next()) is not None:
            headers.start_member()
            yield member
            # tarfile would keep every member, and the global headers for all of them.
            tar.members, tar.pax_headers = [], {}


def span(source: TarSource, start: int, size: int) -> BinaryIO:
    """Open a range of a file as a file."""
    return io.BufferedReader(_Span(source, start, size), CHUNK_BYTES)


class _Headers:
    """The file from which tarfile reads headers; it reads an extended header at once, whatever its size."""

    def __init__(self, stream: BinaryIO, name: str):
        self._stream = stream
        self._name = name
        self._left = _MAX_HEADERS_BYTES
        self._records = _MAX_ALL_RECORDS
        self._extended = False  # the next read is of an extended header's records
        self.seek, self.tell = stream.seek, stream.tell
        self.start_member()

    def start_member(self) -> None:
        """Allow for the headers of one more member."""
        self._left_here = _MAX_HEADER_BYTES
        self._records_here = _MAX_RECORDS

    def read(self, size: int) -> bytes:
        if size > self._left_here:
            raise InvalidArchive(
                f"{self._name} has a member with headers of more than {_MAX_HEADER_BYTES >> 20} MiB (extended "
                "attributes, or a long name); pack it without them"
            )
        if size > self._left:
            raise InvalidArchive(f"the headers in {self._name} have more than {_MAX_HEADERS_BYTES >> 20} MiB together")
        self._left -= size
        self._left_here -= size
        data = self._stream.read(size)
        if self._extended:
            self._extended = False
            return self._needed(data)
        self._extended = size == tarfile.BLOCKSIZE and data[156:157] in _EXTENDED
        return data

    def _needed(self, data: bytes) -> bytes:
        """Return an extended header with only the records that decide what a member is, and of the same size.

        tarfile takes quadratic time for long numbers and for records that overlap, in Pythons before 3.11.10 and
        3.12.6 (https://github.com/python/cpython/issues/121285).
        """
        kept, at = [], 0
        while at < len(data) and data[at]:
            blank = data.find(b" ", at, at + _MAX_DIGITS)
            digits = data[at:blank] if blank > 0 else b""
            end = at + int(digits) if digits.isdigit() else 0
            key, equals, value = data[blank + 1 : end].partition(b"=")
            if not (blank < end <= len(data) and equals and value.endswith(b"\n")):
                raise self._error("a damaged record of extended attributes")
            if not (self._records_here and self._records):
                most = f"{_MAX_RECORDS}, or {_MAX_ALL_RECORDS} in the whole file"
                raise self._error(f"too many records of extended attributes (at most {most}); pack it without them")
            self._records_here -= 1
            self._records -= 1
            if key in _NEEDED or key.startswith(b"GNU.sparse."):
                if _LONG_NUMBER.search(value):
                    raise self._error(f"a number of over {_MAX_DIGITS} digits in '{key.decode()[:100]}'")
                kept.append(data[at:end])
            at = end
        return b"".join(kept).ljust(len(data), b"\0")

    def _error(self, what: str) -> InvalidArchive:
        """Return an error on the next member, whose plain header follows the extended one."""
        name = self._stream.read(tarfile.BLOCKSIZE)[:100].partition(b"\0")[0]
        return InvalidArchive(f"{self._name} has a member, {name.decode('latin-1')!r}, whose headers have {what}")


class _Span(io.RawIOBase):
    """A read-only range of a file, as a file."""

    def __init__(self, source: TarSource, start: int, size: int):
        self._name = source.name
        self._file = source.open()
        self._file.seek(start)
        self._left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        view = memoryview(buffer)[: self._left]
        count = self._file.readinto(view) or 0
        if not count and self._left:
            raise InvalidArchive(f"{self._name} was truncated while it was read")
        self._left -= count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
