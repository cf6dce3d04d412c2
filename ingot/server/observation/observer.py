"""Observes requests from their arrival to their response: for the access log and for traces."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

from ingot.errors import missing_package
from ingot.protocol.context import BatchTimes, RequestContext
from ingot.runtime.metrics import Metrics
from ingot.server.observation.access_log import AccessLog

if TYPE_CHECKING:
    from ingot.server.observation.spans import Spans

log = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class Observer:
    """Reports requests.

    Args:
        access_log: writes them; None for none.
        spans: exports the sampled ones as traces; None for none.
    """

    def __init__(self, access_log: AccessLog | None, spans: Spans | None):
        self._access_log = access_log
        self._spans = spans

    def begin(self, context: RequestContext, method: bytes, path: bytes) -> None:
        """Observe a request from now on, unless nothing would be reported of it."""
        sampled = self._spans is not None and self._spans.begin(context)
        if sampled or self._access_log is not None:
            context.arrived = time.perf_counter()
            context.target = method, path
            context.observer = self

    def answered(self, context: RequestContext, batch: BatchTimes | None, *, failed: bool) -> None:
        """Note that the model answered an inference of a request.

        Args:
            context: the request.
            batch: the model's last one.
            failed: whether the answer is an error.
        """
        context.answered = time.perf_counter()
        # An earlier batch is not this request's: a cache answered, or the request failed before it ran.
        context.batch = None if failed or batch is None or batch.ended < context.submitted else batch
        if self._spans is not None and context.span is not None:
            self._spans.add_inference(context)

    def finish(self, context: RequestContext, status: int) -> None:
        """Report a request that is over; see :meth:`RequestContext.finish`."""
        if self._spans is not None and context.span is not None:
            self._spans.end(context, status)
        if self._access_log is not None:
            self._access_log.write(context, status, time.perf_counter() - context.arrived)

    def close(self) -> None:
        """Export what waits; takes up to seconds."""
        if self._spans is not None:
            self._spans.close()


def spans_to(endpoint: str | None, share: float, metrics: Metrics, replica: str) -> Spans | None:
    """Return the exporter of traces; None if neither ``endpoint`` nor the environment names a collector.

    Args:
        endpoint: the address of a collector; None for that of OpenTelemetry's environment variables, if they are set.
        share: of the requests that are traced.
        metrics: counts them.
        replica: the name of this server among its replicas.

    Raises:
        Unsupported: an endpoint is given, and OpenTelemetry is not installed.
        InvalidArgument: the address is malformed.
    """
    by_environment = any(os.environ.get(name) for name in _ENDPOINTS)
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or not (endpoint or by_environment):
        return None
    try:
        from ingot.server.observation.spans import Spans  # which takes a quarter of a second
    except ModuleNotFoundError as error:
        lacking = missing_package("opentelemetry", "exporting traces", "traces")
        if endpoint:
            raise lacking from error
        # The environment may be made for all programs of a cluster.
        log.warning("no traces are exported, though %s is set: %s", " or ".join(_ENDPOINTS), lacking)
        return None
    return Spans(endpoint or "", share, metrics, replica)
