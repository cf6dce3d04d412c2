"""One request that waits for the engine, and which may run with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ingot.errors import IngotError, InvalidArgument
from ingot.tensors import Array, Signature

Outcome = Mapping[str, Array] | IngotError


@dataclass(eq=False, slots=True)
class Entry:
    """One request that waits for the engine. It carries its own way back.

    ``deadline`` is when its answer is of no more use. A higher ``priority`` goes first. ``waiting`` and ``ticket``
    belong to the scheduler.
    """

    inputs: Mapping[str, Array]
    rows: int
    reply: Callable[[Outcome], None]
    arrived: float
    group: tuple[Any, ...] = ()
    deadline: float = math.inf
    priority: int = 0
    nbytes: int = -1
    cancelled: bool = False
    waiting: bool = field(default=False, init=False)
    ticket: tuple[int, float, int] = field(default=(0, 0.0, 0), init=False)

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            self.nbytes = sum(size_of(array) for array in self.inputs.values())


def size_of(array: Array) -> int:
    """Return the bytes that an array holds; an object array's own count leaves its text out.

    Raises:
        InvalidArgument: an object is no text.
    """
    if array.dtype != object:
        return array.nbytes
    try:
        return array.nbytes + sum(map(len, array.reshape(-1)))
    except TypeError as error:
        raise InvalidArgument(f"an element of a BYTES input is no text ({error}); give bytes") from None


def group_of(signature: Signature, inputs: Mapping[str, Array]) -> tuple[Any, ...]:
    """Return what must be equal for two requests to share a batch: every size except the batch's.

    An input without a batch axis belongs to the whole batch, so there its very content must be equal.
    """
    axes = signature.batch_axes(signature.inputs)
    return tuple(
        array.shape[: axes[name]] + array.shape[axes[name] + 1 :]
        if name in axes
        else (array.shape, array.tobytes() if array.dtype != object else tuple(array.reshape(-1)))
        for name, array in sorted(inputs.items())
    )
