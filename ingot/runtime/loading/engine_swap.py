"""The replacement of engines that serve at once by engines that share memory with other processes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from threading import Event, Lock, Thread

from ingot import foreign, tensors
from ingot.errors import IngotError
from ingot.model_store.store.derived import CacheEntry
from ingot.runtime.engines.engine import BaseEngine, Capabilities, Engine
from ingot.runtime.engines.isolation.engine import ProcessEngine
from ingot.runtime.engines.isolation.supervisor import Supervision
from ingot.runtime.loading.prepacked import Builder, Prepacked, Test
from ingot.tensors import Array, Signature

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD = -1  # of malloc.h


class _Stopped(Exception):
    """The model is being unloaded."""


class Replaceable(BaseEngine):
    """An engine that delegates to another, which can be replaced by an equivalent one.

    Args:
        engine: the first engine; closing this closes it.
    """

    def __init__(self, engine: Engine):
        self.current = engine
        self.signature: Signature = engine.signature
        self.platform = engine.platform
        self.device = engine.device
        self._isolated = engine.capabilities.isolated
        self._supervision: Supervision | None = None
        self._lock = Lock()  # held during a call, so that a running engine is not closed
        self._closed = False

    @property
    def settings(self) -> Mapping[str, str]:
        return self.current.settings

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        with self._lock:
            return self.current.run(inputs)

    def terminate(self) -> None:
        self.current.terminate()

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities that stay when the engine changes: buffers and lanes of one cannot be used with the next."""
        return Capabilities(isolated=self._isolated)

    def kill(self) -> None:
        self.current.kill()

    @property
    def down(self) -> str:
        return self.current.down

    @property
    def failed(self) -> bool:
        """See :class:`ProcessEngine`; false for an engine in this process."""
        return isinstance(self.current, ProcessEngine) and self.current.failed

    @property
    def measures(self) -> Sequence[str]:
        """See :class:`ProcessEngine`; empty for an engine in this process."""
        return self.current.measures if isinstance(self.current, ProcessEngine) else ()

    def supervise(self, supervision: Supervision) -> None:
        """Keep the process of this engine, and of those that replace it, running; no effect without one."""
        with self._lock:
            self._supervision = supervision
            _supervise(self.current, supervision)

    def replace(self, engine: Engine) -> None:
        """Switch to another engine after the current call and close the old one; if closed, close the new one."""
        with self._lock:
            if self._closed:
                old = engine
            else:
                old, self.current = self.current, engine
                if self._supervision is not None:
                    _supervise(engine, self._supervision)
        old.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.current.close()


def _supervise(engine: Engine, supervision: Supervision) -> None:
    if isinstance(engine, ProcessEngine):
        engine.supervise(supervision)


class EngineSwap:
    """Replaces engines while they serve by engines that map the saved form, from its own thread.

    Args:
        prepacked: opens the new engines.
        engines: those that serve now.
        threads: CPU threads of each.
        test: raises IngotError if an engine does not answer correctly.
        done: called with ``hit`` (the saved form existed), ``built`` (it does now) or ``failed`` at the end.
        name: the model's name in the log.
    """

    def __init__(
        self,
        prepacked: Prepacked,
        engines: Sequence[Engine],
        *,
        threads: int,
        test: Test,
        done: Callable[[str], None],
        name: str,
    ):
        self.engines = [Replaceable(engine) for engine in engines]
        self._prepacked = prepacked
        self._threads = threads
        self._test = test
        self._done = done
        self._name = name
        self._stopped = Event()
        self._builder: Builder | None = None
        self._thread = Thread(target=self._run, name=f"ingot-prepack-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; return whether it was reached."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self, timeout: float | None = None) -> None:
        """Abort what is not done yet. The engines are not closed.

        Args:
            timeout: seconds to wait for an engine that is being opened, which cannot be interrupted.
        """
        self._stopped.set()
        if self._builder is not None:
            self._builder.kill()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        result = foreign.outcome(self._to_saved)
        if isinstance(result, Exception):  # the server continues without the cache
            if self._stopped.is_set():
                return
            log.info("model %s is served without the derived cache: %s", self._name, result)
            result = "failed"
            self._to_whole()
        _give_back_memory()
        if not self._stopped.is_set():
            log.info("model %s: derived cache: %s", self._name, result)
            self._done(result)

    def _to_saved(self) -> str:
        entry = self._prepacked.entry()
        found = entry.find()
        if not found:
            self._build(entry)
        try:
            for place in self.engines:
                self._replace(place, lambda: self._prepacked.open_saved(entry, self._threads))
        except IngotError:
            entry.remove()  # it looked complete but is not
            raise
        return "hit" if found else "built"

    def _to_whole(self) -> None:
        for place in self.engines:
            if place.current.capabilities.packed:
                continue
            opened = functools.partial(self._prepacked.open_whole, self._threads)
            error = foreign.outcome(functools.partial(self._replace, place, opened))
            if isinstance(error, _Stopped):
                return
            if error is not None:  # the current engines keep serving
                log.warning("model %s is served with unpacked weights: %s", self._name, error)
                error = None  # which holds the engine that failed

    def _replace(self, place: Replaceable, opened: Callable[[], Engine]) -> None:
        if self._stopped.is_set():
            raise _Stopped
        engine = opened()
        with contextlib.ExitStack() as on_error:
            on_error.callback(engine.close)
            tensors.check_same(place.signature, engine.signature)
            self._test(engine)
            on_error.pop_all()
        place.replace(engine)

    def _build(self, entry: CacheEntry) -> None:
        self._builder = Builder(self._prepacked, entry)
        if self._stopped.is_set():  # closed before the builder existed
            self._builder.kill()
        self._builder.finish()


def _give_back_memory() -> None:
    """Return freed memory to the system; only glibc needs this.

    Packing leaves as much as the largest weight, up to 32 MiB, at the end of this thread's heap. Only freeing a block
    there while the trim threshold is low returns that memory: malloc_trim does not trim the ends of heaps.
    """
    with contextlib.suppress(AttributeError, OSError):  # no glibc
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
        libc.free.argtypes = (ctypes.c_void_p,)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 20)
        libc.free(libc.malloc(3 << 19))
        libc.mallopt(_M_TRIM_THRESHOLD, 64 << 20)  # glibc's own maximum
        libc.malloc_trim(0)
