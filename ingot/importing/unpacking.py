"""The members of zip and tar files."""

from __future__ import annotations

import gzip
import io
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import IO, BinaryIO, cast

from ingot.errors import InvalidArgument
from ingot.importing.members import DAMAGED, LIMITS, InPieces, Limits, Members, Meter, reason, too_many, write
from ingot.model_store.format.tar import LocalFile, members, span

# A local header, without the name.
_HEADER = 30
_ENCRYPTED = 0x1


class ZipMembers(Members):
    """A zip file, as TorchServe's archiver writes it: plain files, stored or deflated.

    Raises:
        InvalidArgument: it is damaged, encrypted, or malicious.
    """

    def __init__(self, path: Path, limits: Limits = LIMITS):
        super().__init__(path, limits, Meter(path, limits))
        self._file = InPieces(path)
        try:
            self._zip = zipfile.ZipFile(self._file)
            entries = self._zip.infolist()
            for entry in entries:
                self._check(entry)
            self._check_apart(entries)
        except DAMAGED as error:
            self.close()
            raise InvalidArgument(f"{path} is damaged or truncated: {reason(error)}") from error
        except InvalidArgument:
            self.close()
            raise

    def open(self, name: str) -> IO[bytes]:  # type: ignore[override] # zipfile's streams are not called BinaryIO
        return self._zip.open(name)

    def close(self) -> None:
        self._file.close()

    def _check(self, entry: zipfile.ZipInfo) -> None:
        if entry.orig_filename != entry.filename:  # cut at a NUL
            raise InvalidArgument(
                f"{self.path} holds a file called {entry.orig_filename[:200]!r}, which is not a valid name"
            )
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if entry.is_dir() and kind in (0, stat.S_IFDIR):
            if entry.filename.strip("/"):
                return
            raise InvalidArgument(f"{self.path} holds a folder without a name; pack it again")
        if kind not in (0, stat.S_IFREG):
            raise InvalidArgument(
                f"{self.path} holds '{entry.filename[:200]}' as a link or special file; pack it with plain files"
            )
        self.add(entry.filename, entry.file_size)
        if entry.flag_bits & _ENCRYPTED:
            raise InvalidArgument(f"'{entry.filename}' in {self.path} is encrypted; pack it without a password")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise InvalidArgument(
                f"'{entry.filename}' in {self.path} is packed by method {entry.compress_type}; pack it by deflate"
            )

    def _check_apart(self, entries: list[zipfile.ZipInfo]) -> None:
        """Check that members do not overlap, as in zip bombs."""
        spans = sorted((entry.header_offset, entry.compress_size + _HEADER, entry.filename) for entry in entries)
        # The type stub of ZipFile lacks the offset of the directory.
        end = (cast("int", vars(self._zip)["start_dir"]), 0, "its directory")
        for (start, length, name), (following, _, _) in pairwise([*spans, end]):
            if start < 0 or start + length > following:
                raise InvalidArgument(f"'{name}' in {self.path} overlaps another file: it is malicious")


_CHUNK = 1 << 20


class TarMembers(Members):
    """A tar file. A compressed one is decompressed first, since its members cannot be located otherwise.

    Args:
        path: the file.
        scratch: a folder for the decompressed file.
        limits: the bounds on unpacking.

    Raises:
        InvalidArgument: it is damaged, or malicious.
    """

    def __init__(self, path: Path, scratch: Path, limits: Limits = LIMITS):
        super().__init__(path, limits)
        self._file = LocalFile(_plain(path, scratch, limits))
        self._size = self._file.size()
        self._spans: dict[str, tuple[int, int]] = {}
        try:
            with io.BufferedReader(self._file.open()) as stream:
                for count, member in enumerate(members(stream, str(path))):
                    if count >= limits.entries:
                        raise too_many(path, limits)
                    self._take(member)
        except (*DAMAGED, OverflowError) as error:  # tarfile raises OverflowError for impossible sizes in a header
            raise InvalidArgument(f"{path} is damaged or truncated: {reason(error)}") from error

    def open(self, name: str) -> BinaryIO:
        return span(self._file, *self._spans[name])

    def close(self) -> None:
        pass

    def _take(self, member: tarfile.TarInfo) -> None:
        name = member.name.removeprefix("./")
        if member.isdir():
            return
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.sparse is not None:
            raise InvalidArgument(
                f"{self.path} holds '{name[:200]}' as a link, sparse or special file; pack it with plain files"
            )
        if not 0 <= member.size <= self._size - member.offset_data:
            raise InvalidArgument(f"{self.path} is truncated: it ends inside '{name[:200]}'")
        self.add(name, member.size)
        self._spans[name] = (member.offset_data, member.size)


def _plain(path: Path, scratch: Path, limits: Limits) -> Path:
    with path.open("rb") as stream:
        if stream.read(2) != b"\x1f\x8b":
            return path
    return write(scratch / "members.tar", _unpacked(path, Meter(path, limits)))


def _unpacked(path: Path, meter: Meter) -> Iterator[bytes]:
    try:
        with gzip.open(path) as stream:
            while chunk := stream.read(_CHUNK):
                meter.count(len(chunk))
                yield chunk
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InvalidArgument(f"{path} is damaged or truncated: {reason(error)}") from error
