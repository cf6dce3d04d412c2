"""The vulnerabilities of Triton Inference Server, by name, tried on Ingot.

docs/concepts/reliability.md lists all named attacks with their tests. Where NVIDIA's bulletins name only a class of
fault, the class is tried.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from ingot.protocol import open_inference_pb2 as pb
from tests.server.access.served import Served, make_key, served
from tests.server.faults.http1 import PATH, Connection, body_of, chunked
from tests.server.http2_peer import Peer
from tests.server.outside import INFER, Service, affine, request_of
from tests.server.outside import still_answers as still_answers
from tests.support import matrix

pytestmark = pytest.mark.usefixtures("still_answers")
BODY: dict[str, Any] = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}


def post(service: Service, path: str, body: Any = None) -> httpx.Response:
    return httpx.post(f"http://{service.http}{path}", json=BODY if body is None else body, trust_env=False, timeout=60)


def status(service: Service, request: pb.ModelInferRequest) -> tuple[grpc.StatusCode, str]:
    with grpc.insecure_channel(service.grpc) as channel:
        ask: Any = channel.unary_unary(INFER, None, pb.ModelInferResponse.FromString)
        with pytest.raises(grpc.RpcError) as caught:
            ask(request.SerializeToString(), timeout=60)
    error: Any = caught.value
    return error.code(), error.details()


@pytest.mark.matrix
@pytest.mark.parametrize("path", matrix(PATH, "/v2/repository/index", "/v2/models/affine", "/v2/health/live"))
def test_cve_2025_23310_and_23311_a_body_in_hundreds_of_thousands_of_chunks(service: Service, path: str) -> None:
    """Each chunk of 6 bytes took 16 bytes of the stack by alloca(); some 3 MB of them overflowed it."""
    body = body_of([1, 2, 3]) + b" " * 500_000
    before = service.resident()
    with Connection(service.http_address, 60) as connection:
        for _ in range(2):
            connection.send(chunked(body, 1, path))
            answer = connection.answer()
            assert answer.status in ((200,) if path == PATH else (405, 501))
            if path == PATH:
                assert answer.values == [3, 5, 7]
            if answer.headers.get("connection") == "close":
                break
    assert service.resident() - before < 100 << 20


SHARED = [
    ("GET", "/v2/systemsharedmemory/status"),
    ("GET", "/v2/cudasharedmemory/status"),
    ("POST", "/v2/systemsharedmemory/region/a/register"),
    ("POST", "/v2/cudasharedmemory/region/a/register"),
    ("POST", "/v2/systemsharedmemory/unregister"),
]


@pytest.mark.parametrize(("method", "path"), SHARED)
def test_cve_2025_23319_and_23334_memory_cannot_be_registered(service: Service, method: str, path: str) -> None:
    """A client registered the private region of Triton's Python backend as its own, and read and wrote it."""
    body = {"key": "/psm_1", "offset": 0, "byte_size": 64}
    answer = httpx.request(method, f"http://{service.http}{path}", json=body, trust_env=False)
    assert answer.status_code == 501
    assert "--shared-memory" in answer.json()["error"]


def test_cve_2025_23319_tensors_cannot_point_into_shared_memory(service: Service) -> None:
    """Inputs and outputs of requests named regions by `shared_memory_region`."""
    region = {"shared_memory_region": "/psm_1", "shared_memory_byte_size": 12, "shared_memory_offset": 4096}
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3], "parameters": region}
    assert post(service, PATH, {"inputs": [tensor]}).status_code == 501
    assert post(service, PATH, {**BODY, "outputs": [{"name": "y", "parameters": region}]}).status_code == 501
    request = affine([1, 2, 3])
    request.inputs[0].parameters["shared_memory_region"].string_param = "/psm_1"
    request.inputs[0].parameters["shared_memory_byte_size"].int64_param = 12
    del request.raw_input_contents[:]
    assert status(service, request)[0] is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.matrix
def test_cve_2025_23320_errors_name_nothing_of_the_servers_memory(service: Service) -> None:
    """The error about a request that was too large held the name of the backend's region."""
    wide = {"name": "x", "datatype": "FP32", "shape": [1, 400_000], "data": [0.5] * 400_000}
    texts = [
        post(service, PATH, {"inputs": [wide]}).text,
        post(service, PATH, {"inputs": [{**wide, "shape": [1 << 40, 3]}]}).text,
        status(service, request_of(np.zeros((1, 1 << 20), np.float32)))[1],
        status(service, request_of(np.zeros((1, 3 << 20), np.float32)))[1],
    ]
    for text in texts:
        assert not re.search(r"psm_|/dev/|memfd|/proc|shm|0x[0-9a-f]{6}|/tmp/|\.py\b", text), text
        assert len(text) < 1100


def test_cve_2025_33201_bodies_larger_than_memory(service: Service) -> None:
    """An unusually large payload met no check before it was held, and ended the server."""
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\n"
    for length in ((1 << 62), (1 << 40), (9 << 20)):
        with Connection(service.http_address) as connection:
            connection.send(f"{head}Content-Length: {length}\r\n\r\n".encode() + b" " * 1000)
            assert connection.answer().status == 413
    with Connection(service.http_address) as connection:
        try:
            connection.send(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
            for _ in range(1000):
                connection.send(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
            raise AssertionError("a gigabyte was accepted")
        except (ConnectionError, TimeoutError):
            pass
    with Peer(service.grpc_address) as peer:
        peer.send(peer.call(1, b"\x00\xff\xff\xff\xff" + bytes(1000), end=False))
        assert peer.answer(1)[0]["grpc-status"] == "8"


NAMES = ["..", "../../../../etc/passwd", "/etc/passwd", "affine/../../affine", "affine\0.onnx", "a" * 10_000]


@pytest.mark.one_case
@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_cve_2026_24208_and_24209_names_that_lead_out_of_the_folder(service: Service, name: str) -> None:
    """Names with `..` reached files outside of the model folder (also CVE-2023-31036)."""
    quoted = "".join(f"%{byte:02x}" for byte in name.encode())
    for path in (f"/v2/models/{quoted}/infer", f"/v2/models/affine/versions/{quoted}/infer", f"/v2/models/{quoted}"):
        answer = post(service, path)
        assert answer.status_code in (400, 404, 405, 431), answer.text
        assert "root:" not in answer.text
        assert len(answer.text) < 1100
    for request in (affine([1, 2, 3], name), affine([1, 2, 3])):
        request.model_version = "" if request.model_name == name else name
        code, text = status(service, request)
        assert code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT)
        assert len(text) < 1100


@pytest.mark.parametrize("path", ["affine/load", "new/load", "affine/unload", "..%2f..%2ftmp/load"])
def test_cve_2023_31036_models_cannot_be_loaded_from_requests(service: Service, path: str, tmp_path: Path) -> None:
    """`load` accepted files in the request and wrote them to a path that the client chose."""
    target = tmp_path / "written"
    content = {"parameters": {"config": "{}", f"file:../../../../../../..{target}": "eA=="}}
    assert post(service, f"/v2/repository/models/{path}", content).status_code in (404, 501)
    assert not target.exists()
    assert post(service, PATH).status_code == 200


def test_cve_2024_0087_the_log_cannot_be_moved(service: Service, tmp_path: Path) -> None:
    """`/v2/logging` set the path of the log file: a client could write any file."""
    target = tmp_path / "written"
    assert post(service, "/v2/logging", {"log_file": str(target)}).status_code == 403
    assert not target.exists()


HUGE = [[1 << 62, 4], [1 << 32, 1 << 32], [(1 << 63) - 1, 3], [1 << 61, 3], [-1, 3], [-(1 << 62), -3], [1 << 64, 3]]


@pytest.mark.one_case
@pytest.mark.parametrize("shape", HUGE, ids=str)
def test_cve_2026_24173_sizes_whose_product_overflows(service: Service, shape: list[int]) -> None:
    """A malformed request made a product of sizes wrap around."""
    tensor = {"name": "x", "datatype": "FP32", "shape": shape, "data": [1, 2, 3]}
    assert post(service, PATH, {"inputs": [tensor]}).status_code == 400
    described = {"inputs": [{**tensor, "data": [], "parameters": {"binary_data_size": 12}}]}
    del described["inputs"][0]["data"]
    text = json.dumps(described).encode()
    answer = httpx.post(
        f"http://{service.http}{PATH}",
        content=text + bytes(12),
        headers={"Inference-Header-Content-Length": str(len(text))},
        trust_env=False,
    )
    assert answer.status_code == 400
    if max(map(abs, shape)) < 1 << 63:
        request = affine([1, 2, 3])
        del request.inputs[0].shape[:]
        request.inputs[0].shape.extend(shape)
        assert status(service, request)[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_cve_2026_24146_outputs_in_any_number(service: Service) -> None:
    """The number of outputs that a request names was not limited."""
    assert post(service, PATH, {**BODY, "outputs": [{"name": "y"}] * 100_000}).status_code == 400
    request = affine([1, 2, 3])
    for _ in range(100_000):
        request.outputs.add(name="y")
    assert status(service, request)[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("locked")
    make_key(folder / "auth.toml", "infer")
    with served("fast", folder, folder / "auth.toml") as running:
        yield running


METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods]
ABSENT = ["RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"]


@pytest.mark.one_case
@pytest.mark.parametrize("method", sorted({*METHODS} - {"ServerLive", "ServerReady"}))
def test_cve_2026_24207_and_24206_every_method_of_grpc_needs_a_key(locked: Served, method: str) -> None:
    """Authentication was avoided by another path or channel: here, by other methods and by a proxy's headers."""
    name = f"inference.GRPCInferenceService/{method}"
    for metadata in ((), (("x-forwarded-user", "admin"),), (("authorization", "Bearer "),)):
        assert code_of(locked, name, metadata) is grpc.StatusCode.UNAUTHENTICATED


def test_cve_2026_24206_reflection_needs_a_key(locked: Served) -> None:
    """Reflection describes the service: it is not more open than what it describes."""
    name = "grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    assert code_of(locked, name, ()) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("method", ABSENT)
def test_cve_2026_24207_there_is_no_method_that_manages(locked: Served, method: str) -> None:
    """Triton's methods for its repository do not exist, with or without a key."""
    absent = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}
    assert code_of(locked, f"inference.GRPCInferenceService/{method}", ()) in absent


def code_of(locked: Served, name: str, metadata: Any) -> grpc.StatusCode:
    assert locked.grpc is not None
    with grpc.insecure_channel(locked.grpc.removeprefix("grpc://")) as channel:
        ask: Any = channel.unary_unary(f"/{name}", None, None)
        with pytest.raises(grpc.RpcError) as caught:
            ask(b"", timeout=30, metadata=metadata)
    error: Any = caught.value
    found: grpc.StatusCode = error.code()
    return found


@pytest.mark.matrix
@pytest.mark.parametrize(
    "header",
    [
        {"X-Original-URL": "/v2/health/live"},
        {"X-Rewrite-URL": "/v2/health/live"},
        {"X-HTTP-Method-Override": "OPTIONS"},
        {"X-Forwarded-For": "127.0.0.1"},
        {"Forwarded": "for=127.0.0.1"},
        {"Cookie": "authorization=Bearer x"},
        {"Proxy-Authorization": "Bearer x"},
        {"Origin": "null", "Access-Control-Request-Method": "POST"},
    ],
    ids=lambda header: next(iter(header)),
)
def test_cve_2026_24207_headers_do_not_avoid_the_check(locked: Served, header: dict[str, str]) -> None:
    """A proxy's headers change nothing: the path, the method and the peer are those of the request."""
    assert locked.infer(**header).status_code == 401
    assert locked.get("/metrics", None, **header).status_code == 401
