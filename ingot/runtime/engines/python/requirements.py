"""The versions of packages that a model in Python requires: read, compared with those installed, and installed."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from ingot.errors import InvalidArgument, Unsupported, write_error

log = logging.getLogger(__name__)

_PIN = re.compile(r"(?P<name>[A-Za-z0-9][\w.\-]*)(\[[^\]]*\])?\s*==\s*(?P<version>[\w.+!\-]+)")
_PIP = (
    "-m",
    "pip",
    "install",
    "--no-deps",
    "--only-binary",
    ":all:",
    "--no-input",
    "--disable-pip-version-check",
    "-q",
)


def pinned(text: str, where: str) -> tuple[str, ...]:
    """Return the requirements in the text of a requirements file, each as ``name==version``; hashes are left out.

    Raises:
        InvalidArgument: a line is not of the form ``name==version``.
    """
    pins, others = parsed(text)
    for number, stated in others.items():
        raise InvalidArgument(
            f"{where}, line {number}: '{stated}' is not of the form name==version; pip freeze prints such lines"
        )
    return pins


def parsed(text: str) -> tuple[tuple[str, ...], dict[int, str]]:
    """Return the requirements in a text, each as ``name==version``, and its other lines by their numbers."""
    pins, others = [], {}
    for number, line in enumerate(text.replace("\\\n", " ").splitlines(), 1):
        stated = re.sub(r"(^|\s)#.*|\s--hash=\S+", "", line).strip()
        if match := _PIN.fullmatch(stated):
            pins.append(f"{match['name']}=={match['version']}")
        elif stated:
            others[number] = stated
    return tuple(pins), others


def check(requirements: Sequence[str]) -> None:
    """Check that the required versions of packages are installed.

    Raises:
        Unsupported: some are not; the message names them, and the command that installs them.
    """
    if unmet := _unmet(requirements):
        shown = ", ".join(f"{requirement} ({state})" for requirement, state in unmet.items())
        raise Unsupported(
            f"the model requires {shown}: pip install {' '.join(unmet)}, or serve it with --install-requirements"
        )


def prepared(requirements: Sequence[str], *, install: bool) -> Path | None:
    """Return a folder with the required packages that this environment lacks; None if it lacks none.

    Models with the same requirements share a folder. Only wheels are installed, whose code does not run here.

    Args:
        requirements: each as ``name==version``; all that the model needs, since those of packages are not followed.
        install: install what is missing.

    Raises:
        Unsupported: packages are missing and are not to be installed, or pip cannot install them.
        InvalidArgument: the folder cannot be written.
    """
    if not (unmet := _unmet(requirements)):
        return None
    if not install:
        check(requirements)
    key = hashlib.sha256("\n".join([sys.version, platform.machine(), *sorted(unmet)]).encode()).hexdigest()
    folder = _root() / key[:32]
    if not folder.is_dir():
        _install([*unmet], folder)
    return folder


def _install(requirements: Sequence[str], folder: Path) -> None:
    log.warning("installing %s into %s", ", ".join(requirements), folder)
    began = time.monotonic()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch, "packages")
            command = [sys.executable, *_PIP, "--target", str(made), *requirements]
            done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()]
                raise Unsupported(f"pip cannot install {', '.join(requirements)}: {lines[-1][:500]}")
            if not folder.is_dir():  # another server may have been faster
                made.rename(folder)
    except OSError as error:
        raise write_error(f"packages cannot be installed into {folder}", error) from error
    log.warning("installed %s (%.1f s)", ", ".join(requirements), time.monotonic() - began)


def _unmet(requirements: Sequence[str]) -> dict[str, str]:
    """Return the requirements that the installed packages do not meet, each with the reason."""
    found = {}
    for requirement in requirements:
        name, _, wanted = requirement.partition("==")
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[requirement] = "it is not installed"
            continue
        if installed.partition("+")[0] != wanted.partition("+")[0]:  # such as 2.9.0+cpu
            found[requirement] = f"{installed} is installed"
    return found


def _root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ingot" / "packages"
