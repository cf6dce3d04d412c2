"""The access log: a line for each request, or for those that matter."""

from __future__ import annotations

import logging
import random
from typing import Any, Literal

from ingot.faults import rate_limited_logger
from ingot.protocol.context import CONTEXT, RequestContext
from ingot.runtime.metrics import Counts

Mode = Literal["off", "sampled", "slow", "all"]

log = rate_limited_logger("ingot.access")

# gRPC's names of its statuses, by number.
_GRPC = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)
# Those for which the server is to blame.
_GRPC_FAULTS = frozenset((2, 13, 14, 15))
_HTTP_FAULTS = 500


class AccessLog:
    """Writes requests as records of the logger ``ingot.access``; never their inputs or outputs.

    In the modes ``sampled`` and ``slow``, requests that the server failed are written too, as errors, at a limited
    rate.

    Args:
        mode: which requests are written.
        share: of the requests, in the mode ``sampled``.
        slow: seconds from which a request is slow.
        lines: counts what is written.
    """

    def __init__(self, mode: Mode, share: float, slow: float, lines: Counts):
        self._mode = mode
        self._share = share
        self._slow = slow
        self._lines = {
            level: lines.labels(logging.getLevelName(level).lower()) for level in (logging.INFO, logging.ERROR)
        }
        log.setLevel(logging.INFO)  # whatever the level of other records is

    def write(self, context: RequestContext, status: int, seconds: float) -> None:
        """Write a request that is over, if the mode asks for it.

        Args:
            context: the request.
            status: of its response, by the protocol's number.
            seconds: from its arrival.
        """
        failed = status in _GRPC_FAULTS if context.grpc else status >= _HTTP_FAULTS
        level = logging.INFO
        if self._mode == "sampled":
            if random.random() >= self._share:
                level = logging.ERROR
        elif self._mode == "slow" and seconds < self._slow:
            level = logging.ERROR
        if level == logging.ERROR and not failed:
            return
        self._lines[level].inc()
        fields = _fields(context, status, seconds)
        token = CONTEXT.set(context)
        log.log(level, "%(method)s %(path)s %(status)s", fields, extra={"fields": fields})
        CONTEXT.reset(token)


def _fields(context: RequestContext, status: int, seconds: float) -> dict[str, Any]:
    """Return the fields of a line; those that do not apply are left out."""
    named = _GRPC[status] if context.grpc and status < len(_GRPC) else str(status)
    fields: dict[str, Any] = {"method": context.method, "path": context.path, "status": named}
    if context.model:
        fields |= {"model": context.model, "version": context.version, "rows": context.rows}
    if context.inferences > 1:
        fields["inferences"] = context.inferences
    batch = context.batch
    if batch is not None:
        fields |= {
            "queue_ms": _milliseconds(batch.started - context.submitted),
            "compute_ms": _milliseconds(batch.ran - batch.began),
            "batch_rows": batch.samples,
            "batch_reason": batch.reason,
        }
    fields["total_ms"] = _milliseconds(seconds)
    return fields


def _milliseconds(seconds: float) -> float:
    return round(max(0.0, seconds) * 1e3, 3)
