"""Copies of many blobs in several threads: progress and cancellation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import TypeVar

Item = TypeVar("Item")
_thread = threading.local()


class Cancelled(Exception):
    """A copy was cancelled because another blob of the transfer failed, or the user interrupted it.

    It is not an IngotError, since no caller sees it: the original error is raised.
    """


class Transfer:
    """The progress of a copy of many blobs, updated by several threads.

    Args:
        report: called after every change, by any thread, one at a time. It must be fast.

    Attributes:
        total: the expected number of bytes.
        moved: the bytes that were read and written.
        skipped: the bytes that existed already.
    """

    def __init__(self, report: Callable[[Transfer], None] | None = None):
        self.total = 0
        self.moved = 0
        self.skipped = 0
        self._report = report
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._callbacks: set[Callable[[], None]] = set()

    @staticmethod
    def of_this_thread() -> Transfer | None:
        """Return the transfer that this thread works for, inside :meth:`each`; None in other threads."""
        return getattr(_thread, "transfer", None)

    @property
    def done(self) -> int:
        """The bytes that were moved or skipped."""
        return self.moved + self.skipped

    @property
    def cancelled(self) -> bool:
        """Whether the transfer was cancelled."""
        return self._cancelled.is_set()

    def check(self) -> None:
        """Raise Cancelled if the transfer was cancelled."""
        if self._cancelled.is_set():
            raise Cancelled("the transfer was cancelled")

    def pause(self, seconds: float) -> None:
        """Wait for ``seconds`` or until the transfer is cancelled."""
        self._cancelled.wait(seconds)

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Register a callback for cancellation, to interrupt blocked threads."""
        with self._lock:
            self._callbacks.add(callback)

    def expect(self, count: int) -> None:
        """Add bytes to the expected total."""
        self._add("total", count)

    def advance(self, count: int) -> None:
        """Count moved bytes; a negative number retracts bytes that will be moved again.

        Raises:
            Cancelled: the transfer was cancelled.
        """
        self._add("moved", count)
        self.check()

    def skip(self, count: int) -> None:
        """Count bytes that existed already."""
        self._add("skipped", count)

    def each(self, work: Callable[[Item], None], items: Iterable[Item], workers: int) -> None:
        """Call ``work`` for each item in ``workers`` threads. The first error cancels the transfer and is raised."""
        with ThreadPoolExecutor(workers, thread_name_prefix="ingot-transfer") as pool, ExitStack() as on_error:
            # Also on Ctrl-C: threads must end before the destination is cleaned up.
            on_error.callback(pool.shutdown, cancel_futures=True)
            on_error.callback(self._cancel)
            futures = [pool.submit(self._work, work, item) for item in items]
            finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
            if any(future.exception() is not None for future in finished):
                self._cancel()
                pool.shutdown(cancel_futures=True)
                _raise_first(future.exception() for future in futures if not future.cancelled())
            on_error.pop_all()

    def _work(self, work: Callable[[Item], None], item: Item) -> None:
        _thread.transfer = self
        work(item)

    def _cancel(self) -> None:
        self._cancelled.set()
        with self._lock:
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback()

    def _add(self, name: str, count: int) -> None:
        with self._lock:
            setattr(self, name, getattr(self, name) + count)
            if self._report is not None:
                self._report(self)


def _raise_first(errors: Iterable[BaseException | None]) -> None:
    """Raise the error that caused the cancellation."""
    real = [error for error in errors if error is not None]
    raise next((error for error in real if not isinstance(error, Cancelled)), real[0])
