"""Smaller batches for a while after there was too little memory for one: pure policy, as the scheduler."""

from __future__ import annotations

import math

# Seconds until larger batches are tried again: at first, and at most.
_SOONEST, _LATEST = 10.0, 600.0


class MemoryCap:
    """The most samples of a batch for which there is memory, as far as failures have shown.

    A failed size is halved, and doubled again after a while. If it then fails again soon, the next attempt is later.

    Attributes:
        samples: the most samples; infinite until a batch fails.
    """

    def __init__(self) -> None:
        self.samples: float = math.inf
        self._failed = math.inf
        self._wait = _SOONEST
        self._next = 0.0

    def lower(self, samples: int, now: float) -> float:
        """Record that a batch of so many samples failed; return in how many seconds larger ones are tried again."""
        lowered = max(1, samples // 2)
        if lowered < self.samples:  # not one of those that were running when another failed
            soon = self._failed < math.inf and now < self._next + _LATEST
            self._wait = min(2 * self._wait, _LATEST) if soon else _SOONEST
            self.samples, self._failed = float(lowered), float(samples)
        self._next = now + self._wait
        return self._wait

    def allowed(self, now: float) -> float:
        """Return the most samples now."""
        if now >= self._next and self.samples < math.inf:
            self.samples = math.inf if self.samples >= self._failed else 2 * self.samples
            self._next = now + self._wait
        return self.samples
