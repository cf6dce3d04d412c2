"""Servers of every kind with a file of API keys, and raw clients for both protocols."""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx

import ingot
from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol import proto_codec
from ingot.server.access.auth_file import add_key
from ingot.server.access.keys import ApiKey, generate
from tests import onnx_models
from tests.server.apponly import serve_app
from tests.server.outside import affine

NOW = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
DAY = datetime.timedelta(days=1)
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}

KINDS: dict[str, dict[str, Any]] = {
    "fast": {"grpc_server": "fast"},
    "grpcio": {"grpc_server": "grpcio"},
}


@dataclass(frozen=True)
class Served:
    """A server with access rules; ``grpc`` is None for FastAPI alone."""

    kind: str
    auth: Path
    http: str
    grpc: str | None

    def get(self, path: str, key: str | None = None, **headers: str) -> httpx.Response:
        return httpx.get(f"{self.http}{path}", headers=_headers(key, headers), trust_env=False, timeout=60)

    def infer(self, key: str | None = None, **headers: str) -> httpx.Response:
        url = f"{self.http}/v2/models/affine/infer"
        return httpx.post(url, json=BODY, headers=_headers(key, headers), trust_env=False, timeout=60)

    def refused(self, reason: str, key: str) -> float:
        """Return how many requests were refused for a reason."""
        pattern = rf'^ingot_auth_refused_total{{reason="{reason}"}} (\S+)$'
        return sum(map(float, re.findall(pattern, self.get("/metrics", key).text, re.MULTILINE)))

    def loaded(self, file: str, result: str, key: str) -> float:
        """Return how often changed files were loaded with some result."""
        pattern = rf'^ingot_reloads_total{{file="{file}",result="{result}"}} (\S+)$'
        return sum(map(float, re.findall(pattern, self.get("/metrics", key).text, re.MULTILINE)))

    def call(self, method: str, request: Any, reply: Any, key: str | None = None) -> Any:
        """Call a method of gRPC; returns the reply, or raises grpc.RpcError."""
        assert self.grpc is not None
        with grpc.insecure_channel(self.grpc.removeprefix("grpc://")) as channel:
            ask: Any = channel.unary_unary(f"/{method}", type(request).SerializeToString, reply.FromString)
            return ask(request, timeout=60, metadata=list(_headers(key, {}).items()))

    def infer_grpc(self, key: str | None = None) -> pb.ModelInferResponse:
        reply: pb.ModelInferResponse = self.call(
            f"{proto_codec.SERVICE}/ModelInfer", affine([1, 2, 3]), pb.ModelInferResponse, key
        )
        return reply


def _headers(key: str | None, more: Mapping[str, str]) -> dict[str, str]:
    return {**({} if key is None else {"authorization": f"Bearer {key}"}), **more}


def make_key(path: Path, *scopes: str, expires: datetime.datetime | None = None, name: str = "test") -> str:
    """Add a key to the file and return it."""
    token, identifier, digest = generate()
    add_key(path, ApiKey(id=identifier, name=name, hash=digest, scopes=frozenset(scopes), created=NOW, expires=expires))
    return token


@contextlib.contextmanager
def served(kind: str, folder: Path, auth: Path, **settings: Any) -> Iterator[Served]:
    """Serve the model ``affine`` with the keys of a file, by a kind of server."""
    model = str(onnx_models.affine(folder))
    if kind == "fastapi":
        with serve_app([model], 1 << 20, auth) as url:
            yield Served(kind, auth, url, None)
        return
    with ingot.serve(model, http_port=0, grpc_port=0, auth=auth, **KINDS[kind], **settings) as server:
        yield Served(kind, auth, server.http_url, server.grpc_url)
