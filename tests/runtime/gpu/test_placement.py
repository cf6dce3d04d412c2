"""Which GPU a model runs on, with the libraries of a machine that has some."""

from __future__ import annotations

import ctypes
import sys
import uuid
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ingot.errors import InvalidArgument, Unsupported
from ingot.runtime import devices
from ingot.runtime.engines import ort, ort_session
from ingot.runtime.engines.ort import OrtEngine
from ingot.runtime.gpu import nvml
from ingot.runtime.gpu.pipeline import Pipeline
from tests import onnx_models
from tests.runtime.gpu.fake_device import FakeDevice

GIB = 1 << 30


class Driver:
    """NVIDIA's driver, of GPUs by their identifiers."""

    def __init__(self, visible: list[str]):
        self._visible = visible

    def cuInit(self, flags: int) -> int:  # noqa: N802 - the library's names
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self._visible)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = index
        return 0 if index < len(self._visible) else 101

    def cuDeviceGetUuid_v2(self, identifier: Any, device: Any) -> int:  # noqa: N802
        text = self._visible[device.value]
        ctypes.memmove(identifier._obj, uuid.UUID(text.partition("-")[2]).bytes, 16)
        return 0


class Management(ModuleType):
    """``pynvml`` of the same GPUs: their free and used bytes, and their utilization in percent."""

    nvmlMemory_v2 = 0x02000028  # noqa: N815 - as the package names it

    def __init__(self, gpus: dict[str, tuple[int, int]]):
        super().__init__("pynvml")
        self.gpus = gpus
        self.percent: dict[int, int] = {}

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:  # noqa: N802
        if name not in self.gpus:
            raise RuntimeError("Not Found")
        return list(self.gpus).index(name)

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int) -> Any:  # noqa: N802
        assert version == self.nvmlMemory_v2
        free, used = list(self.gpus.values())[handle]
        return SimpleNamespace(total=free + used, reserved=0, free=free, used=used)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        if list(self.gpus)[handle].startswith("MIG"):
            raise RuntimeError("Not Supported")
        return SimpleNamespace(gpu=self.percent.get(handle, 0))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts GPUs into the machine, whose free and used memory is given in GiB."""
    library = ctypes.CDLL

    def put(*gpus: tuple[str, int, int]) -> Management:
        found = {f"{kind}-{uuid.uuid4()}": (free * GIB, used * GIB) for kind, free, used in gpus}
        driver, management = Driver(list(found)), Management(found)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: driver if name == "libcuda.so.1" else library(name))
        monkeypatch.setattr(devices, "has_cuda", lambda: bool(found))
        monkeypatch.setitem(sys.modules, "pynvml", management)
        return management

    return put


def test_the_memory_of_visible_gpus(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(("GPU", 10, 70), ("GPU", 60, 20), ("GPU", 40, 40)).percent[1] = 35
    assert nvml.roomiest() == 1
    assert nvml.memory_used() == 130 * GIB
    assert nvml.utilization_of(1) == 0.35
    assert nvml.memory_of(3) is nvml.utilization_of(3) is None
    machine(("MIG", 7, 3))
    assert nvml.roomiest() == 0
    assert nvml.memory_used() == 3 * GIB
    assert nvml.utilization_of(0) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert nvml.memory_of(0) is None
    assert (nvml.roomiest(), nvml.memory_used()) == (0, 0)
    machine()
    assert nvml.roomiest() == 0
    assert nvml.memory_used() == 0


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
