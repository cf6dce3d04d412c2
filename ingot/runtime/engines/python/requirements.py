"""The versions of packages that a model in Python requires: read, compared with those installed, and installed."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from ingot.errors import InvalidArgument, NotFound, Unsupported, write_error
from ingot.model_store.format.partition import PythonPlan

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
    "--progress-bar",
    "off",
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


def hashes_of(text: str, where: str) -> dict[str, tuple[str, ...]]:
    """Return the hashes that a requirements file states for each requirement; empty if it has none.

    Raises:
        InvalidArgument: some requirements have none, or one is not a SHA-256.
    """
    found: dict[str, tuple[str, ...]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if match := _PIN.match(line.strip()):
            found[f"{match['name']}=={match['version']}"] = tuple(re.findall(r"--hash=(\S+)", line))
    if not any(found.values()):
        return {}
    for pin, hashes in found.items():
        if not hashes or not all(re.fullmatch("sha256:[0-9a-f]{64}", each) for each in hashes):
            raise InvalidArgument(f"{where}: '{pin}' needs a hash, --hash=sha256:..., since others have one")
    return found


def wheels_of(requirements: Sequence[str], folder: Path) -> list[Path]:
    """Return the wheels in a folder that requirements need: for each, those of all platforms.

    Raises:
        NotFound: one has none; the message has the command that downloads them.
    """
    by_name: dict[tuple[str, str], list[Path]] = {}
    for path in sorted(folder.glob("*.whl")):
        name, version, *_ = path.name.split("-")
        by_name.setdefault((_normal(name), version), []).append(path)
    pins = [tuple(requirement.split("==")) for requirement in requirements]
    if missing := [f"{name}=={version}" for name, version in pins if (_normal(name), version) not in by_name]:
        raise NotFound(
            f"{folder} has no wheel of {', '.join(missing)}: pip download --no-deps --only-binary :all: "
            f"-d {folder} {' '.join(missing)}"
        )
    return [path for name, version in pins for path in by_name[_normal(name), version]]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


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


def prepared(plan: PythonPlan, blobs: Path, *, install: bool) -> Path | None:
    """Return a folder with the required packages that this environment lacks; None if it lacks none.

    Models with the same requirements share a folder, unless their archives hold other wheels. Only wheels are
    installed, whose code does not run here.

    Args:
        plan: the model's; it lists all requirements, since those of packages are not followed.
        blobs: the folder of its wheels.
        install: install what is missing.

    Raises:
        Unsupported: packages are missing and are not to be installed, or pip cannot install them.
        InvalidArgument: the folder cannot be written.
    """
    if not (unmet := _unmet(plan.requirements)):
        return None
    if not install:
        check(plan.requirements)
    lines = [" ".join((pin, *(f"--hash={each}" for each in plan.hashes.get(pin, ())))) for pin in sorted(unmet)]
    parts = [sys.version, platform.machine(), *lines, *sorted(plan.wheels.values())]
    folder = _root() / hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Another server may be installing the same.
        with folder.with_suffix(".lock").open("w") as lock, tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                wheels = {name: blobs / blob for name, blob in plan.wheels.items()}
                _install(lines, wheels, Path(scratch)).rename(folder)
    except OSError as error:
        raise write_error(f"packages cannot be installed into {folder}", error) from error
    return folder


def _install(lines: Sequence[str], wheels: Mapping[str, Path], scratch: Path) -> Path:
    """Install requirements into a new folder below ``scratch``, from the wheels if there are any."""
    named, began = ", ".join(line.partition(" ")[0] for line in lines), time.monotonic()
    log.warning("installing %s", named)
    (listed := scratch / "requirements.txt").write_text("\n".join(lines))
    command = [sys.executable, *_PIP, "--target", str(made := scratch / "packages"), "-r", str(listed)]
    if wheels:
        command += ["--isolated", "--no-index", "--find-links", str(links := scratch / "wheels")]
        links.mkdir()
        for name, path in wheels.items():
            (links / name).symlink_to(path.resolve())
    failure = _run(command)
    if failure:
        raise Unsupported(f"pip cannot install {named}: {failure}")
    log.warning("installed %s (%.1f s)", named, time.monotonic() - began)
    return made


def _run(command: Sequence[str]) -> str:
    """Run pip, and log its downloads as they begin; return why it failed, empty if it did not."""
    said = ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL
    ) as process:
        for line in process.stdout or ():
            if line.strip().startswith("Downloading"):
                log.warning("%s", line.strip()[:200])
            elif line.strip() and (line.startswith("ERROR") or not said.startswith("ERROR")):
                said = line.strip()[:500]
    return said if process.returncode else ""


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
