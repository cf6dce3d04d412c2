"""Requests between their submission and their answer, and the clock that ends those that take too long."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush
from typing import Protocol

import numpy as np

from ingot.errors import DeadlineExceeded, IngotError, InternalError
from ingot.runtime.dispatch.signature_check import InputKey
from ingot.runtime.scheduling.entry import Entry, Outcome, Reply
from ingot.tensors import Array, Signature

log = logging.getLogger(__name__)

# Requests that are over stay with the clock until their time is up, unless they come to outnumber those that are not.
_PURGE_ABOVE = 64


class Cancellable(Protocol):
    """A request that was submitted."""

    done: bool

    def cancel(self) -> None:
        """Forget the request, as its client left."""


class Submit(Protocol):
    """Accept a request and return at once; see :meth:`ingot.runtime.dispatch.dispatcher.Dispatcher.submit`."""

    def __call__(
        self,
        inputs: Mapping[str, Array],
        reply: Reply,
        timeout: float | None = None,
        priority: int = 0,
        key: InputKey | None = None,
    ) -> Cancellable: ...


class Owner(Protocol):
    """Who took requests in."""

    def left(self, pending: Pending, outcome: Outcome | None) -> None:
        """Note that a request is over, with its outcome; None if it was cancelled."""

    def discard(self, entry: Entry) -> None:
        """Take an entry out of the queue."""

    def go_on(self, parts: Parts) -> None:
        """Put the next parts of a request into the queue."""

    def release(self, nbytes: int) -> None:
        """Forget the bytes of parts that are not in the queue yet."""


class Pending(ABC):
    """One request that was submitted. All of it belongs to one event loop.

    Attributes:
        done: whether it is answered or cancelled.
        waiting: whether no part of it runs yet.
        arrived: when it was submitted.
        reply: called once with the answer or the error, unless the request is cancelled before.
        owner: who took it in.
    """

    __slots__ = ()

    done: bool
    waiting: bool
    arrived: float
    reply: Reply
    owner: Owner

    def settle(self, outcome: Outcome) -> None:
        """Answer, unless the request is over already. A reply that fails is its own client's loss, and no other's."""
        if self.done:
            return
        self.done = True  # type: ignore[misc]  # those below have the slot
        # Nothing is held any more after that: replies lead back here, and what refers to itself, with all of a
        # request's bytes, would wait for the garbage collector.
        reply, self.reply = self.reply, _ignore
        self.owner.left(self, outcome)
        try:
            reply(outcome)
        except Exception:  # others are answered by the same callback
            log.exception("an answer could not be given")

    def cancel(self) -> None:
        """Forget the request, as its client left; the reply is not called any more."""
        if not self.done:
            self.done = True  # type: ignore[misc]  # as above
            self.reply = _ignore
            self.owner.left(self, None)
            self._drop()

    def fail(self, error: IngotError) -> None:
        """Answer with an error, and let the engine skip what is left."""
        if not self.done:
            self.settle(error)
            self._drop()

    @abstractmethod
    def _drop(self) -> None:
        """Take what waits out of the queue."""


class Single(Pending, Entry):
    """A request that is one entry, as nearly all are."""

    __slots__ = ("owner",)

    def _drop(self) -> None:
        self.owner.discard(self)


class Parts(Pending):
    """A request that is too large for one batch. Few of its parts are in the queue at once: whenever one is answered,
    the owner takes the next out. The answers are put together again.

    Args:
        owner: who took it in.
        reply: called with the answer.
        arrived: when it was submitted.
        signature: the model's.
        count: how many parts there are.
        make: returns the part of a number, with its reply.

    Attributes:
        entries: the parts that wait or run, by their numbers.
        rest: the bytes of the parts that are still to come, as far as the queue counts them.
    """

    __slots__ = (
        "_axes",
        "_count",
        "_left",
        "_make",
        "_next",
        "_outcomes",
        "arrived",
        "done",
        "entries",
        "owner",
        "reply",
        "rest",
    )

    def __init__(
        self,
        owner: Owner,
        reply: Reply,
        arrived: float,
        *,
        signature: Signature,
        count: int,
        make: Callable[[int, Reply], Entry],
    ):
        self.owner = owner
        self.reply = reply
        self.arrived = arrived
        self.done = False
        self.entries: dict[int, Entry] = {}
        self.rest = 0
        self._make: Callable[[int, Reply], Entry] | None = make
        self._next = 0
        self._count = count
        self._axes = signature.batch_axes(signature.outputs)
        self._outcomes: list[Mapping[str, Array] | None] = [None] * count
        self._left = count

    @property
    def waiting(self) -> bool:  # type: ignore[override]  # it is one of the entries' own
        return self._left == self._count and all(entry.waiting for entry in self.entries.values())

    def next_part(self) -> Entry | None:
        """Return the next part, which is to be put into the queue; None if there is none."""
        index = self._next
        if self._make is None or index == self._count:
            return None
        self._next += 1
        entry = self.entries[index] = self._make(index, functools.partial(self.take, index))
        return entry

    def take(self, index: int, outcome: Outcome) -> None:
        """Take the answer to a part; it is the reply of that part's entry."""
        if self.done:
            return
        if isinstance(outcome, IngotError):
            self.fail(outcome)
            return
        del self.entries[index]
        self._outcomes[index] = outcome
        self._left -= 1
        if self._left:
            self.owner.go_on(self)
        else:
            joined = self._joined()
            self._forget()
            self.settle(joined)

    def _joined(self) -> Outcome:
        found = [outcome for outcome in self._outcomes if outcome is not None]
        try:
            return {name: np.concatenate([part[name] for part in found], axis) for name, axis in self._axes.items()}
        except Exception as error:  # what engines give is as little known as how they fail
            log.exception("the outputs of a request that ran in %d parts cannot be joined", len(found))
            return InternalError(
                f"the outputs of the request's {len(found)} parts do not fit together: {error}; send fewer samples at once"
            )

    def _drop(self) -> None:
        for entry in self._forget():
            self.owner.discard(entry)
        self.owner.release(self.rest)

    def _forget(self) -> list[Entry]:
        """Hold nothing any more, and return the entries: they lead back here, and the clock may hold this for long."""
        entries, self.entries, self._outcomes, self._make = [*self.entries.values()], {}, [], None
        return entries


def _ignore(_: Outcome) -> None:
    """Take the place of a reply that was called."""


class Expiry:
    """Fails requests whose own time is up, also while the engine is stuck; one timer serves them all."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._heap: list[tuple[float, int, float, bool, Pending]] = []
        self._order = itertools.count()
        self._timer: asyncio.Handle | None = None
        self._armed = math.inf  # when the timer is due; uvloop's handles of what is due at once do not tell
        self._purge_above = _PURGE_ABOVE

    def add(self, loop: asyncio.AbstractEventLoop, pending: Pending, timeout: float, *, firm: bool = True) -> None:
        """Fail ``pending`` in ``timeout`` seconds unless it is over before or, if that is not ``firm``, runs then."""
        if len(self._heap) > self._purge_above:
            self._heap = [item for item in self._heap if not item[-1].done]
            heapify(self._heap)
            self._purge_above = max(2 * len(self._heap), _PURGE_ABOVE)
        heappush(self._heap, (loop.time() + timeout, next(self._order), timeout, firm, pending))
        self._arm(loop)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        due = self._heap[0][0]
        if self._timer is not None:
            if self._armed <= due:
                return
            self._timer.cancel()
        self._armed = due
        self._timer = loop.call_at(due, self._fire, loop)

    def _fire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        try:
            while self._heap and (self._heap[0][-1].done or self._heap[0][0] <= now):
                _, _, timeout, firm, pending = heappop(self._heap)
                if firm or pending.waiting:
                    pending.fail(DeadlineExceeded(f"model '{self._model}' had no answer within {timeout:g} s"))
        finally:
            if self._heap:
                self._arm(loop)
