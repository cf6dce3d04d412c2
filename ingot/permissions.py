"""The permissions of a model in Python: what its process may do beyond computing, reading and temporary files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from ingot.errors import InvalidArgument, Unsupported

Permission = Literal["network", "network-at-load", "programs", "write"]
PERMISSIONS: tuple[Permission, ...] = get_args(Permission)
NETWORK, NETWORK_AT_LOAD, PROGRAMS, WRITE = PERMISSIONS
NAMES = ", ".join(PERMISSIONS)
"""For messages and help."""


def parsed(text: str | None) -> tuple[str, ...]:
    """Return the permissions of a setting, such as ``network,programs``.

    Raises:
        InvalidArgument: one is not known, or two contradict each other.
    """
    found = tuple(dict.fromkeys(part for part in (text or "").split(",") if part))
    if unknown := [each for each in found if each not in PERMISSIONS]:
        raise InvalidArgument(f"--permit: '{unknown[0]}' is not a permission; there are {NAMES}")
    if NETWORK_AT_LOAD in found and PROGRAMS in found and NETWORK not in found:
        raise InvalidArgument(
            f"a program that a model starts while it loads keeps the network, so {NETWORK_AT_LOAD} and {PROGRAMS} "
            f"exclude each other; permit {NETWORK},{PROGRAMS}"
        )
    return found


def check(needed: Sequence[str], permitted: Sequence[str]) -> None:
    """Check that a server permits what an archive needs.

    Raises:
        Unsupported: it does not; the message names the setting.
    """
    also = (NETWORK_AT_LOAD,) if NETWORK in permitted else ()
    if missing := [each for each in needed if each not in (*permitted, *also)]:
        raise Unsupported(
            f"the model needs the permission {' and '.join(missing)}, which this server does not give; if you trust "
            f"its source, allow it with --permit {','.join(dict.fromkeys((*permitted, *missing)))}"
        )
