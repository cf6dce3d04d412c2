from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from ingot.errors import InvalidArgument
from ingot.runtime import Model, ModelSource, ServingTerms, Settings
from ingot.runtime.loading import threads
from ingot.runtime.loading.threads import Tuned
from ingot.runtime.machine import devices
from ingot.runtime.profiling.profile import zeros
from ingot.tensors import Array
from tests import onnx_models
from tests.runtime.fake_engines import DOUBLER, FunctionEngine


class Machine:
    """A clock that advances only by the time of engines: ``cost`` gives seconds by threads and samples."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cost: Callable[[int, int], float]):
        self.now = 0.0
        self.cost = cost
        self.opened: dict[int, FunctionEngine] = {}
        monkeypatch.setattr("ingot.runtime.loading.threads.time.perf_counter", lambda: self.now)

    def open(self, count: int) -> FunctionEngine:
        def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
            self.now += self.cost(count, len(inputs["x"]))
            return {"y": inputs["x"]}

        self.opened[count] = FunctionEngine(run)
        return self.opened[count]

    def tune(self, loaded: float = 0.01) -> Tuned:
        return threads.tune(self.open(4), 4, loaded, DOUBLER, zeros(DOUBLER), self.open)


def test_threads_that_make_calls_faster_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, lambda count, samples: 0.004 * samples / count)
    tuned = machine.tune()
    assert (tuned.engine, tuned.threads) == (machine.opened[4], 4)
    assert "4.00 times" in tuned.why
    assert machine.opened[1].closed
    assert not machine.opened[4].closed


def test_threads_that_gain_little_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, lambda count, samples: 0.004 * samples / (1.05 if count > 1 else 1))
    tuned = machine.tune()
    assert (tuned.engine, tuned.threads) == (machine.opened[1], 1)
    assert machine.opened[4].closed


def test_a_tiny_model_gets_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, lambda count, samples: 10e-6 * samples / count)
    tuned = machine.tune()
    assert (tuned.engine, tuned.threads) == (machine.opened[1], 1)
    assert machine.opened[4].closed


@pytest.mark.parametrize("cost", [10e-6, 0.01])
def test_a_model_that_loads_slowly_is_not_loaded_twice(monkeypatch: pytest.MonkeyPatch, cost: float) -> None:
    machine = Machine(monkeypatch, lambda count, samples: cost)
    tuned = machine.tune(loaded=2.0)
    assert (tuned.engine, tuned.threads, list(machine.opened)) == (machine.opened[4], 4, [4])


def test_a_slow_model_is_called_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, lambda count, samples: 1.0 * samples / count)
    assert machine.tune().threads == 4
    assert all(len(engine.calls) <= 4 for engine in machine.opened.values())


def test_a_model_that_rejects_zeros_keeps_its_threads() -> None:
    def reject(inputs: Mapping[str, Array]) -> dict[str, Array]:
        raise InvalidArgument("not zero, please")

    engine = FunctionEngine(reject)
    tuned = threads.tune(engine, 4, 0.01, DOUBLER, zeros(DOUBLER), lambda count: pytest.fail("opened again"))
    assert (tuned.engine, tuned.threads, engine.closed) == (engine, 4, False)
    assert "not zero, please" in tuned.why


def served(path: Path, settings: Settings) -> Model:
    model = Model("m", "1", ModelSource.of_file(path, settings, "m"), ServingTerms(settings))
    model.load()
    model.close()
    return model


def test_the_choice_is_reported_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "cpu_count", lambda: 4)
    caplog.set_level(logging.INFO, "ingot.runtime")
    settings = served(onnx_models.affine(tmp_path), Settings(device="cpu")).engine_settings
    assert settings["threads"] == "1"
    assert "too short to parallelize" in settings["threads_why"]
    assert settings["spinning"] == "off"
    assert "threads 1" in caplog.text


def test_requested_threads_are_used(tmp_path: Path) -> None:
    settings = served(onnx_models.affine(tmp_path), Settings(device="cpu", engine_threads=3)).engine_settings
    assert (settings["threads"], settings["threads_why"]) == ("3", "as configured")


def test_instances_share_out_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cpu_count", lambda: 2)
    settings = served(onnx_models.affine(tmp_path), Settings(device="cpu", instances=2)).engine_settings
    assert (settings["instances"], settings["threads"]) == ("2", "1")
    assert settings["threads_why"] == "an instance has one core"


def test_zeros_fit_a_models_ranges() -> None:
    assert zeros(DOUBLER)["x"].tolist() == np.zeros((1, 2)).tolist()
