"""Copies of many blobs: what they tell about themselves on the way, and how they end early."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")
_thread = threading.local()


class Cancelled(Exception):
    """A copy was given up because another blob of the same transfer failed, or the user interrupted it.

    No IngotError, for no caller sees it: what the transfer was given up for is raised.
    """


class Transfer:
    """The state of a copy of many blobs, told by several threads at once.

    ``total`` is all that must be there in the end; ``moved`` are the bytes that were really read and written, and
    ``skipped`` those that were there already.

    Args:
        report: called after every change, by any thread, one at a time. It must be quick.
    """

    def __init__(self, report: Callable[[Transfer], None] | None = None):
        self.total = 0
        self.moved = 0
        self.skipped = 0
        self._report = report
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._break_offs: set[Callable[[], None]] = set()

    @staticmethod
    def of_this_thread() -> Transfer | None:
        """Return the transfer that this thread works for, inside :meth:`each`."""
        return getattr(_thread, "transfer", None)

    @property
    def done(self) -> int:
        return self.moved + self.skipped

    @property
    def cancelled(self) -> bool:
        """Whether the transfer is given up."""
        return self._cancelled.is_set()

    def check(self) -> None:
        """Raise Cancelled if the transfer is given up."""
        if self._cancelled.is_set():
            raise Cancelled("the transfer was given up")

    def pause(self, seconds: float) -> None:
        """Wait, but not once the transfer is given up."""
        self._cancelled.wait(seconds)

    def on_cancel(self, break_off: Callable[[], None]) -> None:
        """Have something called when the transfer is given up, to end what its threads wait for."""
        with self._lock:
            self._break_offs.add(break_off)

    def expect(self, count: int) -> None:
        """Add bytes to those that are to be there in the end."""
        self._add("total", count)

    def advance(self, count: int) -> None:
        """Count bytes that were moved; a negative number takes back what is moved again.

        Raises:
            Cancelled: the transfer is given up.
        """
        self._add("moved", count)
        self.check()

    def skip(self, count: int) -> None:
        """Count bytes that were there already."""
        self._add("skipped", count)

    def each(self, work: Callable[[Item], None], items: Iterable[Item], workers: int) -> None:
        """Do some work for each item, in several threads. The first error ends all of it and is raised."""
        with ThreadPoolExecutor(workers, thread_name_prefix="ingot-transfer") as pool:
            try:
                futures = [pool.submit(self._work, work, item) for item in items]
                finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
                failed = [future for future in finished if future.exception() is not None]
                if failed:
                    self._cancel()
                    pool.shutdown(cancel_futures=True)
                    _raise_first(future.exception() for future in futures if not future.cancelled())
            except BaseException:  # Ctrl-C: the threads must end before the folder that they write to is left
                self._cancel()
                pool.shutdown(cancel_futures=True)
                raise

    def _work(self, work: Callable[[Item], None], item: Item) -> None:
        _thread.transfer = self
        work(item)

    def _cancel(self) -> None:
        self._cancelled.set()
        with self._lock:
            break_offs = list(self._break_offs)
        for break_off in break_offs:
            break_off()

    def _add(self, name: str, count: int) -> None:
        with self._lock:
            setattr(self, name, getattr(self, name) + count)
            if self._report is not None:
                self._report(self)


def _raise_first(errors: Iterable[BaseException | None]) -> None:
    """Raise the error that the others were given up for."""
    real = [error for error in errors if error is not None]
    raise next((error for error in real if not isinstance(error, Cancelled)), real[0])
