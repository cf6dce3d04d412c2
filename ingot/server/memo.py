"""Requests recognized by the bytes around their tensors, so that a repeated request is looked up instead of parsed."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from ingot.runtime import key_of
from ingot.server.limits import BoundedCache
from ingot.server.requests import InferRequest, Template

_ENTRIES = 512
MAX_BYTES = 4 << 10
"""Most bytes around the tensors of a request that is remembered."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Memo(Generic[K, V]):
    """A bounded cache of what requests mean, which learns a key at its second occurrence.

    Requests that never repeat then do not evict those that do.
    """

    def __init__(self) -> None:
        self._known: BoundedCache[K, V] = BoundedCache(_ENTRIES)
        self._seen: BoundedCache[int, None] = BoundedCache(_ENTRIES)
        self.get = self._known.get
        self.keep = self._known.keep

    def is_new(self, key: K) -> bool:
        """Return whether a key occurs for the first time, and note that it has occurred."""
        seen = hash(key)
        if seen in self._seen:
            return False
        self._seen.keep(seen, None)
        return True


class Pattern(NamedTuple):
    """A request without its id and the values of its raw tensors.

    Attributes:
        template: what the request asks for.
        tensors: name, shape, type and offset of each.
        size: where the last tensor ends.
    """

    template: Template
    tensors: tuple[tuple[str, tuple[int, ...], np.dtype[Any], int], ...]
    size: int

    @classmethod
    def of(cls, request: InferRequest, gaps: Iterable[int] = ()) -> Pattern | None:
        """Return a request's pattern, or None if its tensors must be checked each time or it is too large to keep.

        Args:
            request: with raw tensors, in their order.
            gaps: bytes before each tensor, behind the one before it; by default none.
        """
        arrays = request.inputs.values()
        # Text and truth values are checked each time.
        if not request.template.light or any(array.dtype.kind in "Ob" or not array.size for array in arrays):
            return None
        tensors, end = [], 0
        for (name, array), gap in zip(request.inputs.items(), itertools.chain(gaps, itertools.repeat(0)), strict=False):
            tensors.append((name, array.shape, array.dtype, end + gap))
            end += gap + array.nbytes
        request.template.key = key_of(request.inputs)
        return cls(request.template, tuple(tensors), end)

    def request(self, data: bytes, start: int, identifier: str, left: float | None = None) -> InferRequest:
        """Return the request with the tensors of ``data``, as views; offsets count from ``start``."""
        inputs = {}
        for name, shape, dtype, offset in self.tensors:
            inputs[name] = np.ndarray(shape, dtype, data, start + offset)
        return InferRequest(self.template, inputs, identifier, left)
