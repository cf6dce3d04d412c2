"""The members of a tar file, compressed or not."""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ingot.errors import InvalidArgument
from ingot.importing.members import DAMAGED, LIMITS, Limits, Members, Meter, reason, too_many, write
from ingot.model_store.format.tar import LocalFile, members, span

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
