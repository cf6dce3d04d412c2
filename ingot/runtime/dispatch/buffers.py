"""Memory for batches that is used again: the inputs of large batches, and those of engines with memory of their own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from ingot.runtime.engine import Engine
from ingot.tensors import Array, TensorSpec

# Memory for smaller arrays is cheap to get: malloc keeps it, and does not ask the kernel for fresh pages each time.
_LARGE = 1 << 20
# What one engine's buffers hold at most together; larger batches get memory for themselves.
LIMIT = 64 << 20


class Buffers:
    """One buffer an input, grown to the largest batch that came, for an engine that runs one batch at a time.

    Args:
        engine: if it has a method ``allocate(spec, shape) -> array``, buffers come from that; on a GPU all of them,
            since what it gives is pinned memory, from which the GPU reads without a copy.
        limit: bytes of all buffers.
    """

    def __init__(self, engine: Engine, limit: int = LIMIT):
        self._allocate = getattr(engine, "allocate", None)
        self._always = self._allocate is not None and engine.device != "cpu"
        self._limit = limit
        self._kept: dict[str, Array] = {}
        self.nbytes = 0  # what is held between batches

    def wants(self, nbytes: int) -> bool:
        """Whether an array of so many bytes is better taken from here than from numpy."""
        return self._always or nbytes >= _LARGE

    def take(self, spec: TensorSpec, shape: Sequence[int]) -> Array:
        """Return an array, whose content is arbitrary, for the next batch; that of the last is taken back by it."""
        count = math.prod(shape)
        kept = self._kept.get(spec.name)
        if kept is not None and kept.size >= count:
            return kept[:count].reshape(shape)
        del kept  # freed before more is asked for
        self._drop(spec.name)
        made: Array = np.empty(count, spec.dtype.numpy) if self._allocate is None else self._allocate(spec, (count,))
        if self.nbytes + made.nbytes <= self._limit:
            self._kept[spec.name] = made
            self.nbytes += made.nbytes
        return made.reshape(shape)

    def _drop(self, name: str) -> None:
        dropped = self._kept.pop(name, None)
        if dropped is not None:
            self.nbytes -= dropped.nbytes

    def part_from(self, outputs: Iterable[Array]) -> None:
        """Give up buffers that an engine's outputs lie in, which their readers need for longer than the batch."""
        for output in outputs:
            for name, buffer in list(self._kept.items()):
                if np.may_share_memory(output, buffer):
                    self._drop(name)
