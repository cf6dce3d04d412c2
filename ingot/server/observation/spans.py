"""Traces of requests in OpenTelemetry's format, exported to a collector."""

from __future__ import annotations

import asyncio
import functools
import io
import os
import random
import threading
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AttributeValue

from ingot._version import __version__
from ingot.errors import InvalidArgument
from ingot.protocol.context import BatchTimes, RequestContext
from ingot.runtime.metrics import Metrics

if TYPE_CHECKING:
    import requests

# As much of a collector's answer is read.
_ANSWER_BYTES = 64 << 10
# Seconds to export what waits when the server stops.
_FLUSH = 5.0
_FLAGS = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("ingot", __version__)
_OK, _ERROR = Status(), Status(StatusCode.ERROR)


class Spans:
    """Makes the spans of sampled requests and of their batches.

    A request is sampled if its trace context says so, or, without one, at random. Spans are made when they are over,
    from the times of the request: OpenTelemetry's tracer, which can also change spans and choose some, takes nine times
    as long for them.

    Args:
        endpoint: the address of the collector, ``http://host:4318`` or ``grpc://host:4317``; empty for that of
            OpenTelemetry's environment variables.
        share: of the requests without a trace context.
        metrics: counts the traces.
        replica: the name of this server among its replicas.

    Raises:
        InvalidArgument: the address is malformed.
    """

    def __init__(self, endpoint: str, share: float, metrics: Metrics, replica: str):
        resource = Resource.create(
            {"service.name": os.environ.get("OTEL_SERVICE_NAME", "ingot"), "service.instance.id": replica}
        )
        self._resource = resource.merge(OTELResourceDetector().detect())  # whose attributes replace these
        self._exporter = _exporter(endpoint)
        self._processor = BatchSpanProcessor(self._exporter)
        self._share = share
        self._traced = metrics.traces
        # Spans have the time of the day, and contexts that of a clock that never jumps.
        self._epoch = time.time_ns() - time.perf_counter_ns()
        self._batches: dict[tuple[str, str, float], list[SpanContext]] = {}

    def begin(self, context: RequestContext) -> bool:
        """Return whether a request is sampled; if so, its trace context is that of its span from now on."""
        came = context.traceparent
        if not (int(came[53:55], 16) & 1 if came else random.random() < self._share):
            return False
        parent = _remote(came) if came else None
        span = _new(parent)
        context.span = span, parent
        context.traceparent = b"00-%032x-%016x-%02x" % (span.trace_id, span.span_id, _FLAGS)
        self._traced.inc()
        return True

    def add_inference(self, context: RequestContext) -> None:
        """Add the stages of an inference until its answer, and its batch."""
        if context.inferences == 1:  # a further message of a stream has no known arrival
            self._stage(context, "decode", context.arrived, context.submitted)
        batch = context.batch
        for node, began, ended in context.nodes:
            self._stage(context, f"node {node}", began, ended, {"ingot.pipeline.node": node})
        if batch is None:
            return
        for kind, began, ended in context.steps:
            self._stage(context, kind, began, ended)
        prepared = max([context.submitted, *(ended for _, _, ended in context.steps if ended <= batch.started)])
        self._stage(context, "queue", prepared, batch.started, {"ingot.batch.reason": batch.reason})
        self._stage(context, "batch", batch.started, batch.began)
        self._stage(context, "compute", batch.began, batch.ran)
        for name, began, ended in batch.models:
            self._stage(context, f"call {name}", began, ended, {"ingot.model": name})
        # The answers of one batch come in one turn of the event loop; its span needs them all.
        key = (context.model, context.version, batch.ended)
        links = self._batches.get(key)
        if links is None:
            links = self._batches[key] = []
            asyncio.get_running_loop().call_soon(functools.partial(self._end_batch, key, batch))
        links.append(context.span[0])

    def end(self, context: RequestContext, status: int) -> None:
        """End the span of a request."""
        now = time.perf_counter()
        if context.answered:
            self._stage(context, "encode", context.batch.ran if context.batch else context.answered, now)
        name = context.method
        attributes: dict[str, AttributeValue] = {"ingot.request.id": context.id.decode()}
        if context.model:
            name = f"infer {context.model}"
            attributes |= {"ingot.model": context.model, "ingot.version": context.version, "ingot.rows": context.rows}
        if context.grpc:
            service, _, method = context.path.lstrip("/").partition("/")
            attributes |= {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
            attributes["rpc.grpc.status_code"] = status
        else:
            attributes |= {"http.request.method": context.method, "url.path": context.path}
            attributes["http.response.status_code"] = status
        failed = status != 0 if context.grpc else status >= HTTPStatus.INTERNAL_SERVER_ERROR
        span, parent = context.span
        self._end(name, span, parent, context.arrived, now, attributes, kind=SpanKind.SERVER, failed=failed)

    def close(self) -> None:
        """Export what waits, for some seconds, and stop."""
        # OpenTelemetry has no limit for this: a collector that does not answer would hold up the end of the server.
        ending = threading.Thread(target=self._processor.shutdown, name="ingot-spans", daemon=True)
        ending.start()
        ending.join(_FLUSH)
        if ending.is_alive():
            self._exporter.shutdown()  # which ends its repetitions

    def _stage(
        self,
        context: RequestContext,
        name: str,
        start: float,
        end: float,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> None:
        request, _ = context.span
        self._end(name, _new(request), request, start, max(start, end), attributes)

    def _end_batch(self, key: tuple[str, str, float], batch: BatchTimes) -> None:
        model, version, _ = key
        attributes: dict[str, AttributeValue] = {
            "ingot.model": model,
            "ingot.version": version,
            "ingot.batch.requests": batch.requests,
            "ingot.batch.rows": batch.samples,
            "ingot.batch.reason": batch.reason,
        }
        links = [Link(each) for each in self._batches.pop(key)]
        self._end(f"batch {model}", _new(None), None, batch.started, batch.ended, attributes, links=links)

    def _end(
        self,
        name: str,
        span: SpanContext,
        parent: SpanContext | None,
        start: float,
        end: float,
        attributes: Mapping[str, AttributeValue] | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[Link] = (),
        failed: bool = False,
    ) -> None:
        """Export a span that is over."""
        self._processor.on_end(
            ReadableSpan(
                name,
                span,
                parent,
                self._resource,
                attributes,
                links=links,
                kind=kind,
                status=_ERROR if failed else _OK,
                start_time=self._time(start),
                end_time=self._time(end),
                instrumentation_scope=_SCOPE,
            )
        )

    def _time(self, seconds: float) -> int:
        """Return nanoseconds since 1970."""
        return self._epoch + int(seconds * 1e9)


def _new(parent: SpanContext | None) -> SpanContext:
    """Return the identity of a new span; without a parent, of a new trace. Zero would be invalid."""
    trace_id = random.randrange(1, 1 << 128) if parent is None else parent.trace_id
    return SpanContext(trace_id, random.randrange(1, 1 << 64), is_remote=False, trace_flags=_FLAGS)


def _remote(traceparent: bytes) -> SpanContext:
    numbers = int(traceparent[3:35], 16), int(traceparent[36:52], 16)
    return SpanContext(*numbers, is_remote=True, trace_flags=_FLAGS)


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
    # With this variable, the user's own session is used.
    session = None if os.environ.get("OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER") else _session()
    return HttpExporter(path if endpoint else None, session=session)


def _session() -> requests.Session:
    """Return a session that keeps only the beginning of a collector's answer, which may have no end."""
    import requests
    from requests.adapters import HTTPAdapter

    class Bounded(HTTPAdapter):
        def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:  # type: ignore[override]
            response = super().send(request, **{**options, "stream": True})
            content = response.raw.read(_ANSWER_BYTES)
            response.raw.close()
            response.raw = io.BytesIO(content)
            return response

    session = requests.Session()
    session.headers["Accept-Encoding"] = "identity"
    session.mount("http://", Bounded())
    session.mount("https://", Bounded())
    return session
