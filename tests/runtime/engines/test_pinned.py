from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.runtime import load_engine
from ingot.runtime.engines import pinned
from ingot.runtime.engines.ort import OrtEngine
from ingot.runtime.engines.ort_binding import Binding
from tests import onnx_models


class FakeLibrary:
    """The functions of NVIDIA's driver over ordinary memory; ``left`` is how many bytes can be pinned."""

    def __init__(self, left: int = 1 << 20):
        self.left = left
        self.held: dict[int, Any] = {}

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:  # noqa: N802 - the driver's names
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        return 0

    def cuMemHostAlloc(self, address: Any, size: Any, flags: Any) -> int:  # noqa: N802
        if size.value > self.left:
            return 2
        memory = ctypes.create_string_buffer(size.value)
        address._obj.value = ctypes.addressof(memory)
        self.held[address._obj.value] = memory
        return 0

    def cuMemFreeHost(self, address: Any) -> int:  # noqa: N802
        del self.held[address.value]
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLibrary]:
    fake = FakeLibrary()
    driver = pinned.Driver(fake)
    monkeypatch.setattr(pinned, "driver_of_first_gpu", lambda: driver)
    yield fake
    gc.collect()
    assert not fake.held


@pytest.mark.matrix
def test_pinned_memory_lives_as_long_as_its_last_view(library: FakeLibrary) -> None:
    array = pinned.empty((4, 3), np.dtype(np.float32))
    array[:] = 7
    sample = array[1:2].view(np.uint32)
    assert len(library.held) == 1
    del array
    gc.collect()
    assert len(library.held) == 1
    assert sample.view(np.float32).tolist() == [[7, 7, 7]]


def test_without_pinned_memory_it_is_ordinary(library: FakeLibrary) -> None:
    library.left = 10
    array = pinned.empty((4, 3), np.dtype(np.float32))
    array[:] = 1
    assert array.shape == (4, 3)
    assert not library.held
    assert pinned.empty((0, 3), np.dtype(np.int64)).shape == (0, 3)


def test_an_engine_on_the_cpu_allocates_ordinary_memory_for_inputs(tmp_path: Path) -> None:
    engine = load_engine(onnx_models.affine(tmp_path), device="cpu")
    assert isinstance(engine, OrtEngine)
    array = engine.allocate(engine.signature.inputs[0], (2, 3))
    assert array.shape == (2, 3)
    assert array.dtype == np.float32
    array[:] = 1
    assert engine.run({"x": array})["y"].tolist() == [[3, 3, 3]] * 2
    assert engine.settings["io_binding"] == "off"


def test_bound_runs_answer_as_plain_ones_and_keep_nothing_of_the_call_before(tmp_path: Path) -> None:
    """ONNX Runtime binds on the CPU too, which can be tested without a GPU."""
    onnxruntime = pytest.importorskip("onnxruntime")
    path = onnx_models.affine(tmp_path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    binding = Binding(session, ["y", "z"], "cpu")
    first = binding.run({"x": np.array([[1, 2, 3]], np.float32)}, onnxruntime.RunOptions())
    second = binding.run({"x": np.zeros((5, 3), np.float32)}, onnxruntime.RunOptions())
    assert [array.tolist() for array in first] == [[[3, 5, 7]], [[-1, -2, -3]]]
    assert second[0].tolist() == [[1, 1, 1]] * 5


def test_a_failed_bound_run_leaves_the_next_alone(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    path = onnx_models.embedding(tmp_path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    session.disable_fallback()
    binding = Binding(session, ["y"], "cpu")
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument):
        binding.run({"ids": np.array([[10]])}, onnxruntime.RunOptions())
    assert binding.run({"ids": np.array([[1]])}, onnxruntime.RunOptions())[0].tolist() == [[[2, 3]]]


def test_an_array_at_an_odd_address_or_in_fortran_order_is_copied(tmp_path: Path) -> None:
    engine = load_engine(onnx_models.affine(tmp_path), device="cpu")
    odd = np.frombuffer(b"." + np.arange(6, dtype=np.float32).tobytes(), np.float32, offset=1).reshape(2, 3)
    turned = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    for array in (odd, turned):
        assert engine.run({"x": array})["z"].tolist() == [[0, -1, -2], [-3, -4, -5]]
