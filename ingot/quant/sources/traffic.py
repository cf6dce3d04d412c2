"""Recorded traffic: requests that a server has answered, kept in the form of an archive's goldens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ingot.errors import InvalidArchive, InvalidArgument
from ingot.model_store import goldens


def find(folder: Path) -> list[Path]:
    """Return the files of recorded requests below a folder, in order of their paths."""
    return sorted(path for path in folder.rglob("*.safetensors") if not path.name.startswith("."))  # being written


def read(files: Sequence[Path], what: str) -> Iterator[tuple[str, Any]]:
    """Yield the inputs of each recorded request, with its name for messages.

    Raises:
        InvalidArgument: a file cannot be read.
    """
    for path in files:
        try:
            cases = goldens.decode(path.read_bytes())
        except (InvalidArchive, OSError) as error:
            raise InvalidArgument(f"{path} is not recorded traffic: {error}") from error
        for number, case in enumerate(cases):
            yield f"{what}, request {number} of {path},", case.inputs
