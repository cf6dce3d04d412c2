"""Traces of requests in OpenTelemetry's format, exported to a collector."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import time
from collections.abc import Mapping
from http import HTTPStatus
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from ingot._version import __version__
from ingot.errors import InvalidArgument
from ingot.runtime.dispatch.statistics import BatchTimes
from ingot.runtime.metrics import Metrics
from ingot.server.observation.context import RequestContext

# Milliseconds to export what waits when the server stops.
_FLUSH = 5000
_SAMPLED = b"01"


class Spans:
    """Makes the spans of sampled requests and of their batches.

    A request is sampled if its trace context says so, or, without one, at random. The sampling is decided here and not
    by OpenTelemetry's sampler, so that requests that are not sampled make no span.

    Args:
        endpoint: the address of the collector, ``http://host:4318`` or ``grpc://host:4317``; empty for that of
            OpenTelemetry's environment variables.
        share: of the requests without a trace context.
        metrics: counts the traces.

    Raises:
        InvalidArgument: the address is malformed.
    """

    def __init__(self, endpoint: str, share: float, metrics: Metrics):
        resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "ingot")})
        resource = resource.merge(OTELResourceDetector().detect())  # whose attributes replace these
        self._provider = TracerProvider(resource=resource, sampler=ALWAYS_ON, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
        self._tracer = self._provider.get_tracer("ingot", __version__)
        self._share = share
        self._traced = metrics.traces
        # Spans have the time of the day, and contexts that of a clock that never jumps.
        self._epoch = time.time_ns() - time.perf_counter_ns()
        self._batches: dict[tuple[str, str, float], list[SpanContext]] = {}

    def begin(self, context: RequestContext) -> None:
        """Begin the span of a request if it is sampled; its trace context is then that of the span."""
        parent = context.traceparent
        if not (int(parent[53:55], 16) & 1 if parent else random.random() < self._share):
            return
        outer = trace.set_span_in_context(NonRecordingSpan(_remote(parent))) if parent else Context()
        start = self._time(context.arrived)
        span = self._tracer.start_span(context.method, outer, SpanKind.SERVER, start_time=start)
        made = span.get_span_context()
        context.span = span
        context.traceparent = b"00-%032x-%016x-%b" % (made.trace_id, made.span_id, _SAMPLED)
        self._traced.inc()

    def add_inference(self, context: RequestContext) -> None:
        """Add the stages of an inference until its answer, and its batch."""
        if context.inferences == 1:  # a further message of a stream has no known arrival
            self._stage(context, "decode", context.arrived, context.submitted)
        batch = context.batch
        if batch is None:
            return
        self._stage(context, "queue", context.submitted, batch.started, {"ingot.batch.reason": batch.reason})
        self._stage(context, "batch", batch.started, batch.began)
        self._stage(context, "compute", batch.began, batch.ran)
        # The answers of one batch come in one turn of the event loop; its span needs them all.
        key = (context.model, context.version, batch.ended)
        links = self._batches.get(key)
        if links is None:
            links = self._batches[key] = []
            asyncio.get_running_loop().call_soon(functools.partial(self._end_batch, key, batch))
        links.append(context.span.get_span_context())

    def end(self, context: RequestContext, status: int) -> None:
        """End the span of a request."""
        span, now = context.span, time.perf_counter()
        if context.answered:
            self._stage(context, "encode", context.batch.ran if context.batch else context.answered, now)
        grpc = context.method == "gRPC"
        attributes: dict[str, str | int] = {"ingot.request.id": context.id.decode()}
        if context.model:
            span.update_name(f"infer {context.model}")
            attributes |= {"ingot.model": context.model, "ingot.version": context.version, "ingot.rows": context.rows}
        if grpc:
            service, _, method = context.path.lstrip("/").partition("/")
            attributes |= {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
            attributes["rpc.grpc.status_code"] = status
        else:
            attributes |= {"http.request.method": context.method, "url.path": context.path}
            attributes["http.response.status_code"] = status
        span.set_attributes(attributes)
        if status != 0 if grpc else status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            span.set_status(Status(StatusCode.ERROR))
        span.end(self._time(now))

    def close(self) -> None:
        """Export what waits, for some seconds, and stop."""
        self._provider.force_flush(_FLUSH)
        self._provider.shutdown()

    def _stage(
        self,
        context: RequestContext,
        name: str,
        start: float,
        end: float,
        attributes: Mapping[str, str] | None = None,
    ) -> None:
        outer = trace.set_span_in_context(context.span)
        span = self._tracer.start_span(name, outer, attributes=attributes, start_time=self._time(start))
        span.end(self._time(max(start, end)))

    def _end_batch(self, key: tuple[str, str, float], batch: BatchTimes) -> None:
        model, version, _ = key
        span = self._tracer.start_span(
            f"batch {model}",
            Context(),
            links=[Link(each) for each in self._batches.pop(key)],
            attributes={
                "ingot.model": model,
                "ingot.version": version,
                "ingot.batch.requests": batch.requests,
                "ingot.batch.rows": batch.samples,
                "ingot.batch.reason": batch.reason,
            },
            start_time=self._time(batch.started),
        )
        span.end(self._time(batch.ended))

    def _time(self, seconds: float) -> int:
        """Return nanoseconds since 1970."""
        return self._epoch + int(seconds * 1e9)


def _remote(traceparent: bytes) -> SpanContext:
    numbers = int(traceparent[3:35], 16), int(traceparent[36:52], 16)
    return SpanContext(*numbers, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _exporter(endpoint: str) -> SpanExporter:
    address = urlsplit(endpoint)
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if endpoint and (address.scheme not in ("http", "https", "grpc", "grpcs") or not address.hostname):
        raise InvalidArgument(
            f"--otlp is '{endpoint}'; it must be the address of a collector: http://HOST:4318 or grpc://HOST:4317"
        )
    if address.scheme in ("grpc", "grpcs") or (not endpoint and protocol == "grpc"):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(address.netloc or None, insecure=True if address.scheme == "grpc" else None)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    path = endpoint if address.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
    return HttpExporter(path if endpoint else None)
