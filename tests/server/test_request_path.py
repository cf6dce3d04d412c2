"""A request enters few modules between its bytes and the engine, and is decoded and encoded once at most."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import numpy as np
import pytest

import ingot
from ingot import RunningServer
from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol import proto_codec
from tests import onnx_models
from tests.server.http.test_fast_path import connect
from tests.support import ROOT

pytestmark = pytest.mark.source  # the calls are watched by sys.setprofile

# Modules up to the engine, by whether the request is the first of its kind.
MOST = {
    (False, "json"): 18,
    (False, "binary"): 18,
    (False, "grpc"): 22,
    (True, "json"): 27,
    (True, "binary"): 26,
    (True, "grpc"): 27,
}
# Entered for the PING and WINDOW_UPDATE that grpcio sends with a request.
CONTROL = ("server/http2/control.py", "server/http2/abuse_budget.py", "server/http2/sender.py")
CODECS = ("protocol/json_codec.py", "protocol/proto_codec.py")
PACKAGE = str(ROOT / "ingot")


class Road:
    """The modules that calls in one thread enter, in order, and how often a codec converts for others."""

    def __init__(self) -> None:
        self.rooms: list[str] = []
        self.codec = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(PACKAGE):
            return
        room = file.removeprefix(PACKAGE + "/")
        if room not in self.rooms:
            self.rooms.append(room)
        caller = frame.f_back
        converts = frame.f_code.co_name.startswith(("decode_", "encode_"))
        if converts and room in CODECS and (caller is None or not caller.f_code.co_filename.endswith(room)):
            self.codec += 1

    @property
    def to_engine(self) -> list[str]:
        """Those up to the engine."""
        last = next(index for index, room in enumerate(self.rooms) if "/engines/" in room)
        return [room for room in self.rooms[: last + 1] if room not in CONTROL]


TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 3]}
BODIES = {
    "json": (json.dumps({"inputs": [{**TENSOR, "data": [1.0, 2.0, 3.0]}]}).encode(), b""),
    "binary": (
        json.dumps({"inputs": [{**TENSOR, "parameters": {"binary_data_size": 12}}]}).encode(),
        np.ones(3, np.float32).tobytes(),
    ),
}


KINDS = (*BODIES, "grpc")


@contextlib.contextmanager
def client(server: RunningServer, kind: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that sends a request; another text makes it another request to the codec."""
    if kind == "grpc":
        with grpc.insecure_channel(server.grpc_url.removeprefix("grpc://")) as channel:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{proto_codec.SERVICE}/ModelInfer")

            def ask(text: str) -> None:
                message = pb.ModelInferRequest(model_name="affine", raw_input_contents=[bytes(12)])
                message.inputs.add(name="x", datatype="FP32", shape=[1, 3])
                message.parameters["text"].string_param = text
                call(message.SerializeToString(), timeout=60, wait_for_ready=True)

            yield ask
        return
    with connect(server.http_url) as connection:

        def ask(text: str) -> None:
            header, raw = BODIES[kind]
            header += b" " * len(text)
            length = f"Inference-Header-Content-Length: {len(header)}\r\n" if raw else ""
            length += f"Content-Length: {len(header + raw)}\r\n"
            head = f"POST /v2/models/affine/infer HTTP/1.1\r\nHost: x\r\n{length}\r\n"
            connection.sendall(head.encode() + header + raw)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")

        yield ask


def road_of(folder: Path, kind: str, text: str) -> Road:
    """Return the road of one request, after several requests with an empty text."""
    road, ready = Road(), threading.Event()
    with ingot.serve(str(onnx_models.affine(folder)), http_port=0, grpc_port=0) as server, client(server, kind) as ask:
        loop = server._runner.get_loop()

        def trace() -> None:
            sys.setprofile(road)
            ready.set()

        for _ in range(8):  # until the heads and bodies are known and a call is known to be short
            ask("")
        loop.call_soon_threadsafe(trace)
        assert ready.wait(60)
        ask(text)
        loop.call_soon_threadsafe(sys.setprofile, None)
    return road


@pytest.mark.one_case
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["", "new"], ids=["repeated", "first"])
def test_a_request_enters_few_modules(tmp_path: Path, kind: str, text: str) -> None:
    conversions = 2 if text else 1  # to encode, and to decode if the body is not known
    for _ in range(3):  # on a busy machine a request may arrive in two pieces, or with a PING
        road = road_of(tmp_path, kind, text)
        # A slow machine runs the engine in a thread, which is not traced: then only conversions are counted.
        rooms = road.to_engine if any("/engines/" in room for room in road.rooms) else []
        if len(rooms) <= MOST[bool(text), kind] and road.codec <= conversions:
            return
    pytest.fail(f"{road.codec} conversions, {len(rooms)} modules: {rooms}")
