from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from ingot.errors import EngineLost, InternalError, InvalidArgument, TooLarge
from ingot.runtime import EngineSpec, load_engine
from ingot.runtime.engines.ort import ort_arena
from ingot.runtime.engines.ort.ort_engine import OrtEngine
from ingot.runtime.engines.ort.ort_lane import OrtLane
from ingot.runtime.gpu.graphs import GraphOptions
from ingot.runtime.gpu.pipeline import Pipeline
from ingot.tensors import Array, DType
from tests import onnx_models
from tests.runtime.gpu.pipelined import CapturingSession, Session, SessionDevice, asynchronous, pipelined
from tests.server.samples import sample


def values(seed: int) -> dict[str, Array]:
    return {"x": np.random.default_rng(seed).standard_normal((1 + seed % 7, 3)).astype(np.float32)}


def test_lanes_of_one_session_answer_as_a_plain_one(tmp_path: Path) -> None:
    path = onnx_models.affine(tmp_path)
    engine, plain = pipelined(path, SessionDevice()), load_engine(EngineSpec(path, device="cpu"))
    lanes = [engine, *engine.more_lanes(2)]
    assert lanes[0] is engine
    assert engine.settings["pipeline"] == "on"

    def serve(index: int) -> list[tuple[Array, int]]:
        return [(lanes[index].run(values(seed))["y"], seed) for seed in range(index, 120, 3)]

    with ThreadPoolExecutor(3) as threads:
        results = [result for part in threads.map(serve, range(3)) for result in part]
    for answer, seed in results:  # only now: no answer may be overwritten by a later call
        np.testing.assert_array_equal(answer, plain.run(values(seed))["y"])


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype is not DType.BYTES], ids=lambda each: each.value)
def test_every_datatype_of_numbers_passes(tmp_path: Path, dtype: DType) -> None:
    engine = pipelined(onnx_models.identity(tmp_path, dtype), SessionDevice())
    array = sample(dtype)
    result = engine.run({"x": array})["y"]
    assert result.dtype == array.dtype
    assert result.tolist() == array.tolist()


def test_tensors_that_a_session_has_on_the_host_are_not_copied_to_the_device(tmp_path: Path) -> None:
    """A session on the CPU reports that of all its tensors."""
    engine = OrtEngine(onnx_models.affine(tmp_path), device="cpu", threads=1)
    device = SessionDevice()
    signature = engine.signature
    lane = OrtLane(engine._session, Pipeline(device), signature.inputs, signature.outputs, ("cuda", 0))
    assert not lane.asynchronous
    for seed in range(3):
        answer, plain = lane.run(values(seed), onnxruntime.RunOptions()), engine.run(values(seed))
        for array, expected in zip(answer, plain.values(), strict=True):
            np.testing.assert_array_equal(array, expected)
    assert not device.blocks
    assert not device.pinned
    assert pipelined(onnx_models.affine(tmp_path), device)._lane.asynchronous  # type: ignore[union-attr]


def test_inputs_are_assembled_in_pinned_memory(tmp_path: Path) -> None:
    device = SessionDevice()
    engine = pipelined(onnx_models.affine(tmp_path), device)
    array = engine.allocate(engine.signature.inputs[0], (4, 3))
    assert array.ctypes.data in device.pinned
    array[:] = 2
    assert engine.run({"x": array})["y"].tolist() == [[5, 5, 5]] * 4
    empty = engine.run({"x": np.empty((0, 3), np.float32)})["y"]
    assert empty.shape == (0, 3)


def test_an_engine_on_the_cpu_has_one_lane_and_allocates_ordinary_memory(tmp_path: Path) -> None:
    engine = load_engine(EngineSpec(onnx_models.affine(tmp_path), device="cpu"))
    assert isinstance(engine, OrtEngine)
    assert engine.more_lanes(2) == []
    array = engine.allocate(engine.signature.inputs[0], (2, 3))
    assert array.shape == (2, 3)
    assert array.dtype == np.float32
    array[:] = 1
    assert engine.run({"x": array})["y"].tolist() == [[3, 3, 3]] * 2
    assert engine.settings["pipeline"] == "off"


def test_rejected_values_fail_their_batch_only(tmp_path: Path) -> None:
    engine = pipelined(onnx_models.embedding(tmp_path), SessionDevice())
    with pytest.raises(InvalidArgument, match="rejects"):
        engine.run({"ids": np.array([[10]])})
    assert engine.run({"ids": np.array([[1]])})["y"].tolist() == [[[2, 3]]]


def test_after_a_batch_without_memory_the_arena_gives_back_what_it_does_not_use(tmp_path: Path) -> None:
    device = SessionDevice()
    engine = pipelined(onnx_models.affine(tmp_path), device)

    def shrinks() -> bool:
        try:
            return bool(engine._run_options.get_run_config_entry(ort_arena.SHRINK))
        except RuntimeError:  # there is no such entry
            return False

    for message in (
        "Error in execution: Failed to allocate memory for requested buffer of size 1073741824",
        "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN failure 5000: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "CUDA failure 2: out of memory",
    ):
        device.failing = RuntimeError(message)
        with pytest.raises(TooLarge, match="more memory"):
            engine.run(values(1))
        assert shrinks()
        assert not asynchronous(engine._run_options)
        device.failing = None
        engine._shrinks = False  # the option itself needs a GPU's arena
        engine._run_options = engine._new_options()
        assert engine.run(values(1))["y"].shape == (2, 3)
    device.memory = 0
    with pytest.raises(TooLarge, match="little memory"):
        engine.run({"x": np.zeros((1000, 3), np.float32)})
    assert shrinks()


def test_a_failed_device_is_reported_as_such(tmp_path: Path) -> None:
    device = SessionDevice()
    engine = pipelined(onnx_models.affine(tmp_path), device)
    assert engine.down == ""
    device.failing = RuntimeError("CUDA failure 700: an illegal memory access was encountered")
    device.lost = "error 700"
    with pytest.raises(EngineLost, match="700"):
        engine.run(values(1))
    assert engine.down == "error 700"
    engine.close()


def test_other_failures_of_the_engine_are_internal(tmp_path: Path) -> None:
    device = SessionDevice()
    engine = pipelined(onnx_models.identity(tmp_path, DType.BF16), device)
    for message, remedy in (
        ("CUDA failure 1: invalid argument", r"invalid argument$"),
        ("cuDNN is not available: libcudnn.so.9: cannot open shared object file", r"cuDNN 9, and ingot-serve\[gpu\]$"),
    ):
        device.failing = RuntimeError(message)
        with pytest.raises(InternalError, match=remedy):
            engine.run({"x": sample(DType.BF16)})


@pytest.mark.matrix
def test_memory_that_asynchronous_runs_keep_is_freed_by_runs_that_wait(tmp_path: Path) -> None:
    engine = pipelined(onnx_models.affine(tmp_path), SessionDevice())
    session, kept = engine._session, []
    assert isinstance(session, Session)
    for _ in range(600):
        engine.run(values(0))
        kept.append(session.kept)
    assert max(kept) == 256
    assert [number for number, count in enumerate(kept, 1) if not count] == [257, 513]


@pytest.mark.matrix
def test_the_last_lane_returns_the_memory(tmp_path: Path) -> None:
    device = SessionDevice()
    free = device.memory, device.pinnable
    engine = pipelined(onnx_models.affine(tmp_path), device)
    lanes = [engine, *engine.more_lanes(2)]
    answers = [lane.run(values(seed))["y"] for seed, lane in enumerate(lanes)]
    for lane in lanes[:2]:
        lane.close()
    assert lanes[2].run(values(4))["y"].shape == (5, 3)
    lanes[2].close()
    assert device.memory == free[0]
    assert not device._streams
    assert not device._events
    assert device.pinnable < free[1]
    del answers
    gc.collect()
    assert device.pinnable == free[1]


@pytest.mark.parametrize("graphs", [False, True])
def test_a_closed_engine_frees_its_session_without_garbage_collection(tmp_path: Path, *, graphs: bool) -> None:
    """As in a server, which freezes what is there when its models are loaded."""
    engine = pipelined(onnx_models.affine(tmp_path), SessionDevice(), GRAPHS if graphs else None)
    lanes = [engine, *engine.more_lanes(2)]
    for lane in lanes:
        lane.run(values(1))
    session = weakref.ref(engine._session)
    gc.disable()
    try:
        for lane in lanes:
            lane.close()
        assert session() is None
    finally:
        gc.enable()


def test_an_array_at_an_odd_address_or_in_fortran_order_is_copied(tmp_path: Path) -> None:
    path = onnx_models.affine(tmp_path)
    odd = np.frombuffer(b"." + np.arange(6, dtype=np.float32).tobytes(), np.float32, offset=1).reshape(2, 3)
    turned = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    for engine in (load_engine(EngineSpec(path, device="cpu")), pipelined(path, SessionDevice())):
        for array in (odd, turned):
            assert engine.run({"x": array})["z"].tolist() == [[0, -1, -2], [-3, -4, -5]]


GRAPHS = GraphOptions(most=4, batch=None, padded=True)


def fed(seed: int, samples: int) -> dict[str, Array]:
    return {"x": np.random.default_rng(seed).standard_normal((samples, 3)).astype(np.float32)}


def runs_of(engine: OrtEngine) -> list[int]:
    assert isinstance(engine._session, CapturingSession)
    return engine._session.runs


def test_batches_of_captured_sizes_have_fixed_addresses(tmp_path: Path) -> None:
    device, path = SessionDevice(), onnx_models.affine(tmp_path)
    memory = device.memory
    engine, plain = pipelined(path, device, GRAPHS), load_engine(EngineSpec(path, device="cpu"))
    assert engine.settings["cuda_graphs"] == "1,2,4"
    assert engine.capabilities.captured == (1, 2, 4)
    assert engine.more_lanes(2) == []
    for seed, samples in enumerate((1, 2, 4, 3, 1, 2, 4, 100, 1, 1)):
        answer = engine.run(fed(seed, samples))
        for name, array in plain.run(fed(seed, samples)).items():
            np.testing.assert_array_equal(answer[name], array)
    # A batch of 3 is not enlarged; one of 100 moves the inputs, so that there is another graph.
    assert runs_of(engine) == [1, 2, 3, -1, 1, 2, 3, -1, 4, 4]
    engine.close()
    assert device.memory == memory


def test_a_capture_that_fails_is_logged_and_the_batch_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = onnx_models.affine(tmp_path)
    engine, plain = pipelined(path, SessionDevice(), GRAPHS), load_engine(EngineSpec(path, device="cpu"))
    engine._session.refusing = True
    for seed in range(3):
        np.testing.assert_array_equal(engine.run(fed(seed, 2))["y"], plain.run(fed(seed, 2))["y"])
    assert runs_of(engine) == [1, -1, -1]
    assert [record.message.partition(": ")[0] for record in caplog.records] == ["batches run without CUDA graphs"]
