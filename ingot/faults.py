"""Faults: the boundary of one request or change, whose fault must not reach the others, and the limit of the log.

:func:`attempt` makes an error of a fault; :func:`rate_limited_logger` writes repeated ones a few times and counts the
rest.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from ingot.errors import IngotError, InternalError

P = ParamSpec("P")
T = TypeVar("T")

# Number of records of one kind that are written per period, and the period in seconds.
_MOST = 5
_SECONDS = 10.0
# Number of kinds tracked, and the length of the message prefix that identifies one.
_KINDS = 256
_PREFIX = 200


class RateLimitFilter(logging.Filter):
    """Suppresses repeated errors of a logger; the next record that is written reports the number of suppressed ones.

    Records are of one kind if their messages differ only in numbers.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()  # loggers call filters from any thread
        self._seen: dict[str, tuple[float, int]] = {}  # by kind: start of the period and number of records since

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        message = record.getMessage()
        kind = re.sub(r"\d+", "", message[:_PREFIX])
        now = self._clock()
        with self._lock:
            began, count = self._seen.get(kind, (now, 0))
            if now >= began + _SECONDS:
                if count > _MOST:
                    record.msg, record.args = f"{message} ({count - _MOST} more like this were not logged)", ()
                began, count = now, 0
            if len(self._seen) >= _KINDS and kind not in self._seen:
                self._seen.clear()
            self._seen[kind] = began, count + 1
            return count < _MOST


def rate_limited_logger(name: str) -> logging.Logger:
    """Return the logger of a module with a rate limit for repeated errors. Call it once per name."""
    logger = logging.getLogger(name)
    logger.addFilter(RateLimitFilter())
    return logger


log = rate_limited_logger(__name__)


def public_error(error: Exception, failure: str) -> IngotError:
    """Return the error to answer a request with: a deliberate one as it is, any other logged, as an internal one.

    Args:
        error: what was raised.
        failure: what failed, as a clause for the log.
    """
    if isinstance(error, IngotError):
        return error
    log.error("%s", failure, exc_info=error)
    return InternalError(f"{failure}: {type(error).__name__}: {error}")


def attempt(failure: str, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | IngotError:
    """Run a step of one request, and return its result, or :func:`public_error` of what it raises."""
    try:
        return step(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the boundary of one request: its fault must not reach the others
        return public_error(error, failure)


async def attempt_async(failure: str, step: Awaitable[T]) -> T | IngotError:
    """Do the same as :func:`attempt`, with a coroutine."""
    try:
        return await step
    except Exception as error:  # noqa: BLE001 - the boundary of one request: its fault must not reach the others
        return public_error(error, failure)
