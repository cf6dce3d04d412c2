"""CUDA in engine processes, which may write nothing but what CUDA needs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ingot.runtime import EngineSpec, load_engine
from ingot.runtime.engines.isolation.engine import Isolation
from ingot.runtime.gpu.graphs import GraphOptions
from ingot.tensors import DType
from tests import onnx_models
from tests.gpu.cuda import GPU, needs_provider

pytestmark = GPU
ISOLATED = Isolation(why="a test wants it", required=True, lanes=3)


@needs_provider("CUDA")
def test_onnx_runtime_uses_the_gpu_in_an_engine_process(tmp_path: Path) -> None:
    spec = EngineSpec(onnx_models.affine(tmp_path), device="cuda")
    engine = load_engine(spec, ISOLATED)
    try:
        assert engine.device.startswith("cuda:")
        for rows in (1, 7, 64):
            x = np.random.default_rng(rows).standard_normal((rows, 3)).astype(np.float32)
            np.testing.assert_allclose(engine.run({"x": x})["y"], 2 * x + 1, rtol=1e-5)
    finally:
        engine.close()


def test_pytorch_uses_the_gpu_in_an_engine_process(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs PyTorch with CUDA")
    from benchmarks.gpu.models import specs, write_program

    spec, path = specs(small=True)["bert"], tmp_path / "model.pt2"
    write_program(spec, path, DType.FP32)
    graphs = GraphOptions(most=8, batch="batch", padded=True)
    isolated = load_engine(EngineSpec(path, format="pt2", device="cuda", allow_code=True, graphs=graphs), ISOLATED)
    here = load_engine(EngineSpec(path, format="pt2", device="cpu", allow_code=True))
    try:
        assert isolated.device.startswith("cuda:")
        feed = {"x": np.concatenate([spec.sample(np.random.default_rng(number), DType.FP32) for number in range(5)])}
        for _ in range(3):
            np.testing.assert_allclose(isolated.run(feed)["y"], here.run(feed)["y"], rtol=1e-3, atol=1e-4)
    finally:
        isolated.close()
        here.close()
