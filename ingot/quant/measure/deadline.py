"""The time that a search may take, from the first look at the data to the written evidence."""

from __future__ import annotations

import math
import time


class TimeUp(Exception):
    """The time for a search is over."""


class Deadline:
    """A moment at which work must end.

    Args:
        seconds: from now; None for no limit.
    """

    def __init__(self, seconds: float | None = None):
        self._end = math.inf if seconds is None else self.now + seconds

    @property
    def now(self) -> float:
        """A time in seconds that never goes back."""
        return time.monotonic()

    @property
    def left(self) -> float:
        """The seconds that are left; infinity without a limit."""
        return self._end - self.now

    def check(self, needed: float = 0.0) -> None:
        """Check that some seconds are left.

        Raises:
            TimeUp: they are not.
        """
        if self.left < needed:
            raise TimeUp
