"""Bounds of batches and of the queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PATIENCE: Final = 1.0
"""Seconds for which a request can be overtaken by later requests with tighter deadlines, within one priority."""
LONGEST: Final = 1 / 2
"""The longest batch, as a share of the time that requests allow: a request that arrives just after a batch began waits
for that batch and then for its own."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one batch and of the queue.

    ``max_batch`` is in samples; an entry with more samples runs alone. The queue is bounded in requests and in bytes.
    ``max_delay`` is the longest time, in seconds, that an idle engine waits for more samples; None derives it from the
    latency profile.
    """

    max_batch: int = 64
    max_queue: int = 4096
    max_queue_bytes: int = 256 << 20
    max_delay: float | None = None
