"""One candidate that is tried while another model answers: its share, its steps and its limits."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from ingot.runtime import Model, State
from ingot.runtime.settings.canary import Plan
from ingot.serving.comparison import at_least
from ingot.serving.deployment import Deployment
from ingot.serving.traffic_split import TrafficSplit

# Requests or comparisons below which a candidate is not rolled back, and those that a step needs at least.
_FEW, _ENOUGH = 10, 50
# Latencies of each model that its p99 needs.
_LATENCIES = 100

Outcome = Literal["running", "passed", "rolled back", "stopped"]


@dataclass(eq=False, kw_only=True)
class Canary:
    """A candidate that is tried for a deployment.

    Attributes:
        deployment: whose requests it gets.
        split: shares the requests, and counts.
        found: the deployment of its source, if a client named one; None if it was followed or reloaded.
        skipped_digest: what the deployment's alias resolves to, if the candidate detaches the deployment from it.
        step: the index of the plan's step.
        began: when the step began.
        outcome: how it ended.
        reason: why.
    """

    deployment: Deployment
    split: TrafficSplit
    found: Deployment | None
    skipped_digest: str = ""
    step: int = 0
    began: float = field(default_factory=time.monotonic)
    outcome: Outcome = "running"
    reason: str = ""
    _at_step: tuple[int, int] = (0, 0)

    @property
    def plan(self) -> Plan:
        return self.split.plan

    @property
    def candidate(self) -> Model:
        return self.split.candidate

    def enter(self, step: int, weight: float) -> None:
        """Begin a step."""
        self.step, self.split.weight, self.began = step, weight, time.monotonic()
        self._at_step = (self.split.sides[self.candidate].total, self.split.drift.compared)

    def fault(self) -> str:
        """Return why the candidate is to be rolled back; empty if it is not."""
        plan, split = self.plan, self.split
        side, drift = split.sides[self.candidate], split.drift
        if self.candidate.state is State.FAILED:
            return f"it failed: {self.candidate.reason}"
        if plan.errors is not None and side.total >= _FEW and at_least(side.failed, side.total) > plan.errors:
            return f"it failed {side.failed} of {side.total} requests; {plan.errors:g} % are allowed"
        if plan.drift is not None and drift.compared >= _FEW and at_least(drift.differed, drift.compared) > plan.drift:
            return (
                f"{drift.differed} of {drift.compared} answers differ by more than {plan.tolerance:g}, the worst by "
                f"{drift.worst:.3g}; {plan.drift:g} % are allowed"
            )
        if plan.latency is not None and (ratio := self._latency_ratio()) is not None and ratio > plan.latency:
            return f"its p99 latency is {ratio:.2f} times the current model's; {plan.latency:g} is allowed"
        return ""

    def _latency_ratio(self) -> float | None:
        sides = self.split.sides.values()
        if any(len(side.seconds) < _LATENCIES for side in sides):
            return None
        current, candidate = (side.latency(0.99) for side in sides)
        return candidate / current

    @property
    def passed(self) -> bool:
        """Whether the step has lasted long enough, and has seen enough requests and comparisons to continue."""
        plan, split = self.plan, self.split
        side, drift = split.sides[self.candidate], split.drift
        requests, compared = self._at_step
        return (
            time.monotonic() - self.began >= plan.every
            and (not split.weight or side.total - requests >= _ENOUGH)
            and ((plan.drift is None and bool(split.weight)) or drift.compared - compared >= _ENOUGH)
            and (plan.errors is None or 100 * side.failed <= plan.errors * side.total)
            and (plan.drift is None or 100 * drift.differed <= plan.drift * drift.compared)
            and (plan.latency is None or self._latency_ratio() is not None)
        )

    @property
    def content(self) -> dict[str, Any]:
        """The canary's state for users, as JSON has it."""
        return {
            "digest": self.candidate.digest,
            "source": "" if self.found is None else self.found.source,
            "state": self.outcome,
            "reason": self.reason,
            "weight": self.split.weight,
            "steps": list(self.plan.steps),
            "step": self.step,
            "limits": {"errors": self.plan.errors, "drift": self.plan.drift, "latency": self.plan.latency},
            **self.split.content,
        }
