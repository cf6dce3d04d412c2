"""A connection of the fast gRPC server without a socket: bytes in, frames out, an echo behind it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
from hpack import Decoder, Encoder

from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol.requests import InferRequest, InferResponse, Route
from ingot.runtime import Metrics
from ingot.server.grpc.connection import Connection
from ingot.server.grpc.fast import FastListener
from ingot.server.http2 import frames
from ingot.server.plane.dataplane import DataPlane
from ingot.tensors import DType, TensorSpec

LIMIT = 100_000
INFER = "/inference.GRPCInferenceService/ModelInfer"


class EchoTicket:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class EchoPlane:
    """A data plane that answers with the inputs; requests to the model ``never`` are not answered."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.metrics = Metrics()
        self.repository = SimpleNamespace(get=lambda name, version: SimpleNamespace(decoupled=False))  # has every model
        self.requests: list[InferRequest] = []
        self.tickets: list[EchoTicket] = []
        self.errors: list[Exception] = []
        self.ready = True
        self.reader = None
        self.observer = None
        self.encoding_grpc = self.metrics.encode_seconds.labels("grpc")
        self.sticky_header = ""
        self._loop = loop

    def submit(self, request: InferRequest, _: str, reply: Any) -> EchoTicket:
        self.requests.append(request)
        ticket = EchoTicket()
        self.tickets.append(ticket)
        template = request.template
        specs = tuple(TensorSpec(name, DType.of(array), array.shape) for name, array in request.inputs.items())
        if template.model != "never":
            template.route = template.route or Route(template.model, "1", specs)
            response = InferResponse(template.route, request.id, request.inputs)
            self._loop.call_soon(lambda: None if ticket.cancelled else reply(response))
        return ticket

    async def infer(self, request: InferRequest, protocol: str) -> InferResponse:
        answered: asyncio.Future[InferResponse] = self._loop.create_future()
        self.submit(request, protocol, answered.set_result)
        return await answered

    def count_error(self, _: str, error: Exception) -> None:
        self.errors.append(error)


class Wire:
    """A fake socket of the connection."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.closed = self.aborted = self.reading_paused = False

    def get_extra_info(self, name: str) -> None:
        """Return that nothing is known: the connection is not encrypted."""

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = self.closed = True

    def pause_reading(self) -> None:
        self.reading_paused = True

    def resume_reading(self) -> None:
        self.reading_paused = False


class Peer:
    """A client of one connection, which can send invalid bytes. Use it inside a running event loop."""

    def __init__(self, *, begin: bool = True, plane: DataPlane | None = None):
        loop = asyncio.get_running_loop()
        self.plane = EchoPlane(loop)
        behind: Any = plane or self.plane
        self.listener = FastListener(behind, LIMIT, 4 * LIMIT)
        self.connection = Connection(loop, self.listener._calls, self.listener._connections)
        self.wire = Wire()
        self.connection.connection_made(self.wire)  # type: ignore[arg-type]
        self._encoder = Encoder()
        self._decoder = Decoder()
        if begin:
            self.send(frames.PREFACE + frames.settings({}))

    def send(self, data: bytes) -> None:
        if not self.wire.closed:
            self.connection.data_received(data)

    def head(self, stream_id: int, path: str = INFER, flags: int = frames.END_HEADERS, **more: str) -> bytes:
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
        fields |= {"content-type": "application/grpc", **{name.replace("_", "-"): text for name, text in more.items()}}
        return frames.frame(frames.HEADERS, flags, stream_id, self._encoder.encode(list(fields.items())))

    def call(self, stream_id: int, message: bytes, **more: str) -> bytes:
        return self.head(stream_id, INFER, frames.END_HEADERS, **more) + data(
            stream_id, prefixed(message), frames.END_STREAM
        )

    async def received(self) -> list[tuple[int, int, int, bytes]]:
        """Return the frames that came since the last time: type, flags, stream and payload."""
        for _ in range(20):
            await asyncio.sleep(0)
        found = []
        while self.wire.written:
            head, flags, stream_id = frames.HEAD.unpack_from(self.wire.written)
            size = head >> 8
            found.append((head & 0xFF, flags, stream_id, bytes(self.wire.written[9 : 9 + size])))
            del self.wire.written[: 9 + size]
        return found

    def headers(self, block: bytes) -> dict[str, str]:
        return {str(name): str(value) for name, value in self._decoder.decode(block)}


def request(*values: float, model: str = "m", request_id: str = "") -> bytes:
    message = pb.ModelInferRequest(model_name=model, id=request_id)
    message.inputs.add(name="x", datatype="FP32", shape=[1, len(values)])
    message.raw_input_contents.append(np.array(values, np.float32).tobytes())
    return message.SerializeToString()


def prefixed(message: bytes, flag: int = 0) -> bytes:
    return bytes((flag,)) + len(message).to_bytes(4, "big") + message


def data(stream_id: int, payload: bytes, flags: int = 0) -> bytes:
    return frames.frame(frames.DATA, flags, stream_id, payload)
