"""Keeps one engine process running: starts it, tests it, and starts another when it ends."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ingot import foreign
from ingot.errors import DeadlineExceeded, EngineLost, Unavailable
from ingot.runtime.engines.ipc import arena
from ingot.runtime.engines.ipc.arena import Outgoing
from ingot.runtime.engines.isolation.calls import Answer, Ask
from ingot.runtime.engines.isolation.description import Description
from ingot.runtime.engines.isolation.link import arena_size
from ingot.runtime.engines.isolation.process import Ended, EngineProcess
from ingot.runtime.engines.isolation.spec import ProcessSpec
from ingot.tensors import Array

log = logging.getLogger(__name__)

# Seconds between the end of a process and the next start: doubled each time, until one has run for a while.
_FIRST_WAIT = 0.1
_LONGEST_WAIT = 5.0
_LONG_LIFE = 30.0
# So many unexpected ends within so many seconds make the model fail; from then on a start every so many seconds.
_MOST_ENDS = 5
_ENDS_SECONDS = 60.0
_FAILED_WAIT = 10.0
# A later start may take this many seconds, or this multiple of the first.
_START_SECONDS = 60.0
_START_FACTOR = 10

Run = Callable[[Mapping[str, Array]], dict[str, Array]]


@dataclass(frozen=True)
class Supervision:
    """The model's name, for messages, and the test that each new process must pass.

    ``lost`` is called in another thread with how the process ended, such as ``ended by SIGFPE``, and ``changed`` when
    the engine is down, runs again, or has failed. ``ask`` asks another model for the engine's code.
    """

    model: str
    test: Callable[[Run], object]
    lost: Callable[[str], None]
    changed: Callable[[], None]
    ask: Ask | None = None


class Supervisor:
    """The thread that starts the processes of one engine. They end with it, so it stays until :meth:`close`.

    Args:
        spec: as for :class:`EngineProcess`.
        limit: seconds until calls fail, counted from now; None is unlimited. The limit ends with :meth:`supervise`.

    Attributes:
        inputs: an arena for the inputs of each lane, which all processes of this engine share.
        down: how the last process ended, while no other is ready; empty otherwise.
        failed: whether restarts are delayed because processes ended too often.
        description: the engine's, once it has started.
    """

    def __init__(self, spec: ProcessSpec, limit: float | None):
        self.down = ""
        self.failed = False
        self.description: Description
        self._spec = spec
        self._device = "cpu"  # until the first process has opened the engine
        with _address_space():
            self._handles = [arena.create(arena_size()) for _ in range(spec.lanes)]
            self.inputs = [*map(Outgoing, self._handles)]
        self._end = None if limit is None else time.monotonic() + limit
        self._start_limit = _START_SECONDS
        self._supervision: Supervision | None = None
        self._changed = threading.Condition()
        self._ready: EngineProcess | None = None
        self._latest: EngineProcess | None = None
        self._failure: Exception | None = None
        self._closed = False
        self._given_up = 0
        self._wait = _FIRST_WAIT
        self._ends: deque[float] = deque(maxlen=_MOST_ENDS)
        self._thread = threading.Thread(target=self._keep, name="ingot-engine", daemon=True)

    def start(self) -> None:
        """Start the first process and open the engine in it.

        Raises:
            IngotError: the engine cannot be opened, or its process ended, or the limit passed.
        """
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._ready is not None or self._failure is not None)
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    @property
    def left(self) -> float | None:
        """Seconds until calls fail."""
        return None if self._end is None else max(0.1, self._end - time.monotonic())

    def supervise(self, supervision: Supervision) -> None:
        """Replace processes that end, from now on. Until then, the engine ends with its first process.

        Raises:
            EngineLost: it has ended.
        """
        with self._changed:
            if self.failed:
                raise EngineLost(f"{self.name} {self.down}")
            self._supervision, self._end = supervision, None

    def running(self) -> EngineProcess:
        """Return the process, and wait for it if it is being started.

        Raises:
            Unavailable: none will be ready soon.
        """
        ready = self._ready
        if ready is not None:
            return ready
        with self._changed:
            given_up = self._given_up
            self._changed.wait_for(
                lambda: self._ready is not None or self.failed or self._closed or self._given_up != given_up
            )
            if self._ready is None:
                raise Unavailable(f"{self.name} {self.down or 'was closed'}, and no other is ready")
            return self._ready

    def lose(self, process: EngineProcess) -> None:
        """Stop using a process that has ended."""
        with self._changed:
            if self._ready is process:
                self._ready, self.down = None, process.ending

    def retire(self, process: EngineProcess) -> None:
        """End a process between two calls; the next call waits for the one that follows it."""
        with self._changed:
            if self._ready is not process or self._supervision is None:
                return
            self._ready = None
        process.kill(process.retiring)

    def _unhealthy(self, process: EngineProcess, why: str) -> None:
        """Show that the engine of a process is unfit for requests; without a reason, that it is fit again."""
        with self._changed:
            supervision = self._supervision
            down = f"reports that it is not healthy: {why}" if why else ""
            if self._ready is not process or supervision is None or down == self.down:
                return
            self.down = down
        log.warning("%s %s", self.name, self.down or "is healthy again")
        supervision.changed()

    def _ask(self, model: str, inputs: Mapping[str, Array], timeout: float, reply: Callable[[Answer], None]) -> None:
        """Ask another model for the engine's code, once the engine is supervised."""
        if self._supervision is None or self._supervision.ask is None:
            reply(Unavailable("context.infer can be called in a server, once the model is loaded: not for example()"))
        else:
            self._supervision.ask(model, inputs, timeout, reply)

    @property
    def name(self) -> str:
        """The engine process, as messages call it."""
        return f"the engine process of model '{self._supervision.model}'" if self._supervision else "the engine process"

    def terminate(self, lane: int) -> None:
        """Ask the engine to end the running call of a lane."""
        ready = self._ready
        if ready is not None:
            ready.terminate(lane)

    def end_streams(self, numbers: Sequence[int]) -> bool:
        """Let the engine forget streams; see :meth:`EngineProcess.end_streams`."""
        ready = self._ready
        return ready is None or ready.end_streams(numbers)

    def kill(self, why: str) -> None:
        """End the process; if none is ready, fail the calls that wait. ``why`` completes "the process ..."."""
        with self._changed:
            ready = self._ready
            self._given_up += 1
            self._changed.notify_all()
        if ready is not None:
            ready.kill(why)

    def close(self) -> None:
        """End the process and the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._latest is not None:
                self._latest.close()
        self._thread.join()

    def _keep(self) -> None:
        try:
            process = self._start_first()
            while process is not None:
                began = time.monotonic()
                ending = process.wait()
                self.lose(process)
                process.release()
                with self._changed:
                    supervision = self._supervision
                    if self._closed or supervision is None:
                        self.failed = True
                        break
                if process.retiring:
                    log.warning("%s %s", self.name, ending)
                    self._ends.clear()
                    self._wait = _FIRST_WAIT
                else:
                    log.error("%s %s; it is started again", self.name, ending)
                supervision.lost(ending)
                supervision.changed()
                if time.monotonic() - began > _LONG_LIFE:
                    self._wait = _FIRST_WAIT
                process = self._start_next(supervision)
        finally:
            for handle in self._handles:
                os.close(handle)
            with self._changed:
                self.failed = True
                self._changed.notify_all()

    def _describe(self, found: Description) -> None:
        """Keep the description of the engine that a process has opened.

        Raises:
            Unavailable: it is on the CPU, and earlier ones were on a GPU.
        """
        if self._device != "cpu" and found.device == "cpu":
            raise Unavailable(f"it would run on the CPU, since it cannot use {self._device} any more")
        self._device, self.description = found.device, found

    def _start_first(self) -> EngineProcess | None:
        began = time.monotonic()
        first = foreign.outcome(lambda: self._launch(self.left, None))
        with self._changed:
            if isinstance(first, Exception):
                late = self._end is not None and time.monotonic() >= self._end
                ending = f"{self.name} {first} while it loaded the model"
                self._failure = (
                    (DeadlineExceeded if late else EngineLost)(ending) if isinstance(first, Ended) else first
                )
            self._changed.notify_all()
        self._start_limit = max(_START_SECONDS, _START_FACTOR * (time.monotonic() - began))
        return None if isinstance(first, Exception) else first

    def _start_next(self, supervision: Supervision) -> EngineProcess | None:
        """Start a process in place of one that ended; None if the engine is closed meanwhile."""
        while True:
            self._ends.append(time.monotonic())
            failed = len(self._ends) == _MOST_ENDS and self._ends[-1] - self._ends[0] < _ENDS_SECONDS
            with self._changed:
                if failed and not self.failed:
                    self.failed = True  # requests that wait for the next process fail now
                    self._changed.notify_all()
                    log.error(
                        "%s ended, or could not be started, %d times within %.0f s, so the model is not ready; "
                        "it is started every %g s",
                        self.name,
                        _MOST_ENDS,
                        self._ends[-1] - self._ends[0],
                        _FAILED_WAIT,
                    )
            supervision.changed()
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, _FAILED_WAIT if failed else self._wait):
                    return None
            self._wait = min(2 * self._wait, _LONGEST_WAIT)
            found = foreign.outcome(lambda: self._launch(self._start_limit, supervision.test))
            if isinstance(found, EngineProcess):
                log.warning("%s runs again", self.name)
                supervision.changed()
                return found
            log.error("%s cannot be started again: %s", self.name, found)

    def _launch(self, limit: float | None, test: Callable[[Run], object] | None) -> EngineProcess:
        """Return a new process, ready for requests.

        Raises:
            Ended: it ended, or took longer than ``limit`` seconds.
            IngotError: the engine cannot be opened, or failed its test.
            Unavailable: there is no memory, or address space, for it; or it cannot use the GPU that earlier ones had.
            OSError: the process cannot be started.
        """
        with _address_space():
            process = EngineProcess(self._spec, self.inputs, self._handles)
        with contextlib.ExitStack() as on_error:
            on_error.callback(process.release)
            on_error.callback(process.wait)
            on_error.callback(process.close)
            process.unhealthy = partial(self._unhealthy, process)
            process.ask = self._ask
            with self._changed:
                self._latest = process
            if self._closed:
                raise Ended("was closed")
            self._describe(process.open(limit))
            if test is not None:
                test(lambda inputs: process.run(inputs, limit))
            on_error.pop_all()
        with self._changed:
            self._ready, self.down, self.failed = process, "", False
            self._changed.notify_all()
        return process


@contextlib.contextmanager
def _address_space() -> Iterator[None]:
    """Name the cause where there is no memory to map.

    Raises:
        Unavailable: there is no memory to map.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        cause = f"the address space is limited to {limit >> 20} MiB" if limit != resource.RLIM_INFINITY else "no memory"
        raise Unavailable(
            f"an engine process cannot be started: {cause}, and shared memory of {arena_size() >> 20} MiB in each "
            "direction does not fit; raise the limit (ulimit -v), or use --isolate none for models that you trust"
        ) from error
