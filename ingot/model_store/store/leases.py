"""Leases of running pushes, which protect blobs from collection before a tag refers to them.

A lease is a file that lists digests, locked while its owner lives: the kernel releases the lock of a killed process, so
leases need no expiry.
"""

from __future__ import annotations

import contextlib
import fcntl
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ingot.model_store.blobs.files import open_plain


class Leases:
    """The leases of one store.

    Args:
        root: the store's folder.
    """

    def __init__(self, root: Path):
        self._folder = root / "leases"
        self._gate = root / ".gc.lock"

    @contextmanager
    def hold(self, digests: Iterable[str]) -> Iterator[None]:
        """Protect blobs from collection, including those that do not exist yet.

        Raises:
            OSError: the store cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / secrets.token_hex(8)
        with contextlib.ExitStack() as stack:
            # Inside the gate: a collector either sees the lease locked and complete, or has swept before it.
            with open_plain(self._gate, "ab+") as gate:
                fcntl.flock(gate, fcntl.LOCK_SH)
                lease = stack.enter_context(path.open("x"))
                stack.callback(path.unlink, missing_ok=True)
                fcntl.flock(lease, fcntl.LOCK_EX)
                lease.write("\n".join(digests))
                lease.flush()
            yield

    @contextmanager
    def closed(self) -> Iterator[set[str]]:
        """Block new leases, and yield the leased digests. Leases of dead processes are removed.

        Raises:
            OSError: the store cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        with open_plain(self._gate, "ab+") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            leased: set[str] = set()
            for path in list(self._folder.iterdir()):
                if path.is_file() and not path.is_symlink():
                    leased.update(_read(path))
            yield leased


def is_locked(path: Path) -> bool:
    """Return whether a living process holds the lock of a file; False if the file is gone."""
    try:
        with open_plain(path) as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _read(path: Path) -> list[str]:
    if not is_locked(path):
        path.unlink(missing_ok=True)
        return []
    try:
        return path.read_bytes().decode("ascii", "replace").split()
    except FileNotFoundError:
        return []
