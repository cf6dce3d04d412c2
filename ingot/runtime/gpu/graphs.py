"""CUDA graphs: which batches an engine captures once, and then replays with one call instead of a call per kernel.

A graph has fixed addresses and shapes, so there is one for each of a few sizes of batches, in each lane. A batch of
another size is enlarged to the next one where samples do not affect each other, and otherwise runs without a graph.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from typing import TypedDict

from ingot import foreign
from ingot.tensors import Array, DType, Signature, TensorSpec

log = logging.getLogger(__name__)

LARGEST = 512
"""Most samples of a batch that is captured: kernels of larger batches take longer than their launch."""


class GraphOptions(TypedDict):
    """The batches that an engine is to capture, in a form that JSON has: an engine process receives it.

    ``most`` is the samples of the largest one, ``batch`` the name of the dimension of samples, if there is one, and
    ``padded`` whether batches may be enlarged, since samples do not affect each other.
    """

    most: int
    batch: str | None
    padded: bool


class Graphs:
    """The sizes of batches that an engine captures; its lanes share this.

    Args:
        signature: the engine's, with the batch; see :func:`obstacle`.
        most: samples of the largest batch.
        padded: as for :class:`GraphOptions`.

    Attributes:
        sizes: in samples, ascending.
        failure: why the engine no longer captures; empty while it does.
    """

    def __init__(self, signature: Signature, most: int, *, padded: bool):
        self.signature = signature
        self._axes = signature.batch_axes(signature.inputs) if signature.batch is not None else {}
        # In front, samples that are appended leave the others where they are.
        self._padded = padded and not any(self._axes.values())
        self.sizes = [1]
        if signature.batch is not None:
            allowed = signature.range(signature.batch)
            self.sizes = [size for size in sizes(signature.max_samples(most)) if allowed.nearest(size) == size]
        self.failure = ""

    def samples(self, inputs: Mapping[str, Array]) -> int:
        """Return how many samples a batch has; 1 for a model without a batch."""
        return next((inputs[name].shape[axis] for name, axis in self._axes.items()), 1)

    def size_of(self, samples: int) -> int | None:
        """Return the size with which a batch of so many samples is captured; None if it is not."""
        place = bisect_left(self.sizes, samples)
        if self.failure or not samples or place == len(self.sizes):
            return None
        size = self.sizes[place]
        return size if self._padded or size == samples else None

    def shape_of(self, spec: TensorSpec, size: int) -> tuple[int, ...]:
        """Return the shape of an input or output in a batch of a size."""
        return tuple(dim if isinstance(dim, int) else size for dim in spec.shape)

    @property
    def rooms(self) -> dict[str, int]:
        """Bytes of each input in the largest batch."""
        largest = self.sizes[-1]
        return {
            spec.name: math.prod(self.shape_of(spec, largest)) * spec.dtype.numpy.itemsize
            for spec in self.signature.inputs
        }

    def give_up(self, why: Exception | str) -> None:
        """Run all batches without graphs from now on, and log why."""
        if not self.failure:
            self.failure = why if isinstance(why, str) else foreign.typed(why)
            log.warning("batches run without CUDA graphs: %s", self.failure)


def described(graphs: Graphs | None) -> str:
    """Return the sizes that are captured, for users."""
    return "off" if graphs is None or graphs.failure else ",".join(map(str, graphs.sizes))


def sizes(most: int) -> list[int]:
    """Return the sizes of batches up to ``most`` samples: at most a third of a batch of over 16 is padding."""
    powers = [1 << power for power in range(LARGEST.bit_length())]
    steps = sorted({*powers, *(3 * size // 2 for size in powers if size >= 16)})
    most = min(most, LARGEST)
    return [*(size for size in steps if size < most), most]


def obstacle(signature: Signature) -> str:
    """Return why no batch of a model can be captured; empty if one can."""
    for spec in (*signature.inputs, *signature.outputs):
        if spec.dtype is DType.BYTES:
            return f"'{spec.name}' is text"
        variable = next((dim for dim in spec.shape if isinstance(dim, str) and dim != signature.batch), None)
        if variable is not None:
            return f"the size of '{variable}' of '{spec.name}' is not fixed"
    return ""


def graphs_of(signature: Signature, options: GraphOptions | None) -> Graphs | None:
    """Return the batches that an engine captures; None if there are none, with the reason in the log.

    Args:
        signature: the engine's own, which may not name the batch.
        options: what it is to capture; None for nothing.
    """
    if options is None:
        return None
    batch = options["batch"] or signature.batch
    signature = replace(signature, batch=batch if batch in signature.symbols else None)
    if why := obstacle(signature):
        log.info("batches run without CUDA graphs: %s", why)
        return None
    found = Graphs(signature, options["most"], padded=options["padded"])
    return found if found.sizes else None
