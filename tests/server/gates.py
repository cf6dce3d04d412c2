"""Models that answer only when a test lets them, in servers in this process and in others.

``python -m tests.server.gates FILE ARGS...`` is the ``ingot`` command with such models.
"""

from __future__ import annotations

import fcntl
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ingot.runtime import Engine, EngineSpec, load_engine
from ingot.runtime.dispatch.worker import Worker
from ingot.runtime.engines.isolation.engine import Isolation
from ingot.runtime.loading import load_spec
from ingot.tensors import Array


class Gate:
    """Holds every call of the models called ``held`` while it is shut; it is open at first.

    It is a lock on a file, so it works across processes, and opens when the test's process ends. Leaving its ``with``
    block opens it for good.
    """

    def __init__(self, folder: Path):
        self.path = folder / "gate"
        self._file = self.path.open("w")
        self._waiting = _sign(self.path)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def shut(self) -> None:
        """Hold later calls, after the running ones have ended."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._waiting.unlink(missing_ok=True)

    def waited_at(self) -> bool:
        """Return whether a call has reached the gate since it was shut."""
        return self._waiting.exists()

    def open(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    @contextmanager
    def closed(self) -> Iterator[None]:
        self.shut()
        try:
            yield
        finally:
            self.open()


def _sign(gate: Path) -> Path:
    return gate.with_suffix(".waiting")


def hold(gate: Path, patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Make the engines of this process wait at a gate. A test passes ``monkeypatch.setattr``."""
    run = Worker.run

    def load_held(spec: EngineSpec, isolation: Isolation | None) -> Engine:
        engine = load_engine(spec, isolation)
        return _Held(engine, gate) if spec.path.stem == "held" else engine

    def run_without_the_wait(self: Worker, entries: Any) -> Any:
        # Otherwise the scheduler learns that the model is slow, and refuses requests that have a deadline.
        outcomes, seconds, spent = run(self, entries)
        return outcomes, seconds - getattr(self._engine, "waited", 0), spent

    patch(load_spec, "load_engine", load_held)
    patch(Worker, "run", run_without_the_wait)


class _Held:
    def __init__(self, engine: Engine, gate: Path):
        self._engine = engine
        self._gate = gate
        self.waited = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        began = time.perf_counter()
        with self._gate.open() as file:
            _sign(self._gate).touch()
            fcntl.flock(file, fcntl.LOCK_SH)
            self.waited = time.perf_counter() - began
            time.sleep(0.001)  # a call that is shorter runs in the event loop, where it must not wait
            return self._engine.run(inputs)


if __name__ == "__main__":
    hold(Path(sys.argv.pop(1)))
    from ingot.__main__ import main

    main()
