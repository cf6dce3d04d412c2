"""How a new version is tried before it takes over."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a candidate is tried.

    Attributes:
        steps: shares of the requests in percent; after the last one it takes over. Empty for a share that stays.
        every: seconds that a step takes at least.
        errors: most percent of its requests that may fail although the current model answers them; None for no limit.
        drift: most percent of compared answers that may differ; None for no limit.
        latency: highest ratio of its p99 latency to the current model's; None for no limit.
        tolerance: largest error of an answer that does not differ, as a share of the largest value of the output.
        sticky: whether a client's requests all go to the same model.
        compare: percent of the requests that both models answer.
    """

    steps: tuple[float, ...] = ()
    every: float = 60.0
    errors: float | None = None
    drift: float | None = None
    latency: float | None = None
    tolerance: float = 0.01
    sticky: bool = False
    compare: float = 10.0

    @classmethod
    def parse_steps(cls, text: str | None) -> tuple[float, ...]:
        """Return ``5,25,50`` as numbers."""
        return tuple(float(step) for step in text.split(",")) if text else ()
