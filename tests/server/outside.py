"""A server in a separate process, with helpers for clients that share no code with it."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol import proto_codec
from ingot.tensors import Array, arrays
from tests import onnx_models
from tests.server.gates import Gate
from tests.support import ROOT, matrix

# Both implement the same protocol, so both run the same tests.
GRPC_SERVERS = matrix("fast", "grpcio")

INFER = f"/{proto_codec.SERVICE}/ModelInfer"

# FP32[1, 1048576] is a message of 4 MiB and some bytes.
FOUR_MIB = 1 << 20


@dataclass(frozen=True)
class Service:
    """A running ``ingot serve``. ``http`` and ``grpc`` are ``host:port``; ``gate`` holds its model ``held``."""

    kind: str
    process: subprocess.Popen[str]
    log: Path
    http: str
    grpc: str
    gate: Gate

    @property
    def http_address(self) -> tuple[str, int]:
        return _address(self.http)

    @property
    def grpc_address(self) -> tuple[str, int]:
        return _address(self.grpc)

    def resident(self) -> int:
        """Return the bytes of memory that the server and its children hold."""
        return sum(_resident(pid) for pid in [self.process.pid, *_children(self.process.pid)])

    def metrics(self) -> str:
        return httpx.get(f"http://{self.http}/metrics", timeout=30, trust_env=False).text

    def count(self, metric: str, **labels: str) -> float:
        """Return the sum of a metric over all the series that have these labels."""
        lines = re.findall(rf"^{metric}(?:\{{(.*)\}})? (\S+)$", self.metrics(), re.MULTILINE)
        wanted = [f'{name}="{value}"' for name, value in labels.items()]
        return sum(float(value) for found, value in lines if all(label in found.split(",") for label in wanted))

    def check(self) -> None:
        """Check that both protocols answer, and right."""
        assert self.process.poll() is None, "the server is gone"
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}
        with httpx.Client(base_url=f"http://{self.http}", trust_env=False, timeout=60) as client:
            answer = client.post("/v2/models/affine/infer", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["outputs"][0]["data"] == [3, 5, 7]
        # Imported late: the tests of HTTP alone need no gRPC.
        import grpc

        with grpc.insecure_channel(self.grpc) as channel:
            ask: Any = channel.unary_unary(INFER, None, pb.ModelInferResponse.FromString)
            reply = ask(affine([1, 2, 3]).SerializeToString(), timeout=60)
        assert floats(reply) == [3, 5, 7]


def affine(values: Sequence[float], model: str = "affine", name: str = "x") -> pb.ModelInferRequest:
    """Return a request of one row with raw contents."""
    return request_of(np.array([values], np.float32), model, name)


def request_of(x: Array, model: str = "affine", name: str = "x") -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name=name, datatype="INT64" if x.dtype == np.int64 else "FP32", shape=x.shape)
    request.raw_input_contents.append(arrays.to_bytes(x))
    return request


def floats(reply: pb.ModelInferResponse) -> list[float]:
    """Return the first output's values."""
    return np.frombuffer(reply.raw_output_contents[0], np.float32).tolist()  # type: ignore[no-any-return]


def row(number: int) -> list[float]:
    """Return inputs of ``affine`` that are unique per number; :func:`affine_of` returns the expected answer."""
    return [number, number + 0.25, -number]


def affine_of(values: Sequence[float]) -> list[float]:
    return [2 * value + 1 for value in values]


def large(number: int) -> Array:
    """Return an input of ``increment`` of 4 MiB that is unique per number, FP32 [1, 1048576]."""
    x = np.arange(FOUR_MIB, dtype=np.float32).reshape(1, FOUR_MIB)
    x[0, :2] = number
    return x


def message(request: pb.ModelInferRequest) -> bytes:
    """Return a request as gRPC sends it: with its prefix of five bytes."""
    body = request.SerializeToString()
    return b"\0" + len(body).to_bytes(4, "big") + body


def unpacked(data: bytes) -> pb.ModelInferResponse:
    """Return the only answer in a stream's data."""
    assert data[0] == 0
    assert int.from_bytes(data[1:5], "big") == len(data) - 5
    return pb.ModelInferResponse.FromString(data[5:])


def wait_until(true: Callable[[], bool], seconds: float = 30) -> None:
    """Wait until a condition holds; fail after ``seconds``."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not become so in time"
        time.sleep(0.02)


def allow_many_files() -> int:
    """Raise the number of open files to the hard limit, for this process and its children; return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def models(folder: Path) -> list[str]:
    """Make the models of the tests: affine, embedding, increment (y = x + 1) and held."""
    made = [onnx_models.affine(folder), onnx_models.embedding(folder), onnx_models.held(folder)]
    one = numpy_helper.from_array(np.array(1, np.float32), "one")
    shape = ("batch", "width")
    kind = TensorProto.FLOAT
    nodes: list[onnx.NodeProto] = [helper.make_node("Add", ["x", "one"], ["y"])]
    made.append(onnx_models.save(folder / "increment.onnx", nodes, [("x", kind, shape)], [("y", kind, shape)], [one]))
    return [str(path) for path in made]


@contextmanager
def serving(kind: str, folder: Path, *options: str, sources: Sequence[str] | None = None) -> Iterator[Service]:
    """Run ``ingot serve`` with a gRPC server of some kind until the block ends; by default with :func:`models`."""
    log = folder / "log"
    allow_many_files()
    with Gate(folder) as gate, log.open("w") as errors:
        command = [sys.executable, "-m", "tests.server.gates", str(gate.path)]
        command += ["serve", *(models(folder) if sources is None else sources), "--grpc-server", kind, *options]
        command += ["--http-port", "0", "--grpc-port", "0", "--max-body-mb", "8", "--json"]
        environment = {**os.environ, "INGOT_HOME": str(folder)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=ROOT)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, log.read_text()
            addresses: dict[str, Any] = json.loads(line)
            http, grpc = (addresses[key].partition("://")[2] for key in ("http", "grpc"))
            yield Service(kind, process, log, http, grpc, gate)
        finally:
            process.kill()
            process.communicate()


@pytest.fixture(scope="session", params=GRPC_SERVERS)
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture
def still_answers(service: Service) -> Iterator[None]:
    """After each test, both protocols must answer, without requests in flight or escaped exceptions."""
    logged = service.log.stat().st_size
    yield
    service.check()
    wait_until(lambda: service.count("ingot_in_flight_requests") == 0)
    assert not (found := _failures(service.log.read_text()[logged:])), found


def _failures(log: str) -> list[str]:
    """Return the log's records of exceptions, except those that libraries log when a client leaves."""
    records = re.split(r"^(?=\d{4}-\d\d-\d\d )", log, flags=re.MULTILINE)
    left = ("grpc._cython", "the handler is closed")  # gRPC's library; uvicorn on uvloop
    failures = [record for record in records if "Traceback" in record and not any(text in record for text in left)]
    return [record if len(record) < 2000 else record[:200] + " ... " + record[-800:] for record in failures[:5]]


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def _resident(pid: int) -> int:
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
