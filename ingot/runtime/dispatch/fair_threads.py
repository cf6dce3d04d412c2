"""Threads that models share, so that the requests of one model do not delay those of others for long."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeVar

from ingot.runtime.scheduling.entry import Entry, ignore
from ingot.runtime.scheduling.queue import Clients

T = TypeVar("T")


class _Work:
    """A function that waits for a thread; ``entry`` is its place among the others."""

    __slots__ = ("entry", "function", "future", "owner")

    def __init__(self, owner: str, number: int, function: Callable[[], Any]):
        self.owner = owner
        self.entry = Entry({}, 1, ignore, 0.0, nbytes=0, client=owner)
        self.entry.number = number
        self.function = function
        self.future: Future[Any] = Future()


class _Owner:
    """The work of one model: what is queued or runs, what is held back, and the seconds that the last work took."""

    __slots__ = ("active", "expected", "held")

    def __init__(self) -> None:
        self.active = 0
        self.held: deque[_Work] = deque()
        self.expected = 0.0


class FairThreads:
    """Runs functions in threads. The next one is that of the model whose functions have taken the least time.

    One thread more than ``count`` is kept, and no model takes more than ``count``: long work of one model does not
    occupy all threads. Any thread may call it.

    Args:
        count: most threads of one model.
        name: a prefix of the threads' names.
    """

    def __init__(self, count: int, name: str):
        self._count = count
        self._threads = ThreadPoolExecutor(count + 1, name)
        self._lock = Lock()
        self._clients = Clients(0)
        self._owners: dict[str, _Owner] = {}  # those with work
        self._queued: dict[int, _Work] = {}  # by the numbers of their entries
        self._number = 0

    def submit(self, owner: str, function: Callable[[], T]) -> Future[T]:
        """Run a function of a model; return the future of its result."""
        with self._lock:
            self._number += 1
            work = _Work(owner, self._number, function)
            known = self._owners.setdefault(owner, _Owner())
            if known.active >= self._count:
                known.held.append(work)
            else:
                self._queue(known, work)
        return work.future

    def close(self) -> None:
        """Wait for the work, and end the threads."""
        self._threads.shutdown()

    def _queue(self, owner: _Owner, work: _Work) -> None:
        owner.active += 1
        self._clients.put(work.entry)
        self._queued[work.entry.number] = work
        self._threads.submit(self._run_next)

    def _run_next(self) -> None:
        with self._lock:
            entry = self._clients.first()
            work = self._queued.pop(entry.number)
            owner = self._owners[work.owner]
            expected = owner.expected
            # Charged before it runs: several threads could otherwise take work of the same model.
            self._clients.charge(entry, expected)
            self._clients.remove(entry)
        began = time.perf_counter()
        _settle(work)
        seconds = time.perf_counter() - began
        with self._lock:
            self._clients.charge(entry, seconds - expected)
            self._finish(work.owner, owner, seconds)

    def _finish(self, name: str, owner: _Owner, seconds: float) -> None:
        owner.active -= 1
        owner.expected = seconds
        if owner.held:
            self._queue(owner, owner.held.popleft())
        elif not owner.active:
            del self._owners[name]


def _settle(work: _Work) -> None:
    if not work.future.set_running_or_notify_cancel():
        return
    try:
        found = work.function()
    except BaseException as error:  # noqa: BLE001 - raised by the future, as by that of any executor
        work.future.set_exception(error)
    else:
        work.future.set_result(found)
