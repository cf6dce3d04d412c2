"""What can be called: one message to one, or messages to messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

Unary = Callable[[bytes], Awaitable[bytes]]
Streaming = Callable[[AsyncIterator[bytes]], AsyncGenerator[bytes, None]]


@dataclass(frozen=True, slots=True)
class Method:
    """One call of a service, by one of the two ways; ``many`` says that it takes more than one message."""

    unary: Unary | None = None
    streaming: Streaming | None = None
    many: bool = False
