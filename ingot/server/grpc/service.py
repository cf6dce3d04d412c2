"""The methods of the Open Inference Protocol's gRPC service: they convert messages and call the data plane."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import Message

from ingot.errors import IngotError, NotFound, Unsupported, public_text
from ingot.faults import attempt_async, public_error
from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol import proto_codec
from ingot.protocol.regions import refuse
from ingot.protocol.requests import CLIENT, InferRequest, InferResponse
from ingot.server.net import compression
from ingot.server.plane import extensions, generation
from ingot.server.plane.dataplane import DataPlane
from ingot.server.triton.cuda_memory import CudaRegion
from ingot.serving.control import ELSEWHERE
from ingot.tensors import TensorSpec

if TYPE_CHECKING:
    from ingot.serving.control import Control

M = TypeVar("M", bound=Message)
T = TypeVar("T")

# Most requests of one stream in progress at once.
_AHEAD = 64
_EMPTY_FINAL = "triton_enable_empty_final_response"

Unary = Callable[[Any], Awaitable[Message]]


class Service:
    """The six methods of the Open Inference Protocol's core, and Triton's extensions.

    Args:
        plane: the server's behaviour.
        control: of the models, on the management listener.
    """

    def __init__(self, plane: DataPlane, control: Control | None = None):
        self._plane = plane
        self._control = control

    async def server_live(self, request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def server_ready(self, request: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._plane.ready)

    async def model_ready(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        try:
            return pb.ModelReadyResponse(ready=self._plane.model_ready(request.name, request.version))
        except NotFound:  # as Triton does: otherwise tritonclient's is_model_ready() would raise
            return pb.ModelReadyResponse(ready=False)

    async def server_metadata(self, request: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(**self._plane.server_metadata(managed=self._control is not None))

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
        config = extensions.configuration(self._plane, request.name, request.version)
        return _filled(pb.ModelConfigResponse(), {"config": config})

    async def model_statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        counted = extensions.statistics(self._plane, request.name, request.version)
        return _filled(pb.ModelStatisticsResponse(), counted)

    async def memory_status(self, request: pb.SystemSharedMemoryStatusRequest) -> pb.SystemSharedMemoryStatusResponse:
        regions = self._plane.memory.status(CLIENT.get(), request.name)
        return _filled(pb.SystemSharedMemoryStatusResponse(), {"regions": {each["name"]: each for each in regions}})

    async def register_memory(
        self, request: pb.SystemSharedMemoryRegisterRequest
    ) -> pb.SystemSharedMemoryRegisterResponse:
        memory = self._plane.memory
        memory.register(CLIENT.get(), request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def unregister_memory(
        self, request: pb.SystemSharedMemoryUnregisterRequest
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        self._plane.memory.unregister(CLIENT.get(), request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def cuda_memory_status(self, request: pb.CudaSharedMemoryStatusRequest) -> pb.CudaSharedMemoryStatusResponse:
        regions = self._plane.memory.status(CLIENT.get(), request.name, CudaRegion)
        return _filled(pb.CudaSharedMemoryStatusResponse(), {"regions": {each["name"]: each for each in regions}})

    async def register_cuda_memory(
        self, request: pb.CudaSharedMemoryRegisterRequest
    ) -> pb.CudaSharedMemoryRegisterResponse:
        memory = self._plane.memory
        memory.register_cuda(CLIENT.get(), request.name, request.raw_handle, request.device_id, request.byte_size)
        return pb.CudaSharedMemoryRegisterResponse()

    async def unregister_cuda_memory(
        self, request: pb.CudaSharedMemoryUnregisterRequest
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        self._plane.memory.unregister(CLIENT.get(), request.name, CudaRegion)
        return pb.CudaSharedMemoryUnregisterResponse()

    def _controlled(self) -> Control:
        if self._control is None:
            raise Unsupported(ELSEWHERE)
        return self._control

    async def repository_index(self, request: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        return _filled(pb.RepositoryIndexResponse(), {"models": self._controlled().index(ready=request.ready)})

    async def repository_load(self, request: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        await self._controlled().load(request.model_name, _chosen(request.parameters))
        return pb.RepositoryModelLoadResponse()

    async def repository_unload(self, request: pb.RepositoryModelUnloadRequest) -> pb.RepositoryModelUnloadResponse:
        name, _, version = request.model_name.partition(":")
        dependents = _chosen(request.parameters).get("unload_dependents") is True
        await self._controlled().unload(name, version, dependents)
        return pb.RepositoryModelUnloadResponse()

    async def log_settings(self, request: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
        chosen = {name: (value, value.WhichOneof("parameter_choice")) for name, value in request.settings.items()}
        if chosen:
            wanted = {name: getattr(value, kind) if kind else None for name, (value, kind) in chosen.items()}
            self._plane.logs.change(wanted, CLIENT.get(), managed=self._control is not None)
        answer = pb.LogSettingsResponse()
        kinds = {bool: "bool_param", int: "uint32_param", str: "string_param"}
        for name, value in self._plane.logs.content.items():
            setattr(answer.settings[name], kinds[type(value)], value)
        return answer

    async def model_infer(self, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        decoded = await self._decoded(request)
        response = await self._plane.infer(decoded, "grpc")
        return await self._encoded(decoded, response)

    async def _encoded(self, request: InferRequest, response: InferResponse) -> pb.ModelInferResponse:
        typed = proto_codec.wants_typed(request)
        encode = functools.partial(proto_codec.timed, response, typed)
        message, seconds = await _run(encode, in_thread=response.is_slow(one_by_one=typed))
        self._plane.encoding["grpc"].observe(seconds)
        return message

    async def _decoded(self, request: pb.ModelInferRequest) -> InferRequest:
        client = CLIENT.get()
        read = refuse if self._plane.reader is None else self._plane.reader(client)
        decode = functools.partial(proto_codec.decode_request, request, self._plane.repository.get, read)
        decoded = await _run(decode, in_thread=proto_codec.is_slow(request))
        decoded.client = client
        return decoded

    async def model_stream_infer(
        self, requests: AsyncIterator[pb.ModelInferRequest]
    ) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
        """Answer requests, with errors as messages; several run at once.

        Answers have the order of their requests, except those of models that answer several times: they are sent when
        they are there.
        """
        answers: asyncio.Queue[asyncio.Future[pb.ModelStreamInferResponse] | None] = asyncio.Queue()
        room = asyncio.Semaphore(_AHEAD)
        working: set[asyncio.Task[Any]] = set()
        loop = asyncio.get_running_loop()

        def begin(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
            task = asyncio.create_task(work)
            working.add(task)
            task.add_done_callback(working.discard)
            return task

        async def pass_on(request: pb.ModelInferRequest) -> None:
            async with contextlib.aclosing(self._repeated(request)) as messages:
                async for message in messages:
                    await room.acquire()
                    ready = loop.create_future()
                    ready.set_result(message)
                    answers.put_nowait(ready)

        async def read() -> None:
            streams: set[asyncio.Task[None]] = set()
            try:
                async for request in requests:
                    if self._repeats(request):
                        streams.add(task := begin(pass_on(request)))
                        task.add_done_callback(streams.discard)
                        if len(streams) >= _AHEAD:
                            await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
                        continue
                    answers.put_nowait(begin(self._in_band(request)))
                    await room.acquire()
                if streams:
                    await asyncio.wait(streams)
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

    def _repeats(self, request: pb.ModelInferRequest) -> bool:
        """Return whether the model of a request answers several times."""
        try:
            return self._plane.repository.get(request.model_name, request.model_version).repeat is not None
        except NotFound:
            return False

    async def _in_band(self, request: pb.ModelInferRequest) -> pb.ModelStreamInferResponse:
        outcome = await attempt_async("a request of ModelStreamInfer failed", self.model_infer(request))
        return self._failed(request, outcome) if isinstance(outcome, IngotError) else _final(outcome, True)

    async def _repeated(self, request: pb.ModelInferRequest) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
        """Yield the answers to one request; like Triton's, the last is empty if the client asks for that."""
        empty = _EMPTY_FINAL in request.parameters and request.parameters[_EMPTY_FINAL].bool_param
        try:
            decoded = await self._decoded(request)
            async with contextlib.aclosing(generation.answers(self._plane, decoded, "grpc")) as answers:
                async for response, last in answers:
                    yield _final(await self._encoded(decoded, response), last and not empty)
        except Exception as error:  # noqa: BLE001 - the boundary of one request
            yield self._failed(request, public_error(error, "a request of ModelStreamInfer failed"))
            return
        if empty:
            route = response.route
            message = pb.ModelInferResponse(model_name=route.name, model_version=route.version, id=request.id)
            yield _final(message, True)

    def _failed(self, request: pb.ModelInferRequest, error: IngotError) -> pb.ModelStreamInferResponse:
        self._plane.count_error("grpc", error)
        answered = pb.ModelInferResponse(id=request.id)
        return pb.ModelStreamInferResponse(error_message=public_text(error), infer_response=answered)

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
            "RepositoryIndex": (self.repository_index, pb.RepositoryIndexRequest),
            "RepositoryModelLoad": (self.repository_load, pb.RepositoryModelLoadRequest),
            "RepositoryModelUnload": (self.repository_unload, pb.RepositoryModelUnloadRequest),
            "LogSettings": (self.log_settings, pb.LogSettingsRequest),
            "SystemSharedMemoryStatus": (self.memory_status, pb.SystemSharedMemoryStatusRequest),
            "SystemSharedMemoryRegister": (self.register_memory, pb.SystemSharedMemoryRegisterRequest),
            "SystemSharedMemoryUnregister": (self.unregister_memory, pb.SystemSharedMemoryUnregisterRequest),
            "CudaSharedMemoryStatus": (self.cuda_memory_status, pb.CudaSharedMemoryStatusRequest),
            "CudaSharedMemoryRegister": (self.register_cuda_memory, pb.CudaSharedMemoryRegisterRequest),
            "CudaSharedMemoryUnregister": (self.unregister_cuda_memory, pb.CudaSharedMemoryUnregisterRequest),
        }


async def _run(work: Callable[[], T], *, in_thread: bool) -> T:
    """Return the result of work that the event loop does itself, or a thread if it takes long."""
    return await asyncio.get_running_loop().run_in_executor(compression.threads, work) if in_thread else work()


def _chosen(parameters: Mapping[str, pb.ModelRepositoryParameter]) -> dict[str, Any]:
    return {
        name: getattr(value, kind)
        for name, value in parameters.items()
        if (kind := value.WhichOneof("parameter_choice")) is not None
    }


def _final(message: pb.ModelInferResponse, last: bool) -> pb.ModelStreamInferResponse:
    """Return an answer of a stream, which says whether its request gets more."""
    message.parameters["triton_final_response"].bool_param = last
    return pb.ModelStreamInferResponse(infer_response=message)


def _filled(message: M, content: dict[str, Any]) -> M:
    """Return a message filled from a JSON object; keys without a field are ignored."""
    from google.protobuf.json_format import ParseDict  # takes as long to import as the rest of protobuf

    return ParseDict(content, message, ignore_unknown_fields=True)


def _tensor(spec: TensorSpec) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(name=spec.name, datatype=spec.dtype.value, shape=spec.wire_shape)
