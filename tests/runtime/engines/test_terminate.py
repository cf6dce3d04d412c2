"""Calls that another thread ends: with each way of calling an engine, and without effect on later calls."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.errors import EngineTimeout
from ingot.runtime import Engine, EngineSpec, load_engine
from ingot.runtime.loading.engine_swap import Replaceable
from tests import onnx_models
from tests.runtime.gpu.pipelined import SessionDevice, pipelined

ENDLESS = {"n": np.array([2**62])}
THREE = {"n": np.array([3])}


def plain(path: Path) -> Engine:
    return load_engine(EngineSpec(path, device="cpu", threads=1))


def by_value(path: Path) -> Engine:
    engine: Any = plain(path)
    engine._by_value = True
    return engine  # type: ignore[no-any-return]


def in_a_pipeline(path: Path) -> Engine:
    return pipelined(path, SessionDevice())


def replaceable(path: Path) -> Engine:
    return Replaceable(plain(path))


@contextmanager
def ended_by_another_thread(engine: Engine) -> Iterator[None]:
    """End calls of the engine, again and again, as it is not known when one has begun."""
    stop = threading.Event()

    def end() -> None:
        while not stop.wait(0.01):
            engine.terminate()

    thread = threading.Thread(target=end)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("opened", [plain, by_value, in_a_pipeline, replaceable])
def test_a_loop_that_never_ends_is_ended(tmp_path: Path, opened: Any) -> None:
    engine = opened(onnx_models.counting(tmp_path))
    for _ in range(3):
        with pytest.raises(EngineTimeout), ended_by_another_thread(engine):
            engine.run(ENDLESS)
        assert engine.run(THREE)["y"].tolist() == [3]
    engine.close()


def test_without_a_call_it_has_no_effect(tmp_path: Path) -> None:
    engine = plain(onnx_models.counting(tmp_path))
    engine.terminate()
    assert engine.run(THREE)["y"].tolist() == [3]
    engine.terminate()
    engine.terminate()
    assert engine.run(THREE)["y"].tolist() == [3]


@pytest.mark.matrix
def test_openvino_ends_between_operators(tmp_path: Path) -> None:
    if importlib.util.find_spec("openvino") is None:
        pytest.skip("the package 'openvino' is not installed")
    engine = load_engine(
        EngineSpec(onnx_models.slow(tmp_path, repeats=1000), device="cpu", threads=1, engine="openvino")
    )
    x = {"x": np.ones((64, 1024), np.float32)}
    with pytest.raises(EngineTimeout), ended_by_another_thread(engine):
        engine.run(x)
    engine.terminate()
    small = {"x": np.zeros((1, 1024), np.float32)}
    assert (engine.run(small)["y"] == 0).all()
