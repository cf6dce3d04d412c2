"""The extension cuda_shared_memory, with tritonclient and a driver whose memory is the host's."""

from __future__ import annotations

import base64
import importlib
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

import ingot
from ingot import RunningServer
from ingot.tensors import DType
from tests import onnx_models
from tests.runtime.gpu.shared_gpu import COUNT, HANDLE_BYTES, SharedGpu, machine_with
from tests.server import gates
from tests.server.extensions.conftest import Triton, clients
from tests.server.outside import wait_until
from tests.support import matrix

X = np.array([[1, 2, 3]], np.float32)


@pytest.fixture(scope="module")
def gpu() -> Iterator[SharedGpu]:
    made = SharedGpu()
    with machine_with(made):
        yield made


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gates.Gate]:
    with gates.Gate(tmp_path_factory.mktemp("gate")) as gate, pytest.MonkeyPatch.context() as patch:
        gates.hold(gate.path, patch.setattr)
        yield gate


@pytest.fixture(scope="module", params=matrix("fast", "grpcio"))
def server(
    request: pytest.FixtureRequest, gpu: SharedGpu, gate: gates.Gate, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    made = [onnx_models.affine(folder), onnx_models.pair(folder), onnx_models.held(folder)]
    made += [onnx_models.identity(folder, dtype) for dtype in (DType.BYTES, DType.BOOL)]
    settings: dict[str, Any] = {"shared_memory": "*", "max_body_mb": 1, "grpc_server": request.param, "device": "cpu"}
    with ingot.serve(*map(str, made), http_port=0, grpc_port=0, **settings) as running:
        yield running


@pytest.fixture(scope="module")
def both(server: RunningServer) -> Iterator[dict[str, Triton]]:
    yield from clients(server)


@pytest.fixture
def triton(both: dict[str, Triton], protocol: str, gpu: SharedGpu) -> Iterator[Triton]:
    yield both[protocol]
    both[protocol].client.unregister_cuda_shared_memory()
    wait_until(lambda: not gpu.mapped)
    assert not gpu.handles  # no stream is left


Make = Callable[..., Any]


@pytest.fixture
def shm(gpu: SharedGpu) -> Any:
    """tritonclient's own module, over a substitute for NVIDIA's package ``cuda``."""
    return importlib.import_module("tritonclient.utils.cuda_shared_memory")


@pytest.fixture
def register(triton: Triton, shm: Any) -> Make:
    """Create, fill and register a region; return what tritonclient reads it by."""

    def make(name: str, size: int, *values: Any, device: int = 0) -> Any:
        region = shm.create_shared_memory_region(name, size, device)
        shm.set_shared_memory_region(region, list(values))
        triton.client.register_cuda_shared_memory(name, shm.get_raw_handle(region), device, size)
        return region

    return make


def status(triton: Triton, name: str = "") -> dict[str, Any]:
    found = triton.client.get_cuda_shared_memory_status(name)
    if isinstance(found, list):
        return {item["name"]: (item["device_id"], item["byte_size"]) for item in found}
    return {name: (item.device_id, item.byte_size) for name, item in found.regions.items()}


def to_memory(triton: Triton, name: str, region: str, size: int, offset: int = 0) -> Any:
    output = triton.output(name)
    output.set_shared_memory(region, size, offset)
    return output


def test_inputs_and_outputs_in_regions(triton: Triton, register: Make, shm: Any) -> None:
    given, wanted = register("given", 20, np.zeros(2, np.float32), X), register("wanted", 32, device=1)
    assert status(triton) == {"given": (0, 20), "wanted": (1, 32)}
    assert status(triton, "wanted") == {"wanted": (1, 32)}
    outputs = [to_memory(triton, "y", "wanted", 12), to_memory(triton, "z", "wanted", 20, 12)]
    for factor in (1, 2, 3):
        shm.set_shared_memory_region(given, [np.zeros(2, np.float32), factor * X])
        answer = triton.infer("affine", [triton.shared("x", [1, 3], "FP32", "given", 12, 8)], outputs, request_id="1")
        found = shm.get_contents_as_numpy(wanted, np.float32, [2, 3])
        assert found.tolist() == [(2 * factor * X + 1)[0].tolist(), (-factor * X)[0].tolist()]
    described = answer.get_output("y")
    assert list(described["shape"] if isinstance(described, dict) else described.shape) == [1, 3]


def test_with_tensors_that_are_sent_and_in_system_memory(triton: Triton, register: Make) -> None:
    register("b", 12, X)
    answer = triton.infer("pair", [triton.input("a", 10 * X), triton.shared("b", [1, 3], "FP32", "b", 12)])
    assert answer.as_numpy("y").tolist() == [[11, 22, 33]]
    path = Path("/dev/shm") / f"ingot-test-{uuid.uuid4().hex}"
    path.write_bytes((5 * X).tobytes())
    try:
        triton.client.register_system_shared_memory("a", f"/{path.name}", 12)
        places = [triton.shared(name, [1, 3], "FP32", name, 12) for name in "ab"]
        answer = triton.infer("pair", places, [to_memory(triton, "y", "a", 12)])
        assert np.frombuffer(path.read_bytes(), np.float32).tolist() == [6, 12, 18]
    finally:
        path.unlink()
        triton.client.unregister_system_shared_memory()


def test_texts_and_truth_values(triton: Triton, register: Make, shm: Any) -> None:
    words = serialize_byte_tensor(np.array([b"a", b"longer"], object))
    size = len(words.item())
    region = register("words", size + 50, words)
    tensor = triton.shared("x", [1, 2], "BYTES", "words", size)
    triton.infer("identity-bytes", [tensor], [to_memory(triton, "y", "words", size, 0)])
    assert shm.get_contents_as_numpy(region, np.object_, [2]).tolist() == [b"a", b"longer"]
    register("flags", 4, np.array([0, 1, 2, 0], np.uint8))
    tensor = triton.shared("x", [1, 2], "BOOL", "flags", 2)
    assert triton.infer("identity-bool", [tensor]).as_numpy("y").tolist() == [[False, True]]
    with pytest.raises(InferenceServerException, match="BOOL but holds bytes other than 0 and 1"):
        triton.infer("identity-bool", [triton.shared("x", [1, 2], "BOOL", "flags", 2, 1)])


def test_both_extensions_share_the_names(triton: Triton, register: Make, gpu: SharedGpu) -> None:
    path = Path("/dev/shm") / f"ingot-test-{uuid.uuid4().hex}"
    path.write_bytes(bytes(12))
    try:
        triton.client.register_system_shared_memory("system", f"/{path.name}", 12)
        register("cuda", 12)
        with pytest.raises(InferenceServerException, match="already registered"):
            register("system", 12)
        with pytest.raises(InferenceServerException, match="already registered"):
            triton.client.register_system_shared_memory("cuda", f"/{path.name}", 12)
        with pytest.raises(InferenceServerException, match="no region of this name"):
            status(triton, "system")
        with pytest.raises(InferenceServerException, match="no region of this name"):
            triton.client.get_system_shared_memory_status("cuda")
        triton.client.unregister_system_shared_memory("cuda")
        triton.client.unregister_cuda_shared_memory("system")
        assert status(triton) == {"cuda": (0, 12)}
        triton.client.unregister_system_shared_memory()
        assert status(triton) == {"cuda": (0, 12)}
        assert len(gpu.mapped) == 1
        triton.client.unregister_cuda_shared_memory("cuda")
        triton.client.unregister_cuda_shared_memory("cuda")  # which is not registered any more
        assert not gpu.mapped
    finally:
        path.unlink()
        triton.client.unregister_system_shared_memory()


def test_memory_that_is_registered_twice_is_mapped_until_both_are_gone(
    triton: Triton, register: Make, shm: Any, gpu: SharedGpu
) -> None:
    region = register("one", 12, X)
    triton.client.register_cuda_shared_memory("two", shm.get_raw_handle(region), 0, 8)
    triton.client.unregister_cuda_shared_memory("one")
    assert len(gpu.mapped) == 1
    with pytest.raises(InferenceServerException, match="not registered"):
        triton.infer("affine", [triton.shared("x", [1, 3], "FP32", "one", 12)])
    with pytest.raises(InferenceServerException, match="does not lie within"):
        triton.infer("affine", [triton.shared("x", [1, 3], "FP32", "two", 12)])


def test_no_tensor_lies_outside_of_its_region(triton: Triton, register: Make, shm: Any) -> None:
    region = register("r", 64)
    for size, offset in ((12, 53), (12, 64), (65, 0), (12, 1 << 40), (12, (1 << 63) - 12), (12, (1 << 63) - 1)):
        with pytest.raises(InferenceServerException, match="does not lie within"):
            triton.infer("affine", [triton.shared("x", [1, 3], "FP32", "r", size, offset)])
        with pytest.raises(InferenceServerException, match="does not lie within"):
            triton.infer("affine", [triton.input("x", X)], [to_memory(triton, "y", "r", size, offset)])
    with pytest.raises(InferenceServerException, match=r"has 12 bytes, and .* provides 11"):
        triton.infer("affine", [triton.input("x", X)], [to_memory(triton, "y", "r", 11)])
    with pytest.raises(InferenceServerException, match=r"has 8 bytes of data, but FP32 \[1, 3\] takes 12"):
        triton.infer("affine", [triton.shared("x", [1, 3], "FP32", "r", 8)])
    assert not shm.get_contents_as_numpy(region, np.uint8, [64]).any()


def test_what_cannot_be_registered(triton: Triton, register: Make, shm: Any, gpu: SharedGpu) -> None:
    region = shm.create_shared_memory_region("r", 64, 0)
    handle = shm.get_raw_handle(region)
    for wrong, device, size, message in (
        (handle, COUNT, 64, "'device_id' is 2; this server sees 2 GPUs"),
        (handle, -1, 64, "'device_id' is -1"),
        (handle, 0, 65, "has 64 bytes, fewer than the 65"),
        (handle, 0, 1 << 62, "has 64 bytes"),
        (base64.b64encode(bytes(HANDLE_BYTES)), 0, 64, "cannot be opened on cuda:0: error 1 in cuIpcOpenMemHandle"),
        (base64.b64encode(bytes(63)), 0, 64, "has 64 bytes, not 63"),
        (b"", 0, 64, "has 64 bytes, not 0"),
    ):
        with pytest.raises(InferenceServerException, match=message):
            triton.client.register_cuda_shared_memory("r", wrong, device, size)
        assert not gpu.mapped
    for code in (1, 201, 999):  # of a handle of this process, and of the unknown error: the GPU works all the same
        gpu.failing = {"cuIpcOpenMemHandle_v2": code}
        with pytest.raises(InferenceServerException, match=f"cannot be opened on cuda:0: error {code}"):
            triton.client.register_cuda_shared_memory("r", handle, 0, 64)
        gpu.failing = {}
    triton.client.register_cuda_shared_memory("r", handle, 0, 64)
    assert status(triton) == {"r": (0, 64)}


@pytest.mark.matrix
def test_malformed_registrations(server: RunningServer) -> None:
    url = f"{server.http_url}/v2/cudasharedmemory/region/r/register"
    handle = {"b64": base64.b64encode(bytes(HANDLE_BYTES)).decode()}
    for body in (
        {},
        {"raw_handle": handle},
        {"raw_handle": handle, "device_id": 0},
        {"raw_handle": handle, "device_id": "0", "byte_size": 64},
        {"raw_handle": handle, "device_id": 0, "byte_size": True},
        {"raw_handle": handle, "device_id": 0, "byte_size": -1},
        {"raw_handle": handle["b64"], "device_id": 0, "byte_size": 64},
        {"raw_handle": {"b64": "%"}, "device_id": 0, "byte_size": 64},
        {"raw_handle": {"b64": "é"}, "device_id": 0, "byte_size": 64},
    ):
        answer = httpx.post(url, json=body, trust_env=False)
        assert answer.status_code == 400, body
        assert answer.json()["error"]


def test_the_sizes_of_inputs_are_limited_as_those_of_bodies(triton: Triton, register: Make) -> None:
    register("r", 2 << 20)
    wide = (1 << 20) // 8
    assert triton.infer("pair", [triton.shared(name, [1, wide], "FP32", "r", 4 * wide) for name in "ab"]) is not None
    with pytest.raises(InferenceServerException, match="--max-body-mb"):
        triton.infer("pair", [triton.shared(name, [1, wide + 1], "FP32", "r", 4 * wide + 4) for name in "ab"])


def test_memory_stays_mapped_until_the_last_request_that_uses_it_has_ended(
    server: RunningServer, triton: Triton, protocol: str, register: Make, shm: Any, gpu: SharedGpu, gate: gates.Gate
) -> None:
    region = register("r", 24, X)
    tensors = [triton.shared("x", [1, 3], "FP32", "r", 12)], [to_memory(triton, "y", "r", 12, 12)]

    def infer() -> None:
        both = clients(server)  # tritonclient's over HTTP belongs to one thread
        next(both)[protocol].infer("held", *tensors)
        both.close()  # type: ignore[attr-defined]

    with ThreadPoolExecutor() as pool:
        gate.shut()
        try:
            answer = pool.submit(infer)
            wait_until(gate.waited_at)
            triton.client.unregister_cuda_shared_memory("r")
            assert status(triton) == {}
            assert len(gpu.mapped) == 1
        finally:
            gate.open()
        answer.result()
    wait_until(lambda: not gpu.mapped)
    assert shm.get_contents_as_numpy(region, np.float32, [6]).tolist() == [1, 2, 3, 2, 3, 4]


def test_a_gpu_that_fails_is_an_error_of_the_requests_that_use_it(
    triton: Triton, register: Make, gpu: SharedGpu, caplog: pytest.LogCaptureFixture
) -> None:
    register("r", 24, X)
    for function, tensors in (
        ("cuMemcpyDtoHAsync_v2", ([triton.shared("x", [1, 3], "FP32", "r", 12)], None)),
        ("cuMemcpyHtoDAsync_v2", ([triton.input("x", X)], [to_memory(triton, "y", "r", 12, 12)])),
    ):
        gpu.failing = {function: 1}
        with pytest.raises(InferenceServerException, match="internal error"):
            triton.infer("affine", *tensors)
        assert f"cuda:0: error 1 in {function}" in caplog.text
        caplog.clear()  # its records keep the errors, and so the memory
        gpu.failing = {}
        assert triton.infer("affine", *tensors) is not None


def test_the_server_names_the_extension_and_its_paths(server: RunningServer, triton: Triton) -> None:
    metadata = triton.client.get_server_metadata()
    named = metadata["extensions"] if isinstance(metadata, dict) else metadata.extensions
    assert {"cuda_shared_memory", "system_shared_memory"} <= set(named)
    paths = httpx.get(f"{server.http_url}/openapi.json", trust_env=False).json()["paths"]
    assert "/v2/cudasharedmemory/region/{region}/register" in paths


def test_without_the_setting_it_is_off(gpu: SharedGpu, tmp_path: Path) -> None:
    model = str(onnx_models.affine(tmp_path))
    with (
        ingot.serve(model, http_port=0, grpc_port=0, device="cpu") as server,
        httpx.Client(base_url=server.http_url, trust_env=False) as http,
    ):
        assert "cuda_shared_memory" not in http.get("/v2").json()["extensions"]
        answer = http.get("/v2/cudasharedmemory/status")
        assert answer.status_code == 501
        assert "--shared-memory turns it on" in answer.json()["error"]
