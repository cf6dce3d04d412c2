"""Recorded traffic: requests that a server has answered, in the format of an archive's goldens."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ingot.errors import InvalidArchive, InvalidArgument
from ingot.model_store.format import goldens
from ingot.tensors.arrays import open_regular

MAX_FILE = 256 << 20
"""The largest file that is read; a server starts a new one long before."""


def find(folder: Path) -> list[Path]:
    """Return the files of recorded requests below a folder, in order of their paths."""
    return sorted(path for path in folder.rglob("*.safetensors") if not path.name.startswith("."))  # being written


def read(files: Sequence[Path], what: str) -> Iterator[tuple[str, Any]]:
    """Yield the inputs of each recorded request, with its name for messages.

    Raises:
        InvalidArgument: a file cannot be read, is larger than :data:`MAX_FILE`, or is a link, a device or a pipe.
    """
    for path in files:
        try:
            cases = goldens.decode(_content(path))
        except (InvalidArchive, OSError) as error:
            raise InvalidArgument(f"{path} is not recorded traffic: {error}") from error
        for number, case in enumerate(cases):
            # Copied: as views, they would keep the whole file in memory, with all outputs.
            inputs = {name: array.copy() for name, array in (case.inputs or case.raw).items()}
            yield f"{what}, request {number} of {path},", inputs


def _content(path: Path) -> bytes:
    """Return a file's bytes. Others may write into the folder: links are not followed, pipes not waited for."""
    try:
        with open_regular(path, follow=False) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_FILE:
                raise OSError(f"it is larger than {MAX_FILE >> 20} MiB")
            return file.read(size)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError("it is a symbolic link") from error
        raise
