"""Rate-limits repeated errors in the log, and counts the suppressed ones."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable

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
