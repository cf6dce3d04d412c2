"""Waiting in an event loop for another thread or a later tick."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def wait_until(true: Callable[[], object], seconds: float = 30) -> None:
    """Let the loop run until something is so; fails after ``seconds``."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not become so in time"
        await asyncio.sleep(0)
