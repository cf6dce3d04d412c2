"""One engine and the thread that runs it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

from ingot.errors import EngineTimeout, IngotError, InternalError
from ingot.runtime.dispatch.batch_run import BatchRunner, BatchTimings
from ingot.runtime.engines.engine import Engine
from ingot.runtime.scheduling.entry import Entry, Outcome

log = logging.getLogger(__name__)

Done = Callable[["Worker", list[Entry], list[Outcome], float, BatchTimings], None]


class Worker:
    """Runs batches outside the event loop, one at a time; engines release the interpreter lock while they compute.

    Args:
        engine: the loaded model; the worker closes it.
        runner: runs batches on the engine.
        done: called in the worker thread with (worker, entries, outcomes, seconds, timings) after each batch.
        name: of the thread.

    Attributes:
        calls: number of batches that have begun.
        running: the batch that runs; None while idle. Other threads may read it.
        threaded: whether it runs in the worker's thread; otherwise it blocks the event loop.
        expected: seconds that the next batch is expected to take, 0 if unknown; set by the caller.
        reason: why the batch left the queue; set by the caller.
        isolated: whether the engine runs in an engine process.
    """

    def __init__(self, engine: Engine, runner: BatchRunner, done: Done, name: str):
        self.calls = 0
        self.running: list[Entry] | None = None
        self.threaded = False
        self.expected = 0.0
        self.reason = "idle"
        self.isolated = engine.capabilities.isolated
        self._ending: tuple[int, IngotError] | None = None
        self._engine = engine
        self._runner = runner
        self._done = done
        self._work: SimpleQueue[list[Entry] | None] = SimpleQueue()
        self._own_thread = Thread(target=self._loop, name=name, daemon=True)
        self._own_thread.start()

    def start(self, entries: list[Entry]) -> None:
        """Run a batch in the thread; call only while idle."""
        self._work.put(entries)

    def close(self, timeout: float | None = None) -> None:
        """Finish the current batch, stop the thread and free the engine.

        An engine call that exceeds ``timeout`` seconds is terminated. If that does not end it, its engine process is
        killed; without one, the call is abandoned and ends with this process.
        """
        self._work.put(None)
        self._own_thread.join(timeout)
        if self._own_thread.is_alive():
            self.end(self.calls, EngineTimeout("the engine call was ended, since the server stops"))
            self._own_thread.join(timeout)
        if not self._own_thread.is_alive() or self.isolated:
            self._engine.close()  # which ends the call of an isolated engine

    def end(self, call: int, error: IngotError) -> None:
        """Terminate a running batch, from any thread; repeat it until the batch has ended.

        Args:
            call: the value of :attr:`calls` while the batch runs. No other batch is affected.
            error: the outcome of its requests.
        """
        if self.calls == call and self.running is not None:
            self._ending = call, error
            self._engine.terminate()

    def drop_calls(self, left: Entry) -> None:
        """Cancel the calls of the running batch to other models, if the client that left was its last."""
        running = self.running
        if running is not None and left in running and all(entry.done for entry in running):
            for cancel in [*self._runner.spent.open.values()]:
                cancel()

    @property
    def down(self) -> bool:
        """Whether the engine's process has ended and another is not ready yet."""
        return bool(self._engine.down)

    @property
    def lost(self) -> str:
        """Why the engine's device has failed for good; empty while it works."""
        return "" if self.isolated else self._engine.down

    @property
    def device(self) -> str:
        """The engine's device."""
        return self._engine.device

    def kill(self, call: int) -> bool:
        """End the engine's process, as a running batch does not end; return False if it has none."""
        if not self.isolated:
            return False
        if self.calls == call and self.running is not None:
            self._engine.kill()
        return True

    def run(self, entries: list[Entry]) -> tuple[list[Outcome], float, BatchTimings]:
        """Run a batch in the caller's thread; call only while idle.

        Returns:
            The outcomes, the total seconds, and the timings by stage.
        """
        began = time.perf_counter()
        self.calls += 1
        self.running = entries
        try:
            outcomes = self._runner.run(entries)
            if self._runner.ended is not None:
                outcomes = self._ended(entries, outcomes)
        except BaseException as error:  # noqa: BLE001 - a worker must not die and leave its clients waiting
            log.critical("the engine raised a fatal error in its thread: %r", error)
            outcomes = [InternalError("the engine failed on this input") for _ in entries]
        self.running = None
        return outcomes, time.perf_counter() - began, self._runner.spent

    def _ended(self, entries: list[Entry], outcomes: list[Outcome]) -> list[Outcome]:
        """Return the outcomes of a batch whose engine call was ended."""
        if self._ending is not None and self._ending[0] == self.calls - 1:
            # The batch before this one was meant, and ended at the same moment.
            outcomes = self._runner.run(entries)
        if self._ending is None or self._ending[0] != self.calls:
            return outcomes
        error, ended = self._ending[1], self._runner.ended
        return [error if outcome is ended else outcome for outcome in outcomes]

    def _loop(self) -> None:
        while (entries := self._work.get()) is not None:
            self.threaded = True
            done = self.run(entries)
            self.threaded = False
            self._done(self, entries, *done)
            del done
            del entries  # do not keep their arrays until the next batch
