"""Axes of charts: the position of a value, and the values of the ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass

_LEAST_SPAN = 1e-9  # relative to the larger end; a smaller difference is not drawn


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        low: the value at ``start``.
        high: the value at ``end``.
        start: its first coordinate in the drawing.
        end: its last coordinate; less than ``start`` for an axis that points up.
        log: whether equal distances are equal factors.
    """

    low: float
    high: float
    start: float
    end: float
    _: KW_ONLY
    log: bool = False

    @classmethod
    def over(cls, values: Iterable[float], start: float, end: float, *, log: bool = False, pad: float = 0.06) -> Axis:
        """Return an axis over all values, extended by ``pad`` of its span at both ends; ``log`` needs values > 0."""
        held = [math.log10(value) if log else value for value in values]
        low, high = min(held), max(held)
        if high - low <= _LEAST_SPAN * max(abs(low), abs(high), 1e-100):
            room = 0.2 if log else max(abs(low) * 0.05, 1e-6)
            low, high = low - room, high + room
        room = (high - low) * pad
        low, high = low - room, high + room
        return cls(10.0**low, 10.0**high, start, end, log=True) if log else cls(low, high, start, end)

    def at(self, value: float) -> float:
        """Return the coordinate of a value, clipped to the ends."""
        low, high, value = (self._scaled(item) for item in (self.low, self.high, value))
        return self.start + (self.end - self.start) * min(max((value - low) / (high - low), 0.0), 1.0)

    def ticks(self) -> list[tuple[float, str]]:
        """Return two to about eight round values in the range, with their texts."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            for steps in ((1, 2, 5), (1,)):
                powers = range(first, last + 1, max(1, (last - first) // 8))
                found = [step * 10.0**power for power in powers for step in steps]
                held = [value for value in found if self.low <= value <= self.high]
                if 2 <= len(held) <= 8:
                    return [(value, f"{value:g}") for value in held]
        return _linear(self.low, self.high)

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value


def _linear(low: float, high: float) -> list[tuple[float, str]]:
    rough = (high - low) / 5
    power = math.floor(math.log10(rough))
    step = next(unit * 10.0**power for unit in (1, 2, 5, 10) if unit * 10.0**power >= rough * 0.999)
    values = [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
    plain = max(abs(low), abs(high)) < 1e6 and power > -7
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [(value, f"{value:.{digits}f}" if plain else f"{value:.4g}") for value in values]
