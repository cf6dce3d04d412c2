"""Limits of a quantization: time, and disk space."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ingot.errors import FULL_DISK, StorageFull

# The system's messages, which compilers and ONNX Runtime repeat in theirs, and ONNX Runtime's message for a partly
# written file, which lacks the reason.
_WORDS = (*map(os.strerror, FULL_DISK), "Failed to write external initializers")


class TimeUp(Exception):
    """The time for a search is over."""


class Deadline:
    """The time at which a search must end. The deadlines of requests are in :mod:`ingot.runtime.dispatch.pending`.

    Args:
        seconds: the time; None for no limit.
        began: when it began, in monotonic seconds; None for now.
    """

    def __init__(self, seconds: float | None = None, began: float | None = None):
        self._end = math.inf if seconds is None else (self.now if began is None else began) + seconds

    @property
    def now(self) -> float:
        """The monotonic time in seconds."""
        return time.monotonic()

    @property
    def left(self) -> float:
        """The seconds that are left; infinity without a limit."""
        return self._end - self.now

    def check(self, needed: float = 0.0) -> None:
        """Check that ``needed`` seconds are left.

        Raises:
            TimeUp: fewer are left.
        """
        if self.left < needed:
            raise TimeUp


def disk_is_full(error: BaseException | str) -> bool:
    """Return whether an error, or its message, says that a disk is full."""
    if isinstance(error, OSError) and error.errno in FULL_DISK:
        return True
    return any(words in str(error) for words in _WORDS)


def disk_full(folder: Path | None = None) -> StorageFull:
    """Return the error for a full disk; ``folder`` None is that of temporary files."""
    if folder is not None:
        return StorageFull(f"no space is left in {folder.resolve()}: free some, or choose another folder")
    return StorageFull(
        f"no space is left in {tempfile.gettempdir()}, where models are built: free some, or set TMPDIR to a folder "
        "with more"
    )


@contextlib.contextmanager
def disk_watched(folder: Path | None = None) -> Iterator[None]:
    """Turn any error of a full disk into one that names the folder and the remedy; see :func:`disk_full`.

    Raises:
        StorageFull: the disk is full.
    """
    try:
        yield
    except Exception as error:  # compilers and ONNX Runtime report a full disk by their own classes
        if not disk_is_full(error):
            raise
        raise disk_full(folder) from error
