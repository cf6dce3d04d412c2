"""Protocols of the contestants: each encodes a sample as a request and decodes an answer."""

from __future__ import annotations

import json
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.serving.models import Model
from ingot.protocol import json_codec, proto_codec
from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol.requests import InferRequest, Template
from ingot.tensors import Array

_NUMBERS = re.compile(rb"\[[^\[\]{}]*\]")


@dataclass(frozen=True)
class Request:
    """One request: where it goes, its headers and its body. Of gRPC, the body is the message without its prefix."""

    path: str
    headers: dict[str, str]
    body: bytes

    def http(self) -> bytes:
        """Return the request as HTTP/1.1."""
        headers = {"Host": "127.0.0.1", **self.headers, "Content-Length": str(len(self.body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"POST {self.path} HTTP/1.1\r\n{head}\r\n".encode() + self.body


class Wire(ABC):
    """A way to speak to a server.

    Attributes:
        format: ``json``, ``binary`` or ``grpc``, under which results are compared.
    """

    format = ""

    @abstractmethod
    def request(self, model: Model, number: int) -> Request:
        """Return the request that asks for one sample."""

    @abstractmethod
    def answer(self, body: bytes) -> Array:
        """Return the numbers of an answer, without dimensions.

        Raises:
            ValueError: it holds none.
        """

    @abstractmethod
    def mark(self, body: bytes) -> bytes:
        """Return the part of a right answer that identifies its sample, as the server writes it."""


class PlainJson(Wire):
    """A sample as ``{"x": [...]}``, the answer anywhere in JSON."""

    format = "json"

    def __init__(self, path: str, wrap: Callable[[dict[str, object]], object] = lambda sample: sample):
        self._path = path
        self._wrap = wrap

    def request(self, model: Model, number: int) -> Request:
        sample = {name: value.tolist() for name, value in model.samples[number].items()}
        return _json(self._path.format(model=model.name), self._wrap(sample))

    def answer(self, body: bytes) -> Array:
        return np.array(json.loads(self.mark(body)), np.float32)

    def mark(self, body: bytes) -> bytes:
        found = max(_NUMBERS.findall(body), key=len, default=b"")
        if len(found) < 8:
            raise ValueError(f"an answer without numbers: {body[:200]!r}")
        return found


class PlainBinary(Wire):
    """The bytes of a sample's tensors, one after the other, and the bytes of the answer's."""

    format = "binary"

    def __init__(self, path: str):
        self._path = path

    def request(self, model: Model, number: int) -> Request:
        body = b"".join(value.tobytes() for value in model.samples[number].values())
        return Request(self._path.format(model=model.name), {"Content-Type": "application/octet-stream"}, body)

    def answer(self, body: bytes) -> Array:
        return np.frombuffer(body, np.float32)

    def mark(self, body: bytes) -> bytes:
        return body


class OpenJson(PlainJson):
    """The Open Inference Protocol in JSON."""

    def __init__(self, path: str = "/v2/models/{model}/infer"):
        super().__init__(path)

    def request(self, model: Model, number: int) -> Request:
        body, _ = json_codec.encode_request(_asked(model, number), binary=False)
        return Request(self._path.format(model=model.name), {"Content-Type": "application/json"}, body)


class OpenBinary(Wire):
    """The Open Inference Protocol with raw tensors behind a JSON header, both ways."""

    format = "binary"

    def request(self, model: Model, number: int) -> Request:
        body, header = json_codec.encode_request(_asked(model, number), binary=True)
        headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(header)}
        return Request(f"/v2/models/{model.name}/infer", headers, body)

    def answer(self, body: bytes) -> Array:
        return np.frombuffer(self.mark(body), np.float32)

    def mark(self, body: bytes) -> bytes:
        header, end = json.JSONDecoder().raw_decode(body.decode("latin-1"))
        size = sum(output["parameters"]["binary_data_size"] for output in header["outputs"])
        return body[len(body) - size :] if end <= len(body) - size else b""


class OpenGrpc(Wire):
    """The Open Inference Protocol over gRPC, tensors as raw bytes."""

    format = "grpc"

    def request(self, model: Model, number: int) -> Request:
        message = proto_codec.encode_request(_asked(model, number))
        return Request("/inference.GRPCInferenceService/ModelInfer", {}, message.SerializeToString())

    def answer(self, body: bytes) -> Array:
        message = pb.ModelInferResponse.FromString(body)
        if message.raw_output_contents:
            return np.frombuffer(message.raw_output_contents[0], np.float32)
        if not message.outputs:
            raise ValueError("an answer without outputs")
        return np.array(message.outputs[0].contents.fp32_contents, np.float32)

    def mark(self, body: bytes) -> bytes:
        return self.answer(body).tobytes()


def framed(message: bytes) -> bytes:
    """Return a gRPC message with its prefix: not compressed, and its length."""
    return struct.pack(">BI", 0, len(message)) + message


def _json(path: str, body: object) -> Request:
    return Request(path, {"Content-Type": "application/json"}, json.dumps(body, separators=(",", ":")).encode())


def _asked(model: Model, number: int) -> InferRequest:
    return InferRequest(Template(model.name), {name: value[None] for name, value in model.samples[number].items()})
