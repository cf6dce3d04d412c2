"""The identity of one request, and what is observed of it."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

REQUEST_ID = "X-Request-Id"
GRPC = b"gRPC"
"""Stands for the method of a request that is a call of gRPC."""

_MOST_PATH = 200

# Visible ASCII. A longer or another id is replaced: it is written to logs and sent back.
_ID = re.compile(rb"[\x21-\x7e]{1,128}")
# https://www.w3.org/TR/trace-context/: version, trace id, span id, flags; later versions may add fields.
_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_PREFIX = os.urandom(6).hex().encode()
_LAST = [b"%02x" % number for number in range(256)]


def _new_ids() -> Iterator[bytes]:
    """Yield ids that no other request of any server has."""
    for number in itertools.count():
        first = b"%b-%x" % (_PREFIX, number)  # formatted once for many ids, which costs more than the rest of one
        for last in _LAST:
            yield first + last


_ids = _new_ids()


class BatchTimes:
    """One batch: its times in seconds of ``time.perf_counter``, its size, and why it left the queue.

    Attributes:
        started: when the inputs began to be joined.
        began, ran: when the engine call began and ended.
        ended: when the outputs were split.
        requests: in the batch.
        samples: in the batch.
        reason: see :attr:`ingot.runtime.scheduling.scheduler.Scheduler.reason`.
        models: calls of the model's code to others: the name of each, and when it began and ended.
    """

    __slots__ = ("began", "ended", "models", "ran", "reason", "requests", "samples", "started")

    def __init__(
        self, started: float, began: float, ran: float, ended: float, requests: int, samples: int, reason: str
    ):
        self.started = started
        self.began = began
        self.ran = ran
        self.ended = ended
        self.requests = requests
        self.samples = samples
        self.reason = reason
        self.models: tuple[tuple[str, float, float], ...] = ()


class Reporter(Protocol):
    """Reports requests; implemented by :class:`ingot.server.observation.observer.Observer`."""

    def answered(self, context: RequestContext, batch: BatchTimes | None, *, failed: bool) -> None:
        """Note that the model answered an inference of a request."""

    def finish(self, context: RequestContext, status: int) -> None:
        """Report a request with the status of its response."""


class RequestContext:
    """One request: its identity, and its times while requests are observed.

    Times are in seconds of ``time.perf_counter``.

    Attributes:
        id: from the header ``X-Request-Id``, or made here.
        traceparent: the W3C trace context that the request came with, or that of its span here; empty for none.
        observer: reports the request when it is over; None if requests are not observed.
        target: the method and the URL; for a call, ``gRPC`` and the path of its method.
        arrived: when its head had arrived.
        submitted: when its last inference was handed to the model; 0 if none was.
        answered: when the model's answer came; 0 if none did.
        model, version: that its last inference used; the names asked for if there is no such model.
        rows: of all its inferences.
        inferences: their number; more than 1 only in a stream.
        batch: the last batch that its inputs ran in; None if a cache answered, or another process has the models.
        steps: of its last inference that had raw inputs: the kind of each step, and when it began and ended.
        nodes: of its last inference by a pipeline: the name of each node, and when it began and ended.
        span: the identities of the request's span and of its parent, if it is sampled.
    """

    target = b"", b""
    model = ""
    version = ""
    arrived = 0.0
    submitted = 0.0
    answered = 0.0
    rows = 0
    inferences = 0
    steps: tuple[tuple[str, float, float], ...] = ()
    nodes: tuple[tuple[str, float, float], ...] = ()

    def __init__(self, request_id: bytes = b"", traceparent: bytes = b""):
        self.id = request_id or next(_ids)
        self.traceparent = traceparent
        self.observer: Reporter | None = None
        self.batch: BatchTimes | None = None
        self.span: Any = None

    @property
    def grpc(self) -> bool:
        """Whether it is a call of gRPC."""
        return self.target[0] == GRPC

    @property
    def method(self) -> str:
        """Such as ``POST``, or ``gRPC``."""
        return self.target[0].decode("ascii", "replace")

    @property
    def path(self) -> str:
        """The path of the URL, without the query, which may hold secrets."""
        return self.target[1].partition(b"?")[0][:_MOST_PATH].decode("ascii", "backslashreplace")

    def finish(self, status: int) -> None:
        """Report the request, if requests are observed, with the status of its response; the first call counts."""
        observer, self.observer = self.observer, None
        if observer is not None:
            observer.finish(self, status)


CONTEXT: ContextVar[RequestContext | None] = ContextVar("request", default=None)
"""The request that the current code serves; log records name it."""


def identity_of(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """Return the id and the trace context of a request by its headers, each empty if it is absent or malformed."""
    request_id = traceparent = b""
    for name, value in headers:
        if name == b"x-request-id":
            request_id = value if _ID.fullmatch(value) else b""
        elif name == b"traceparent":
            traceparent = value if len(value) <= 128 and _TRACEPARENT.fullmatch(value) else b""
    return request_id, traceparent
