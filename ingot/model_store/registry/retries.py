"""Retries of registry calls: transient failures are retried a few times, at growing intervals."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ingot.errors import Transient, Unavailable
from ingot.model_store.blobs.transfer import Transfer

Result = TypeVar("Result")

LONGEST_RETRY_AFTER = 60.0
"""Seconds; calls are not retried if the registry asks for a longer wait."""


@dataclass(frozen=True)
class Retries:
    """Number of attempts, and the waits between them: ``first`` seconds, doubling up to ``longest``.

    Waits are randomly shortened by up to a half, so that many clients do not return simultaneously.
    """

    tries: int = 5
    first: float = 0.4
    longest: float = 10.0

    def run(self, call: Callable[[], Result]) -> Result:
        """Make a call until it succeeds.

        Raises:
            Unavailable: it failed every time.
        """
        failed = 0
        while True:
            try:
                return call()
            except Transient as error:
                failed += 1
                self.wait(failed, error)

    def wait(self, failed: int, error: Transient) -> None:
        """Wait after ``failed`` failures in a row.

        Raises:
            Unavailable: it was the last attempt, or the registry asks for too long a wait.
        """
        if failed >= self.tries:
            raise Unavailable(f"{error} (tried {failed} times)") from error
        if error.after > LONGEST_RETRY_AFTER:
            raise Unavailable(f"{error}; it asks to retry in {error.after:.0f} seconds") from error
        pause = min(self.longest, self.first * 2 ** (failed - 1))
        transfer = Transfer.of_this_thread()
        sleep = time.sleep if transfer is None else transfer.pause
        sleep(max(error.after, pause * random.uniform(0.5, 1)))
