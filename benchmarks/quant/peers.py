"""The peers' environments: one per requirements file in this folder, made at first use."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path


def python_of(environment: str, cache: Path) -> Path:
    """Return the interpreter of an environment, with all that its requirements file lists.

    Args:
        environment: the NAME of ``requirements-NAME.txt``; empty for the one that runs this.
        cache: the folder that holds environments.

    Raises:
        CalledProcessError: pip could not install it.
    """
    if not environment:
        return Path(sys.executable)
    requirements = Path(__file__).with_name(f"requirements-{environment}.txt")
    digest = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()[:12]
    folder = cache / "environments" / f"{environment}-{digest}"
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "-r", str(requirements)], check=True)
        done.touch()
    return python
