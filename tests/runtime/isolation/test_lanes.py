"""Several calls at a time in one engine process, by an engine whose calls wait for each other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import EngineLost, EngineTimeout
from ingot.runtime import EngineSpec, load_engine
from ingot.runtime.engines.ipc.arena import THRESHOLD
from ingot.runtime.engines.isolation.engine import Isolation, ProcessEngine
from ingot.runtime.engines.isolation.process import EngineProcess
from ingot.runtime.engines.isolation.supervisor import Supervision
from ingot.tensors import Array
from tests import onnx_models
from tests.server.outside import wait_until

ENGINE = '''
import copy
import threading

from ingot.errors import EngineLost, EngineTimeout
from ingot.runtime.engines.engine import BaseEngine, Capabilities
from ingot.tensors import DType, Signature, TensorSpec


class Meeting(BaseEngine):
    """Calls with a positive input return when three run at once; those with -1, when they are ended; others fail."""

    platform = "meeting"
    settings = {}
    capabilities = Capabilities(captured=(1, 2))
    down = ""

    def __init__(self, path, *, device, threads):
        self.device, self.lane = device, 0
        specs = [TensorSpec(name, DType.FP32, ("batch", 3)) for name in "xy"]
        self.signature = Signature((specs[0],), (specs[1],), "batch")
        self.meeting, self.ended = threading.Barrier(3), threading.Event()

    def more_lanes(self, count):
        lanes = [copy.copy(self) for _ in range(count)]
        for number, lane in enumerate(lanes, 1):
            lane.lane, lane.ended = number, threading.Event()
        return lanes

    def run(self, inputs):
        x = inputs["x"]
        if x[0, 0] > 0:
            self.meeting.wait(60)
        if x[0, 0] < -1:
            self.down = "error 700"
            raise EngineLost("the device pair:0 failed: error 700")
        if x[0, 0] < 0:
            self.ended.wait(60)
            raise EngineTimeout(f"lane {self.lane} was ended")
        return {"y": x + self.lane}

    def terminate(self):
        self.ended.set()

    def close(self):
        pass
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with the engine, which engine processes find where this process does."""
    folder = tmp_path / "plugins"
    (folder / "meeting-1.0.dist-info").mkdir(parents=True)
    (folder / "meeting.py").write_text(ENGINE)
    (folder / "meeting-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: meeting\nVersion: 1.0\n")
    (folder / "meeting-1.0.dist-info" / "entry_points.txt").write_text("[ingot.engines]\nmeeting = meeting:Meeting\n")
    monkeypatch.syspath_prepend(folder)


@contextlib.contextmanager
def opened(path: Path, lanes: int) -> Iterator[list[ProcessEngine]]:
    isolation = Isolation(why="a test", lanes=lanes, required=True)
    engine = load_engine(EngineSpec(path, device="pair:0", engine="meeting", threads=1), isolation)
    assert isinstance(engine, ProcessEngine)
    engines = [engine, *engine.more_lanes(lanes - 1)]
    try:
        yield engines
    finally:
        for each in engines:
            each.close()


def running(engines: list[ProcessEngine], calls: int) -> EngineProcess:
    """Wait until ``calls`` calls are in the process; one that comes after its end would wait for the next process."""
    process = engines[0]._supervisor._ready
    assert process is not None
    wait_until(lambda: sum(channel.calling.locked() for channel in process._channels) == calls)
    return process


def full(value: float, samples: int = 1) -> dict[str, Array]:
    return {"x": np.full((samples, 3), value, np.float32)}


@pytest.mark.matrix
@pytest.mark.usefixtures("package")
def test_calls_of_lanes_run_at_once_and_end_or_fail_alone(tmp_path: Path) -> None:
    large = THRESHOLD  # in shared memory
    with opened(onnx_models.affine(tmp_path), 3) as engines, ThreadPoolExecutor(3) as threads:
        assert [each.capabilities.captured for each in engines] == [(1, 2)] * 3
        for value in range(1, 20):
            samples = large if value % 3 == 0 else value
            answers = threads.map(lambda engine, v=value, n=samples: engine.run(full(v, n))["y"], engines)
            for lane, answer in enumerate(answers):
                np.testing.assert_array_equal(answer, np.full((samples, 3), value + lane, np.float32))
        engines[0].supervise(Supervision("m", lambda run: None, lambda ending: None, lambda: None))
        held = [threads.submit(engine.run, full(-1)) for engine in engines[1:]]
        running(engines, 2)
        assert engines[0].run(full(0))["y"].tolist() == [[0, 0, 0]]
        engines[2].terminate()
        with pytest.raises(EngineTimeout, match="lane 2 was ended"):
            held[1].result(60)
        assert not held[0].done()
        engines[2].kill()
        with pytest.raises(EngineTimeout, match="was killed"):
            held[0].result(60)
        answers = threads.map(lambda engine: engine.run(full(1))["y"][0, 0], engines)  # in the next process
        assert list(answers) == [1, 2, 3]
        held = [threads.submit(engine.run, full(-1)) for engine in engines]
        running(engines, 3)._process.kill()
        for each in held:
            with pytest.raises(EngineLost, match="ended by SIGKILL"):
                each.result(60)


@pytest.mark.matrix
@pytest.mark.usefixtures("package")
def test_a_process_whose_device_has_failed_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    endings: list[str] = []
    replaced = threading.Event()

    def lose(ending: str) -> None:
        endings.append(ending)
        replaced.set()

    with opened(onnx_models.affine(tmp_path), 2) as engines:
        engines[0].supervise(Supervision("m", lambda run: None, lose, lambda: None))
        with pytest.raises(EngineLost, match="pair:0 failed: error 700"):
            engines[1].run(full(-2))
        assert replaced.wait(60)
        assert [each.run(full(0))["y"][0, 0] for each in engines] == [0, 1]
    assert endings == ["ended with exit code 1"]
    assert "wrote before its end: error 700" in caplog.text


@pytest.mark.matrix
@pytest.mark.usefixtures("package")
def test_a_server_has_as_many_batches_in_flight_as_lanes(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"engine": "meeting", "device": "pair:0", "isolate": "all", "max_batch": 1}
    meeting = threading.Barrier(3)
    with (
        ingot.serve(onnx_models.affine(tmp_path), http_port=0, grpc_port=0, lanes=3, **settings) as server,
        ThreadPoolExecutor(3) as threads,
    ):

        def ask(value: int) -> float:
            with ingot.Client(server.http_url) as client:
                meeting.wait(60)
                return float(client.infer("affine", full(value))["y"][0, 0])

        answers = [*threads.map(ask, [10, 20, 30])]
        assert sorted(answer // 10 for answer in answers) == [1, 2, 3]
        assert sorted(answer % 10 for answer in answers) == [0, 1, 2]  # the lanes
