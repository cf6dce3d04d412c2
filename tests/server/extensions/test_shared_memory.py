"""The extension system_shared_memory: what works, and what clients must not reach by it."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

import ingot
from ingot import RunningServer
from ingot.config import ServerConfig
from ingot.errors import InvalidArgument
from ingot.tensors import DType
from tests import onnx_models
from tests.server.access.served import make_key
from tests.server.extensions.conftest import Triton, clients
from tests.support import matrix

X = np.array([[1, 2, 3]], np.float32)


@dataclasses.dataclass
class Memory:
    """Shared memory of a client: a file in the folder of POSIX shared memory."""

    key: str

    @property
    def path(self) -> Path:
        return Path("/dev/shm") / self.key.removeprefix("/")

    def floats(self, count: int, at: int = 0) -> list[float]:
        found: list[float] = np.frombuffer(self.path.read_bytes()[at : at + 4 * count], np.float32).tolist()
        return found


Make = Callable[..., Memory]


@pytest.fixture
def make() -> Iterator[Make]:
    """Create shared memory, of which nothing is left after the test."""
    with contextlib.ExitStack() as stack:

        def create(content: bytes, prefix: str = "ingot-test") -> Memory:
            memory = Memory(f"/{prefix}-{uuid.uuid4().hex}")
            memory.path.write_bytes(content)
            stack.callback(memory.path.unlink, missing_ok=True)
            return memory

        yield create


@pytest.fixture(scope="module", params=matrix("fast", "grpcio"))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    made = [onnx_models.affine(folder), onnx_models.pair(folder), onnx_models.identity(folder, DType.BYTES)]
    settings: dict[str, Any] = {
        "shared_memory": "ingot-test-*, other-?",
        "max_body_mb": 1,
        "grpc_server": request.param,
    }
    with ingot.serve(*map(str, made), http_port=0, grpc_port=0, **settings) as running:
        yield running


@pytest.fixture(scope="module")
def both(server: RunningServer) -> Iterator[dict[str, Triton]]:
    yield from clients(server)


@pytest.fixture
def triton(both: dict[str, Triton], protocol: str) -> Iterator[Triton]:
    yield both[protocol]
    both[protocol].client.unregister_system_shared_memory()
    plain = both[protocol].infer("affine", [both[protocol].input("x", X)])
    assert plain.as_numpy("y").tolist() == [[3, 5, 7]]


def status(triton: Triton, name: str = "") -> dict[str, Any]:
    found = triton.client.get_system_shared_memory_status(name)
    if isinstance(found, list):
        return {item["name"]: (item["key"], item["offset"], item["byte_size"]) for item in found}
    return {name: (item.key, item.offset, item.byte_size) for name, item in found.regions.items()}


def to_memory(triton: Triton, name: str, region: str, size: int, offset: int = 0) -> Any:
    output = triton.output(name)
    output.set_shared_memory(region, size, offset)
    return output


def test_inputs_and_outputs_in_one_region(triton: Triton, make: Make) -> None:
    memory = make(bytes(8) + X.tobytes() + bytes(100))
    triton.client.register_system_shared_memory("mine", memory.key, 112, offset=8)
    assert status(triton) == {"mine": (memory.key, 8, 112)} == status(triton, "mine")
    outputs = [to_memory(triton, "y", "mine", 12, 16), to_memory(triton, "z", "mine", 20, 40)]
    for factor in (1, 2, 3):  # what a request means is remembered, but not the values
        memory.path.write_bytes(bytes(8) + (factor * X).tobytes() + bytes(100))
        answer = triton.infer("affine", [triton.shared("x", [1, 3], "FP32", "mine", 12)], outputs, request_id="1")
        assert memory.floats(3, 8 + 16) == (2 * factor * X + 1)[0].tolist()
        assert memory.floats(3, 8 + 40) == (-factor * X)[0].tolist()
        assert memory.path.stat().st_size == 8 + 12 + 100
    described = answer.get_output("y")
    shape = described["shape"] if isinstance(described, dict) else described.shape
    assert list(shape) == [1, 3]


def test_only_some_tensors_in_memory(triton: Triton, make: Make) -> None:
    memory = make(X.tobytes())
    triton.client.register_system_shared_memory("b", memory.key, 12)
    for shared, sent in (("a", "b"), ("b", "a")):
        inputs = [triton.input(sent, 10 * X), triton.shared(shared, [1, 3], "FP32", "b", 12)]
        assert triton.infer("pair", inputs).as_numpy("y").tolist() == [[11, 22, 33]]
        assert triton.infer("pair", inputs[::-1]).as_numpy("y").tolist() == [[11, 22, 33]]
    answer = triton.infer("affine", [triton.input("x", X)], [to_memory(triton, "z", "b", 12), triton.output("y")])
    assert answer.as_numpy("y").tolist() == [[3, 5, 7]]
    assert memory.floats(3) == [-1, -2, -3]


def test_texts(triton: Triton, make: Make) -> None:
    words = serialize_byte_tensor(np.array([b"a", b"longer"], object)).item()
    memory = make(words + bytes(50))
    triton.client.register_system_shared_memory("words", memory.key, len(words) + 50)
    tensor = triton.shared("x", [1, 2], "BYTES", "words", len(words))
    triton.infer("identity-bytes", [tensor], [to_memory(triton, "y", "words", 50, len(words))])
    assert memory.path.read_bytes() == words + words + bytes(50 - len(words))


def test_a_name_is_free_again_after_unregistering(triton: Triton, make: Make) -> None:
    first, second = make(X.tobytes()), make((5 * X).tobytes())
    tensor = triton.shared("x", [1, 3], "FP32", "r", 12)
    triton.client.register_system_shared_memory("r", first.key, 12)
    with pytest.raises(InferenceServerException, match="already registered"):
        triton.client.register_system_shared_memory("r", second.key, 12)
    triton.client.unregister_system_shared_memory("r")
    triton.client.unregister_system_shared_memory("r")  # which is not registered any more
    with pytest.raises(InferenceServerException, match="not registered"):
        triton.infer("affine", [tensor])
    with pytest.raises(InferenceServerException, match="no region of this name"):
        status(triton, "r")
    triton.client.register_system_shared_memory("r", second.key, 12)
    assert triton.infer("affine", [tensor]).as_numpy("z").tolist() == [[-5, -10, -15]]


def test_no_tensor_lies_outside_of_its_region(triton: Triton, make: Make) -> None:
    """CVE-2025-23319: offsets and sizes reached memory outside of the region."""
    memory = make(bytes(4096))
    triton.client.register_system_shared_memory("r", memory.key, 64, offset=1024)
    for size, offset in ((12, 53), (12, 64), (65, 0), (12, 1 << 40), (12, (1 << 63) - 12), (12, (1 << 63) - 1)):
        with pytest.raises(InferenceServerException, match="does not lie within"):
            triton.infer("affine", [triton.shared("x", [1, 3], "FP32", "r", size, offset)])
        with pytest.raises(InferenceServerException, match="does not lie within"):
            triton.infer("affine", [triton.input("x", X)], [to_memory(triton, "y", "r", size, offset)])
    for size, offset in ((-1, 0), (12, -4)):
        with pytest.raises(InferenceServerException, match="must be a number of bytes"):
            triton.infer("affine", [triton.shared("x", [1, 3], "FP32", "r", size, offset)])
    with pytest.raises(InferenceServerException, match=r"has 12 bytes, and .* provides 11"):
        triton.infer("affine", [triton.input("x", X)], [to_memory(triton, "y", "r", 11)])
    with pytest.raises(InferenceServerException, match=r"has 8 bytes of data, but FP32 \[1, 3\] takes 12"):
        triton.infer("affine", [triton.shared("x", [1, 3], "FP32", "r", 8)])
    assert memory.path.read_bytes() == bytes(4096)


KEYS = [
    "/../etc/passwd",
    "/../../etc/passwd",
    "..",
    ".",
    "/",
    "",
    "//etc/passwd",
    "/ingot-test-a/../../../etc/passwd",
    "/ingot-test-a/b",
    "/ingot-test-" + "a" * 300,
    "/ingot-test-\0",
]


@pytest.mark.parametrize("key", KEYS, ids=range(len(KEYS)))
def test_only_names_are_opened(triton: Triton, key: str) -> None:
    with pytest.raises(InferenceServerException, match="not the name of a POSIX shared memory object"):
        triton.client.register_system_shared_memory("r", key, 1)


def test_only_allowed_memory_is_opened(triton: Triton, make: Make, tmp_path: Path) -> None:
    """CVE-2025-23319 and -23334: clients registered the memory of another program."""
    with pytest.raises(InferenceServerException, match="--shared-memory allows"):
        triton.client.register_system_shared_memory("r", make(bytes(64), "psm").key, 64)
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret" * 10)
    link, folder, pipe = make(b""), make(b""), make(b"")
    for made in (link, folder, pipe):
        made.path.unlink()
    link.path.symlink_to(secret)
    os.mkfifo(pipe.path)
    small, missing = make(bytes(63)), Memory("/ingot-test-missing")
    closed = make(bytes(64))
    with contextlib.ExitStack() as stack:
        folder.path.mkdir()
        stack.callback(folder.path.rmdir)
        for memory in (link, folder, pipe, small, missing):
            with pytest.raises(InferenceServerException, match=r"of this (key|name)|of this key has fewer") as caught:
                triton.client.register_system_shared_memory("region-name", memory.key, 64)
            assert "ingot-test" not in str(caught.value)
            assert "region-name" not in str(caught.value)
        for size, offset in ((64, 1), (65, 0), (1 << 62, 0), (0, 65)):
            with pytest.raises(InferenceServerException, match="has fewer bytes"):
                triton.client.register_system_shared_memory("r", closed.key, size, offset=offset)
    assert status(triton) == {}


def test_errors_name_no_region(triton: Triton, make: Make) -> None:
    """CVE-2025-23320: an error contained the name of memory that was not the client's."""
    secret = make(bytes(12))
    triton.client.register_system_shared_memory("secret-region", secret.key, 12)
    for region in ("other", "secret", "", "../secret-region"):
        with pytest.raises(InferenceServerException) as caught:
            triton.infer("affine", [triton.shared("x", [1, 3], "FP32", region, 12)])
        assert "secret" not in str(caught.value)
        assert "ingot-test" not in str(caught.value)


def test_memory_that_its_client_shrinks_is_an_error(triton: Triton, make: Make) -> None:
    """An access to a mapping of it would end the server by SIGBUS."""
    memory = make(X.tobytes() + bytes(12))
    triton.client.register_system_shared_memory("r", memory.key, 24)
    os.truncate(memory.path, 8)
    with pytest.raises(InferenceServerException, match="smaller than it was"):
        triton.infer("affine", [triton.shared("x", [1, 3], "FP32", "r", 12)])
    with pytest.raises(InferenceServerException, match="smaller than it was"):
        triton.infer("affine", [triton.input("x", X)], [to_memory(triton, "y", "r", 12, 12)])
    assert memory.path.stat().st_size == 8
    memory.path.unlink()  # its descriptor remains
    with pytest.raises(InferenceServerException, match="smaller than it was"):
        triton.infer("affine", [triton.shared("x", [1, 3], "FP32", "r", 12)])


def test_the_sizes_of_inputs_are_limited_as_those_of_bodies(triton: Triton, make: Make) -> None:
    memory = make(b"")
    os.truncate(memory.path, 1 << 30)
    triton.client.register_system_shared_memory("r", memory.key, 1 << 30)
    wide = (1 << 20) // 4
    assert triton.infer("pair", [triton.shared(name, [1, 8], "FP32", "r", 32) for name in "ab"]) is not None
    for size in (wide + 1, 100 * wide, wide // 2 + 1):
        inputs = [triton.shared(name, [1, size], "FP32", "r", 4 * size) for name in "ab"]
        with pytest.raises(InferenceServerException, match="--max-body-mb"):
            triton.infer("pair", inputs)


def test_large_outputs_are_written_in_a_thread(triton: Triton, make: Make) -> None:
    memory = make(np.arange(40_000, dtype=np.float32).tobytes() * 2)
    triton.client.register_system_shared_memory("r", memory.key, 320_000)
    inputs = [
        triton.shared("a", [1, 40_000], "FP32", "r", 160_000),
        triton.shared("b", [1, 40_000], "FP32", "r", 160_000),
    ]
    triton.infer("pair", inputs, [to_memory(triton, "y", "r", 160_000, 160_000)])
    assert np.array_equal(memory.floats(40_000, 160_000), 2 * np.arange(40_000))


def test_the_number_of_regions_is_limited(triton: Triton, make: Make) -> None:
    memory = make(bytes(16))
    for number in range(256):
        triton.client.register_system_shared_memory(f"r{number}", memory.key, 16)
    with pytest.raises(InferenceServerException, match="too many regions"):
        triton.client.register_system_shared_memory("one more", memory.key, 16)
    assert len(status(triton)) == 256


def test_the_metric(server: RunningServer, both: dict[str, Triton], make: Make) -> None:
    both["http"].client.register_system_shared_memory("m", make(bytes(1)).key, 1)
    assert "ingot_shared_memory_regions 1.0" in httpx.get(f"{server.http_url}/metrics", trust_env=False).text
    both["grpc"].client.unregister_system_shared_memory()
    assert "ingot_shared_memory_regions 0.0" in httpx.get(f"{server.http_url}/metrics", trust_env=False).text


def test_without_a_gpu_cuda_memory_is_refused(triton: Triton) -> None:
    triton.client.unregister_cuda_shared_memory()  # of which there is none
    found = triton.client.get_cuda_shared_memory_status()
    assert not (found if isinstance(found, list) else found.regions)
    with pytest.raises(InferenceServerException, match="sees no NVIDIA GPU"):
        triton.client.register_cuda_shared_memory("r", base64.b64encode(bytes(64)), 0, 64)
    extensions = triton.client.get_server_metadata()
    named = extensions["extensions"] if isinstance(extensions, dict) else extensions.extensions
    assert "system_shared_memory" in named
    assert "cuda_shared_memory" not in named


@pytest.mark.matrix
def test_malformed_places(server: RunningServer) -> None:
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, 3]}
    place: dict[str, Any] = {"shared_memory_region": "r", "shared_memory_byte_size": 12}
    sent = {**tensor, "data": [1, 2, 3]}
    bodies = [
        {"inputs": [{**sent, "parameters": place}]},
        {"inputs": [{**tensor, "parameters": {"shared_memory_byte_size": 12}}]},
        {"inputs": [{**tensor, "parameters": {"shared_memory_region": "r"}}]},
        {"inputs": [{**tensor, "parameters": {**place, "shared_memory_region": 7}}]},
        {"inputs": [{**tensor, "parameters": {**place, "shared_memory_byte_size": 12.5}}]},
        {"inputs": [{**tensor, "parameters": {**place, "shared_memory_offset": True}}]},
        {"inputs": [sent], "outputs": [{"name": "y", "parameters": {**place, "classification": 1}}]},
        {"inputs": [sent], "outputs": [{"name": "y", "parameters": {"shared_memory_offset": 1}}]},
    ]
    for body in bodies:
        answer = httpx.post(f"{server.http_url}/v2/models/affine/infer", json=body, trust_env=False)
        assert answer.status_code == 400, body
    url = f"{server.http_url}/v2/systemsharedmemory/region/r/register"
    for content in (
        b"",
        b"[]",
        b"{",
        b'{"key": 1, "byte_size": 1}',
        b'{"key": "/a", "byte_size": "1"}',
        b'{"key": "/a"}',
    ):
        assert httpx.post(url, content=content, trust_env=False).status_code == 400


@pytest.mark.matrix
def test_clients_with_keys_have_their_own_regions(make: Make, tmp_path: Path) -> None:
    keys = [make_key(tmp_path / "keys.toml", "infer") for _ in range(2)]
    memory = make(X.tobytes())
    settings: dict[str, Any] = {"shared_memory": "*", "auth": tmp_path / "keys.toml"}
    model = str(onnx_models.affine(tmp_path))
    with ingot.serve(model, http_port=0, grpc_port=0, **settings) as server:
        address = server.grpc_url.removeprefix("grpc://")
        holder, other = ({"authorization": f"Bearer {key}"} for key in keys)
        with triton_grpc.InferenceServerClient(address) as client:
            client.register_system_shared_memory("r", memory.key, 12, headers=holder)
            assert [*client.get_system_shared_memory_status(headers=holder).regions] == ["r"]
            assert not client.get_system_shared_memory_status(headers=other).regions
            client.unregister_system_shared_memory(headers=other)
            tensor = triton_grpc.InferInput("x", [1, 3], "FP32")
            tensor.set_shared_memory("r", 12)
            with pytest.raises(InferenceServerException, match="not registered"):
                client.infer("affine", [tensor], headers=other)
            assert client.infer("affine", [tensor], headers=holder).as_numpy("y").tolist() == [[3, 5, 7]]
            url = f"{server.http_url}/v2/systemsharedmemory/status"
            assert [item["name"] for item in httpx.get(url, headers=holder, trust_env=False).json()] == ["r"]
            assert httpx.get(url, headers=other, trust_env=False).json() == []
            assert httpx.get(url, trust_env=False).status_code == 401
            for number in range(63):
                client.register_system_shared_memory(f"r{number}", memory.key, 12, headers=holder)
            with pytest.raises(InferenceServerException, match="too many regions"):
                client.register_system_shared_memory("one more", memory.key, 12, headers=holder)
            client.register_system_shared_memory("r", memory.key, 12, headers=other)


@pytest.mark.parametrize("value", ["", ",", "/ingot-*", "a/b"])
def test_settings_that_are_not_patterns(value: str) -> None:
    with pytest.raises(InvalidArgument, match="write patterns of names"):
        ServerConfig.of({"shared_memory": value})
