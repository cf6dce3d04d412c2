"""Metrics of GPUs, read from a substitute for NVIDIA's management library: no GPU is needed."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest

import ingot
from ingot.runtime import EngineSpec
from ingot.runtime.engines import loader
from ingot.runtime.engines.ort.ort_engine import OrtEngine
from ingot.runtime.machine.nvml import Gpus
from tests import onnx_models


class Library(ModuleType):
    """``pynvml`` of a machine with two GPUs, the second of which is partitioned (MIG) and in another container."""

    nvmlMemory_v2 = 0x02000028  # noqa: N815 - as the package names it

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.calls = 0
        self.failure: Exception | None = None

    def nvmlInit(self) -> None:  # noqa: N802
        if self.failure is not None:
            raise self.failure

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self.calls += 1
        if self.failure is not None:
            raise self.failure
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int) -> Any:  # noqa: N802
        assert version == self.nvmlMemory_v2
        return SimpleNamespace(total=1000 + handle, reserved=10, used=300, free=690)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        if handle == 1:
            raise RuntimeError("Not Supported")
        return SimpleNamespace(gpu=35, memory=20)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> Any:  # noqa: N802
        mine, other = SimpleNamespace(pid=os.getpid(), usedGpuMemory=200), SimpleNamespace(pid=1, usedGpuMemory=70)
        return [mine, other] if handle == 0 else [other]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def samples(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_it_reads_memory_and_utilization_and_leaves_out_what_a_gpu_does_not_have(library: Library) -> None:
    registry = CollectorRegistry()
    Gpus(registry).use()
    assert samples(registry) == [
        'ingot_gpu_memory_bytes{gpu="0",kind="total"} 1000.0',
        'ingot_gpu_memory_bytes{gpu="0",kind="reserved"} 10.0',
        'ingot_gpu_memory_bytes{gpu="0",kind="used"} 300.0',
        'ingot_gpu_memory_bytes{gpu="0",kind="server"} 200.0',
        'ingot_gpu_memory_bytes{gpu="1",kind="total"} 1001.0',
        'ingot_gpu_memory_bytes{gpu="1",kind="reserved"} 10.0',
        'ingot_gpu_memory_bytes{gpu="1",kind="used"} 300.0',
        'ingot_gpu_utilization_ratio{gpu="0"} 0.35',
    ]


def test_the_library_is_asked_at_most_once_a_second(library: Library) -> None:
    registry, clock = CollectorRegistry(), Clock()
    Gpus(registry, clock).use()
    for seconds, calls in ((0.0, 1), (0.5, 1), (0.6, 2)):
        clock.now += seconds
        assert len(samples(registry)) == 8
        assert library.calls == calls


@pytest.mark.parametrize("late", [False, True], ids=["at-the-start", "later"])
def test_a_failure_breaks_no_scrape_and_is_logged_once(
    library: Library, caplog: pytest.LogCaptureFixture, late: bool
) -> None:
    registry, clock = CollectorRegistry(), Clock()
    Gpus(registry, clock).use()
    if late:
        assert len(samples(registry)) == 8
    library.failure = RuntimeError("Driver Not Loaded")
    for seconds in (2.0, 2.0, 60.0):
        clock.now += seconds
        assert samples(registry) == []
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        "there are no metrics of GPUs: RuntimeError: Driver Not Loaded"
    ]
    library.failure = None
    clock.now += 60
    assert len(samples(registry)) == 8


def test_without_the_package_the_log_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    registry = CollectorRegistry()
    Gpus(registry).use()
    assert samples(registry) == []
    assert "pip install 'ingot-serve[gpu]'" in caplog.text


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_server_reads_it_only_with_a_model_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Library, device: str
) -> None:
    def open_engine(spec: EngineSpec) -> OrtEngine:
        engine = OrtEngine(spec.path, device="cpu", threads=spec.threads)
        engine.device = device
        return engine

    monkeypatch.setattr(loader, "open_engine", open_engine)
    with ingot.serve(onnx_models.affine(tmp_path), http_port=0, grpc_port=0, device="cpu") as running:
        text = httpx.get(f"{running.http_url}/metrics", trust_env=False, timeout=60).text
    assert ('ingot_gpu_memory_bytes{gpu="0",kind="server"} 200.0' in text) == (device == "cuda:0")
    assert (library.calls > 0) == (device == "cuda:0")
