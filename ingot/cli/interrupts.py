"""Handle signals reliably, and end promptly, despite callbacks, imports and native code.

The interpreter ignores exceptions that are raised in some callbacks, also during imports. It runs the handlers of
signals only in the main thread, between two bytecode instructions: while an engine is working there, no handler runs.

This module is imported before any other, so it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

GRACE = 3.0
"""Seconds in which a signal's handler must have run; after that, the main thread is assumed to be in native code."""
_seen: list[int] = []
_handled: list[int] = []
_scratch: list[str] = []
_displays: list[Callable[[str], None]] = []
_said = threading.Lock()


@contextlib.contextmanager
def displayed(say: Callable[[str], None]) -> Iterator[None]:
    """Let ``say`` print that the command is interrupted while it has a progress display on the terminal."""
    _displays.append(say)
    try:
        yield
    finally:
        _displays.remove(say)


def watch() -> None:
    """Record Ctrl-C in addition to raising KeyboardInterrupt, unless SIGINT is ignored or already handled."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


class Hangups:
    """Remembers SIGHUP until a server can reload; if the terminal was closed, it still ends the process.

    Attributes:
        pending: whether there was one.
    """

    def __init__(self) -> None:
        self.pending = False
        self._there = self._opens()
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            signal.signal(signal.SIGHUP, self._note)

    @property
    def closed(self) -> bool:
        """Whether the terminal was closed: the kernel then sends SIGHUP, and the process has no terminal any longer."""
        return self._there and not self._opens()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.pending = True
        if self.closed:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    @staticmethod
    def _opens() -> bool:
        try:
            os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
        except OSError:
            return False
        return True


def check() -> None:
    """Raise KeyboardInterrupt if there was a Ctrl-C; for endless loops."""
    if _seen:
        raise KeyboardInterrupt


def terminate(number: int, frame: FrameType | None) -> None:
    """Raise Terminated: the handler of SIGTERM."""
    _handled.append(number)
    raise Terminated(128 + number)


class Terminated(BaseException):
    """SIGTERM. Not SystemExit, which would look like the model's own exit while its code runs."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


@contextlib.contextmanager
def prompt(folder: str) -> Iterator[None]:
    """Let SIGTERM and Ctrl-C end the command, within :data:`GRACE` even while an engine occupies the main thread.

    Args:
        folder: the folder of temporary files, which is removed then.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.signal(signal.SIGTERM, terminate)
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    _scratch.append(folder)
    threading.Thread(target=_watch, args=(reading,), name="ingot-signals", daemon=True).start()
    try:
        yield
    finally:
        _scratch.pop()
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, before)
        os.close(writing)


@contextlib.contextmanager
def limited(seconds: float, message: str) -> Iterator[None]:
    """End the command with a message if the block takes longer, also in native code; 0 means no limit."""
    timer = threading.Timer(seconds, _abandon, (1, f"error: {message}"))
    timer.daemon = True
    if seconds:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _watch(reading: int) -> None:
    """Read the numbers of signals as they arrive, and end the process if one is not handled.

    A signal is sent again until the command ends: where a destructor or a callback runs, its exception was ignored.
    """
    due = len(_handled)
    with open(reading, "rb", buffering=0) as numbers:
        while number := numbers.read(1):
            if signal.getsignal(number[0]) not in (_interrupt, terminate):
                continue
            if number[0] == signal.SIGINT:
                _say()
            due += 1
            until = time.monotonic() + GRACE
            while len(_handled) < due and time.monotonic() < until:
                time.sleep(0.05)
            if len(_handled) < due and _scratch:
                _abandon(128 + number[0])
            if not select.select([reading], [], [], GRACE)[0]:
                os.kill(os.getpid(), number[0])


def _abandon(code: int, text: str = "") -> None:
    """End the process at once."""
    if text:
        print(f"\n{text}" if sys.stderr.isatty() else text, file=sys.stderr)
    for folder in _scratch:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _say() -> None:
    """Print "interrupted", once: what has to end before the command does can take seconds."""
    if not _said.acquire(blocking=False):
        return
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # closed, or interrupted while it was written to
        if _displays:
            _displays[-1]("interrupted")
        else:  # not by sys.stderr, which may be redirected
            os.write(2, b"\ninterrupted\n" if os.isatty(2) else b"interrupted\n")


def _interrupt(number: int, frame: FrameType | None) -> None:
    _say()
    _seen.append(number)
    _handled.append(number)
    raise KeyboardInterrupt
