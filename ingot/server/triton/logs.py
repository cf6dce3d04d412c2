"""What the server logs, as clients read and change it: Triton's extension logging."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ingot.errors import InvalidArgument, PermissionDenied
from ingot.serving.deployment import CHANGES

log = logging.getLogger(CHANGES)

_LOGGER = logging.getLogger("ingot")
# From the most detailed: a level includes those behind it, unlike Triton's.
_FLAGS = {"log_info": logging.INFO, "log_warning": logging.WARNING, "log_error": logging.ERROR}
_VERBOSE = "log_verbose_level"
# A client that chose the file could write any (CVE-2024-0087).
_FIXED = {"log_file": "", "log_format": "default"}


class LogSettings:
    """The level of the server's log records.

    Args:
        changeable: whether clients may change it.
    """

    def __init__(self, *, changeable: bool = False):
        self.changeable = changeable
        self._before: int | None = None

    @property
    def content(self) -> dict[str, Any]:
        """The settings as Triton names them."""
        level = _LOGGER.getEffectiveLevel()
        flags = {name: level <= own for name, own in _FLAGS.items()}
        return {"log_file": "", **flags, _VERBOSE: int(level <= logging.DEBUG), "log_format": "default"}

    def change(self, wanted: Mapping[str, Any], client: object, *, managed: bool = False) -> None:
        """Change some of the settings; the others follow, as each level includes the more severe ones.

        Args:
            wanted: by name; the others stay.
            client: who wants it, for the log.
            managed: whether that is a client of the management listener, which may always change them.

        Raises:
            PermissionDenied: the client may not change them.
            InvalidArgument: a setting is unknown, has a wrong value, or contradicts another.
        """
        if not self.changeable and not managed:
            raise PermissionDenied(
                "clients may not change what this server logs; --log-control allows it to all, and the management "
                "listener to its clients"
            )
        for name, value in wanted.items():
            _check(name, value)
        on = [level for name, level in _FLAGS.items() if wanted.get(name) is True]
        off = [level for name, level in _FLAGS.items() if wanted.get(name) is False]
        verbose = wanted.get(_VERBOSE)
        on += [logging.DEBUG] if verbose else []
        off += [logging.DEBUG] if verbose == 0 and verbose is not None else []
        if on and off and min(on) <= max(off):
            raise InvalidArgument(
                "the log settings contradict each other: log_info needs log_warning, which needs log_error; and "
                "log_verbose_level needs log_info"
            )
        level = _LOGGER.getEffectiveLevel()
        if on:
            level = min(level, *on)
        if off:
            level = max(level, max(off) + 10)  # the next severe one
        if level != _LOGGER.getEffectiveLevel():
            self._before = _LOGGER.level if self._before is None else self._before
            log.info("%s set the log level to %s", client or "a client", logging.getLevelName(level).lower())
            _LOGGER.setLevel(level)

    def close(self) -> None:
        """Restore the level, which belongs to the whole program."""
        if self._before is not None:
            _LOGGER.setLevel(self._before)
            self._before = None


def _check(name: str, value: object) -> None:
    if name in _FIXED:
        if value != _FIXED[name]:
            raise InvalidArgument(f"'{name}' cannot be changed while the server runs; it is '{_FIXED[name]}'")
    elif name in _FLAGS:
        if not isinstance(value, bool):
            raise InvalidArgument(f"'{name}' must be true or false")
    elif name == _VERBOSE:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidArgument(f"'{name}' must be a whole number, 0 for no verbose messages")
    else:
        known = ", ".join((*_FIXED, *_FLAGS, _VERBOSE))
        raise InvalidArgument(f"there is no log setting '{name[:100]}'; known: {known}")
