"""The methods of the Open Inference Protocol's gRPC service: they convert messages and call the data plane."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from google.protobuf.message import Message

from ingot.errors import IngotError, NotFound, public_text
from ingot.server import extensions
from ingot.server.dataplane import DataPlane, attempt_async
from ingot.server.grpc import codec
from ingot.server.grpc import open_inference_pb2 as pb
from ingot.server.requests import CLIENT
from ingot.tensors import TensorSpec

M = TypeVar("M", bound=Message)

# Most requests of one stream in progress at once.
_AHEAD = 64

Unary = Callable[[Any], Awaitable[Message]]


class Service:
    """The six methods of the Open Inference Protocol's core, and Triton's extensions."""

    def __init__(self, plane: DataPlane):
        self._plane = plane

    async def server_live(self, request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=self._plane.live)

    async def server_ready(self, request: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._plane.ready)

    async def model_ready(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        try:
            return pb.ModelReadyResponse(ready=self._plane.model_ready(request.name, request.version))
        except NotFound:  # as Triton does: otherwise tritonclient's is_model_ready() would raise
            return pb.ModelReadyResponse(ready=False)

    async def server_metadata(self, request: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(**self._plane.server_metadata())

    async def model_metadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        metadata = self._plane.model_metadata(request.name, request.version)
        return pb.ModelMetadataResponse(
            name=metadata.name,
            versions=metadata.versions,
            platform=metadata.platform,
            inputs=[_tensor(spec) for spec in metadata.inputs],
            outputs=[_tensor(spec) for spec in metadata.outputs],
            properties=metadata.properties,
        )

    async def model_config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        config = await extensions.configuration(self._plane, request.name, request.version)
        return _filled(pb.ModelConfigResponse(), {"config": config})

    async def model_statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        counted = await extensions.statistics(self._plane, request.name, request.version)
        return _filled(pb.ModelStatisticsResponse(), counted)

    async def model_infer(self, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        decoded = codec.decode_request(request, self._plane.repository.get)
        decoded.client = CLIENT.get()
        response = await self._plane.infer(decoded, "grpc")
        return codec.encode_response(response, typed=not request.raw_input_contents)

    async def model_stream_infer(
        self, requests: AsyncIterator[pb.ModelInferRequest]
    ) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
        """Answer requests in their order, with errors as messages; several run at once."""
        answers: asyncio.Queue[asyncio.Task[pb.ModelStreamInferResponse] | None] = asyncio.Queue()
        room = asyncio.Semaphore(_AHEAD)
        working: set[asyncio.Task[pb.ModelStreamInferResponse]] = set()

        async def read() -> None:
            try:
                async for request in requests:
                    task = asyncio.create_task(self._in_band(request))
                    working.add(task)
                    task.add_done_callback(working.discard)
                    answers.put_nowait(task)
                    await room.acquire()
            finally:
                answers.put_nowait(None)

        reading = asyncio.create_task(read())
        try:
            while (answer := await answers.get()) is not None:
                room.release()
                yield await answer
            await reading
        finally:
            reading.cancel()
            for task in tuple(working):
                task.cancel()

    async def _in_band(self, request: pb.ModelInferRequest) -> pb.ModelStreamInferResponse:
        outcome = await attempt_async("a request of ModelStreamInfer failed", self.model_infer(request))
        if not isinstance(outcome, IngotError):
            return pb.ModelStreamInferResponse(infer_response=outcome)
        self._plane.count_error("grpc", outcome)
        answered = pb.ModelInferResponse(id=request.id)
        return pb.ModelStreamInferResponse(error_message=public_text(outcome), infer_response=answered)

    def unary(self) -> dict[str, tuple[Unary, type[Message]]]:
        """Return the unary methods by name, with the type of their request."""
        return {
            "ServerLive": (self.server_live, pb.ServerLiveRequest),
            "ServerReady": (self.server_ready, pb.ServerReadyRequest),
            "ModelReady": (self.model_ready, pb.ModelReadyRequest),
            "ServerMetadata": (self.server_metadata, pb.ServerMetadataRequest),
            "ModelMetadata": (self.model_metadata, pb.ModelMetadataRequest),
            "ModelConfig": (self.model_config, pb.ModelConfigRequest),
            "ModelStatistics": (self.model_statistics, pb.ModelStatisticsRequest),
            "ModelInfer": (self.model_infer, pb.ModelInferRequest),
        }


def _filled(message: M, content: dict[str, Any]) -> M:
    """Return a message filled from a JSON object; keys without a field are ignored."""
    from google.protobuf.json_format import ParseDict  # takes as long to import as the rest of protobuf

    return ParseDict(content, message, ignore_unknown_fields=True)


def _tensor(spec: TensorSpec) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(name=spec.name, datatype=spec.dtype.value, shape=spec.wire_shape)
