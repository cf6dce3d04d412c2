"""The growth of a server's memory: samples over time, and the slope of a line through them."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.serving.processes import Process

SETTLING = 0.3  # the share of the time in which caches, pools and arenas may still fill
TEN_MINUTES = 600.0


@dataclass(frozen=True)
class Growth:
    """A line through the samples after :data:`SETTLING`: percent of their mean in ten minutes, with a 95% interval."""

    percent: float
    error: float
    megabytes: float

    def leaks(self, limit: float = 1.0) -> bool:
        """Whether memory certainly grows by more than a limit, in percent in ten minutes."""
        return self.percent - self.error > limit


def growth(times: list[float], sizes: list[float]) -> Growth:
    """Fit a line. ``times`` are in seconds from the start, ``sizes`` in bytes.

    The interval takes neighbouring samples as dependent: it uses one degree of freedom for each ten samples.

    Raises:
        ValueError: fewer than 20 samples remain.
    """
    at, size = np.array(times), np.array(sizes)
    kept = at >= SETTLING * at[-1]
    at, size = at[kept], size[kept]
    if len(at) < 20:
        raise ValueError(f"{len(at)} samples of memory are too few for a slope")
    slope, base = np.polyfit(at, size, 1)
    left = size - (slope * at + base)
    free = max(len(at) / 10 - 2, 1)
    error = np.sqrt((left**2).mean() * len(at) / free / ((at - at.mean()) ** 2).sum()) if left.any() else 0.0
    scale = 100 * TEN_MINUTES / size.mean()
    return Growth(float(scale * slope), float(1.96 * scale * error), float(size.mean() / (1 << 20)))


class Watch(threading.Thread):
    """Samples the memory (PSS) of a server's processes until :meth:`stop`."""

    def __init__(self, server: Process, interval: float):
        super().__init__(daemon=True)
        self.times: list[float] = []
        self.sizes: list[float] = []
        self._server = server
        self._interval = interval
        self._stop_requested = threading.Event()
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        while not self._stop_requested.wait(self._interval):
            self.sizes.append(self._server.usage().memory)
            self.times.append(time.monotonic() - began)

    def stop(self) -> Growth:
        self._stop_requested.set()
        self.join()
        return growth(self.times, self.sizes)
