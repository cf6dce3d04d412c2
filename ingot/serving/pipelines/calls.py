"""The work of one node for one request: requests to a model, or a step in a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from ingot.errors import IngotError
from ingot.faults import attempt
from ingot.runtime import Model, Outcome, Request, Submitted
from ingot.runtime.dispatch.stepped import preparing, when_done
from ingot.serving.pipelines.pictures import Work
from ingot.serving.pipelines.values import stacked
from ingot.tensors import Array

# Requests of one node that are submitted at a time, so that one request does not fill a model's queue.
_AT_ONCE: Final = 32

Settle = Callable[[Mapping[str, Array] | IngotError, int | None], None]
"""Accepts the outputs of a node, or an error with the item that it is of; None for that of all."""


class ModelCall:
    """The requests of a node to its model: one for all items, or one for each, a few at a time.

    Args:
        model: the node's.
        request: with the inputs of all items, the priority and the client.
        count: the number of requests: 1, or that of the items.
        time_left: returns the seconds until the deadline, or raises DeadlineExceeded.
        settle: called once.
    """

    __slots__ = (
        "_count",
        "_found",
        "_inputs",
        "_left",
        "_model",
        "_next",
        "_pending",
        "_request",
        "_settle",
        "_time_left",
        "done",
    )

    def __init__(
        self,
        model: Model,
        request: Request,
        count: int,
        time_left: Callable[[], float | None],
        settle: Settle,
    ):
        self.done = False
        self._model = model
        self._request = request
        self._time_left = time_left
        self._count = self._left = count
        self._settle = settle
        self._found: list[Mapping[str, Array] | None] = [None] * count
        self._next = 0
        self._pending: dict[int, Submitted] = {}

    def start(self) -> None:
        """Submit the first requests.

        Raises:
            IngotError: one is refused.
        """
        while self._next < self._count and len(self._pending) < _AT_ONCE and not self.done:
            self._submit(self._next)

    def cancel(self) -> None:
        """Cancel what is not answered."""
        self.done = True
        pending, self._pending = self._pending, {}
        for each in pending.values():
            each.cancel()

    def _submit(self, index: int) -> None:
        self._next += 1
        whole = self._request
        inputs = whole.inputs
        if self._count > 1:
            inputs = {name: array[index : index + 1] for name, array in inputs.items()}
        left = self._time_left()
        inner = Request(
            inputs, lambda outcome: self._answered(index, outcome), left, whole.priority, None, whole.client
        )
        self._pending[index] = self._model.acceptor.accepting.submit(inner)

    def _answered(self, index: int, outcome: Outcome) -> None:
        if self.done:
            return
        self._pending.pop(index, None)
        item = index if self._count > 1 else None
        if isinstance(outcome, IngotError):
            self._fail(outcome, item)
            return
        self._found[index] = outcome
        self._left -= 1
        if not self._left:
            self.done = True
            self._settle(self._joined(), None)
            return
        failure = f"a request of node's model '{self._model.name}' failed"
        if (error := attempt(failure, self.start)) is not None:
            self._fail(error, self._next - 1)

    def _fail(self, error: IngotError, item: int | None) -> None:
        self.cancel()
        self._settle(error, item)

    def _joined(self) -> Mapping[str, Array] | IngotError:
        found = [each for each in self._found if each is not None]
        if len(found) == 1:
            return found[0]
        failure = f"the outputs of model '{self._model.name}' for {len(found)} items cannot be joined"
        return attempt(failure, lambda: {name: stacked([each[name] for each in found]) for name in found[0]})


class StepCall:
    """A step that runs in a thread; ``output`` is the name of what it returns."""

    __slots__ = ("done",)

    def __init__(self, pipeline: str, work: Work, output: str, inputs: Mapping[str, Array], settle: Settle):
        self.done = False
        failure = f"a step of pipeline '{pipeline}' failed"

        def run() -> Mapping[str, Array] | IngotError:
            # A request that is over while it waits is not run.
            return {} if self.done else attempt(failure, lambda: {output: work(inputs)})

        def finished(outcome: Mapping[str, Array] | IngotError) -> None:
            if not self.done:
                self.done = True
                settle(outcome, None)

        when_done(preparing.submit(pipeline, run), failure, finished)

    def cancel(self) -> None:
        """Ignore what it returns."""
        self.done = True
