"""A repeated request enters few modules between its bytes and the engine, and the codec only a few times."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import ingot
from tests import onnx_models
from tests.server.http.test_fast_path import connect
from tests.support import ROOT

MOST = 16
PACKAGE = str(ROOT / "ingot")


class Road:
    """The modules that calls in one thread enter, in order, and how often the HTTP codec is entered from others."""

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
        if room == "server/http/codec.py" and (caller is None or not caller.f_code.co_filename.endswith(room)):
            self.codec += 1

    @property
    def to_engine(self) -> list[str]:
        """Those up to the engine."""
        last = next(index for index, room in enumerate(self.rooms) if "/engines/" in room)
        return self.rooms[: last + 1]


TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 3]}
BODIES = {
    "json": (json.dumps({"inputs": [{**TENSOR, "data": [1.0, 2.0, 3.0]}]}).encode(), b""),
    "binary": (
        json.dumps({"inputs": [{**TENSOR, "parameters": {"binary_data_size": 12}}]}).encode(),
        np.ones(3, np.float32).tobytes(),
    ),
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_repeated_request_enters_few_modules(tmp_path: Path, kind: str) -> None:
    header, raw = BODIES[kind]
    length = f"Inference-Header-Content-Length: {len(header)}\r\n" if raw else ""
    head = f"POST /v2/models/affine/infer HTTP/1.1\r\nHost: x\r\n{length}Content-Length: {len(header + raw)}\r\n\r\n"
    road, ready = Road(), threading.Event()
    with (
        ingot.serve(str(onnx_models.affine(tmp_path)), http_port=0, grpc_port=0) as server,
        connect(server.http_url) as connection,
    ):
        loop = server._runner.get_loop()

        def ask() -> None:
            connection.sendall(head.encode() + header + raw)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")

        def trace() -> None:
            sys.setprofile(road)
            ready.set()

        for _ in range(8):  # until the heads and bodies are known and a call is known to be short
            ask()
        loop.call_soon_threadsafe(trace)
        assert ready.wait(60)
        ask()
        loop.call_soon_threadsafe(sys.setprofile, None)
    # A slow machine runs the engine in a thread, which is not traced: then these are the modules up to the thread.
    rooms = road.to_engine if any("/engines/" in room for room in road.rooms) else road.rooms
    assert len(rooms) <= MOST or rooms is road.rooms, rooms
    assert road.codec <= 1  # to encode: the body is known
