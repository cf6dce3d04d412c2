"""The abuse budget for frames that advance no call: a limit on floods of control frames, resets and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ingot.server.http2.frames import ErrorCode, Fault
from ingot.server.http2.sender import Sender

# Frames that advance no call: the burst, the rate per second, and the number earned by each answered call.
_BURST = 1000
_PER_SECOND = 100
_PER_CALL = 4
# A cancelled call costs more, because work was done for it.
COST_OF_RESET = 2
# A refusal counts as an answer and earns _PER_CALL, so a call refused by its headers alone must cost more than that.
COST_OF_REFUSAL = _PER_CALL + 1


class AbuseBudget:
    """Limits the frames of one connection that advance no call.

    Args:
        sender: counts the answers that earn budget.
        clock: returns seconds.
    """

    __slots__ = ("_clock", "_credited", "_left", "_sender", "_since")

    def __init__(self, sender: Sender[Any], clock: Callable[[], float]):
        self._sender = sender
        self._clock = clock
        self._left = _BURST
        self._since = clock()
        self._credited = 0

    def spend(self, cost: int, what: str = "too many frames that advance no call") -> None:
        """Charge a frame.

        Raises:
            Fault: the abuse budget is used up.
        """
        self._left -= cost
        if self._left < 0:
            now, sender = self._clock(), self._sender
            self._left += int((now - self._since) * _PER_SECOND)
            self._left += (sender.progress - self._credited) * _PER_CALL
            self._left = min(self._left, _BURST)
            self._since, self._credited = now, sender.progress
            # Open calls may have brought their frames already: gRPC's core sends two with each call that it opens.
            if self._left + len(sender.streams) * _PER_CALL < 0:
                raise Fault(ErrorCode.ENHANCE_YOUR_CALM, what)
