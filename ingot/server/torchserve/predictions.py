"""Predictions over HTTP and gRPC: from a body to the data plane, and the answer back, in TorchServe's form."""

from __future__ import annotations

import asyncio
import re
import urllib.parse
from collections.abc import AsyncGenerator, Hashable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ingot.errors import IngotError, InvalidArgument, Unsupported
from ingot.faults import attempt
from ingot.protocol import json_large
from ingot.protocol.context import CONTEXT, RequestContext
from ingot.protocol.requests import Cancellable, InferRequest, InferResponse, Template, memory_of
from ingot.runtime import Model
from ingot.runtime.engines.python.torchserve.rows import BODY, EXPLAIN, EXPLAINS, PLATFORM, Part
from ingot.server.http import exchange, parser, responses
from ingot.server.http.bodies import ThreadedBody
from ingot.server.http.exchange import Done, Service
from ingot.server.http.parser import HeaderList, InferHead
from ingot.server.http.responses import HttpResponse
from ingot.server.net import compression
from ingot.server.net.compression import Hold
from ingot.server.plane import decoupled
from ingot.server.plane.dataplane import DataPlane
from ingot.server.torchserve import handlers
from ingot.server.torchserve.bodies import Row, parts_of, row_of
from ingot.server.torchserve.errors import pretty, refusal
from ingot.server.torchserve.values import answer, inputs_of, joined, text
from ingot.server.torchserve.versions import Versions
from ingot.serving.pipelines.pipeline import Pipeline

_ROUTE = re.compile(
    r"/(?P<api>predictions|explanations)/(?P<model>[^/]+)(?:/(?P<version>[^/]+)(?:/.*)?)?"
    r"|/(?P<invocations>invocations)|/models/(?P<invoked>[^/]+)/invoke"
    r"|/v1/models/(?P<kserve>[^/:]+):(?P<verb>predict|explain)|/wfpredict/(?P<workflow>[^/]+)"
)
_METHODS = (b"POST", b"PUT")  # curl -T sends PUT
# Most values of an answer that the event loop encodes; Python writes a million values per second as indented JSON.
_AT_ONCE = 256
_INSTANCES, _NAME = "instances", "model_name"


class _Detail(NamedTuple):
    """The parts of a request's head on which the reading of its body depends.

    Attributes:
        media_type: the body's type.
        instances: whether the body may be a list of KServe's instances.
        explains: whether the request asks for an explanation.
        headers: the headers, for handlers.
        query: the query of an invocation, for handlers; empty for other requests.
        workflow: whether the request names a workflow, which is a pipeline whose nodes are handlers.
    """

    media_type: str
    instances: bool
    explains: bool
    headers: Mapping[str, str]
    query: str
    workflow: bool


def infers(method: bytes, url: bytes, headers: HeaderList) -> InferHead | None:
    """Return the parts of a request for a prediction; None for any other request."""
    path, _, query = url.decode("latin-1").partition("?")
    route = _ROUTE.fullmatch(urllib.parse.unquote(path)) if method in _METHODS else None
    if route is None:
        return None
    first = parser.first_of(headers)
    named = urllib.parse.parse_qs(query).get(_NAME, [""])[0] if route["invocations"] else ""
    model = route["model"] or route["invoked"] or route["kserve"] or route["workflow"] or named
    explains = route["api"] == "explanations" or route["verb"] == "explain"
    read = query if route["invocations"] or route["invoked"] else ""  # TorchServe reads no other queries
    media_type, workflow = first.get("content-type", ""), route["workflow"] is not None
    detail = _Detail(media_type, route["kserve"] is not None, explains, first, read, workflow)
    return replace(InferHead.of(model, route["version"] or "", first), detail=detail)


class _Reading(NamedTuple):
    """A decoded request, and the facts on which the form of its answer depends.

    Attributes:
        request: the request.
        model: the model or pipeline that answers.
        alone: whether the request is one sample, whose answer is not in a list.
        instances: whether the request is a list of KServe's instances.
    """

    request: InferRequest
    model: Model | Pipeline
    alone: bool
    instances: bool


class Predictions:
    """Predictions of the models of a server.

    Args:
        plane: the server's behaviour.
        versions: finds a model by its name and version.
    """

    def __init__(self, plane: DataPlane, versions: Versions):
        self._plane = plane
        self._versions = versions

    def begin(
        self,
        service: Service,
        head: InferHead,
        body: bytes,
        hold: Hold,
        done: Done,
        client: Hashable = None,
        context: RequestContext | None = None,
    ) -> Cancellable | None:
        """Begin a prediction; see :func:`ingot.server.http.exchange.begin`."""
        return exchange.begin(service, head, body, hold, done, client, context, self._decode)

    def _decode(
        self,
        service: Service,
        head: InferHead,
        body: bytes,
        hold: Hold,
        done: Done,
        client: Hashable,
        context: RequestContext | None,
    ) -> Cancellable | None:
        read = partial(self._read, head, body)
        proceed = partial(self._submit, service, hold, done, client, context)
        # In a thread: parts of forms may be JSON, and numbers of any media type are read as JSON.
        if len(body) > json_large.AT_ONCE:
            return ThreadedBody(service.budget, len(body), proceed).start(read)
        return proceed(attempt("a prediction failed", read))

    def _submit(
        self,
        service: Service,
        hold: Hold,
        done: Done,
        client: Hashable,
        context: RequestContext | None,
        reading: _Reading | Exception,
    ) -> Cancellable | None:
        if isinstance(reading, Exception):
            done(responses.failure(service.plane, reading, refusal))
            return None
        request = reading.request
        request.client, request.context = client, context
        try:
            hold(sum(memory_of(array) for array in request.inputs.values()))
            return service.plane.submit(request, "http", partial(self._reply, reading, done))
        except IngotError as error:
            done(responses.refusal(service.plane, error, refusal))
        return None

    def _reply(self, reading: _Reading, done: Done, outcome: InferResponse | IngotError) -> None:
        CONTEXT.set(reading.request.context)  # log records carry it
        if isinstance(outcome, IngotError):
            done(responses.refusal(self._plane, outcome, refusal))
            return
        encode = partial(attempt, "an answer could not be written", _encoded, reading, outcome)
        if sum(array.size for array in outcome.arrays.values()) <= _AT_ONCE:
            self._send(done, encode())
            return
        encoding = asyncio.get_running_loop().run_in_executor(compression.threads, encode)
        encoding.add_done_callback(lambda future: self._send(done, future.result()))

    def _send(self, done: Done, response: HttpResponse | IngotError) -> None:
        if isinstance(response, IngotError):
            response = responses.refusal(self._plane, response, refusal)
        done(response)

    def _read(self, head: InferHead, body: bytes) -> _Reading:
        """Return the request that a body contains.

        Raises:
            IngotError: the body does not fit the model, or the model cannot answer.
        """
        detail = _detail(head)
        parts = parts_of(body, detail.media_type)
        name = head.model
        if not name:
            name = next((text(part.content) for part in parts if part.name == _NAME), "") or self._versions.only()
            parts = [part for part in parts if part.name != _NAME]
        if not name:
            raise InvalidArgument("Parameter model_name is required.")
        return self.reading(name, head.version, parts, detail)

    def reading(self, name: str, version: str, parts: Sequence[Part], detail: _Detail | None = None) -> _Reading:
        """Return a request for a model, made of values.

        Args:
            name: the model's name.
            version: the model's version; empty for the default.
            parts: the values.
            detail: the parts of the HTTP request's head; None for a gRPC call.

        Raises:
            IngotError: the values do not fit the model, or there is no such model.
        """
        if detail is not None and detail.workflow:
            return _workflow(self._versions.workflow(name), parts, detail)
        model = self._versions.model(name, version)
        template = Template(model.name, model.version)
        explains = detail is not None and detail.explains
        if model.platform == PLATFORM:
            headers, query = (detail.headers, detail.query) if detail is not None else ({}, "")
            headers = {**headers, EXPLAIN: EXPLAINS} if explains else headers
            return _Reading(InferRequest(template, handlers.inputs(parts, headers, query)), model, True, False)
        if explains:
            raise Unsupported(
                f"model '{model.name}' has no code that explains its answers, as handlers in Python may have; compute "
                "explanations where the module is"
            )
        if model.generation is not None:
            raise InvalidArgument(f"model '{model.name}' writes text; ask /v1/completions on the server's own port")
        row = row_of(parts)
        if instances := detail is not None and detail.instances and _has_instances(row):
            found = [inputs_of(model, {BODY: each}) for each in _instances(row)]
            arrays, alone = joined(found), False
        else:
            arrays, alone = inputs_of(model, row)
        return _Reading(InferRequest(template, arrays), model, alone, instances)

    async def answers(
        self, name: str, version: str, parts: Sequence[Part], client: Hashable
    ) -> AsyncGenerator[bytes, None]:
        """Yield the encoded answers to a gRPC call: one unless the model gives several.

        Args:
            name: the model's name.
            version: the model's version; empty for the default.
            parts: the values of the call.
            client: who sends the call.

        Raises:
            IngotError: the values do not fit the model, or the model cannot answer.
        """
        reading = self.reading(name, version, parts)
        reading.request.client = client
        async with aclosing(decoupled.answers(self._plane, reading.request, "grpc")) as found:
            async for response, _ in found:
                many = sum(array.size for array in response.arrays.values()) > _AT_ONCE
                yield (await compression.run(partial(_encoded, reading, response), in_thread=many)).body


def _workflow(pipeline: Pipeline, parts: Sequence[Part], detail: _Detail) -> _Reading:
    request = InferRequest(Template(pipeline.name, pipeline.version), handlers.inputs(parts, detail.headers, ""))
    return _Reading(request, pipeline, True, False)


def _detail(head: InferHead) -> _Detail:
    assert isinstance(head.detail, _Detail)  # noqa: S101 - of infers()
    return head.detail


def _has_instances(row: Row) -> bool:
    content = row.get(BODY)
    return isinstance(content, dict) and _INSTANCES in content


def _instances(row: Row) -> list[Any]:
    found = row[BODY][_INSTANCES]
    if not isinstance(found, list) or not found:
        raise InvalidArgument("'instances' must be a list of one sample or more")
    return found


def _encoded(reading: _Reading, response: InferResponse) -> HttpResponse:
    if reading.model.platform == PLATFORM:
        return handlers.response(response)
    if isinstance(reading.model, Pipeline):
        return handlers.answer(response)
    steps = reading.model.steps_for(reading.request.inputs)
    found = answer(response, reading.model, steps, alone=reading.alone)
    return HttpResponse(200, pretty({"predictions": found} if reading.instances else found))
