"""Inference in the server's process, and tensors of PyTorch as inputs."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack

import ingot
from ingot import RunningServer
from ingot.errors import InvalidArgument, NotFound
from ingot.tensors import DType
from tests import onnx_models
from tests.server.outside import wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    models = [onnx_models.affine(folder), onnx_models.identity(folder, DType.BF16), onnx_models.pair(folder)]
    with ingot.serve(*map(str, models), http_port=0, grpc_port=0, device="cpu") as running:
        yield running


@pytest.fixture(params=["http", "grpc", "python"])
def infer(request: pytest.FixtureRequest, server: RunningServer) -> Iterator[Any]:
    """``infer`` of a client of each protocol, and of the server itself."""
    if request.param == "python":
        yield server.infer
        return
    with ingot.Client(server.http_url if request.param == "http" else server.grpc_url) as client:
        yield client.infer


def test_tensors_are_inputs_and_outputs_become_tensors(infer: Any) -> None:
    x = torch.arange(12, dtype=torch.float32).reshape(4, 3)
    for tensor in (x, x[::2], x.T.contiguous().T):
        outputs = infer("affine", {"x": tensor})
        y = from_dlpack(outputs["y"])
        assert y.data_ptr() == outputs["y"].ctypes.data
        assert torch.equal(y, 2 * tensor + 1)
    assert list(infer("affine", {"x": x}, outputs=["z"])) == ["z"]


def test_bfloat16(infer: Any) -> None:
    x = torch.tensor([[1.5, -2.25]], dtype=torch.bfloat16)
    y = infer("identity-bf16", {"x": x})["y"]
    assert y.dtype == ml_dtypes.bfloat16
    assert torch.equal(from_dlpack(y.view(np.int16)).view(torch.bfloat16), x)


def test_wrong_tensors_name_their_input(infer: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"'x' on cpu cannot be read: .*detach"):
        infer("affine", {"x": torch.ones(1, 3, requires_grad=True)})
    with pytest.raises(InvalidArgument, match="complex64 cannot be served"):
        infer("affine", {"x": torch.ones(1, 3, dtype=torch.complex64)})
    with pytest.raises(InvalidArgument, match="'x' has datatype FP64, the model takes FP32"):
        infer("affine", {"x": torch.ones(1, 3, dtype=torch.float64)})
    with pytest.raises(InvalidArgument, match="'x' on a device of kind 15:0 cannot be read"):
        infer("affine", {"x": Elsewhere()})
    with pytest.raises(NotFound):
        infer("none", {"x": torch.ones(1, 3)})


class Elsewhere:
    """A tensor that its library does not copy to the host."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 15, 0

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("it stays")


def test_a_failed_request_keeps_no_inputs(server: RunningServer) -> None:
    """Memory that a client shares is unmapped with the last reference, so no cycle may hold one."""
    gc.disable()
    try:
        for wrong in ({"parameters": {"timeout": -1}}, {"outputs": ["none"]}, {}):
            x = np.ones((1, 4), np.float32)
            gone = weakref.ref(x)
            with contextlib.suppress(InvalidArgument):
                server.infer("affine", {"x": x}, **wrong)
                pytest.fail("it was accepted")
            del x
            wait_until(lambda gone=gone: gone() is None)  # type: ignore[misc]
    finally:
        gc.enable()


def test_requests_of_the_process_are_counted(server: RunningServer) -> None:
    server.infer("pair", {"a": np.ones((1, 2), np.float32), "b": torch.ones(1, 2)})
    text = httpx.get(f"{server.http_url}/metrics", trust_env=False).text
    assert 'ingot_requests_total{code="ok",model="pair",protocol="python",version="1"} 1.0' in text


def test_a_closed_server_infers_nothing(tmp_path: Path) -> None:
    with ingot.serve(str(onnx_models.affine(tmp_path)), http_port=0, grpc_port=0, device="cpu") as running:
        pass
    with pytest.raises(InvalidArgument, match="this server is closed"):
        running.infer("affine", {"x": np.ones((1, 3), np.float32)})
