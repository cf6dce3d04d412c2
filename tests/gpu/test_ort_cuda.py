"""ONNX Runtime on an NVIDIA GPU; ``pytest -m gpu`` runs only tests like these."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ingot.errors import TooLarge
from ingot.runtime import EngineSpec, load_engine
from ingot.runtime.engines.ort.ort_engine import OrtEngine
from ingot.runtime.gpu.graphs import GraphOptions
from ingot.runtime.machine import devices
from ingot.tensors import Array, DType
from tests import onnx_models

onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime-gpu, which is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not devices.has_cuda(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(
        "CUDAExecutionProvider" not in onnxruntime.get_available_providers(),
        reason="needs onnxruntime-gpu; the installed onnxruntime is for the CPU",
    ),
]


def engine_of(path: Path) -> OrtEngine:
    engine = load_engine(EngineSpec(path, device="cuda"))
    assert isinstance(engine, OrtEngine)
    assert engine.device.startswith("cuda:")
    return engine


def test_inputs_are_allocated_in_pinned_memory(tmp_path: Path) -> None:
    engine = engine_of(onnx_models.affine(tmp_path))
    assert engine.settings["pipeline"] == "on"
    array = engine.allocate(engine.signature.inputs[0], (4, 3))
    assert engine._pipeline is not None
    assert engine._pipeline.pool.nbytes
    assert engine._pipeline.pool.placed(array) is array
    array[:] = 2
    assert engine.run({"x": array})["y"].tolist() == [[5, 5, 5]] * 4


def test_lanes_in_threads_answer_as_the_cpu(tmp_path: Path) -> None:
    path = onnx_models.affine(tmp_path)
    engine, cpu = engine_of(path), load_engine(EngineSpec(path, device="cpu"))
    lanes = [engine, *engine.more_lanes(2)]
    inputs = [{"x": np.random.default_rng(seed).standard_normal((64, 3)).astype(np.float32)} for seed in range(300)]

    def serve(index: int) -> list[dict[str, Array]]:
        return [lanes[index].run(feed) for feed in inputs[index::3]]

    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(serve, range(3)))
    for number, feed in enumerate(inputs):
        for name, array in cpu.run(feed).items():
            np.testing.assert_allclose(answers[number % 3][number // 3][name], array, rtol=1e-5)
    for lane in lanes:
        lane.close()


def test_a_batch_without_memory_fails_alone(tmp_path: Path) -> None:
    engine = engine_of(onnx_models.filled(tmp_path))
    with pytest.raises(TooLarge):
        engine.run({"n": np.array([1 << 40])})
    assert engine.run({"n": np.array([3])})["y"].shape == (3,)


def test_answers_are_the_cpus_at_any_batch_size(tmp_path: Path) -> None:
    path = onnx_models.affine(tmp_path)
    gpu, cpu = engine_of(path), load_engine(EngineSpec(path, device="cpu"))
    outcomes = []
    for rows in (1, 7, 32, 2):
        inputs = {"x": np.random.default_rng(rows).standard_normal((rows, 3)).astype(np.float32)}
        outcomes.append((gpu.run(inputs), cpu.run(inputs)))
    for answer, expected in outcomes:  # only now: no answer may be overwritten by a later call
        for name, array in expected.items():
            np.testing.assert_allclose(answer[name], array, rtol=1e-5)


def test_only_text_does_without_a_pipeline(tmp_path: Path) -> None:
    for dtype, pipeline in ((DType.BYTES, "off"), (DType.BF16, "on")):
        assert engine_of(onnx_models.identity(tmp_path, dtype)).settings["pipeline"] == pipeline


def test_captured_batches_answer_as_the_cpu(tmp_path: Path) -> None:
    path = onnx_models.affine(tmp_path)
    gpu = load_engine(EngineSpec(path, device="cuda", graphs=GraphOptions(most=8, batch=None, padded=False)))
    cpu = load_engine(EngineSpec(path, device="cpu"))
    assert gpu.settings["cuda_graphs"] == "1,2,4,8"
    for seed in range(3):
        for rows in (8, 1, 3, 4):
            inputs = {"x": np.random.default_rng(seed).standard_normal((rows, 3)).astype(np.float32)}
            for name, array in cpu.run(inputs).items():
                np.testing.assert_allclose(gpu.run(inputs)[name], array, rtol=1e-5)
    assert gpu.settings["cuda_graphs"] == "1,2,4,8"
    gpu.close()
