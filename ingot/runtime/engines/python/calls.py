"""Calls of a model's code to other models of its server: the side of the engine process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np

from ingot.errors import IngotError, InvalidArgument, Unavailable
from ingot.tensors import Array

Answer = dict[str, Array] | IngotError
_current: Caller | None = None


class Caller:
    """Sends calls, and reads one answer for each.

    Args:
        send: sends a call: its number, the model, its inputs and its timeout.
        receive: waits for an answer; returns its number and content.
    """

    def __init__(
        self,
        send: Callable[[int, str, Mapping[str, Array], float], object],
        receive: Callable[[], tuple[int, Answer]],
    ):
        self._send = send
        self._receive = receive
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[dict[str, Array]]] = {}
        self._answers = threading.Semaphore(0)  # that are still to be read
        self._reader: threading.Thread | None = None
        self._open = False

    @contextlib.contextmanager
    def during_batch(self) -> Iterator[None]:
        """Allow calls; wait in the end for answers that the code did not wait for: the connection is needed then."""
        global _current
        _current, self._open = self, True
        try:
            yield
        finally:
            with self._lock:
                self._open = False
            wait([*self._waiting.values()])

    def begin(self, model: str, inputs: Mapping[str, Array], timeout: float) -> Future[dict[str, Array]]:
        """Send a call."""
        future: Future[dict[str, Array]] = Future()
        with self._lock:
            if not self._open:
                raise _not_now()
            number = next(self._numbers) % (1 << 32)
            self._send(number, model, inputs, timeout)
            self._waiting[number] = future
            if self._reader is None:
                self._reader = threading.Thread(target=self._read, name="ingot-answers", daemon=True)
                self._reader.start()
        self._answers.release()
        return future

    def _read(self) -> None:
        while self._answers.acquire():
            number, answer = self._receive()
            with self._lock:
                future = self._waiting.pop(number)
            if future.cancelled():
                continue
            if isinstance(answer, IngotError):
                future.set_exception(answer)
            else:
                future.set_result(answer)


def infer(model: str, inputs: Mapping[str, Any], *, timeout: float | None = None) -> Any:
    """Ask another model of the server; see :meth:`~ingot.runtime.engines.python.engine.Context.infer`."""
    if _current is None:
        raise _not_now()
    if not isinstance(model, str) or not model or not isinstance(inputs, Mapping) or not inputs:
        raise InvalidArgument("context.infer takes a model's name and a dict of its inputs")
    arrays = {str(name): _array(name, value) for name, value in inputs.items()}
    future = _current.begin(model, arrays, math.inf if timeout is None else float(timeout))
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return future.result()
    return asyncio.shield(asyncio.wrap_future(future))  # an answer is read also if the code waits no longer


def _array(name: object, value: Any) -> Array:
    array = np.asarray(value)
    if array.dtype.kind in "SU" or (array.dtype == object and isinstance(value, Sequence | np.ndarray)):
        array = np.array(value, object)
        flat = array.reshape(-1)
        for at, item in enumerate(flat):
            if not isinstance(item, str | bytes):
                raise InvalidArgument(f"input '{name}' has a {type(item).__name__}; pass arrays, texts or bytes")
            flat[at] = item.encode() if isinstance(item, str) else item
    if not array.shape:
        raise InvalidArgument(f"input '{name}' is a single value; pass an array or list with the batch dimension")
    return np.ascontiguousarray(array)


def _not_now() -> Unavailable:
    return Unavailable(
        "context.infer can be called while a batch runs in a server: in predict or predict_one, and what these call"
    )
