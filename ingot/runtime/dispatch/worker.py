"""One engine and the thread that runs it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

from ingot.errors import InternalError
from ingot.runtime.dispatch.batching import Batcher, BatchTimings
from ingot.runtime.engine import Engine
from ingot.runtime.scheduling.entry import Entry, Outcome

log = logging.getLogger(__name__)

Done = Callable[["Worker", list[Entry], list[Outcome], float, BatchTimings], None]


class Worker:
    """Runs batches outside the event loop, one at a time; engines release the interpreter lock while they compute.

    Args:
        engine: the loaded model; the worker closes it.
        batcher: runs batches on the engine.
        done: called in the worker thread with (worker, entries, outcomes, seconds, timings) after each batch.
        name: of the thread.
    """

    def __init__(self, engine: Engine, batcher: Batcher, done: Done, name: str):
        self._engine = engine
        self._batcher = batcher
        self._done = done
        self._work: SimpleQueue[list[Entry] | None] = SimpleQueue()
        self._thread = Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def start(self, entries: list[Entry]) -> None:
        """Run a batch in the thread; call only while idle."""
        self._work.put(entries)

    def close(self, timeout: float | None = None) -> None:
        """Finish the current batch, stop the thread and free the engine.

        An engine call that exceeds ``timeout`` seconds is abandoned: it cannot be interrupted and ends with the
        process.
        """
        self._work.put(None)
        self._thread.join(timeout)
        if not self._thread.is_alive():
            self._engine.close()

    def run(self, entries: list[Entry]) -> tuple[list[Outcome], float, BatchTimings]:
        """Run a batch in the caller's thread; call only while idle.

        Returns:
            The outcomes, the total seconds, and the timings by stage.
        """
        began = time.perf_counter()
        try:
            outcomes = self._batcher.run(entries)
        except BaseException as error:  # noqa: BLE001 - a worker must not die and leave its clients waiting
            log.critical("the engine raised a fatal error in its thread: %r", error)
            outcomes = [InternalError("the engine failed on this input") for _ in entries]
        return outcomes, time.perf_counter() - began, self._batcher.spent

    def _loop(self) -> None:
        while (entries := self._work.get()) is not None:
            self._done(self, entries, *self.run(entries))
            del entries  # do not keep their arrays until the next batch
