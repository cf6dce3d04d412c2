"""The members of a tar file, compressed or not."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from ingot.errors import InvalidArgument
from ingot.importing.members import DAMAGED, LIMITS, InPieces, Limits, Members, Meter, reason, write

_CHUNK = 1 << 20


class TarMembers(Members):
    """A tar file. One that is compressed is unpacked whole first, which alone makes its members findable.

    Args:
        path: the file.
        scratch: a folder for the unpacked form.
        limits: bounds on what it unpacks to.

    Raises:
        InvalidArgument: it is damaged, or made to deceive.
    """

    def __init__(self, path: Path, scratch: Path, limits: Limits = LIMITS):
        super().__init__(path, limits)
        self._file = InPieces(_plain(path, scratch, limits))
        try:
            self._tar = tarfile.open(fileobj=self._file, mode="r:")  # noqa: SIM115 - closed with the file
            self._found: dict[str, tarfile.TarInfo] = {}
            for count, member in enumerate(self._tar):
                if count >= 2 * limits.members:
                    raise InvalidArgument(f"{path} holds over {limits.members} files, which no model needs")
                self._take(member)
        except (*DAMAGED, MemoryError, OverflowError) as error:  # tarfile's, of lying sizes of extended headers
            self.close()
            raise InvalidArgument(f"{path} is damaged or truncated: {reason(error)}") from error
        except InvalidArgument:
            self.close()
            raise

    def open(self, name: str) -> IO[bytes]:  # type: ignore[override] # tarfile's streams are not called BinaryIO
        return cast("IO[bytes]", self._tar.extractfile(self._found[name]))  # None of what is no file alone

    def close(self) -> None:
        self._file.close()

    def _take(self, member: tarfile.TarInfo) -> None:
        name = member.name.removeprefix("./")
        if member.isdir():
            return
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.sparse is not None:
            raise InvalidArgument(
                f"{self.path} holds '{name[:200]}' as a link, sparse or special file; pack it with plain files"
            )
        if not 0 <= member.size <= self._file.size - member.offset_data:
            raise InvalidArgument(f"{self.path} is truncated: it ends inside '{name[:200]}'")
        self.add(name, member.size)
        self._found[name] = member


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
