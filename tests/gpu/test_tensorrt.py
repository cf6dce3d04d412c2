"""TensorRT on an NVIDIA GPU; compiling a graph takes a minute or more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ingot.runtime import EngineSpec, load_engine
from tests import onnx_models
from tests.gpu.cuda import GPU, needs_provider

pytest.importorskip("tensorrt", reason="needs TensorRT, which is not installed")
pytestmark = [*GPU, needs_provider("Tensorrt")]


def test_a_graph_is_compiled_once_for_all_batches(tmp_path: Path) -> None:
    path, cache = onnx_models.affine(tmp_path), tmp_path / "cache"
    spec = EngineSpec(path, engine="tensorrt", device="cuda", cache=cache, max_batch=16)
    kept: list[set[str]] = []
    for _ in range(2):
        engine = load_engine(spec)
        assert engine.platform == "onnxruntime_tensorrt"
        for rows in (16, 1, 7):
            x = np.random.default_rng(rows).standard_normal((rows, 3)).astype(np.float32)
            np.testing.assert_allclose(engine.run({"x": x})["y"], 2 * x + 1, rtol=1e-3)
        engine.close()
        kept.append({file.name for file in cache.iterdir()})
    assert kept[0]
    assert kept[0] == kept[1]


def test_lanes_share_what_is_compiled(tmp_path: Path) -> None:
    engine = load_engine(EngineSpec(onnx_models.affine(tmp_path), engine="tensorrt", device="cuda", max_batch=4))
    lanes = [engine, *engine.more_lanes(2)]
    assert len(lanes) == 3
    x = np.ones((4, 3), np.float32)
    for lane in lanes:
        np.testing.assert_allclose(lane.run({"x": x})["y"], 2 * x + 1, rtol=1e-3)
    for lane in lanes:
        lane.close()
