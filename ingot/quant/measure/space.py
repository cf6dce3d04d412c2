"""What is told where a disk is full."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ingot.errors import StorageFull

_CODES = (errno.ENOSPC, errno.EDQUOT)
# What the system says, which compilers and ONNX Runtime repeat in messages of their own; and what the latter says of a
# file that could be written in part, without why.
_WORDS = (*map(os.strerror, _CODES), "Failed to write external initializers")


def is_full(error: BaseException | str) -> bool:
    """Tell whether an error, or the message of one, is that a disk is full."""
    if isinstance(error, OSError) and error.errno in _CODES:
        return True
    return any(words in str(error) for words in _WORDS)


def fault(folder: Path | None = None) -> StorageFull:
    """Return the error for a full disk; ``folder`` None is that of temporary files."""
    if folder is not None:
        return StorageFull(f"no space is left in {folder.resolve()}: make room, or name another folder")
    return StorageFull(
        f"no space is left in {tempfile.gettempdir()}, where models are made: make room, or set TMPDIR to a folder "
        "with more"
    )


@contextlib.contextmanager
def watched(folder: Path | None = None) -> Iterator[None]:
    """Make any error of a full disk one that names the folder and the remedy; see :func:`fault`.

    Raises:
        StorageFull: the disk is full.
    """
    try:
        yield
    except Exception as error:
        if not is_full(error):
            raise
        raise fault(folder) from error
