"""Where management listens: by default on a Unix socket that only the server's user can open."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import stat
import tempfile
from pathlib import Path

from ingot.errors import InvalidArgument

_SUFFIX = ".sock"
_CONNECT_SECONDS = 1.0


def default_socket(port: int) -> Path:
    """Return a path for a server of this process, by its HTTP port, which servers may share; the folder is made.

    Raises:
        InvalidArgument: the folder cannot be made, or other users can write it.
    """
    folder = _folder()
    names = (f"{os.getpid()}-{port}{f'-{number}' if number else ''}{_SUFFIX}" for number in itertools.count())
    return next(path for path in map(folder.joinpath, names) if not accepts(path))


def running() -> list[Path]:
    """Return the sockets of this user's servers that accept connections; those of servers that ended are removed."""
    try:
        found = sorted(_folder().glob(f"*{_SUFFIX}"))
    except InvalidArgument:
        return []
    live = []
    for path in found:
        if accepts(path):
            live.append(path)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return live


def accepts(path: Path) -> bool:
    """Return whether a server accepts connections on a socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_CONNECT_SECONDS)
        try:
            connection.connect(str(path))
        except TimeoutError:
            return True  # it is busy
        except OSError:
            return False
    return True


def _folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "ingot" if runtime else Path(tempfile.gettempdir()) / f"ingot-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise InvalidArgument(
            f"the folder {folder} for the management socket cannot be made: {error.strerror}; give --management "
            "PATH.sock, or --management off"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InvalidArgument(
            f"{folder} for the management socket is not a folder that only its user can open; remove it, or give "
            "--management PATH.sock"
        )
    return folder
