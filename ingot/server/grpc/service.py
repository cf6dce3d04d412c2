"""The methods of the Open Inference Protocol's gRPC service: they convert messages and call the data plane."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import Message

from ingot.errors import IngotError, NotFound, public_text
from ingot.faults import attempt_async, public_error
from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol import proto_codec
from ingot.protocol.regions import refuse
from ingot.protocol.requests import CLIENT, InferRequest, InferResponse
from ingot.server.grpc import as_json
from ingot.server.net import compression
from ingot.server.plane import decoupled
from ingot.server.plane.dataplane import DataPlane
from ingot.server.plane.handlers import Call
from ingot.server.plane.operations import METHODS, Handler
from ingot.server.plane.texts import text_decoder

if TYPE_CHECKING:
    from ingot.serving.control import Control

M = TypeVar("M", bound=Message)
T = TypeVar("T")

# Most requests of one stream in progress at once.
_AHEAD = 64
_EMPTY_FINAL = "triton_enable_empty_final_response"

_METHODS = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name

Unary = Callable[[Any], Awaitable[Message]]


class Service:
    """The methods of the inference service, from the table of operations; inference and its stream are here.

    Args:
        plane: the server's behaviour.
        control: of the models, on the management listener.
    """

    def __init__(self, plane: DataPlane, control: Control | None = None):
        self._plane = plane
        self._control = control

    def unary(self) -> dict[str, tuple[Unary, type[Message]]]:
        """Return the unary methods by name, with the type of their request."""
        found: dict[str, tuple[Unary, type[Message]]] = {"ModelInfer": (self.model_infer, pb.ModelInferRequest)}
        for name, operation in METHODS.items():
            if operation.handler is not None:
                method = _METHODS[name]
                kinds = getattr(pb, method.input_type.name), getattr(pb, method.output_type.name)
                found[name] = functools.partial(self._call, name, operation.handler, kinds[1]), kinds[0]
        return found

    async def _call(self, name: str, handler: Handler, kind: type[M], request: Any) -> M:
        """Answer a call by the handler of its operation; ``as_json.py`` converts its messages."""
        path, content = as_json.READ[name](request)
        call = Call(self._plane, self._control, CLIENT.get(), content, **path)
        try:
            answer = await handler(call)
        except NotFound:
            if name != "ModelReady":
                raise
            answer = {"ready": False}  # as Triton does: otherwise tritonclient's is_model_ready() would raise
        return _filled(kind(), as_json.WRITE[name](answer) if name in as_json.WRITE else answer)

    async def model_infer(self, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        decoded = await self._decoded(request)
        response = await self._plane.infer(decoded, "grpc")
        return await self._encoded(decoded, response)

    async def _encoded(self, request: InferRequest, response: InferResponse) -> pb.ModelInferResponse:
        typed = proto_codec.wants_typed(request)
        encode = functools.partial(proto_codec.timed, response, typed)
        message, seconds = await compression.run(encode, in_thread=response.is_slow(one_by_one=typed))
        self._plane.encoding_grpc.observe(seconds)
        return message

    async def _decoded(self, request: pb.ModelInferRequest) -> InferRequest:
        client = CLIENT.get()
        read = refuse if self._plane.reader is None else self._plane.reader(client)
        decode = functools.partial(proto_codec.decode_request, request, self._plane.repository.get, read)
        decoded = await compression.run(decode, in_thread=proto_codec.is_slow(request))
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
            model = self._plane.repository.get(request.model_name, request.model_version)
            return model.decoupled or text_decoder(model, [each.name for each in request.inputs]) is not None
        except IngotError:
            return False

    async def _in_band(self, request: pb.ModelInferRequest) -> pb.ModelStreamInferResponse:
        outcome = await attempt_async("a request of ModelStreamInfer failed", self.model_infer(request))
        return self._failed(request, outcome) if isinstance(outcome, IngotError) else _final(outcome, True)

    async def _repeated(self, request: pb.ModelInferRequest) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
        """Yield the answers to one request; like Triton's, the last is empty if the client asks for that."""
        empty = _EMPTY_FINAL in request.parameters and request.parameters[_EMPTY_FINAL].bool_param
        try:
            model = self._plane.repository.get(request.model_name, request.model_version)
            decoded = await self._decoded(request)
            async with contextlib.aclosing(decoupled.answers(self._plane, decoded, "grpc")) as answers:
                async for response, last in answers:
                    yield _final(await self._encoded(decoded, response), last and not empty)
        except Exception as error:  # noqa: BLE001 - the boundary of one request
            yield self._failed(request, public_error(error, "a request of ModelStreamInfer failed"))
            return
        if empty:
            message = pb.ModelInferResponse(model_name=model.name, model_version=model.version, id=request.id)
            yield _final(message, True)

    def _failed(self, request: pb.ModelInferRequest, error: IngotError) -> pb.ModelStreamInferResponse:
        self._plane.count_error("grpc", error)
        answered = pb.ModelInferResponse(id=request.id)
        return pb.ModelStreamInferResponse(error_message=public_text(error), infer_response=answered)


def _final(message: pb.ModelInferResponse, last: bool) -> pb.ModelStreamInferResponse:
    """Return an answer of a stream, which says whether its request gets more."""
    message.parameters["triton_final_response"].bool_param = last
    return pb.ModelStreamInferResponse(infer_response=message)


def _filled(message: M, content: dict[str, Any]) -> M:
    """Return a message filled from a JSON object; keys without a field are ignored."""
    from google.protobuf.json_format import ParseDict  # takes as long to import as the rest of protobuf

    return ParseDict(content, message, ignore_unknown_fields=True)
