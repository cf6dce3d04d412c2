"""One request that waits for the engine, and which may run with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ingot.errors import IngotError, InvalidArgument
from ingot.tensors import Array, Signature

Outcome = Mapping[str, Array] | IngotError
Reply = Callable[[Outcome], None]

_NOWHERE: tuple[int, float, int] = (0, 0.0, 0)


class Entry:
    """One request that waits for the engine, or a part of one. It carries its own way back.

    Args:
        inputs: an array for each input.
        samples: of all of them.
        reply: called with the outcome.
        arrived: when it came.
        group: equal for entries that may share a batch.
        deadline: when its answer is of no more use.
        priority: a higher one goes first.
        nbytes: what the inputs hold; by default it is counted.

    Attributes:
        done: whether nobody waits for it any more.
        waiting: whether it is in the queue; this and ``ticket`` belong to the scheduler.
    """

    __slots__ = (
        "arrived",
        "deadline",
        "done",
        "group",
        "inputs",
        "nbytes",
        "priority",
        "reply",
        "samples",
        "ticket",
        "waiting",
    )

    def __init__(
        self,
        inputs: Mapping[str, Array],
        samples: int,
        reply: Reply,
        arrived: float,
        group: tuple[Any, ...] = (),
        deadline: float = math.inf,
        priority: int = 0,
        nbytes: int = -1,
    ):
        self.inputs = inputs
        self.samples = samples
        self.reply = reply
        self.arrived = arrived
        self.group = group
        self.deadline = deadline
        self.priority = priority
        self.nbytes = nbytes if nbytes >= 0 else sum(size_of(array) for array in inputs.values())
        self.done = False
        self.waiting = False
        self.ticket = _NOWHERE

    def settle(self, outcome: Outcome) -> None:
        """Answer."""
        self.reply(outcome)


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
