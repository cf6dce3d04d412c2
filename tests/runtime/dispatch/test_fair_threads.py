from __future__ import annotations

import contextlib
import threading
from concurrent.futures import CancelledError

import pytest

from ingot.runtime.dispatch.fair_threads import FairThreads


def test_a_model_with_long_work_does_not_occupy_all_threads() -> None:
    gate = threading.Event()
    with contextlib.closing(FairThreads(2, "fair")) as threads:
        pictures = [threads.submit("pictures", lambda: gate.wait(30)) for _ in range(8)]
        assert threads.submit("texts", lambda: "done").result(30) == "done"
        assert not any(future.done() for future in pictures)
        gate.set()
        assert all(future.result(30) for future in pictures)


def test_the_model_that_took_the_least_time_is_next() -> None:
    """A backlog of one model, whose work takes long, is passed by each request of another that arrives later."""
    order: list[str] = []
    gates = {name: threading.Event() for name in ("long", "other")}
    with contextlib.closing(FairThreads(1, "fair")) as threads:
        for name, gate in gates.items():  # both threads are taken
            threads.submit(name, lambda gate=gate: gate.wait(30))  # type: ignore[misc]
        futures = [threads.submit("long", lambda: order.append("long")) for _ in range(4)]
        futures += [threads.submit("short", lambda: order.append("short")) for _ in range(3)]
        # The first work of "long" takes longer than all of "short".
        threading.Timer(0.3, gates["long"].set).start()
        for future in futures:
            future.result(30)
        gates["other"].set()
    assert order == ["short"] * 3 + ["long"] * 4


def test_failures_and_cancelled_work() -> None:
    gate, ran = threading.Event(), list[int]()
    with contextlib.closing(FairThreads(1, "fair")) as threads:
        first = threads.submit("a", lambda: gate.wait(30))
        failing = threads.submit("a", lambda: 1 / 0)
        cancelled = threads.submit("a", lambda: ran.append(1))
        exiting = threads.submit("a", lambda: exit(3))
        assert cancelled.cancel()
        gate.set()
        assert first.result(30)
        with pytest.raises(ZeroDivisionError):
            failing.result(30)
        with pytest.raises(SystemExit):
            exiting.result(30)
        with pytest.raises(CancelledError):
            cancelled.result(30)
    assert ran == []
