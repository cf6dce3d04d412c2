"""Requests between their submission and their answer, and the clock that ends those that take too long."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from ingot.errors import DeadlineExceeded, IngotError, InternalError
from ingot.runtime.entry import Entry, Outcome
from ingot.tensors import Array, Signature

log = logging.getLogger(__name__)

Reply = Callable[[Outcome], None]

# Requests that are over stay with the clock until their time is up, unless they come to outnumber those that are not.
_PURGE_ABOVE = 64


class Pending:
    """One request that was submitted. All of it belongs to one event loop.

    Args:
        reply: called once with the answer or the error, unless the request is cancelled before.
        leave: called once when the request is over, whichever way, with its outcome; None if it was cancelled.
        discard: takes an entry out of the queue.
        began: when it was submitted.
    """

    __slots__ = ("_discard", "_leave", "_reply", "began", "done", "entries")

    def __init__(
        self,
        reply: Reply,
        leave: Callable[[Pending, Outcome | None], None],
        discard: Callable[[Entry], None],
        began: float = 0.0,
    ):
        self._reply = reply
        self._leave = leave
        self._discard = discard
        self.entries: Sequence[Entry] = ()
        self.began = began
        self.done = False

    def settle(self, outcome: Outcome) -> None:
        """Answer, unless the request is over already. A reply that fails is its own client's loss, and no other's."""
        if not self.done:
            reply = self._end(outcome)
            try:
                reply(outcome)
            except Exception:  # others are answered by the same callback
                log.exception("an answer could not be given")

    def cancel(self) -> None:
        """Forget the request, as its client left; the reply is not called any more."""
        if not self.done:
            entries = self.entries
            self._end(None)
            self._drop(entries)

    def fail(self, error: IngotError) -> None:
        """Answer with an error, and let the engine skip what is left."""
        if not self.done:
            entries = self.entries
            self.settle(error)
            self._drop(entries)

    def _end(self, outcome: Outcome | None) -> Reply:
        """Note that the request is over, and return its reply.

        Nothing is held any more after that: entries and replies lead back here, and what refers to itself, with all of
        a request's bytes, would wait for the garbage collector.
        """
        self.done = True
        reply, self._reply, self.entries = self._reply, _ignore, ()
        self._leave(self, outcome)
        return reply

    def _drop(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._discard(entry)


def _ignore(_: Outcome) -> None:
    """Take the place of a reply that was called."""


class Gather:
    """Puts the answers to the parts of a request that was too large for one batch together again."""

    def __init__(self, pending: Pending, signature: Signature, parts: int):
        self._pending = pending
        self._axes = signature.batch_axes(signature.outputs)
        self._outcomes: list[Mapping[str, Array] | None] = [None] * parts
        self._left = parts

    def part(self, index: int) -> Reply:
        """Return the reply for a part."""

        def reply(outcome: Outcome) -> None:
            if isinstance(outcome, IngotError):
                self._pending.fail(outcome)
                return
            self._outcomes[index] = outcome
            self._left -= 1
            if not self._left:
                self._pending.settle(self._joined())

        return reply

    def _joined(self) -> Outcome:
        found = [outcome for outcome in self._outcomes if outcome is not None]
        try:
            return {name: np.concatenate([part[name] for part in found], axis) for name, axis in self._axes.items()}
        except Exception as error:  # what engines give is as little known as how they fail
            log.exception("the outputs of a request that ran in %d parts cannot be joined", len(found))
            return InternalError(
                f"the outputs of the request's {len(found)} parts do not fit together: {error}; send fewer rows at once"
            )


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
                if firm or all(entry.waiting for entry in pending.entries):
                    pending.fail(DeadlineExceeded(f"model '{self._model}' had no answer within {timeout:g} s"))
        finally:
            if self._heap:
                self._arm(loop)
