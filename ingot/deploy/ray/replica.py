"""A replica of Ray Serve: a server without ports."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import fastapi
from google.protobuf.message import Message
from ray import serve

from ingot.config import ServerConfig
from ingot.config.configuration import Configuration
from ingot.config.exposure import OFF
from ingot.config.model import ModelConfig
from ingot.deploy.ray.servicer import METHODS
from ingot.errors import IngotError, Unavailable, public_text
from ingot.faults import attempt_async
from ingot.model_store import Store
from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol import proto_codec
from ingot.protocol.requests import CLIENT
from ingot.runtime import Model
from ingot.server.access.audit import AuditLog
from ingot.server.grpc.grpcio_server import STATUS
from ingot.server.grpc.service import Service
from ingot.server.http.app import create_app
from ingot.server.main import create
from ingot.server.net.limits import SMALL_BYTES, check_size
from ingot.tensors import Array

M = TypeVar("M", bound=Message)


class _Proxies:
    """The ports of a server that Ray's proxies have instead."""

    http_port = grpc_port = 0
    audit: AuditLog | None = None

    async def start(self) -> None:
        """Do nothing: the proxies listen."""

    async def set_serving(self, serving: bool) -> None:
        """Do nothing: Serve sends requests once :meth:`Replica.reconfigure` has returned."""

    async def stop(self, drain: float) -> None:
        """Do nothing: Serve has waited for the requests in flight."""


class Replica:
    """A server without ports, which the handles of other deployments call.

    Args:
        settings: of the server, by name.
        store: the folder with models that are not in a registry; None for the user's.
    """

    def __init__(self, settings: Mapping[str, Any], store: str | None = None):
        config = ServerConfig.of({**settings, "management": OFF, "page": False})
        self._configuration = Configuration(server=config)
        place = None if store is None else Store(Path(store))
        self._server = create((), place, lambda: self._configuration, ends_process=True, ports=_Proxies())
        self._plane = self._server.plane
        self._load = _Load()

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Serve the models of a configuration; those that run answer until the new ones are loaded and tested.

        Args:
            user_config: ``models``, each as ``NAME=SOURCE``.

        Raises:
            Unavailable: a first model cannot be loaded. Later ones that cannot are logged, and the earlier ones answer:
                Serve would replace this replica by one that cannot load them either.
        """
        first = not self._configuration.models
        if first:
            await self._server.start()
        named = (text.partition("=") for text in user_config["models"])
        models = tuple(ModelConfig(name=name, source=source, place="user_config") for name, _, source in named)
        self._configuration = dataclasses.replace(self._configuration, models=models)
        failures = (await self._server.rollouts.reload()).failures
        if first and failures:
            raise Unavailable("; ".join(failures))

    def check_health(self) -> None:
        """Have this replica replaced if it does not answer.

        Raises:
            Unavailable: a model is not in memory, or an engine call does not end.
        """
        if not self._plane.ready:
            raise Unavailable(", ".join(f"{model.name}: {model.state.value}" for model in self._server.repository))

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the expected wait in seconds, and the used share of the highest throughput since the last call."""
        models = [*self._server.repository]
        return {"wait": max((model.wait for model in models), default=0.0), "load": self._load.since_last(models)}

    async def infer(
        self, model: str, inputs: Mapping[str, Array], version: str = "", timeout: float | None = None
    ) -> dict[str, Array]:
        """Answer a request of another deployment, in a batch with others.

        Args:
            model: its name.
            inputs: an array for each input.
            version: of the model; by default the highest.
            timeout: seconds until the answer is useless.

        Raises:
            NotFound: no such model or version is served.
            IngotError: as for :meth:`ingot.runtime.Model.infer`.
        """
        return dict(await self._server.repository.model(model, version).infer(inputs, timeout))

    async def __del__(self) -> None:
        """Close the models; Serve calls it when the requests in flight are answered."""
        if server := getattr(self, "_server", None):
            await server.stop()


class _Load:
    """The share of the highest throughput that is used, between two readings of the counters of models."""

    def __init__(self) -> None:
        self._seen: dict[Model, int] = {}
        self._time = time.monotonic()

    def since_last(self, models: list[Model]) -> float:
        before, self._time = self._time, time.monotonic()
        seconds, seen = 0.0, {}
        for model in models:
            counted = model.statistics()
            seen[model] = counted.samples
            known = {item["rows"]: item["seconds"] for item in counted.described.get("latency", ())}
            if known:
                best = min(known, key=lambda rows: known[rows] / rows)
                seconds += (counted.samples - self._seen.get(model, 0)) * known[best] / best / model.settings.instances
        self._seen = seen
        return seconds / max(self._time - before, 1e-3)


@serve.ingress()
class Ingress(Replica):
    """A replica that Ray's proxies call: over gRPC, the methods that are named as those of the protocol."""

    def __init__(self, settings: Mapping[str, Any], store: str | None = None):
        super().__init__(settings, store)
        self._service = Service(self._plane)
        self._unary = self._service.unary()

    def __serve_build_asgi_app__(self) -> fastapi.FastAPI:
        config = self._server.config
        return create_app(self._plane, config.max_body_bytes, config.max_bodies_mb << 20)

    async def ModelStreamInfer(  # noqa: N802 - as in the protocol
        self, messages: AsyncIterator[bytes], grpc_context: Any
    ) -> AsyncGenerator[Message, None]:
        CLIENT.set(hash(grpc_context.peer()))
        requests = (self._parse(pb.ModelInferRequest, data) async for data in messages)
        try:
            async for answer in self._service.model_stream_infer(requests):
                yield answer
        except IngotError as error:
            _fail(grpc_context, error)
            raise

    async def call(self, name: str, raw: bytes, grpc_context: Any) -> Message:
        """Answer a call of a unary method of the protocol."""
        CLIENT.set(hash(grpc_context.peer()))
        function, kind = self._unary[name]

        async def answer() -> Message:
            return await function(self._parse(kind, raw))

        outcome = await attempt_async(f"{name} failed", answer())
        if isinstance(outcome, IngotError):
            self._plane.count_error("grpc", outcome)
            _fail(grpc_context, outcome)
            # The status is sent anyway, and an exception would be logged with its traceback.
            return pb.ServerLiveResponse()
        return outcome

    def _parse(self, kind: type[M], raw: bytes) -> M:
        most = self._server.config.max_body_bytes
        check_size(len(raw), most if kind is pb.ModelInferRequest else min(SMALL_BYTES, most))
        return proto_codec.parse(kind, raw)


def _fail(context: Any, error: IngotError) -> None:
    context.set_code(STATUS[proto_codec.STATUS[error.code]])
    context.set_details(public_text(error))


def _method(name: str) -> Callable[[Ingress, bytes, Any], Awaitable[Message]]:
    async def method(self: Ingress, raw: bytes, grpc_context: Any) -> Message:
        return await self.call(name, raw, grpc_context)

    method.__name__ = name
    return method


for _each in METHODS:
    if not _each.client_streaming:
        setattr(Ingress, _each.name, _method(_each.name))
