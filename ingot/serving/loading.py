"""Work that blocks, such as loading a model, in threads that a stopping server does not wait for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from ingot import foreign
from ingot.errors import DeadlineExceeded, IngotError, InternalError
from ingot.faults import attempt_async
from ingot.report import units
from ingot.runtime import Model

T = TypeVar("T")

log = logging.getLogger(__name__)


class Tasks:
    """Changes of models, made while the server serves; a failure is logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[None]:
        """Run a coroutine in a separate task."""

        async def run() -> None:
            error = await attempt_async("a change of models failed", work())
            if isinstance(error, IngotError):
                log.error("a change of models failed: %s", error)

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> None:
        """Give up what runs."""
        for task in self._tasks:
            task.cancel()


async def load_model(model: Model, sizes: Sequence[int] = (), *, parkable: bool = False) -> None:
    """Load a model within its ``load_timeout``; see :meth:`ingot.runtime.Model.load`.

    Raises:
        DeadlineExceeded: it takes longer. The model can be loaded again if it is parkable, once the load has ended.
        IngotError: it cannot be loaded.
    """
    limit, left = model.settings.load_timeout, threading.Event()

    def load() -> None:
        model.load(sizes, parkable=parkable, wanted=lambda: not left.is_set())

    try:
        async with asyncio.timeout(limit) as scope:
            await in_thread(f"load-{model.name}", load)
    except asyncio.CancelledError:  # the server is stopping, or the model is no longer wanted
        left.set()
        model.close(0)
        raise
    except TimeoutError:
        if limit is None or not scope.expired():  # a file system or a lock of the load itself timed out
            raise
        left.set()
        longest, state = units.written(limit), model.state.value
        if model.give_up(f"its load took longer than {longest}"):
            raise DeadlineExceeded(
                f"model '{model.name}' version {model.version} was not ready within {longest}: it was {state}. If the "
                "model is just large, raise --load-timeout (INGOT_LOAD_TIMEOUT; 0 means no limit). A graph with a loop "
                "or nested functions, or a Python model whose load() waits, may never finish loading"
            ) from None


def in_thread(name: str, work: Callable[[], T]) -> asyncio.Future[T]:
    """Do work in a daemon thread, since an engine call or a registry that hangs must not keep it from ending.

    Args:
        name: of the thread.
        work: raises IngotError if it fails.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    # The user's operators may end the thread, for instance by sys.exit().
    outcome: T | Exception = InternalError(f"the thread ingot-{name} ended without a result")

    def settle() -> None:
        if done.done():  # nothing waits for it any longer
            return
        if isinstance(outcome, Exception):
            done.set_exception(outcome)
        else:
            done.set_result(outcome)

    def run() -> None:
        nonlocal outcome
        try:
            outcome = foreign.outcome(work)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle)

    threading.Thread(target=run, name=f"ingot-{name}", daemon=True).start()
    return done
