"""Detects exhaustion of file descriptors, in which the event loop silently closes new connections."""

from __future__ import annotations

import asyncio
import errno
import logging
import os

from ingot.faultlog import RateLimitFilter
from ingot.runtime import Metrics

log = logging.getLogger(__name__)
log.addFilter(RateLimitFilter())

_EVERY = 1.0  # seconds
_NONE_LEFT = (errno.EMFILE, errno.ENFILE)


class Descriptors:
    """Checks each second that a file can be opened; counts failures, and logs when they start and stop.

    Args:
        metrics: where to count.
    """

    def __init__(self, metrics: Metrics):
        self._count = metrics.out_of_files
        self._out = False
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin; call in the event loop."""
        self._look(asyncio.get_running_loop())

    def stop(self) -> None:
        """End."""
        if self._next is not None:
            self._next.cancel()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._next = loop.call_later(_EVERY, self._look, loop)
        out = not _can_open()
        if out:
            self._count.inc()
        if out and not self._out:
            log.error(
                "out of file descriptors: new connections are closed unanswered; raise the limit (ulimit -n), or let "
                "clients keep fewer connections"
            )
        elif self._out and not out:
            log.warning("file descriptors are available again; accepting connections")
        self._out = out


def _can_open() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in _NONE_LEFT
    return True
