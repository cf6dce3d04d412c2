"""Which GPU a model runs on, with the libraries of a machine that has some."""

from __future__ import annotations

import ctypes
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ingot.errors import InvalidArgument, Unsupported
from ingot.runtime import devices
from ingot.runtime.engines import ort, ort_session
from ingot.runtime.engines.ort import OrtEngine
from ingot.runtime.gpu.pipeline import Pipeline
from tests import onnx_models
from tests.runtime.gpu.fake_device import FakeDevice

GIB = 1 << 30


class Libraries:
    """NVIDIA's driver and management library: GPUs by their identifiers, with their free and used bytes."""

    def __init__(self, visible: dict[str, tuple[int, int]]):
        self._visible = visible

    def cuInit(self, flags: int) -> int:  # noqa: N802 - the libraries' names
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self._visible)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = index
        return 0

    def cuDeviceGetUuid_v2(self, identifier: Any, device: Any) -> int:  # noqa: N802
        text = list(self._visible)[device.value]
        ctypes.memmove(identifier._obj, uuid.UUID(text.partition("-")[2]).bytes, 16)
        return 0

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:  # noqa: N802
        if name.decode() not in self._visible:
            return 6
        handle._obj.value = 1 + list(self._visible).index(name.decode())
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, found: Any) -> int:  # noqa: N802
        found._obj.free, found._obj.used = list(self._visible.values())[handle.value - 1]
        return 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts GPUs into the machine, whose memory is given in GiB."""

    def put(*gpus: tuple[str, int, int]) -> None:
        found = {f"{kind}-{uuid.uuid4()}": (free * GIB, used * GIB) for kind, free, used in gpus}
        libraries = Libraries(found)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: libraries)
        monkeypatch.setattr(devices, "has_cuda", lambda: bool(found))
        monkeypatch.setattr(devices, "_nvml", lambda: libraries)

    return put


def test_the_gpu_with_the_most_free_memory_is_chosen(machine: Any) -> None:
    machine(("GPU", 10, 70), ("GPU", 60, 20), ("GPU", 40, 40))
    assert devices.roomiest_gpu() == 1
    assert devices.gpu_memory_used() == 130 * GIB
    machine(("MIG", 7, 3))
    assert devices.roomiest_gpu() == 0
    assert devices.gpu_memory_used() == 3 * GIB
    machine()
    assert devices.roomiest_gpu() == 0
    assert devices.gpu_memory_used() == 0


CUDA = SimpleNamespace(get_available_providers=lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
CPU = SimpleNamespace(get_available_providers=lambda: ["CPUExecutionProvider"])


def test_where_a_session_runs(machine: Any) -> None:
    machine(("GPU", 10, 70), ("GPU", 60, 20))
    named = {"auto": "cuda:1", "cuda": "cuda:1", "cuda:0": "cuda:0", "cpu": "cpu"}
    assert {device: ort_session.place_of(CUDA, device) for device in named} == named
    assert ort_session.place_of(CPU, "auto") == "cpu"
    with pytest.raises(Unsupported, match="lacks CUDA"):
        ort_session.place_of(CPU, "cuda:0")
    with pytest.raises(InvalidArgument, match="unknown device 'npu:0'"):
        ort_session.place_of(CUDA, "npu:0")
    machine()
    assert ort_session.place_of(CUDA, "auto") == "cpu"
    with pytest.raises(Unsupported, match="no NVIDIA driver or GPU"):
        ort_session.place_of(CUDA, "cuda")


def test_a_session_computes_in_the_pipelines_stream() -> None:
    pipeline = Pipeline(FakeDevice())
    plain = {"device_id": "3", "use_tf32": "0"}
    stream = {"has_user_compute_stream": "1", "user_compute_stream": str(pipeline.compute)}
    for given, options in ((pipeline, {**plain, **stream}), (None, plain)):
        expected = [("CUDAExecutionProvider", options), "CPUExecutionProvider"]
        assert ort_session.providers_of(CUDA, "cuda:3", given) == expected


def test_without_the_cuda_libraries_only_auto_falls_back_to_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """ONNX Runtime then opens the session with the providers that are left."""
    path, device = onnx_models.affine(tmp_path), FakeDevice()
    monkeypatch.setattr(ort_session, "place_of", lambda *_: "cuda:0")
    monkeypatch.setattr(ort, "open_device", lambda name: device)
    providers = ["CPUExecutionProvider", "AzureExecutionProvider"]
    monkeypatch.setattr(ort_session, "providers_of", lambda *_: providers)
    monkeypatch.setattr("onnxruntime.InferenceSession.get_providers", lambda session: providers[:1])
    with pytest.raises(Unsupported, match="'cuda:0' is not available: ONNX Runtime could not use the GPU"):
        OrtEngine(path, device="cuda:0")
    assert not device._streams
    engine = OrtEngine(path, device="auto")
    assert engine.device == "cpu"
    assert engine.settings["pipeline"] == "off"
    assert "serving on the CPU" in caplog.text
    engine.close()
    assert not device._streams


def test_with_a_driver_that_is_too_old_a_model_has_one_batch_in_flight(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str) -> None:
        raise Unsupported("NVIDIA's driver cannot allocate memory of cuda:0 in the order of a stream")

    monkeypatch.setattr(ort, "open_device", refuse)
    assert ort._pipeline_of("cuda:0") is None
    assert "models on cuda:0 have one batch in flight: NVIDIA's driver cannot" in caplog.text
