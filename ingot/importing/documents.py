"""Small files that come with a model, such as the names of its classes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

from ingot.importing.members import Members

_SUFFIXES = (".json", ".txt", ".csv", ".yaml", ".yml")
MAX_BYTES = 1 << 20
MAX_DOCUMENTS = 32
# Names that a note gives before it says how many more there are.
_NAMED = 8


def documents(members: Members, names: Iterable[str]) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return those files that are carried along, by name, and a note on the others, if there are any.

    Raises:
        InvalidArgument: one is damaged.
    """
    taken: dict[str, bytes] = {}
    left: list[str] = []
    for name in sorted(names):
        small = PurePosixPath(name).suffix.lower() in _SUFFIXES and members.sizes[name] <= MAX_BYTES
        if small and len(taken) < MAX_DOCUMENTS:
            taken[name] = members.read(name, MAX_BYTES)
        else:
            left.append(name)
    if not left:
        return taken, ()
    shown = ", ".join(left[:_NAMED]) + (f" and {len(left) - _NAMED} more" if len(left) > _NAMED else "")
    return taken, (f"files that are not taken over: {shown}",)
