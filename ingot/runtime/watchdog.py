"""A thread outside the event loop that ends engine calls over their limits, notices a blocked loop, frees memory."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ingot import foreign
from ingot.errors import EngineTimeout, IngotError, TooLarge
from ingot.faults import rate_limited_logger
from ingot.report.units import size, written
from ingot.runtime.dispatch.worker import Worker
from ingot.runtime.engines.ort import ort_arena
from ingot.runtime.machine import memory
from ingot.runtime.machine.memory import Sweeper
from ingot.runtime.metrics import Metrics
from ingot.runtime.model import Model
from ingot.runtime.scheduling.entry import Entry

log = rate_limited_logger(__name__)

_INTERVAL = 0.25  # seconds between two checks
# The limit of a call by default: seconds, and as a multiple of its expected duration.
_LEAST = 30.0
_TIMES = 50.0
# The limit of a call in the event loop, where it was expected to take microseconds and all clients wait for it.
_INLINE = 5.0
# Growth of the process during one call, in bytes, up to which other requests may be the cause.
_OTHERS = 1 << 30
# Seconds that a terminated call may take to end, and the same in an engine process, which can be killed.
_GRACE = 5.0
_PROCESS_GRACE = 1.0
# Seconds after which an event loop that does nothing counts as blocked.
_BLOCKED = 1.0
_FRAMES = 12  # of the stack of what blocks it, in the log

EXIT_CODE = 70
"""The exit code of a process whose event loop stays blocked: EX_SOFTWARE of sysexits.h."""


@dataclass
class _Call:
    """A running batch; times are on the watchdog's clock, from its first check, and so are the process's bytes."""

    number: int
    since: float
    resident: int
    terminated: float = math.inf
    large: bool = False
    given_up: bool = False


class Watchdog:
    """Ends engine calls that exceed their limits or that no client waits for, and watches the event loop.

    The limit of memory is a second guard of calls in this process, after what is predicted of a call and the limit of
    ONNX Runtime's arena, which has no texts: the process must not grow by more than a call may take.

    Its clock advances only while it runs, so that a process that was stopped and continued, or a machine
    that was suspended, ends no call.

    Args:
        models: the models of the process.
        limit: seconds for one batch; None derives it from the expected duration, 0 means unlimited.
        metrics: where ended calls and blocked seconds are counted.
        ends_process: whether to end the process if a call in the event loop cannot be ended; otherwise it is only
            logged.
    """

    def __init__(self, models: Iterable[Model], limit: float | None, metrics: Metrics, *, ends_process: bool):
        self._models = models
        self._limit = limit
        self._metrics = metrics
        self._ends_process = ends_process
        self._clock = 0.0
        self._resident = 0
        self._most = memory.engine_limit()
        self._calls: dict[Worker, _Call] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._beat = 0.0  # when the loop last ran, by the clock
        self._asked = False
        self._blocked = False
        self._sweeper = Sweeper(ort_arena.give_back, metrics.memory_returned.inc)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ingot-watchdog", daemon=True)

    def start(self) -> None:
        """Begin; call in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._thread.start()

    def stop(self) -> None:
        """End; no call is ended afterwards."""
        self._stop.set()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(_INTERVAL):
            now = time.monotonic()
            step = min(now - last, 2 * _INTERVAL)
            last = now
            self._clock += step
            error = foreign.outcome(functools.partial(self._check, step))
            if error is not None:  # the next check may succeed, and nothing else would notice
                log.error("the watchdog failed", exc_info=error)

    def _check(self, step: float) -> None:
        self._check_calls()
        self._check_loop(step)
        self._sweeper.check(self._clock, idle=not self._calls)

    def _check_calls(self) -> None:
        self._resident = memory.resident()
        seen, self._calls = self._calls, {}
        for model in self._models:
            ended = False
            for worker in model.workers:
                number, entries = worker.calls, worker.running
                call = seen.get(worker)
                ended |= call is not None and call.given_up and (entries is None or call.number != number)
                if entries is None or worker.calls != number:
                    continue
                if call is None or call.number != number:
                    call = _Call(number, self._clock, self._resident)
                else:
                    self._judge(model, worker, call, entries)
                self._calls[worker] = call
            # Other instances of the model may still be stuck.
            if ended and not any(worker in self._calls and self._calls[worker].given_up for worker in model.workers):
                self._resume(model)

    def _judge(self, model: Model, worker: Worker, call: _Call, entries: list[Entry]) -> None:
        """End a batch that is over a limit, or whose requests are all cancelled or past their deadlines."""
        limit, most = self._limit_of(worker), self._most_of(model, worker)
        late = self._clock - call.since > limit
        call.large |= self._resident - call.resident > most
        over = late or call.large
        if not over and not all(entry.done for entry in entries):
            return
        if call.terminated == math.inf:
            call.terminated = self._clock
            reason = "memory" if call.large else "limit" if late else "abandoned"
            self._metrics.engine_ended.labels(model.name, model.version, reason).inc()
            if over:
                what = f"{size(int(most))} of memory" if call.large else written(limit)
                log.error("model %s: ending an engine call over its limit of %s", model.name, what)
            else:
                log.info("model %s: ending an engine call that no client waits for any longer", model.name)
        error: IngotError = EngineTimeout(
            f"the engine call of model '{model.name}' took longer than its limit of {written(limit)}; "
            "see --engine-timeout (INGOT_ENGINE_TIMEOUT)"
        )
        if call.large:
            error = TooLarge(
                f"the server's process grew by more than {size(int(most))} during the engine call of model "
                f"'{model.name}'; send smaller inputs, or raise --max-call-mb (INGOT_MAX_CALL_MB)"
            )
        worker.end(call.number, error)  # at each check: a batch may be between two engine calls
        waited = self._clock - call.terminated
        if over and waited > _PROCESS_GRACE and worker.kill(call.number):
            return
        if over and waited > _GRACE and not call.given_up:
            call.given_up = True
            self._give_up(model, worker, error)

    def _limit_of(self, worker: Worker) -> float:
        if self._limit == 0:
            return math.inf
        limit = max(_LEAST, _TIMES * worker.expected) if self._limit is None else self._limit
        return limit if worker.threaded else min(limit, _INLINE)

    def _most_of(self, model: Model, worker: Worker) -> float:
        """Return by how many bytes the process may grow during a call; an engine process has a limit already."""
        return math.inf if worker.isolated else min(max(model.settings.max_call_bytes, _OTHERS), self._most)

    def _give_up(self, model: Model, worker: Worker, error: IngotError) -> None:
        """Handle a call that did not end after it was terminated."""
        what = f"an engine call of model '{model.name}' does not end {written(_GRACE)} after it was terminated"
        if worker.threaded:
            log.critical("%s: the model is not ready until it ends; restart the server to free its cores", what)
            self._soon(functools.partial(model.suspend, f"{what}; restart the server", worker, error))
            return
        log.critical("%s, and it blocks the event loop: no request can be answered", what)
        if self._ends_process:
            log.critical("the process ends with exit code %d, since nothing else can help", EXIT_CODE)
            logging.shutdown()
            os._exit(EXIT_CODE)

    def _resume(self, model: Model) -> None:
        log.warning("model %s: the engine call that did not end has ended", model.name)
        self._soon(model.resume)

    def _soon(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            if self._loop is not None:
                self._loop.call_soon_threadsafe(callback)

    def _check_loop(self, step: float) -> None:
        silent = self._clock - self._beat
        if silent > _BLOCKED:
            self._metrics.event_loop_blocked.inc(step)
            if not self._blocked:
                self._blocked = True
                log.error("the event loop has been blocked for over %s %s", written(_BLOCKED), self._culprit())
        elif self._blocked:
            self._blocked = False
            log.warning("the event loop is no longer blocked")
        if not self._asked:
            self._asked = True
            self._soon(self._answer)

    def _answer(self) -> None:
        """Note, in the event loop, that it runs."""
        self._beat = self._clock
        self._asked = False

    def _culprit(self) -> str:
        """Return the call that blocks the event loop: an engine's, or a line of Python."""
        for model in self._models:
            for worker in model.workers:
                if worker.running is not None and not worker.threaded:
                    return f"by an engine call of model '{model.name}'"
        frame = sys._current_frames().get(self._loop_thread)
        lines = traceback.extract_stack(frame)[-_FRAMES:] if frame is not None else []
        return "by Python code: " + ", ".join(f"{line.name} ({line.filename}:{line.lineno})" for line in lines)
