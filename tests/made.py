"""Files that take seconds to make, kept between runs in pytest's cache."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tests.support import ROOT

_NO_SOURCE = {"server", "cli", "importing", "bench"}


class MadeOnce(Protocol):
    """Returns the file of a name, which ``make`` writes if it is not kept."""

    def __call__(self, name: str, make: Callable[[Path], None]) -> Path: ...


def make_once(kept: Path, folder: Path, name: str, make: Callable[[Path], None]) -> Path:
    """Copy a kept file into ``folder``; make it first if its sources have changed. One process makes it."""
    with (kept / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        current = kept / f"{sources()}-{name}"
        if not current.exists():
            for old in kept.glob(f"*-{name}"):
                old.unlink()
            partial = kept / f"partial.{name}"
            make(partial)
            partial.replace(current)
        return Path(shutil.copy(current, folder / name))


@functools.cache
def sources() -> str:
    """Return a digest of the code and the releases that such files are made with, and of the machine."""
    from ingot.runtime.machine import (
        devices,  # conftest.py imports this module, also where Ingot's dependencies are missing
    )

    paths = [path for path in (ROOT / "ingot").rglob("*.py") if path.relative_to(ROOT).parts[1] not in _NO_SOURCE]
    digest = hashlib.sha256(f"{platform.python_version()} {devices.describe()}".encode())
    others = "constraints.txt", "tests/conftest.py", "ingot/cli/demo/demo_models.py"
    for path in [*sorted(paths), *(ROOT / name for name in others)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
