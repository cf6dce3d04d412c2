"""Recorded traffic: requests that a server has answered, in the format of an archive's goldens."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ingot.errors import IngotError, InvalidArchive, InvalidArgument
from ingot.model_store import Golden
from ingot.model_store.format import goldens
from ingot.steps import OpenedSteps, Values
from ingot.tensors.arrays import open_regular

OpenSteps = Callable[[], OpenedSteps | None]
"""Returns the steps of a model; None if it has none."""

MAX_FILE = 256 << 20
"""The largest file that is read; a server starts a new one long before."""


def find(folder: Path) -> list[Path]:
    """Return the files of recorded requests below a folder, in order of their paths."""
    return sorted(path for path in folder.rglob("*.safetensors") if not path.name.startswith("."))  # being written


def read(files: Sequence[Path], what: str, steps: OpenSteps) -> Iterator[tuple[str, Any]]:
    """Yield the graph's inputs of each recorded request, with its name for messages.

    Args:
        files: of recorded requests.
        what: the data's name in messages.
        steps: returns the steps of the model, which make tensors of raw requests.

    Raises:
        InvalidArgument: a file cannot be read, is larger than :data:`MAX_FILE`, or is a link, a device or a pipe; or a
            raw request does not fit the steps.
    """
    opened = functools.cache(steps)
    for path in files:
        for number, case in enumerate(cases(path)):
            # Copied: as views, they would keep the whole file in memory, with all outputs.
            place = f"{what}, request {number} of {path},"
            if case.raw and not case.inputs:
                yield place, _tensors(opened(), case.raw, place)
            else:
                yield place, {name: array.copy() for name, array in case.inputs.items()}


def cases(path: Path) -> Sequence[Golden]:
    """Return the requests of a file, with their answers.

    Raises:
        InvalidArgument: as for :func:`read`.
    """
    try:
        return goldens.decode(_content(path))
    except (InvalidArchive, OSError) as error:
        raise InvalidArgument(f"{path} is not recorded traffic: {error}") from error


def _tensors(steps: OpenedSteps | None, raw: Values, place: str) -> Values:
    if steps is None:
        raise InvalidArgument(f"{place} has raw inputs, but the model has no steps that make tensors of them")
    try:
        steps.check(raw)
        return steps.tensors(steps.prepare(raw))
    except IngotError as error:
        raise InvalidArgument(f"{place} {error}") from error


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
