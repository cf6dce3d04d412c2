"""Keys of requests: the form of their inputs, the sequence that they belong to, and caches of what they mean."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from ingot.tensors import Array

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

# Entries of a memo, and the most bytes around the tensors of a request that is remembered.
_MEMO_ENTRIES = 512
MEMO_BYTES = 4 << 10

InputKey = tuple[Any, ...]
"""The names, types and shapes of a request's inputs; requests with equal keys match a signature alike."""


def key_of(inputs: Mapping[str, Array]) -> InputKey:
    """Return the names, types and shapes of inputs."""
    return tuple((name, array.dtype, array.shape) for name, array in inputs.items())


class Step(NamedTuple):
    """The sequence that a request belongs to, and whether the request starts or ends it.

    Attributes:
        sequence: 16 bytes that identify it.
        start: whether it is the first of the sequence; a sequence of this name that is open is dropped.
        end: whether it is the last.
        name: what the client calls it, for models that have it as an input.
    """

    sequence: bytes
    start: bool
    end: bool
    name: int | str = ""

    @classmethod
    def of(cls, name: int | str, start: bool, end: bool) -> Step:
        """Return a step of the sequence that clients call ``name``; the number 1 and the text "1" are different."""
        return cls(_digest(f"{type(name).__name__}:{name}".encode()), start, end, name)

    def owned_by(self, client: Hashable) -> Step:
        """Return the step of the client's own sequence of this name.

        Clients with a key or certificate cannot reach each other's sequences. Others are known by their connection
        only, and a sequence may use several.
        """
        if not isinstance(client, str):
            return self
        return self._replace(sequence=_digest(self.sequence + client.encode()))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


class BoundedCache(dict[K, V]):
    """A dictionary that drops its oldest entry when a new one exceeds the limit.

    Look up with ``get``; add with :meth:`keep`.

    Args:
        limit: most entries.
    """

    def __init__(self, limit: int):
        super().__init__()
        self._limit = limit

    def keep(self, key: K, value: V) -> None:
        """Add a value."""
        if len(self) >= self._limit and key not in self:
            del self[next(iter(self))]
        self[key] = value


class Memo(Generic[K, V]):
    """A bounded cache of what requests mean, which learns a key at its second occurrence.

    Requests that never repeat then do not evict those that do.
    """

    def __init__(self) -> None:
        self._known: BoundedCache[K, V] = BoundedCache(_MEMO_ENTRIES)
        self._seen: BoundedCache[int, None] = BoundedCache(_MEMO_ENTRIES)
        self.get = self._known.get
        self.keep = self._known.keep

    def is_new(self, key: K) -> bool:
        """Return whether a key occurs for the first time, and note that it has occurred."""
        seen = hash(key)
        if seen in self._seen:
            return False
        self._seen.keep(seen, None)
        return True
