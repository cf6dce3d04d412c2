"""Engine processes that run a step which decodes items of clients."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Condition, Timer

import numpy as np

from ingot.errors import EngineLost, InvalidArgument
from ingot.runtime.engines.isolation.engine import Isolation, ProcessEngine
from ingot.runtime.engines.isolation.supervisor import Supervision
from ingot.runtime.engines.spec import EngineSpec
from ingot.runtime.engines.step_engine import ITEM
from ingot.steps import Apply, ItemStep, Values

IDLE_SECONDS = 300.0
"""After how long a process without items ends: another takes most of a second to start."""
# Seconds of one item: a picture of the largest size takes some 2 s.
_CALL_SECONDS = 20.0
# Items that ended a process, which are remembered, and how often one may do so.
_REMEMBERED = 256
_MOST_ENDS = 2


class StepProcesses:
    """Runs a step in processes that are confined as those of engines are, one item at a time in each.

    A process is started for an item that finds none idle, and ends after some minutes without items. An item that ends
    its process costs its own request only. The process is started again, and meanwhile the others decode. The results
    lie in shared memory. Any thread may call it.

    Args:
        step: the step.
        count: most processes, which is how many items are decoded at a time.
        memory_mb: most private memory of a process, in MiB; None for what the step's limits need.
        load_timeout: seconds until a process must be ready.
        idle: seconds after which a process without items ends.
    """

    def __init__(
        self, step: ItemStep, count: int, memory_mb: int | None, load_timeout: float | None, idle: float = IDLE_SECONDS
    ):
        self._spec = EngineSpec(Path(step.kind), format="step", device="cpu", step=step.model_dump_json())
        self._isolation = Isolation(
            why=f"step '{step.kind}' decodes files of clients",
            required=True,
            memory_mb=memory_mb or step.memory_mb,
            load_timeout=load_timeout,
            call_timeout=_CALL_SECONDS,
        )
        self._count = count
        self._idle_seconds = idle
        self._changed = Condition()
        self._engines: list[ProcessEngine] = []
        self._idle: list[tuple[ProcessEngine, float]] = []  # the last used is the next, so that others can end
        self._starting = 0
        self._timer: Timer | None = None
        self._supervision: Supervision | None = None
        self._ends: dict[bytes, int] = {}
        self.apply: Apply = step.over(self._item, self._all)

    @property
    def running(self) -> int:
        """The number of its processes."""
        return len(self._engines)

    @property
    def measures(self) -> tuple[str, ...]:
        """What confines its processes; empty while none runs."""
        return next((engine.measures for engine in self._engines), ())

    def supervise(self, model: str, lost: Callable[[str], None]) -> None:
        """Start processes again when they end; ``lost`` is called with how one ended."""
        with self._changed:
            self._supervision = Supervision(model, lambda run: None, lost, lambda: None)
            for engine in self._engines:
                engine.supervise(self._supervision)

    def check(self) -> None:
        """Start a process, unless one runs: it finds out whether the step can be opened.

        Raises:
            IngotError: it cannot.
        """
        if not self._engines:
            self._return(self._take())

    def close(self) -> None:
        """End the processes without items; a later item starts another."""
        self._end(math.inf)

    def _all(self, function: Callable[[bytes], Values], items: Iterable[bytes]) -> list[Values]:
        found = [*items]
        if len(found) == 1:
            return [function(found[0])]
        with ThreadPoolExecutor(min(self._count, len(found)), "ingot-items") as threads:
            return [*threads.map(function, found)]

    def _take(self) -> ProcessEngine:
        """Return an idle process, or start one.

        Raises:
            IngotError: it cannot be started.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._idle or len(self._engines) + self._starting < self._count)
            if self._idle:
                return self._idle.pop()[0]
            self._starting += 1
        engine: ProcessEngine | None = None
        try:
            engine = ProcessEngine(self._spec, self._isolation)
        finally:
            with self._changed:
                self._starting -= 1
                if engine is not None:
                    self._engines.append(engine)
                    if self._supervision is not None:
                        engine.supervise(self._supervision)
                self._changed.notify()
        return engine

    def _return(self, engine: ProcessEngine) -> None:
        with self._changed:
            self._idle.append((engine, time.monotonic()))
            self._changed.notify()
            self._watch()

    def _watch(self) -> None:
        """End the process that has been longest without items once it is time, and then the others."""
        if self._timer is None and self._idle:
            left = min(since for _, since in self._idle) + self._idle_seconds - time.monotonic()
            self._timer = Timer(max(0.0, left), lambda: self._end(time.monotonic() - self._idle_seconds))
            self._timer.daemon = True
            self._timer.start()

    def _end(self, before: float) -> None:
        """End the processes that have been without items since ``before``."""
        with self._changed:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            ended = [engine for engine, since in self._idle if since <= before]
            self._idle = [(engine, since) for engine, since in self._idle if since > before]
            self._engines = [engine for engine in self._engines if engine not in ended]
            self._watch()
        for engine in ended:
            engine.close()

    def _item(self, content: bytes) -> Values:
        """Return the values of one item.

        Raises:
            InvalidArgument: the item is not valid, or has ended several processes.
            EngineLost: the process ended.
            IngotError: that of the step.
        """
        key = hashlib.sha256(content).digest() if self._ends else b""
        if self._ends.get(key, 0) >= _MOST_ENDS:
            raise InvalidArgument(f"has ended the process that decodes it {_MOST_ENDS} times, so it is refused")
        engine = self._take()
        try:
            return engine.run({ITEM: np.frombuffer(content, np.uint8)})
        except EngineLost:
            self._remember(hashlib.sha256(content).digest())
            raise
        finally:
            self._return(engine)

    def _remember(self, key: bytes) -> None:
        ends = self._ends
        self._ends = {**dict([*ends.items()][1 - _REMEMBERED :]), key: ends.get(key, 0) + 1}
