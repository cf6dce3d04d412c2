"""When a client sends a request again."""

from __future__ import annotations

import random
import time

from ingot.errors import IngotError, InvalidArgument, Unreached

# Seconds before the first retry, if the server does not say; they double with each.
_FIRST = 0.1
# Most that is added to a wait, as a share of it, so that clients do not come back together.
_JITTER = 0.25


class Retries:
    """The tries of one request.

    Only requests that the server refused for now, or that did not reach it, are sent again.

    Args:
        most: retries.
        timeout: seconds for all tries and the waits between them.
        repeatable: whether it may be sent again after the server has seen it; a step of a sequence may not.
    """

    def __init__(self, most: int, timeout: float, *, repeatable: bool = True):
        self._most = most
        self._until = time.monotonic() + timeout
        self._repeatable = repeatable
        self._tried = 0

    @property
    def left(self) -> float:
        """Seconds for the next try."""
        return max(0.0, self._until - time.monotonic())

    def wait(self, error: IngotError) -> float:
        """Return the seconds to wait before the request is sent again.

        Raises:
            IngotError: it is not to be sent again; ``error`` itself.
        """
        after = error.retry_after
        if after is None or self._tried >= self._most or not (self._repeatable or isinstance(error, Unreached)):
            raise error
        seconds: float = max(after, _FIRST * 2**self._tried) * random.uniform(1, 1 + _JITTER)
        if seconds >= self.left:
            raise error
        self._tried += 1
        return seconds


def checked(retries: object) -> int:
    """Return a number of retries.

    Raises:
        InvalidArgument: it is not one.
    """
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise InvalidArgument(f"retries is {retries!r}; it must be a whole number, 0 for none")
    return retries
