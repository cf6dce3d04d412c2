"""Engine processes that run a step which decodes items of clients."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from ingot.errors import EngineLost, InvalidArgument
from ingot.runtime.engines.isolation.engine import Isolation, ProcessEngine
from ingot.runtime.engines.isolation.supervisor import Supervision
from ingot.runtime.engines.spec import EngineSpec
from ingot.runtime.engines.step_engine import ITEM
from ingot.steps import Apply, ItemStep, Values

# Seconds of one item: a picture of the largest size takes some 2 s.
_CALL_SECONDS = 20.0
# Items that ended a process, which are remembered, and how often one may do so.
_REMEMBERED = 256
_MOST_ENDS = 2


class StepProcesses:
    """Runs a step in processes that are confined as those of engines are, one item at a time in each.

    An item that ends its process costs its own request only. The process is started again, and meanwhile the others
    decode. The results lie in shared memory.

    Args:
        step: the step.
        count: of processes, which is how many items are decoded at a time.
        memory_mb: most private memory of a process, in MiB; None for what the step's limits need.
        load_timeout: seconds until the processes must be ready.

    Raises:
        IngotError: the step cannot be opened.
        EngineLost: a process ended.
        DeadlineExceeded: opening takes longer than the limit.
    """

    def __init__(self, step: ItemStep, count: int, memory_mb: int | None, load_timeout: float | None):
        spec = EngineSpec(Path(step.kind), format="step", device="cpu", step=step.model_dump_json())
        isolation = Isolation(
            why=f"step '{step.kind}' decodes files of clients",
            required=True,
            memory_mb=memory_mb or step.memory_mb,
            load_timeout=load_timeout,
            call_timeout=_CALL_SECONDS,
        )
        self._threads = ThreadPoolExecutor(count, f"ingot-{step.kind}")
        self._engines: list[ProcessEngine] = []
        with ExitStack() as undo:
            undo.callback(self.close)  # the processes that have started, if one does not
            for _ in self._threads.map(lambda _: self._engines.append(ProcessEngine(spec, isolation)), range(count)):
                pass
            undo.pop_all()
        self._idle: SimpleQueue[ProcessEngine] = SimpleQueue()
        for engine in self._engines:
            self._idle.put(engine)
        self._ends: dict[bytes, int] = {}
        self.measures = self._engines[0].measures
        self.apply: Apply = step.over(self._item, self._all)

    def supervise(self, model: str, lost: Callable[[str], None]) -> None:
        """Start processes again when they end; ``lost`` is called with how one ended."""
        for engine in self._engines:
            engine.supervise(Supervision(model, lambda run: None, lost, lambda: None))

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown()
        for engine in self._engines:
            engine.close()

    def _all(self, function: Callable[[bytes], Values], items: Iterable[bytes]) -> Iterator[Values]:
        found = [*items]
        return map(function, found) if len(found) == 1 else self._threads.map(function, found)

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
        engine = self._idle.get()
        try:
            return engine.run({ITEM: np.frombuffer(content, np.uint8)})
        except EngineLost:
            self._remember(hashlib.sha256(content).digest())
            raise
        finally:
            self._idle.put(engine)

    def _remember(self, key: bytes) -> None:
        ends = self._ends
        self._ends = {**dict([*ends.items()][1 - _REMEMBERED :]), key: ends.get(key, 0) + 1}
