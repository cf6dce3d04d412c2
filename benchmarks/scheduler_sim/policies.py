"""Policies of other servers, reimplemented from their code with the scheduler's interface."""

from __future__ import annotations

from collections import deque

import numpy as np

from ingot.errors import IngotError, Unavailable
from ingot.runtime.scheduling.entry import Entry


class Fixed:
    """Waits until ``most`` are there or the first has waited ``delay`` seconds; in order of arrival.

    TorchServe (``maxBatchDelay``) and mosec (``max_wait_time``) do the same. The queue holds ``queue`` requests: by
    default 1,024, as mosec's. ``most`` of 1 disables batching.
    """

    def __init__(self, delay: float = 0.005, most: int = 32, queue: int = 1024):
        self.wake: float | None = None
        self.late: list[Entry] = []
        self._delay = delay if most > 1 else 0
        self._most = most
        self._queue = queue
        self._waiting: deque[Entry] = deque()

    def offer(self, entry: Entry, now: float) -> IngotError | None:
        if len(self._waiting) >= self._queue:
            return Unavailable("the queue is full")
        self._waiting.append(entry)
        return None

    def take(self, now: float) -> list[Entry]:
        self.wake = None
        if not self._waiting:
            return []
        due = self._waiting[0].arrived + self._delay
        if len(self._waiting) < self._most and due > now:
            self.wake = due
            return []
        return [self._waiting.popleft() for _ in range(min(self._most, len(self._waiting)))]

    def finish(self, batch: list[Entry], now: float, seconds: float | None = None) -> None: ...


class Regression:
    """BentoML's adaptive batching: a straight line through recent calls says whether to wait one tick more.

    After ``CorkDispatcher`` and ``Optimizer`` of ``bentoml/_internal/marshal/dispatcher.py``, BentoML 1.4.40: calls of
    1, 1, 1, 2 and 3 requests first; then, each millisecond, the oldest is dropped if it could not be answered within
    ``max_latency`` together with all that wait, and the batch goes out unless waiting promises less waiting in sum
    than the recent average. One call at a time.
    """

    TICK = 0.001
    KEPT = 50
    REFRESH = 5.0
    TRAINING = (1, 1, 1, 2, 3)

    def __init__(self, max_latency: float, most: int = 100):
        self.wake: float | None = None
        self.late: list[Entry] = []
        self._latency = max_latency
        self._most = most
        self._waiting: deque[Entry] = deque()
        self._calls: deque[tuple[int, float, float]] = deque(maxlen=self.KEPT)
        self._slope, self._base, self._wait = min(2, max_latency * 2 / 30), min(1, max_latency / 30), 0.0
        self._count = 0
        self._refreshed = -self.REFRESH
        self._began = (0.0, 0.0)

    def offer(self, entry: Entry, now: float) -> IngotError | None:
        self._waiting.append(entry)
        return None

    def take(self, now: float) -> list[Entry]:
        self.wake = None
        waiting = self._waiting
        if self._count < len(self.TRAINING):
            return self._pop(min(self.TRAINING[self._count], len(waiting)), now)
        while waiting:
            first, last, count = now - waiting[0].arrived, now - waiting[-1].arrived, len(waiting)
            if count > 1 and first + self._slope * count + self._base >= self._latency:
                self.late.append(waiting.popleft())
                continue
            if count < self._most and count * (last + self.TICK + self._slope) <= 0.95 * self._wait:
                self.wake = now + self.TICK
                return []
            return self._pop(min(count, self._most), now)
        return []

    def finish(self, batch: list[Entry], now: float, seconds: float | None = None) -> None:
        self._count += 1
        began, wait = self._began
        if self._count <= 2:
            return
        self._calls.append((len(batch), now - began, wait if self._count > len(self.TRAINING) else 0.0))
        if self._count <= len(self.TRAINING) or now - self._refreshed >= self.REFRESH:
            self._refreshed = now
            sizes = [(size, 1.0) for size, _, _ in self._calls]
            slope, base = np.linalg.lstsq(sizes, [taken for _, taken, _ in self._calls], rcond=None)[0]
            self._slope, self._base = max(1e-6, float(slope)), max(0.0, float(base))
            self._wait = sum(wait for _, _, wait in self._calls) / len(self._calls)

    def _pop(self, count: int, now: float) -> list[Entry]:
        batch = [self._waiting.popleft() for _ in range(count)]
        if batch:
            self._began = (now, now - batch[0].arrived)
        return batch
