"""What can be called: one message to one, or messages to messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

Unary = Callable[[bytes], Awaitable[bytes]]
Streaming = Callable[[AsyncIterator[bytes]], AsyncIterator[bytes]]


@dataclass(frozen=True, slots=True)
class Method:
    """One call of a service, by one of the two ways."""

    unary: Unary | None = None
    streaming: Streaming | None = None
