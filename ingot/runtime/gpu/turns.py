"""Turns of the engines that share a device, so that each gets an equal part of its time while all have batches.

The engine that has used the least time of the device launches next. That is fair queueing: as deficit round robin with
equal weights, but by measured times, since how long a batch takes is known only afterwards.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from threading import Event, Lock

from ingot.runtime.gpu.device import Device

# Batches in flight while several engines have some: one that is computed, and the next, so that the device never waits.
_IN_FLIGHT = 2
# Weight of the last batch in what the next is expected to take.
_RECENT = 0.25
# Seconds after which a batch is launched out of turn: another engine's batch may never end.
_PATIENCE = 5.0


class Share:
    """The time that one engine has used of a device, and its batches that wait for their turn."""

    def __init__(self) -> None:
        self.used = 0.0
        self.expected = 0.0
        self.in_flight = 0
        self.waiting: deque[Turn] = deque()

    @property
    def active(self) -> bool:
        """Whether it has batches."""
        return bool(self.in_flight or self.waiting)


class Turn:
    """A batch that waits for its launch, or is in flight since ``began``; ``go`` is set when it may be launched."""

    def __init__(self, share: Share):
        self.share = share
        self.go = Event()
        self.began = 0.0
        self.expected = 0.0


class Turns:
    """Decides whose batch is launched next on one device. Any thread may call it.

    - An engine that alone has batches never waits.
    - With others, two batches are in flight: those of the engines that have used the least. The first batch of an
      engine that was idle is launched at once; a pause earns no time, and time that was used too much stays counted.

    Args:
        clock: returns seconds.

    Attributes:
        shared: whether several engines use the device; with one, batches need no turns.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.shared = False
        self._clock = clock
        self._shares: list[Share] = []
        self._ended = 0.0  # when a batch ended last
        self._lock = Lock()

    def join(self) -> Share:
        """Add an engine."""
        with self._lock:
            self._shares = [*self._shares, share := Share()]
            self.shared = len(self._shares) > 1
        return share

    def leave(self, share: Share) -> None:
        """Remove an engine, which has no batches."""
        with self._lock:
            self._shares = [each for each in self._shares if each is not share]
            self.shared = len(self._shares) > 1

    def enter(self, share: Share) -> Turn:
        """Wait until a batch may be launched; :meth:`finish` its turn when it has ended."""
        turn = self.request(share)
        if not turn.go.wait(_PATIENCE):
            with self._lock:
                if not turn.go.is_set():
                    share.waiting.remove(turn)
                    self._launch(turn)
        return turn

    def request(self, share: Share) -> Turn:
        """Return the turn of a batch, which may be launched as soon as ``go`` is set."""
        turn = Turn(share)
        with self._lock:
            if not share.active:
                share.used = max(share.used, min((each.used for each in self._shares if each.active), default=0.0))
            share.waiting.append(turn)
            self._grant()
        return turn

    def finish(self, turn: Turn) -> None:
        """End the turn of a batch that has ended, or could not be launched."""
        share = turn.share
        with self._lock:
            now = self._clock()
            # Batches share the device, so this one's time begins where the one before has ended.
            seconds = now - max(turn.began, self._ended)
            self._ended = now
            share.in_flight -= 1
            share.used += seconds - turn.expected
            share.expected += _RECENT * (seconds - share.expected)
            self._grant()

    def _grant(self) -> None:
        """Let batches be launched, as many as may be in flight."""
        while waiting := [share for share in self._shares if share.waiting]:
            active = [share for share in self._shares if share.active]
            chosen, in_flight = min(waiting, key=_used), sum(share.in_flight for share in active)
            # Another engine with less time has a batch in flight, and asks for its next one soon.
            ahead = chosen.used > min(map(_used, active))
            room = in_flight < (1 if ahead else _IN_FLIGHT) or not (ahead or chosen.in_flight)
            if len(active) > 1 and not room:
                return
            self._launch(chosen.waiting.popleft())

    def _launch(self, turn: Turn) -> None:
        share = turn.share
        share.in_flight += 1
        turn.began, turn.expected = self._clock(), share.expected
        share.used += turn.expected  # until the batch has ended
        turn.go.set()


def _used(share: Share) -> float:
    return share.used


_TURNS: weakref.WeakKeyDictionary[Device, Turns] = weakref.WeakKeyDictionary()
_OPENING = Lock()


def turns_of(device: Device) -> Turns:
    """Return the turns of a device, the same for each use in the process."""
    with _OPENING:
        return _TURNS.setdefault(device, Turns())
