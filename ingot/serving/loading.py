"""Work that blocks, such as loading a model, in threads that a stopping server does not wait for."""

from __future__ import annotations

import asyncio
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
    """Changes of models that run while the server serves; a failure is logged."""

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
        DeadlineExceeded: it takes longer.
        IngotError: it cannot be loaded.
    """
    limit = model.settings.load_timeout
    try:
        async with asyncio.timeout(limit) as scope:
            await in_thread(f"load-{model.name}", lambda: model.load(sizes, parkable=parkable), lambda: model.close(0))
    except TimeoutError:
        if limit is None or not scope.expired():  # a file system or a lock of the load itself timed out
            raise
        raise DeadlineExceeded(
            f"model '{model.name}' version {model.version} was not ready within {units.written(limit)}: it was "
            f"{model.state.value}. If the model is only large, raise --load-timeout (INGOT_LOAD_TIMEOUT; 0 "
            "means no limit). A graph with a loop or nested functions may never end"
        ) from None


def in_thread(name: str, work: Callable[[], T], discard: Callable[[], None] = lambda: None) -> asyncio.Future[T]:
    """Do work in a daemon thread, since an engine call or a registry that hangs must not keep the process.

    Args:
        name: of the thread.
        work: raises IngotError if it fails.
        discard: called when it is done, if nothing waits for it any longer.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    # The user's operators may end the thread, by sys.exit() say.
    outcome: T | Exception = InternalError(f"the thread ingot-{name} ended without a result")

    def settle() -> None:
        if done.done():  # the server was stopped, or the load timed out
            discard()
        elif isinstance(outcome, Exception):
            done.set_exception(outcome)
        else:
            done.set_result(outcome)

    def run() -> None:
        nonlocal outcome
        try:
            outcome = foreign.outcome(work)
        finally:
            try:
                loop.call_soon_threadsafe(settle)
            except RuntimeError:  # the loop has ended
                discard()

    threading.Thread(target=run, name=f"ingot-{name}", daemon=True).start()
    return done
