"""``ingot serve`` on an NVIDIA GPU: memory of clients, turns, placement, engine processes, and too little memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

import ingot
from ingot.errors import InvalidArgument
from tests import onnx_models
from tests.gpu.cuda import GPU, needs_provider, on_gpu

pytestmark = [*GPU, needs_provider("CUDA")]


def rows(number: int, samples: int = 4) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.full((samples, 3), number, np.float32)


def test_memory_of_a_client_is_read_and_written_on_the_gpu(tmp_path: Path) -> None:
    """The client is another process than the server, as CUDA opens no handle in the process that made it."""
    triton = pytest.importorskip("tritonclient.grpc")
    regions = pytest.importorskip("tritonclient.utils.cuda_shared_memory")
    with on_gpu(tmp_path, onnx_models.affine(tmp_path), options=("--shared-memory", "*")) as service:
        client = triton.InferenceServerClient(service.grpc)
        size = rows(1).nbytes
        given, wanted = (regions.create_shared_memory_region(name, 2 * size, 0) for name in ("given", "wanted"))
        for name, region in (("given", given), ("wanted", wanted)):
            client.register_cuda_shared_memory(name, regions.get_raw_handle(region), 0, 2 * size)
        for number in (1, 2, 3):
            regions.set_shared_memory_region(given, [rows(number)])
            x = triton.InferInput("x", [4, 3], "FP32")
            x.set_shared_memory("given", size)
            outputs = [triton.InferRequestedOutput(name) for name in "yz"]
            for place, output in enumerate(outputs):
                output.set_shared_memory("wanted", size, place * size)
            client.infer("affine", [x], outputs=outputs)
            y, z = regions.get_contents_as_numpy(wanted, np.float32, [2, 4, 3])
            np.testing.assert_array_equal(y, 2 * rows(number) + 1)
            np.testing.assert_array_equal(z, -rows(number))
        client.unregister_cuda_shared_memory()
        for region in (given, wanted):
            regions.destroy_shared_memory_region(region)


@pytest.mark.parametrize("isolate", ["none", "all"])
def test_models_share_the_gpu_and_answer_right(tmp_path: Path, isolate: str) -> None:
    """With ``none`` they take turns in one process, with ``all`` each has a process."""
    sources = [f"{name}={onnx_models.affine(tmp_path, name)}" for name in ("first", "second")]
    options = ("--isolate", isolate, "--lanes", "3", "--max-batch", "8")
    with on_gpu(tmp_path, *sources, options=options) as service, ingot.Client(f"http://{service.http}") as client:

        def right(number: int) -> bool:
            answer = client.infer(("first", "second")[number % 2], {"x": rows(number)})
            return np.array_equal(answer["y"], 2 * rows(number) + 1)

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(right, range(400)))
        for name in ("first", "second"):
            url = f"http://{service.http}/v2/models/{name}/config"
            found = httpx.get(url, trust_env=False, timeout=60).json()
            assert found["instance_group"][0]["kind"] == "KIND_GPU"


def test_the_memory_of_a_model_is_measured(tmp_path: Path) -> None:
    with on_gpu(tmp_path, onnx_models.affine(tmp_path)) as service:
        text = httpx.get(f"http://{service.http}/metrics", trust_env=False, timeout=60).text
    measured = [line for line in text.splitlines() if line.startswith("ingot_model_device_memory_bytes")]
    assert any('kind="measured"' in line for line in measured)
    assert any(line.startswith("ingot_gpu_memory_bytes") for line in text.splitlines())


def test_a_request_without_memory_fails_alone(tmp_path: Path) -> None:
    with on_gpu(tmp_path, onnx_models.filled(tmp_path)) as service:
        found = []
        for count in (3, 1 << 40, 3):
            body = {"inputs": [{"name": "n", "datatype": "INT64", "shape": [1], "data": [count]}]}
            url = f"http://{service.http}/v2/models/filled/infer"
            answer = httpx.post(url, json=body, trust_env=False, timeout=120)
            found.append((answer.status_code, answer.json().get("code", "")))
        assert [status for status, _ in found] == [200, 413, 200]


def test_an_index_out_of_range_is_refused(tmp_path: Path) -> None:
    """ONNX Runtime would answer with zeros."""
    with (
        on_gpu(tmp_path, onnx_models.lookup(tmp_path)) as service,
        ingot.Client(f"http://{service.http}") as client,
    ):
        assert client.infer("lookup", {"ids": np.array([[-10, 9]])})["y"].tolist() == [[[0, 1], [18, 19]]]
        for value in (10, -11):
            with pytest.raises(InvalidArgument, match=r"outside the range that the model takes: -10\.\.9"):
                client.infer("lookup", {"ids": np.array([[0, value]])})
