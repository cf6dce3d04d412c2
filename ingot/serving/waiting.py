"""A request that waits until its model is in memory."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ingot.errors import DeadlineExceeded, IngotError
from ingot.report import units
from ingot.runtime import Model
from ingot.runtime.scheduling.entry import OVER, Outcome, Request


class Waiting:
    """A request for a model that is not in memory. ``queue`` has it until it is over or passed on.

    Args:
        queue: the requests that wait for the same model.
        request: its reply is called once with the outcome.
        longest: seconds that it may wait; None is unlimited.
        nbytes: size of the inputs.
    """

    __slots__ = ("_pending", "_queue", "_request", "_timer", "_until", "done", "nbytes")

    def __init__(
        self,
        queue: list[Waiting],
        request: Request,
        longest: float | None,
        nbytes: int,
    ):
        self._queue = queue
        self._request = request
        self._pending: Any = None
        loop = asyncio.get_running_loop()
        self._until = None if longest is None else time.monotonic() + longest
        self._timer = None if longest is None else loop.call_later(longest, self._expire, longest)
        self.nbytes = nbytes
        self.done = False
        queue.append(self)

    def cancel(self) -> None:
        """Drop the request, as its client left."""
        if self._pending is not None:
            self._pending.cancel()
        elif not self.done:
            self._leave()
        self.done = True

    def pass_on(self, model: Model) -> None:
        """Submit the request to a model."""
        left = None if self._until is None else max(0.0, self._until - time.monotonic())
        self._leave()
        try:
            self._pending = model.submit(self._request.passed_on(self.settle, left))
        except IngotError as error:
            self.settle(error)

    def settle(self, outcome: Outcome) -> None:
        """Reply, unless the request is over."""
        if not self.done:
            self._leave()
            self.done = True
            reply, self._request = self._request.reply, OVER  # the reply refers back to this object
            reply(outcome)

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self in self._queue:
            self._queue.remove(self)

    def _expire(self, longest: float) -> None:
        self.settle(DeadlineExceeded(f"the model was not in memory within {units.written(longest)}"))
