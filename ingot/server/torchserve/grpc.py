"""TorchServe's two gRPC services, over the same predictions and management as its HTTP ports."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from google.protobuf.message import Message

from ingot.protocol.proto_codec import parse
from ingot.protocol.requests import CLIENT
from ingot.runtime import Metrics
from ingot.runtime.engines.python.torchserve.rows import Part
from ingot.server.grpc.call import Method
from ingot.server.grpc.fast import FastListener, method_path, unary
from ingot.server.grpc.service import Service
from ingot.server.plane.dataplane import DataPlane
from ingot.server.torchserve import torchserve_inference_pb2 as inference_pb
from ingot.server.torchserve import torchserve_management_pb2 as management_pb
from ingot.server.torchserve.errors import pretty
from ingot.server.torchserve.management import Management, Parameters, Status
from ingot.server.torchserve.predictions import Predictions

_INFERENCE = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
_MANAGEMENT = "org.pytorch.serve.grpc.management.ManagementAPIsService"


class ServicesListener(FastListener):
    """A gRPC server that has further methods, and whose connections are not those that metrics show.

    Args:
        more: the methods, by their paths.
        args: those of :class:`FastListener`.
    """

    def __init__(self, more: Mapping[bytes, Method], *args: Any):
        self._more = more
        super().__init__(*args)

    def _methods(self, service: Service) -> dict[bytes, Method]:
        return {**super()._methods(service), **self._more}

    def _publish(self, metrics: Metrics) -> None:
        pass


def inference(plane: DataPlane, served: Predictions) -> dict[bytes, Method]:
    """Return the methods of the inference service, by their paths."""

    async def ping(request: Message) -> Message:
        health = {"status": "Healthy" if plane.ready else "Unhealthy"}
        return inference_pb.TorchServeHealthResponse(health=pretty(health).decode())

    async def answers(request: inference_pb.PredictionsRequest) -> AsyncGenerator[Message, None]:
        parts = [Part(name, content) for name, content in request.input.items()]
        async with aclosing(served.answers(request.model_name, request.model_version, parts, CLIENT.get())) as found:
            async for body in found:
                yield inference_pb.PredictionResponse(prediction=body)

    async def predict(request: inference_pb.PredictionsRequest) -> Message:
        async with aclosing(answers(request)) as found:
            return await anext(found)

    async def stream(messages: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        async for data in messages:
            async with aclosing(answers(parse(inference_pb.PredictionsRequest, data))) as found:
                async for answer in found:
                    yield answer.SerializeToString()

    return {
        method_path("Ping", _INFERENCE): Method(unary(ping, inference_pb.Empty)),
        method_path("Predictions", _INFERENCE): Method(unary(predict, inference_pb.PredictionsRequest), large=True),
        method_path("StreamPredictions", _INFERENCE): Method(streaming=stream, large=True),
    }


def management(served: Management) -> dict[bytes, Method]:
    """Return the methods of the management service, by their paths."""

    async def register(request: Any) -> Message:
        return _done(await served.register(_parameters(request)))

    async def scale(request: Any) -> Message:
        return _done(await served.scale(request.model_name, request.model_version, _parameters(request)))

    async def unregister(request: Any) -> Message:
        return _done(await served.unregister(request.model_name, request.model_version))

    async def set_default(request: Any) -> Message:
        return _done(served.set_default(request.model_name, request.model_version))

    async def describe(request: Any) -> Message:
        return _message(served.describe(request.model_name, request.model_version))

    async def listed(request: Any) -> Message:
        return _message(served.page(_parameters(request)))

    kinds = {
        "RegisterModel": (register, management_pb.RegisterModelRequest),
        "ScaleWorker": (scale, management_pb.ScaleWorkerRequest),
        "UnregisterModel": (unregister, management_pb.UnregisterModelRequest),
        "SetDefault": (set_default, management_pb.SetDefaultRequest),
        "DescribeModel": (describe, management_pb.DescribeModelRequest),
        "ListModels": (listed, management_pb.ListModelsRequest),
    }
    return {method_path(name, _MANAGEMENT): Method(unary(*kind)) for name, kind in kinds.items()}


def _parameters(request: Message) -> Parameters:
    """Return the fields that a message has; protobuf leaves out those with the value 0, and asynchronous is false."""
    fields: Mapping[Any, Any] = dict(request.ListFields())
    return Parameters({"synchronous": "false", **{field.name: str(value) for field, value in fields.items()}})


def _done(status: Status) -> Message:
    return management_pb.ManagementResponse(msg=status.text)


def _message(content: Any) -> Message:
    return management_pb.ManagementResponse(msg=pretty(content).decode())
