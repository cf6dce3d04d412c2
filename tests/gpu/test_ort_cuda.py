"""Tests that need an NVIDIA GPU with ``ingot-serve[gpu]``; ``pytest -m gpu`` runs only them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ingot.runtime import devices, load_engine
from ingot.runtime.engines import pinned
from ingot.runtime.engines.ort import OrtEngine
from ingot.tensors import DType
from tests import onnx_models

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not devices.has_cuda(), reason="needs an NVIDIA GPU")]


def engine_of(path: Path) -> OrtEngine:
    engine = load_engine(path, device="cuda")
    assert isinstance(engine, OrtEngine)
    assert engine.device == "cuda"
    return engine


def test_inputs_are_allocated_in_pinned_memory(tmp_path: Path) -> None:
    engine = engine_of(onnx_models.affine(tmp_path))
    assert engine.settings["io_binding"] == "on"
    array = engine.allocate(engine.signature.inputs[0], (4, 3))
    assert pinned.driver_of_first_gpu() is not None
    assert array.base is not None
    array[:] = 2
    assert engine.run({"x": array})["y"].tolist() == [[5, 5, 5]] * 4


def test_answers_are_the_cpus_at_any_batch_size(tmp_path: Path) -> None:
    path = onnx_models.affine(tmp_path)
    gpu, cpu = engine_of(path), load_engine(path, device="cpu")
    outcomes = []
    for rows in (1, 7, 32, 2):
        inputs = {"x": np.random.default_rng(rows).standard_normal((rows, 3)).astype(np.float32)}
        outcomes.append((gpu.run(inputs), cpu.run(inputs)))
    for answer, expected in outcomes:  # only now: no answer may be overwritten by a later call
        for name, array in expected.items():
            np.testing.assert_allclose(answer[name], array, rtol=1e-5)


def test_text_and_bfloat16_do_without_binding(tmp_path: Path) -> None:
    for dtype in (DType.BYTES, DType.BF16):
        assert engine_of(onnx_models.identity(tmp_path, dtype)).settings["io_binding"] == "off"
