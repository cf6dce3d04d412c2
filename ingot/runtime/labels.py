"""The names of classes, from a file with a line for each."""

from __future__ import annotations

from pathlib import Path

from ingot.arrays import open_regular
from ingot.errors import InvalidArgument

_MOST_BYTES = 4 << 20


def read_labels(path: Path | None) -> tuple[str, ...]:
    """Return the lines of a file; none without one.

    Raises:
        InvalidArgument: it cannot be read, is not text, or is too large.
    """
    if path is None:
        return ()
    try:
        with open_regular(path) as file:
            raw = file.read(_MOST_BYTES + 1)
        text = raw.decode().replace("\r\n", "\n").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the labels in {path} cannot be read: {error}") from error
    if len(raw) > _MOST_BYTES:
        raise InvalidArgument(f"the labels in {path} have over {_MOST_BYTES >> 20} MiB")
    return tuple(text.split("\n")) if text else ()
