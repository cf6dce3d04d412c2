"""Read the members of an untrusted archive or folder, with bounds on their number and unpacked size."""

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
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from ingot.errors import InvalidArgument, NotFound, write_error

_CHUNK = 1 << 20
# The most that zipfile and tarfile read at once: a directory of members, or an extended header.
_MOST_AT_ONCE = 4 << 20
_LONGEST_NAME = 1000
_SUFFIXES = (".json", ".txt", ".csv", ".yaml", ".yml")
_MAX_DOCUMENT = 1 << 20
_MAX_DOCUMENTS = 32
# A note names at most this many files.
_NAMED = 8
DAMAGED = (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError)
"""The errors of the standard library for damaged files; RecursionError is a RuntimeError."""


@dataclass(frozen=True)
class Limits:
    """Bounds on unpacking. They apply to the bytes that are read, not to the sizes in headers.

    Args:
        members: the most members.
        total: the most bytes.
        ratio: the largest ratio of unpacked to packed size.
        free: bytes that are allowed at any ratio.
    """

    members: int = 10_000
    total: int = 64 << 30
    ratio: int = 100
    free: int = 64 << 20

    @property
    def entries(self) -> int:
        """The most files and folders together."""
        return 2 * self.members


def too_many(path: Path, limits: Limits) -> InvalidArgument:
    """Return the error for more entries than the limit, in which folders count too."""
    return InvalidArgument(f"{path} holds over {limits.entries} entries, more than any model needs")


LIMITS = Limits()


class Meter:
    """Counts the bytes unpacked from a file, up to a limit."""

    def __init__(self, path: Path, limits: Limits):
        self._path = path
        self._most = min(limits.total, max(limits.free, limits.ratio * path.stat().st_size))
        self._done = 0

    def count(self, amount: int) -> None:
        """Add bytes; raise InvalidArgument over the limit."""
        self._done += amount
        if self._done > self._most:
            raise InvalidArgument(
                f"{self._path} unpacks to more than {self._most} bytes, more than any model: it may be meant to fill "
                "the disk; unpack it by hand and import the folder, if you trust it"
            )


class Members(abc.ABC):
    """Files by their names, which are relative paths without ``..``.

    Args:
        path: the file or folder that contains them.
        limits: the bounds on reading.
        meter: counts the bytes that are read; None if they are not compressed.
    """

    def __init__(self, path: Path, limits: Limits, meter: Meter | None = None):
        self.path = path
        self.limits = limits
        self._meter = meter
        self.sizes: dict[str, int] = {}
        """The size in the header of each member, by name."""

    @abc.abstractmethod
    def open(self, name: str) -> BinaryIO:
        """Open a member."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the file."""

    def add(self, name: str, size: int) -> None:
        """Add a member.

        Raises:
            InvalidArgument: its name leads outside or is a duplicate, or there are too many members.
        """
        check_name(self.path, name)
        if name in self.sizes:
            raise InvalidArgument(f"{self.path} holds '{name[:200]}' twice: it is damaged, or malicious")
        if len(self.sizes) >= self.limits.members:
            raise InvalidArgument(f"{self.path} holds over {self.limits.members} files, more than any model needs")
        self.sizes[name] = size

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield a member's content.

        Raises:
            NotFound: there is no such member.
            InvalidArgument: it is damaged, or exceeds the limits.
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
            NotFound: there is no such member.
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
            NotFound: there is no such member.
            InvalidArgument: it is damaged or too large, or the file exists or cannot be written.
        """
        return write(target, self.chunks(name))


def write(target: Path, chunks: Iterable[bytes]) -> Path:
    """Write a new temporary file.

    Raises:
        InvalidArgument: it exists, or cannot be written.
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
            f"{path} holds a file called {name[:200]!r}, which is not a valid relative path; pack it again"
        )


def reason(error: BaseException) -> str:
    """Return a foreign error in one line."""
    strerror = error.strerror if isinstance(error, OSError) else None
    return " ".join(str(strerror or error).split())[:200] or type(error).__name__


class InPieces(io.BufferedReader):
    """A file that bounds each read, so that a false length in a header cannot exhaust memory."""

    def __init__(self, path: Path):
        super().__init__(io.FileIO(path))
        self.size = os.fstat(self.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        wanted = self.size - self.tell() if size is None or size < 0 else min(size, self.size - self.tell())
        if wanted > _MOST_AT_ONCE:
            raise ValueError(f"its list of files is longer than {_MOST_AT_ONCE >> 20} MiB")
        return super().read(size)


class FolderMembers(Members):
    """The files of a folder. The targets of links must be in it too."""

    def __init__(self, path: Path, limits: Limits = LIMITS):
        super().__init__(path, limits)
        self._root = path.resolve()
        with reading(path):
            items = list(itertools.islice(path.rglob("*"), limits.entries + 1))
            if len(items) > limits.entries:
                raise too_many(path, limits)
            for item in sorted(items):
                if item.is_file():
                    self.add(item.relative_to(path).as_posix(), item.stat().st_size)

    def open(self, name: str) -> BinaryIO:
        return inside(self._root, self.path / name).open("rb")

    def close(self) -> None:
        pass


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn the OSError of a file or folder that cannot be read into InvalidArgument."""
    try:
        yield
    except OSError as error:
        raise InvalidArgument(f"{error.filename or path} cannot be read: {reason(error)}") from error


def inside(root: Path, path: Path) -> Path:
    """Return a path if it is below ``root``, a resolved path, after following links.

    Raises:
        InvalidArgument: a link leads out of ``root``.
    """
    if not path.resolve().is_relative_to(root):
        raise InvalidArgument(f"{path} is a link that leads out of {root.name}; put a copy of the file in its place")
    return path


def documents(members: Members, names: Iterable[str]) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return the small files that are imported with a model, by name, and a note on the others, if any.

    Raises:
        InvalidArgument: a file is damaged.
    """
    taken: dict[str, bytes] = {}
    left: list[str] = []
    for name in sorted(names):
        small = PurePosixPath(name).suffix.lower() in _SUFFIXES and members.sizes[name] <= _MAX_DOCUMENT
        if small and len(taken) < _MAX_DOCUMENTS:
            taken[name] = members.read(name, _MAX_DOCUMENT)
        else:
            left.append(name)
    if not left:
        return taken, ()
    shown = ", ".join(left[:_NAMED]) + (f" and {len(left) - _NAMED} more" if len(left) > _NAMED else "")
    return taken, (f"files that are not imported: {shown}",)
