"""Files that lie in one file or folder of somebody else's, read with bounds on what they unpack to."""

from __future__ import annotations

import abc
import contextlib
import io
import itertools
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ingot.errors import InvalidArgument, NotFound, write_error

_CHUNK = 1 << 20
# What zipfile and tarfile take in at once: a directory of members, or an extended header. Content is read in chunks.
_MOST_AT_ONCE = 4 << 20
_LONGEST_NAME = 1000
DAMAGED = (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError)
"""What the standard library makes of damaged files; RecursionError is a RuntimeError."""


@dataclass(frozen=True)
class Limits:
    """Bounds on unpacking, which hold against what is really read, whatever headers say.

    Args:
        members: how many there may be.
        total: bytes in all.
        ratio: how many times the file's own size may come out of it.
        free: bytes that may come out of any file.
    """

    members: int = 10_000
    total: int = 64 << 30
    ratio: int = 100
    free: int = 64 << 20


LIMITS = Limits()


class Meter:
    """Counts what came out of a file, and stops it at a limit."""

    def __init__(self, path: Path, limits: Limits):
        self._path = path
        self._most = min(limits.total, max(limits.free, limits.ratio * path.stat().st_size))
        self._done = 0

    def count(self, amount: int) -> None:
        """Raise InvalidArgument once the limit is passed."""
        self._done += amount
        if self._done > self._most:
            raise InvalidArgument(
                f"{self._path} unpacks to more than {self._most} bytes, which no model does: it may be meant to fill "
                "the disk; unpack it by hand and import the folder, if you trust it"
            )


class Members(abc.ABC):
    """Files by their names, which are relative paths without ``..``.

    Args:
        path: the file or folder that they lie in.
        limits: bounds on what is read.
        meter: counts what is read; None where it is there in full anyway.
    """

    def __init__(self, path: Path, limits: Limits, meter: Meter | None = None):
        self.path = path
        self.limits = limits
        self._meter = meter
        self.sizes: dict[str, int] = {}
        """Names, and the sizes that headers claim."""

    @abc.abstractmethod
    def open(self, name: str) -> BinaryIO:
        """Open a member."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the file."""

    def add(self, name: str, size: int) -> None:
        """Take note of a member.

        Raises:
            InvalidArgument: its name leads outside or stands twice, or there are too many.
        """
        check_name(self.path, name)
        if name in self.sizes:
            raise InvalidArgument(f"{self.path} holds '{name[:200]}' twice: it is damaged, or made to deceive")
        if len(self.sizes) >= self.limits.members:
            raise InvalidArgument(f"{self.path} holds over {self.limits.members} files, which no model needs")
        self.sizes[name] = size

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield a member's content.

        Raises:
            NotFound: there is none of that name.
            InvalidArgument: it is damaged, or more than the limits allow.
        """
        if name not in self.sizes:
            raise NotFound(f"{self.path} has no file '{name[:200]}'")
        try:
            with self.open(name) as stream:
                while chunk := stream.read(_CHUNK):
                    if self._meter is not None:
                        self._meter.count(len(chunk))
                    yield chunk
        except (*DAMAGED, OSError) as error:
            raise InvalidArgument(f"{self.path} is damaged: '{name}' cannot be read: {reason(error)}") from error

    def read(self, name: str, most: int) -> bytes:
        """Return a small member's content.

        Raises:
            NotFound: there is none of that name.
            InvalidArgument: it is damaged, or has more than ``most`` bytes.
        """
        parts: list[bytes] = []
        left = most
        for chunk in self.chunks(name):
            left -= len(chunk)
            if left < 0:
                raise InvalidArgument(f"'{name}' in {self.path} is larger than {most >> 10} KiB")
            parts.append(chunk)
        return b"".join(parts)

    def copy(self, name: str, target: Path) -> Path:
        """Copy a member to a new file and return that.

        Raises:
            NotFound: there is none of that name.
            InvalidArgument: it is damaged or too large, or the file cannot be written or is there already.
        """
        return write(target, self.chunks(name))


def write(target: Path, chunks: Iterable[bytes]) -> Path:
    """Write a new file for a while.

    Raises:
        InvalidArgument: it cannot be written, or is there already.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as stream:
            for chunk in chunks:
                stream.write(chunk)
    except OSError as error:
        remedy = "; set TMPDIR to a folder with more space"
        raise write_error(f"cannot unpack to {target.parent}", error, remedy) from error
    return target


def check_name(path: Path, name: str) -> None:
    """Raise InvalidArgument if a member's name is not a plain relative path."""
    parts = name.split("/")
    if (
        "\\" in name
        or not name.isprintable()
        or len(name) > _LONGEST_NAME
        or re.match(r"[A-Za-z]:", name)
        or any(part in ("", ".", "..") for part in parts)
    ):
        raise InvalidArgument(
            f"{path} holds a file called {name[:200]!r}, a name that leads elsewhere or is none; pack it anew"
        )


def reason(error: BaseException) -> str:
    """Return a foreign error in one line."""
    strerror = error.strerror if isinstance(error, OSError) else None
    return " ".join(str(strerror or error).split())[:200] or type(error).__name__


class InPieces(io.BufferedReader):
    """A file that gives no more at once than a member's header may need, whatever a length in it says."""

    def __init__(self, path: Path):
        super().__init__(io.FileIO(path))
        self.size = os.fstat(self.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        wanted = self.size - self.tell() if size is None or size < 0 else min(size, self.size - self.tell())
        if wanted > _MOST_AT_ONCE:
            raise ValueError(f"its list of files is longer than {_MOST_AT_ONCE >> 20} MiB")
        return super().read(size)


class FolderMembers(Members):
    """The files of a folder; those that links lead to must lie in it too."""

    def __init__(self, path: Path, limits: Limits = LIMITS):
        super().__init__(path, limits)
        self._root = path.resolve()
        with reading(path):
            for item in sorted(itertools.islice(path.rglob("*"), 2 * limits.members)):
                if item.is_file():
                    self.add(item.relative_to(path).as_posix(), item.stat().st_size)

    def open(self, name: str) -> BinaryIO:
        return inside(self._root, self.path / name).open("rb")

    def close(self) -> None:
        pass


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Make an InvalidArgument of it if a file or folder cannot be read."""
    try:
        yield
    except OSError as error:
        raise InvalidArgument(f"{error.filename or path} cannot be read: {reason(error)}") from error


def inside(root: Path, path: Path) -> Path:
    """Return a file or folder if it lies below ``root``, which is resolved, also once links are followed.

    Raises:
        InvalidArgument: a link leads elsewhere.
    """
    if not path.resolve().is_relative_to(root):
        raise InvalidArgument(f"{path} is a link that leads out of {root.name}; put a copy of the file in its place")
    return path
