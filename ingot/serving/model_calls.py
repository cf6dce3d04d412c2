"""Calls of a model's code to other models of the same server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np

from ingot.errors import CLASSES, IngotError, InvalidArgument, Unavailable, Unsupported
from ingot.faults import attempt
from ingot.runtime import Model, Outcome, Request
from ingot.runtime.dispatch.batch_run import BATCH, Batch
from ingot.runtime.dispatch.pending import Submitted
from ingot.runtime.scheduling.entry import Reply
from ingot.serving.pipelines.pipeline import Pipeline
from ingot.tensors import Array, Signature

ServedModel = Model | Pipeline


class ModelCalls:
    """Submits the calls of models to other models, as requests with the deadline and the client of their batch.

    Engines run one batch at a time, so models that call each other in a cycle could wait for each other without end.
    Which model calls which is known by the calls so far, and a call that makes a cycle is refused.

    Args:
        find: returns what answers under a name and version.

    Attributes:
        loop: of the server; None before it has started.
    """

    def __init__(self, find: Callable[[str, str], ServedModel]):
        self.loop: asyncio.AbstractEventLoop | None = None
        self._find = find
        self._numbers = itertools.count()
        self._called: WeakKeyDictionary[ServedModel, dict[str, None]] = WeakKeyDictionary()

    def _ask(self, caller: Model, name: str, inputs: Mapping[str, Array], timeout: float, reply: Reply) -> None:
        """Ask a model for the batch of a caller, in the worker thread that runs the batch.

        Args:
            caller: whose code calls.
            name: of a model, or ``name:version``.
            inputs: of the model; 64-bit numbers become those that it declares.
            timeout: seconds until the answer is useless.
            reply: called once, in the event loop, with the outputs or the error.
        """
        batch, loop = BATCH.get(), self.loop
        if batch is None or loop is None:
            reply(Unavailable("context.infer can be called in a server only"))
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._submit, caller, name, inputs, timeout, batch, reply)

    def connected(self, model: Model) -> Model:
        """Return a model whose code may call others."""
        model.connect(partial(self._ask, model))
        return model

    def callers_first(self, models: list[Model]) -> list[Model]:
        """Return models so that each comes before those that it calls."""
        return sorted(models, key=lambda model: -len([*self._reached(model)]))

    def _submit(
        self, caller: Model, name: str, inputs: Mapping[str, Array], timeout: float, batch: Batch, reply: Reply
    ) -> None:
        began, number = time.perf_counter(), next(self._numbers)

        def settle(outcome: Outcome) -> None:
            batch.timings.open.pop(number, None)
            batch.timings.models += ((name, began, time.perf_counter()),)
            if isinstance(outcome, IngotError):
                outcome = CLASSES[outcome.code](f"model '{name}', which '{caller.name}' calls: {outcome}")
            reply(outcome)

        found = attempt(f"a call of model '{caller.name}' failed", self._begin, caller, name, inputs, timeout, batch,
                        settle)  # fmt: skip
        if isinstance(found, IngotError):
            settle(found)
            return

        def cancel() -> None:
            found.cancel()
            settle(Unavailable("the clients that waited for the call have left"))

        batch.timings.open[number] = cancel

    def _begin(
        self, caller: Model, name: str, inputs: Mapping[str, Array], timeout: float, batch: Batch, reply: Reply
    ) -> Submitted:
        base, _, version = name.partition(":")
        model = self._find(base, version)
        self._record_call(caller, model)
        if model.sequential or model.decoupled:
            raise Unsupported("it keeps states of sequences, or answers several times, which calls cannot use")
        if all(entry.done for entry in batch.entries):
            raise Unavailable("the clients that wait for the batch have left")
        left = min(timeout, max(entry.deadline for entry in batch.entries) - time.perf_counter())
        clients = {entry.client for entry in batch.entries}
        return model.acceptor.accepting.submit(
            Request(
                _declared(model.signature, inputs),
                reply,
                max(left, 0.0) if left < float("inf") else None,
                max(entry.priority for entry in batch.entries),
                None,
                clients.pop() if len(clients) == 1 else None,
            )
        )

    def _record_call(self, caller: Model, model: ServedModel) -> None:
        """Record that a model calls another one.

        Raises:
            InvalidArgument: the call makes a cycle of models.
        """
        if model.name == caller.name or caller.name in self._reached(model):
            way = "" if model.name == caller.name else ", which calls it, at once or by others"
            raise InvalidArgument(f"model '{caller.name}' cannot call '{model.name}'{way}: that is a cycle")
        self._called.setdefault(caller, {})[model.name] = None

    def _reached(self, model: ServedModel) -> Iterator[str]:
        """Yield the names of the models that a model calls, and of those that these call."""
        seen, left = set[str](), [model]
        while left:
            for name in self._direct(left.pop()):
                if name not in seen:
                    seen.add(name)
                    yield name
                    with contextlib.suppress(IngotError):  # it is not served any longer
                        left.append(self._find(name, ""))

    def _direct(self, model: ServedModel) -> list[str]:
        return model.models if isinstance(model, Pipeline) else [*self._called.get(model, ())]


def _declared(signature: Signature, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return inputs with the numbers' types that a model declares: numbers of Python have 64 bits.

    Raises:
        InvalidArgument: a whole number is out of range.
    """
    found = dict(inputs)
    for spec in signature.inputs:
        array = found.get(spec.name)
        whole = array is not None and array.dtype == np.int64
        if array is None or not (whole or array.dtype == np.float64):
            continue
        if spec.dtype.is_float or (whole and spec.dtype.is_integer):
            found[spec.name] = array.astype(spec.dtype.numpy, copy=False)
            if whole and spec.dtype.is_integer and not np.array_equal(found[spec.name], array):
                raise InvalidArgument(f"input '{spec.name}' has a number that {spec.dtype.torch_name} cannot hold")
    return found
