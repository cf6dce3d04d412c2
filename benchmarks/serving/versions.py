"""Compare the server of another commit with this tree's: ``python -m benchmarks.serving.versions COMMIT``.

Both run with the same interpreter and packages. The table shows this tree's figures divided by the commit's; over 1
means that this tree's is larger.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving.contestants import Ingot, Start
from benchmarks.serving.loads import WrongAnswer
from benchmarks.serving.pairs import build_folder, compare, options

MODELS = ("tiny", "wide")


@dataclass(frozen=True)
class Version(Ingot):
    """The server as it is in a folder."""

    folder: str = ""

    def environment(self, start: Start) -> dict[str, str]:
        return self.variables

    @property
    def variables(self) -> dict[str, str]:
        """The variables with which Python imports the folder's package, and not that of the working directory."""
        return {"PYTHONPATH": self.folder, "PYTHONSAFEPATH": "1"}

    def check(self) -> None:
        """Check that a server of this version runs the folder's code.

        Raises:
            SystemExit: it imports the package from elsewhere.
        """
        line = [sys.executable, "-c", "import ingot; print(ingot.__file__)"]
        found = subprocess.run(
            line, env={**os.environ, **self.variables}, check=True, capture_output=True, text=True
        ).stdout.strip()
        if not Path(found).is_relative_to(self.folder):
            raise SystemExit(f"the server of {self.folder} would import {found}")


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.versions")
    parser.add_argument("commit")
    parsed = options(parser, MODELS)
    old = checkout(parsed.commit, build_folder())
    versions = Version("new", folder=str(Path.cwd())), Version("old", folder=str(old))
    for version in versions:
        version.check()
    compare(*versions, parsed)


def checkout(commit: str, build: Path) -> Path:
    """Return a folder with the tree of a commit."""
    whole = subprocess.run(["git", "rev-parse", commit], check=True, capture_output=True, text=True).stdout.strip()
    folder = build / "versions" / whole
    if not folder.exists():
        folder.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", whole, "ingot"], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", str(folder)], check=True, input=archive)
    return folder


if __name__ == "__main__":
    try:
        main()
    except WrongAnswer as error:
        raise SystemExit(str(error)) from error
