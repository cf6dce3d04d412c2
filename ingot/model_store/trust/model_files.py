"""The files of a model as OpenSSF Model Signing lists them: names relative to the model, with digests."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from ingot.errors import InvalidArchive, InvalidArgument, NotFound

ALWAYS_IGNORED: Final = (".git", ".gitattributes", ".github", ".gitignore")
_MAX_FILES = 200_000
_BLOCK = 1 << 20
_HASHES: Mapping[str, Callable[[], Any]] = {"sha256": hashlib.sha256, "blake2b": hashlib.blake2b}


@dataclass(frozen=True)
class Serialization:
    """How the files of a model are listed.

    Args:
        algorithm: the hash, ``sha256`` or ``blake2b``.
        shard_size: bytes per entry of a list of parts; None lists whole files.
        links: whether symbolic links are followed, which Ingot does not.
        ignored: paths relative to the model that are left out, with everything below them.
    """

    algorithm: str = "sha256"
    shard_size: int | None = None
    links: bool = False
    ignored: frozenset[str] = frozenset()

    def digests(self, path: Path, only: Collection[str] | None = None) -> dict[str, str]:
        """Return the digest of each file, or part of a file, by name.

        Args:
            path: a file, or a folder.
            only: names of entries in a folder; all other files are skipped.

        Raises:
            NotFound: there is no such file or folder.
            InvalidArgument: there are no files, something other than files and folders, or a name that is not UTF-8.
            InvalidArchive: the digests are of a kind that cannot be computed here.
        """
        if self.algorithm not in _HASHES:
            raise InvalidArchive(f"digests of the kind '{self.algorithm[:40]}' are not supported, but sha256 is")
        if self.links:
            raise InvalidArchive("the signature follows symbolic links, which Ingot does not: sign without links")
        if only is None or path.is_file():
            files = list_files(path, self.ignored)
        else:
            files = _named(path, {_file_of(name) if self.shard_size else name for name in only})
        if not files:
            raise InvalidArgument(f"{path} has no files to sign or to verify")
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the interpreter lock
            parts = pool.map(lambda item: list(self._entries(*item, follow=path.is_file())), files.items())
            return {name: digest for entries in parts for name, digest in entries}

    def record(self) -> dict[str, Any]:
        """Return the description that is signed along with the digests."""
        return {
            "method": "files",
            "hash_type": self.algorithm,
            "allow_symlinks": False,
            "ignore_paths": sorted(self.ignored),
        }

    def _entries(self, name: str, path: Path, *, follow: bool) -> Iterator[tuple[str, str]]:
        with _open(path, follow=follow) as stream:
            if self.shard_size is None:
                yield name, self._digest(stream, None)
                return
            size, start = os.fstat(stream.fileno()).st_size, 0
            while start < size:
                end = min(start + self.shard_size, size)
                yield f"{name}:{start}:{end}", self._digest(stream, end - start)
                start = end

    def _digest(self, stream: BinaryIO, count: int | None) -> str:
        digest = _HASHES[self.algorithm]()
        while block := stream.read(_BLOCK if count is None else min(_BLOCK, count)):
            digest.update(block)
            count = None if count is None else count - len(block)
        return str(digest.hexdigest())


def list_files(path: Path, ignored: Collection[str]) -> dict[str, Path]:
    """Return the files of a model by name: one file by its base name, those of a folder by their relative paths.

    Raises:
        NotFound: there is no such file or folder.
        InvalidArgument: something is neither a file nor a folder, or has a name that is not UTF-8.
    """
    if path.is_file():
        return {_text(path.absolute().name, path): path}
    if not path.is_dir():
        raise NotFound(f"there is no file or folder {path}")
    found: dict[str, Path] = {}
    folders = [("", path)]
    while folders:
        prefix, folder = folders.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise InvalidArgument(f"{folder} cannot be read: {error.strerror}") from error
        for entry in entries:
            name = _text(prefix + entry.name, folder)
            if name in ignored:
                continue
            if entry.is_symlink():
                raise InvalidArgument(
                    f"{entry.path} is a symbolic link, which cannot be signed; replace it by the file"
                )
            if entry.is_dir():
                folders.append((f"{name}/", Path(entry.path)))
            elif entry.is_file():
                found[name] = Path(entry.path)
            else:
                raise InvalidArgument(f"{entry.path} is neither a file nor a folder, and cannot be signed")
        if len(found) + len(folders) > _MAX_FILES:
            raise InvalidArgument(f"{path} has over {_MAX_FILES} files, too many for one signature")
    return found


def _named(path: Path, names: Collection[str]) -> dict[str, Path]:
    """Return the files of a folder that have one of some names.

    Raises:
        InvalidArchive: a name leads out of the folder.
    """
    for name in names:
        if name.startswith("/") or ".." in name.split("/") or "\0" in name:
            raise InvalidArchive(f"the signature names {name[:200]!r}, which is not inside {path}")
    return {name: path / name for name in sorted(names) if (path / name).is_file()}


def excluded(path: Path, bundle: Path, more: Collection[str]) -> frozenset[str]:
    """Return the paths in a model that are not signed: git's files, the bundle, and those that a user names."""
    if path.is_file():
        return frozenset()
    inside = os.path.relpath(os.path.realpath(bundle), os.path.realpath(path))
    own = () if Path(inside).parts[0] == os.pardir else (inside,)
    named = (os.path.relpath(item, path.absolute()) if item.startswith("/") else item for item in more)
    return frozenset((*ALWAYS_IGNORED, *own, *map(os.path.normpath, named)))


def _open(path: Path, *, follow: bool) -> BinaryIO:
    """Open a regular file. Files of a folder are not followed if a link has replaced them meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidArgument(f"{path} is not a file any more")
    return os.fdopen(descriptor, "rb", buffering=0)


def _file_of(shard: str) -> str:
    """Return the file of a part's name, ``path:start:end``. Paths may have colons themselves."""
    return shard.rsplit(":", 2)[0]


def _text(name: str, where: Path) -> str:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{where} has a file whose name is not UTF-8 ({name!r}), which cannot be signed"
        ) from error
    return name
