"""Requests between submission and answer, and the timer that ends those that take too long."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, Protocol

import numpy as np

from ingot.errors import DeadlineExceeded, IngotError, InternalError
from ingot.runtime.dispatch.batch_run import AnswerLimit
from ingot.runtime.scheduling.entry import Entry, Outcome, Reply, Request, ignore, size_of
from ingot.tensors import Array, Signature
from ingot.tensors.padding import scattered

log = logging.getLogger(__name__)

# Bytes of outputs that are joined in the event loop, in about a millisecond; more are joined in a thread.
_JOINED_AT_ONCE: Final = 4 << 20

# Finished requests stay in the heap until their time is up, unless they outnumber the others.
_PURGE_ABOVE = 64


class Submitted(Protocol):
    """A submitted request."""

    done: bool

    def cancel(self) -> None:
        """Cancel the request, as its client left."""


class Accepts(Protocol):
    """A component that accepts requests: a dispatcher, or one in front of it."""

    def submit(self, request: Request) -> Submitted:
        """Accept a request and return at once; see :meth:`ingot.runtime.dispatch.dispatcher.Dispatcher.submit`."""


class Owner(ABC):
    """The component that accepted the requests. It is not a protocol, whose methods compiled code calls slowly."""

    @abstractmethod
    def over(self, pending: Pending, outcome: Outcome | None) -> None:
        """Record that a request is over, with its outcome, or None if it was cancelled."""

    @abstractmethod
    def discard(self, entry: Entry) -> None:
        """Remove an entry from the queue."""

    @abstractmethod
    def queue_parts(self, parts: Parts) -> None:
        """Queue the next parts of a request."""

    @abstractmethod
    def release(self, nbytes: int, client: Hashable) -> None:
        """Release bytes of a client's parts that are not queued yet."""


class Expires(Protocol):
    """A request with a deadline; see :class:`Expiry`."""

    done: bool

    @property
    def waiting(self) -> bool:
        """Whether nothing of it runs yet."""

    def fail(self, error: IngotError) -> None:
        """Answer it with an error."""


class Single(Entry):
    """A request that is one entry, as almost all are. ``owner``: the component that accepted it."""

    __slots__ = ("owner",)

    owner: Owner

    def settle(self, outcome: Outcome) -> None:
        _settle(self, outcome)

    def cancel(self) -> None:
        _cancel(self)

    def fail(self, error: IngotError) -> None:
        _fail(self, error)

    def drop(self) -> None:
        """Remove the request from the queue."""
        self.owner.discard(self)


class Parts:
    """A request that is too large for one batch, or whose samples of different sizes run in several.

    Only a few of its parts are queued at once: when one is answered, the owner queues the next. The outputs are joined
    again.

    Args:
        owner: the component that accepted it.
        reply: called with the answer.
        arrived: when it was submitted.
        signature: the model's signature.
        make: returns the part of an index, given its reply.
        limit: of the joined outputs.
        client: who sent it.
        positions: of each part's samples in the request: ranges, or lists if the parts are not in its order.

    Attributes:
        done: whether it is answered or cancelled.
        entries: the parts that wait or run, by index.
        rest: bytes of parts that are still to be queued and count as waiting.
    """

    __slots__ = (
        "_axes",
        "_count",
        "_left",
        "_limit",
        "_make",
        "_nbytes",
        "_next",
        "_outcomes",
        "_positions",
        "arrived",
        "client",
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
        make: Callable[[int, Reply], Entry],
        limit: AnswerLimit,
        client: Hashable = None,
        positions: Sequence[Sequence[int]],
    ):
        self.client = client
        self._positions = positions
        self.owner = owner
        self.reply = reply
        self.arrived = arrived
        self.done = False
        self.entries: dict[int, Entry] = {}
        self.rest = 0
        self._make: Callable[[int, Reply], Entry] | None = make
        self._next = 0
        self._count = count = len(positions)
        self._axes = signature.batch_axes(signature.outputs)
        self._outcomes: list[Mapping[str, Array] | None] = [None] * count
        self._left = count
        self._limit = limit
        self._nbytes = 0

    @property
    def last(self) -> bool:
        """Whether no part follows those that :meth:`next_part` has returned."""
        return self._next == self._count

    @property
    def waiting(self) -> bool:
        """Whether no part of it runs yet."""
        return self._left == self._count and all(entry.waiting for entry in self.entries.values())

    def settle(self, outcome: Outcome) -> None:
        _settle(self, outcome)

    def cancel(self) -> None:
        _cancel(self)

    def fail(self, error: IngotError) -> None:
        _fail(self, error)

    def next_part(self) -> Entry | None:
        """Return the next part to queue, or None."""
        index = self._next
        if self._make is None or index == self._count:
            return None
        self._next += 1
        entry = self.entries[index] = self._make(index, functools.partial(self.take, index))
        return entry

    def take(self, index: int, outcome: Outcome) -> None:
        """Accept the outcome of a part; it is the reply of that part's entry."""
        if self.done:
            return
        if isinstance(outcome, IngotError):
            self.fail(outcome)
            return
        checked = self._limit.checked(outcome, self._nbytes)
        if isinstance(checked, IngotError):
            self.fail(checked)
            return
        self._nbytes += sum(map(size_of, outcome.values()))
        del self.entries[index]
        self._outcomes[index] = outcome
        self._left -= 1
        if self._left:
            self.owner.queue_parts(self)
        else:
            self._join_all([each for each in self._outcomes if each is not None])

    def _join_all(self, found: list[Mapping[str, Array]]) -> None:
        self._forget()
        if self._nbytes <= _JOINED_AT_ONCE or len(found) == 1:
            self.settle(self._joined(found))
            return
        joining = asyncio.get_running_loop().run_in_executor(None, self._joined, found)
        joining.add_done_callback(self._settle_joined)

    def _settle_joined(self, joining: asyncio.Future[Outcome]) -> None:
        if not joining.cancelled():  # the loop has ended
            error = joining.exception()
            self.settle(joining.result() if error is None else InternalError(f"joining outputs failed: {error}"))

    def _joined(self, found: list[Mapping[str, Array]]) -> Outcome:
        if len(found) == 1:
            return found[0]
        try:
            return {name: self._join([part[name] for part in found], axis) for name, axis in self._axes.items()}
        except (ValueError, TypeError, LookupError, AttributeError) as error:  # engines may return any shape
            log.exception("the outputs of a request that ran in %d parts cannot be joined", len(found))
            return InternalError(
                f"the outputs of the request's {len(found)} parts cannot be joined: {error}; "
                "send fewer samples per request"
            )

    def _join(self, parts: list[Array], axis: int) -> Array:
        if isinstance(self._positions[0], range):
            return np.concatenate(parts, axis)
        return scattered(parts, self._positions, axis)

    def drop(self) -> None:
        """Remove the queued parts from the queue."""
        for entry in self._forget():
            self.owner.discard(entry)
        self.owner.release(self.rest, self.client)

    def _forget(self) -> list[Entry]:
        """Drop all references and return the entries: they lead back here, and the timer may hold this for long."""
        entries, self.entries, self._outcomes, self._make = [*self.entries.values()], {}, [], None
        return entries


Pending = Single | Parts
"""One submitted request, which belongs to one event loop. The methods of both are the functions below."""


def _settle(pending: Pending, outcome: Outcome) -> None:
    """Reply, unless the request is over already. A failing reply affects only its own client."""
    if pending.done:
        return
    pending.done = True
    # Drop all references: replies lead back here, and a reference cycle would keep the request's bytes until the
    # garbage collector runs.
    reply, pending.reply = pending.reply, ignore
    pending.owner.over(pending, outcome)
    try:
        reply(outcome)
    except Exception:  # the same callback answers other requests
        log.exception("a reply failed")


def _cancel(pending: Pending) -> None:
    """Cancel the request, as its client left; its reply is not called any more."""
    if not pending.done:
        pending.done = True
        pending.reply = ignore
        pending.owner.over(pending, None)
        pending.drop()


def _fail(pending: Pending, error: IngotError) -> None:
    """Reply with an error and drop what is still queued."""
    if not pending.done:
        _settle(pending, error)
        pending.drop()


class Expiry:
    """Fails requests whose deadline passed, even while the engine is stuck; one timer serves all of them."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._heap: list[tuple[float, int, float, bool, Expires]] = []
        self._order = itertools.count()
        self._timer: asyncio.Handle | None = None
        self._armed = math.inf  # time of the timer; uvloop's handles of due timers do not have it
        self._purge_above = _PURGE_ABOVE

    def add(self, loop: asyncio.AbstractEventLoop, pending: Expires, timeout: float, *, firm: bool = True) -> None:
        """Fail ``pending`` in ``timeout`` seconds unless it is over or, if not ``firm``, running by then."""
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
                    pending.fail(DeadlineExceeded(f"model '{self._model}' did not answer within {timeout:g} s"))
        finally:
            if self._heap:
                self._arm(loop)
