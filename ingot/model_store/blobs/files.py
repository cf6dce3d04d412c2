"""Atomic files, and safe access to files in folders that others may write to."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal


@contextlib.contextmanager
def atomic_file(path: Path, *, mode: int = 0o666, durable: bool = False) -> Iterator[BinaryIO]:
    """Yield a file that appears as ``path`` when the block succeeds, and not at all otherwise.

    Args:
        path: the final name; an existing file is replaced.
        mode: permissions, less the process's umask; a replaced file keeps its own.
        durable: make it survive a power failure.

    Raises:
        OSError: the folder cannot be written.
    """
    temporary = path.with_name(f".tmp-{secrets.token_hex(8)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as stream:
            with contextlib.suppress(OSError):
                os.fchmod(handle, stat.S_IMODE(path.lstat().st_mode) & 0o777)
            fcntl.flock(stream, fcntl.LOCK_EX)  # marks it as being written
            yield stream
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)


def open_plain(path: Path, mode: Literal["rb", "ab+"] = "rb") -> BinaryIO:
    """Open a file in a folder that others may write to. Links, which could lead anywhere, and pipes are refused.

    Raises:
        OSError: it is not a regular file, or cannot be opened.
    """
    flags = os.O_RDONLY if mode == "rb" else os.O_RDWR | os.O_CREAT | os.O_APPEND
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise OSError(error.errno, "it is a link or not a regular file", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(handle, mode)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
