"""Autoscaling by the time that requests are expected to wait. Serve's controller runs a copy, without Ingot."""

from __future__ import annotations

import math
from typing import Any

# Share of a replica's highest throughput that the replicas which stay may be used to.
_FULL = 0.8


class ExpectedWait:
    """Keep the wait that replicas expect at a target.

    The waits of all replicas together are the work that is queued, in seconds; divided by the target, they are the
    replicas that should share it. Replicas leave only if the others can take their load: a queue that is short because
    there are enough replicas is not a reason to remove one.

    Args:
        target: seconds.
    """

    def __init__(self, target: float):
        self._target = target

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, and no state. ``context`` is Serve's ``AutoscalingContext``."""
        current, metrics = context.target_num_replicas, context.aggregated_metrics or {}
        if not metrics.get("wait"):
            return current, {}
        by_wait = math.ceil(sum(metrics["wait"].values()) / self._target)
        by_load = math.ceil(sum(metrics.get("load", {}).values()) / _FULL)
        return max(1, by_wait, min(current, by_load)), {}
