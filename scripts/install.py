"""Install Ingot into this environment for development, with some of its extras.

Usage: python scripts/install.py EXTRAS

pip prints several lines for each of some hundred packages; of these, only large downloads are shown, and all of them if
it fails. pip runs twice before that: an index that does not answer for one package looks like a conflict of versions.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_DOWNLOAD = re.compile(r"Downloading (?:\S*/)?([\w.]+)-\S+ \((\d+)(?:\.\d+)? ([kMG])B\)")
_LARGE_MB = 10


def shown(line: str) -> str | None:
    """Return the text to print for a line of pip's; None for nothing."""
    if (download := _DOWNLOAD.search(line)) is not None:
        name, count, unit = download.groups()
        return (
            f"  downloading {name} ({count} {unit}B)"
            if unit == "G" or (unit == "M" and int(count) >= _LARGE_MB)
            else None
        )
    if line.startswith("Installing collected packages:"):
        return f"  installing {line.count(',') + 1} packages"
    return None


def main(extras: str) -> int:
    """Run pip, a second time if it fails, and return its exit code."""
    code, lines = _install(extras)
    if code:
        print("  pip failed; it runs once more", flush=True)
        code, lines = _install(extras)
    if code:
        sys.stderr.writelines(lines)
    return code


def _install(extras: str) -> tuple[int, list[str]]:
    """Return the exit code of pip and the lines that it printed."""
    options = ["--disable-pip-version-check", "--progress-bar", "off", "-c", "constraints.txt"]
    command = [sys.executable, "-m", "pip", "install", *options, "-e", f".[{extras}]"]
    lines: list[str] = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        for line in pip.stdout or ():
            lines.append(line)
            if (text := shown(line)) is not None:
                print(text, flush=True)
    return pip.returncode, lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
