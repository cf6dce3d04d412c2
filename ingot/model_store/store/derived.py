"""The derived cache: data that a runtime computed from an archive and would otherwise compute at each start.

STORE/derived/<manifest>/<key>/
  ...             the runtime's files, read-only
  entry.json      their sizes and digests; its modification time is that of the entry's last use
STORE/derived/<manifest>/.<key>.lock    held while the entry is built

An entry is complete or absent, never changes, and may be removed at any time: files that a process has mapped stay
readable for that process. Nothing here is part of an archive, and everything can be rebuilt.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ingot.errors import InvalidArchive
from ingot.model_store.blobs.blobs import Blobs
from ingot.model_store.blobs.descriptor import MAX_DOCUMENT_BYTES
from ingot.model_store.blobs.files import atomic_file, open_plain, sync_folder
from ingot.model_store.blobs.folder import BlobFolder
from ingot.model_store.format import manifest
from ingot.model_store.store.leases import is_locked

# Files up to this size are hashed at every use. Hashing gigabytes would take longer than the cache saves.
_HASHED_BYTES = 4 << 20


class _File(BaseModel):
    """``modified`` is in whole seconds, which copies of a store preserve."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    modified: int


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, defer_build=True)

    schema_version: Literal[1] = 1
    files: tuple[_File, ...]


@dataclass(frozen=True)
class CacheEntry:
    """One entry of the cache, which may or may not exist."""

    path: Path

    @property
    def key(self) -> str:
        return self.path.name

    @property
    def manifest_hex(self) -> str:
        """The hex digest of the manifest of its variant."""
        return self.path.parent.name

    @property
    def size(self) -> int:
        """The bytes of its files; zero if it does not exist."""
        record = self._read()
        return sum(file.size for file in record.files) if record else 0

    @property
    def record(self) -> Path:
        """The file that lists the others; its modification time is that of the entry's last use."""
        return self.path / "entry.json"

    def find(self) -> bool:
        """Return whether the entry exists and looks complete, and record its use. Damaged entries are removed.

        Small files are compared with their digests, large ones by size and modification time. That detects truncation
        and writes, but not bit flips on the disk; :meth:`verify` does.
        """
        record = self._read()
        if record is None or not all(self._looks_whole(file) for file in record.files):
            if self.path.exists():
                self.remove()
            return False
        with contextlib.suppress(OSError):  # read-only stores work too
            os.utime(self.record)
        return True

    def verify(self) -> None:
        """Read every file and check its digest.

        Raises:
            InvalidArchive: one is missing or damaged; the entry may be removed.
        """
        record = self._read()
        if record is None:
            raise InvalidArchive(f"derived entry {self.path} has no valid {self.record.name}; it may be removed")
        for file in record.files:
            path = self.path / file.name
            try:
                whole = not path.is_symlink() and _digest(path) == file.sha256
            except OSError:
                whole = False
            if not whole:
                raise InvalidArchive(f"derived entry {self.path}: {file.name} is missing or damaged; it may be removed")

    def build(self, fill: Callable[[Path], None], room: int) -> bool:
        """Build the entry unless it exists. Of several processes one builds it while the others wait.

        Args:
            fill: writes the files into an empty folder.
            room: approximate size of the files in bytes. As much again must remain free on the disk.

        Returns:
            Whether ``fill`` was called.

        Raises:
            OSError: the folder cannot be written, or the disk is too full.
        """
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        with open_plain(self._lock, "ab+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.find():
                return False
            for left in self._asides():  # left by a killed process: only the lock holder builds
                shutil.rmtree(left, ignore_errors=True)
            if shutil.disk_usage(folder).free < 2 * room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
            temporary = self._aside()
            try:
                temporary.mkdir()
                fill(temporary)
                _seal(CacheEntry(temporary))
                temporary.rename(self.path)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            sync_folder(folder)
        return True

    def remove(self) -> None:
        """Remove the entry, if it exists and can be removed."""
        aside = self._aside()
        with contextlib.suppress(OSError):
            self.path.rename(aside)  # atomically, so that no reader finds half of it
            shutil.rmtree(aside, ignore_errors=True)

    def leftovers(self) -> list[Path]:
        """Return files left by a killed builder; none while another process builds the entry."""
        return [] if is_locked(self._lock) else self._asides()

    @property
    def _lock(self) -> Path:
        return self.path.with_name(f".{self.key}.lock")

    def _asides(self) -> list[Path]:
        return sorted(self.path.parent.glob(f".{self.key}.*.tmp"))

    def _aside(self) -> Path:
        return self.path.with_name(f".{self.key}.{secrets.token_hex(8)}.tmp")

    def _read(self) -> _Record | None:
        path = self.record
        try:
            if path.stat().st_size > MAX_DOCUMENT_BYTES:
                return None
            return manifest.decode(_Record, path.read_bytes(), str(path))
        except (OSError, InvalidArchive):
            return None

    def _looks_whole(self, file: _File) -> bool:
        path = self.path / file.name
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_size != file.size:
                return False
            if file.size <= _HASHED_BYTES:
                return _digest(path) == file.sha256
        except OSError:
            return False
        return int(status.st_mtime) == file.modified


class DerivedCache:
    """The cache entries of a store.

    Args:
        root: the folder; created with the first entry.
    """

    def __init__(self, root: Path):
        self.root = root

    @classmethod
    def for_blobs(cls, blobs: Blobs) -> DerivedCache | None:
        """Return the cache of the store that holds these blobs; None if no store does."""
        if not isinstance(blobs, BlobFolder) or not (blobs.root.parent / "repos").is_dir():
            return None
        return cls(blobs.root.parent / "derived")

    def entry(self, manifest_hex: str, key: str) -> CacheEntry:
        """Return the entry of a variant, by the hex digest of its manifest, and a runtime's key."""
        return CacheEntry(self.root / manifest_hex / key)

    def entries(self) -> Iterator[CacheEntry]:
        """Yield all entries, including incomplete and damaged ones."""
        for folder in sorted(self.root.glob("*")):
            names = {path.name for path in folder.glob("*")}
            locks = {
                name[1:].removesuffix(".lock") for name in names if name.startswith(".") and name.endswith(".lock")
            }
            yield from (CacheEntry(folder / key) for key in sorted({name for name in names if name[0] != "."} | locks))


def _seal(entry: CacheEntry) -> None:
    """Make the files of a new entry read-only and durable, and write its record."""
    files = []
    for path in sorted(entry.path.iterdir()):
        path.chmod(0o444)
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            os.fsync(stream.fileno())
            status = os.fstat(stream.fileno())
        files.append(_File(name=path.name, size=status.st_size, sha256=digest, modified=int(status.st_mtime)))
    with atomic_file(entry.record, durable=True) as stream:
        stream.write(manifest.encode(_Record(files=tuple(files))))


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
