"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def atomic_file(path: Path, *, mode: int = 0o666, durable: bool = False) -> Iterator[BinaryIO]:
    """Yield a file that appears as ``path`` when the block ends well, and not at all when it does not.

    Args:
        path: what the file is to be called; what is there already is replaced.
        mode: its permissions, less the process's umask.
        durable: make it survive a power cut.

    Raises:
        OSError: the folder cannot be written.
    """
    temporary = path.with_name(f".tmp-{secrets.token_hex(8)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)  # shows others that it is being written
            yield stream
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
