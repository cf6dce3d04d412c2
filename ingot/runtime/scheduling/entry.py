"""A request to a model, how it waits for the engine, and which requests may run with it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from ingot.errors import IngotError, InvalidArgument
from ingot.protocol.keys import InputKey
from ingot.tensors import Array, Signature

Outcome = Mapping[str, Array] | IngotError
Reply = Callable[[Outcome], None]


class Request:
    """One request to a model.

    Args:
        inputs: an array for each input of the signature.
        reply: called once, in a later tick of the event loop, with the outputs by name or the error.
        timeout: seconds until the answer is useless; by default the model's ``slo``, which a request that is already
            running may exceed.
        priority: requests of higher priority run first.
        key: :func:`~ingot.protocol.keys.key_of` of the inputs, if the caller knows it.
        client: the sender; clients share the engines.
        lengths: the elements of each sample before its padding, int[n], if the model has one dimension that may be
            padded and the sender has padded the samples along it. They may then run in several calls, and outputs are
            zero where a sample had padding.
    """

    __slots__ = ("client", "inputs", "key", "lengths", "priority", "reply", "timeout")

    def __init__(
        self,
        inputs: Mapping[str, Array],
        reply: Reply,
        timeout: float | None = None,
        priority: int = 0,
        key: InputKey | None = None,
        client: Hashable = None,
        lengths: Array | None = None,
    ):
        self.inputs = inputs
        self.reply = reply
        self.timeout = timeout
        self.priority = priority
        self.key = key
        self.client = client
        self.lengths = lengths

    def passed_on(self, reply: Reply, timeout: float | None) -> Request:
        """Return the request with another reply and timeout, for another component that accepts requests."""
        return Request(self.inputs, reply, timeout, self.priority, self.key, self.client, self.lengths)


def ignore(_: Outcome) -> None:
    """Replace a reply that was called: replies lead back to their requests, which would be reference cycles."""


OVER = Request({}, ignore)
"""Replaces a request that is answered, for the same reason."""


class Entry:
    """A request, or part of one, that waits for the engine. It carries its own reply callback.

    Args:
        inputs: an array for each input.
        samples: number of samples in the inputs.
        reply: called with the outcome.
        arrived: arrival time, in seconds of the scheduler's clock.
        group: equal for entries that may share a batch.
        deadline: time after which the answer is useless, on the same clock.
        priority: higher priorities run first.
        nbytes: size of the inputs; computed by default.
        most: samples that a batch with this entry may have, as its memory is limited.
        client: who sent it; clients share the engines.
        sizes: of the dimensions that may be padded, before padding; empty if there are none.
        work: what the duration of its call depends on: its samples, or what
            :class:`~ingot.runtime.scheduling.division.Work` makes of them and its sizes.

    Attributes:
        done: whether the request was answered or cancelled.
        waiting: whether it is in the queue; this, ``due`` and ``number`` belong to the scheduler.
        due: the time at which it must start.
        number: counts entries in the order of their arrival.
        filled: the share of its inputs that is padding already, from 0 to 1.
    """

    filled = 0.0

    __slots__ = (
        "arrived",
        "client",
        "deadline",
        "done",
        "due",
        "group",
        "inputs",
        "most",
        "nbytes",
        "number",
        "priority",
        "reply",
        "samples",
        "sizes",
        "waiting",
        "work",
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
        most: int = sys.maxsize,
        client: Hashable = None,
        sizes: tuple[int, ...] = (),
        work: int = 0,
    ):
        self.inputs = inputs
        self.samples = samples
        self.sizes = sizes
        self.work = work or samples
        self.reply = reply
        self.arrived = arrived
        self.group = group
        self.deadline = deadline
        self.priority = priority
        self.nbytes = nbytes if nbytes >= 0 else sum(size_of(array) for array in inputs.values())
        self.most = most
        self.client = client
        self.done = False
        self.waiting = False
        self.due = 0.0
        self.number = 0

    @property
    def place(self) -> tuple[int, float, int]:
        """Its place in the queue: entries are sorted by priority, then by when they must start, then by arrival."""
        return -self.priority, self.due, self.number

    def settle(self, outcome: Outcome) -> None:
        """Reply with the outcome."""
        self.reply(outcome)


def size_of(array: Array) -> int:
    """Return the bytes that an array holds. Unlike ``nbytes``, this counts the text of object arrays.

    Raises:
        InvalidArgument: an object is not text.
    """
    if array.dtype != object:
        return array.nbytes
    try:
        return array.nbytes + sum(map(len, array.reshape(-1).tolist()))
    except TypeError as error:
        raise InvalidArgument(f"an element of a BYTES input is not text ({error}); pass bytes") from None


def group_of(signature: Signature, inputs: Mapping[str, Array]) -> tuple[Any, ...]:
    """Return the key that two requests must share to run in one batch: every size except the batch's.

    An input without a batch axis applies to the whole batch, so its content must be equal.
    """
    axes = signature.batch_axes(signature.inputs)
    return tuple(
        array.shape[: axes[name]] + array.shape[axes[name] + 1 :]
        if name in axes
        else (array.shape, array.tobytes() if array.dtype != object else tuple(array.reshape(-1)))
        for name, array in sorted(inputs.items())
    )
