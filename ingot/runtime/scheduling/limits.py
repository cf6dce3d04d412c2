"""Bounds of batches and of the queue, and the room that one client may use."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

from ingot.errors import Unavailable

# A client may use this multiple of the free room in the queue: seven eighths of the queue if it is alone.
_TIMES_FREE: Final = 7


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


def check_room(
    limits: Limits,
    waiting: int,
    queued: int,
    nbytes: int,
    client: Hashable,
    held: Callable[[Hashable], tuple[int, int]],
) -> None:
    """Check that a queue has room for another request, and that no client fills the queue alone.

    Args:
        limits: of the queue.
        waiting: requests in the queue.
        queued: their bytes.
        nbytes: bytes of the new request.
        client: who sent the request; None for a request that counts for no client.
        held: returns how many of the requests a client has, and their bytes.

    Raises:
        Unavailable: the queue is full, or the client has its share.
    """
    if waiting >= limits.max_queue or (waiting and queued + nbytes > limits.max_queue_bytes):
        raise Unavailable(f"the queue is full ({waiting} requests wait); send fewer at once, or try later")
    room, free = _TIMES_FREE * (limits.max_queue - waiting), _TIMES_FREE * (limits.max_queue_bytes - queued)
    if client is None or (waiting < room and queued + nbytes <= free):
        return
    entries, size = held(client)
    if entries and (entries >= room or size + nbytes > free):
        raise Unavailable(
            f"{entries} requests of this client wait, and the rest of the queue is kept for others; send fewer at "
            "once, or try later"
        )
