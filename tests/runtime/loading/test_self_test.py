from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from ingot.errors import InvalidArgument
from ingot.runtime import (
    Capabilities,
    EngineSpec,
    Latency,
    Limits,
    LoadSpec,
    Model,
    ModelSource,
    ServingTerms,
    Settings,
    load_engine,
    single_variant,
)
from ingot.runtime.loading.self_test import run_sizes
from ingot.tensors import Array
from tests import onnx_models
from tests.runtime.fake_engines import DOUBLER, FunctionEngine

# Eight samples take as long as one: the more, the better. Beyond four samples nothing is gained.
PAYS = Latency({1: 0.01, 2: 0.01, 4: 0.01, 8: 0.01})
UP_TO_FOUR = Latency({1: 0.01, 2: 0.01, 4: 0.01, 8: 0.02})


class Compiler(FunctionEngine):
    capabilities = Capabilities(compiles=True)


def test_an_engine_that_compiles_runs_every_size_that_batches_will_have() -> None:
    engine = Compiler()
    assert run_sizes([engine], DOUBLER, [], UP_TO_FOUR, 64, 60) == 0
    # 1, 2, 4 and 8 were measured. Eight, which gained nothing, are tried once more; larger batches are not.
    assert engine.calls == [3, 5, 6, 7]
    second = Compiler()
    assert run_sizes([engine, second], DOUBLER, [], UP_TO_FOUR, 64, 60) == 0
    assert sorted(second.calls) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_the_batch_of_a_server_under_load_comes_first() -> None:
    engine = Compiler()
    run_sizes([FunctionEngine(), engine], DOUBLER, [], PAYS, 64, 60)
    assert engine.calls[0] == 16
    assert sorted(engine.calls) == list(range(1, 17))


def test_an_engine_that_captures_batches_runs_their_sizes_whatever_the_time() -> None:
    first, second = Compiler(), Compiler()
    first.capabilities = second.capabilities = Capabilities(captured=(1, 2, 8, 16, 128))
    assert run_sizes([first, second], DOUBLER, [], PAYS, 64, 0) == 0
    assert (first.calls, second.calls) == ([16], [16, 8, 2, 1])  # the others were measured with the first


def test_other_engines_beyond_the_first_run_once() -> None:
    first, second = FunctionEngine(), FunctionEngine()
    assert run_sizes([first, second], DOUBLER, [], PAYS, 64, 60) == 0
    assert (first.calls, second.calls) == ([], [8])


def test_sizes_skipped_for_lack_of_time_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        nonlocal now
        now += 1.0
        return {"y": inputs["x"]}

    monkeypatch.setattr("ingot.runtime.loading.self_test.time.perf_counter", lambda: now)
    engine = Compiler(run)
    assert run_sizes([FunctionEngine(), engine], DOUBLER, [], PAYS, 64, 2.5) == 13
    assert len(engine.calls) == 3


def test_a_model_that_rejects_a_size_is_left_alone() -> None:
    def reject(inputs: Mapping[str, Array]) -> dict[str, Array]:
        raise InvalidArgument("no")

    engine = Compiler(reject)
    assert run_sizes([engine], DOUBLER, [], UP_TO_FOUR, 64, 60) == 0
    assert engine.calls == [3]
    assert run_sizes([engine], DOUBLER, [], Latency(), 64, 60) == 0
    assert engine.calls == [3]


def test_a_model_that_is_ready_has_run_the_sizes_of_its_batches() -> None:
    engine = Compiler()
    settings = Settings(limits=Limits(max_batch=6), warm_time=6)
    source = ModelSource(single_variant(LoadSpec(lambda device, threads: engine), settings))
    model = Model("m", "1", source, ServingTerms(settings))
    model.load()
    assert set(engine.calls) >= {1, 2, 4}
    before = len(engine.calls)

    async def work() -> None:
        for samples in sorted(set(engine.calls)):
            assert (await model.infer({"x": np.ones((samples, 2), np.float32)}))["y"].shape == (samples, 2)

    asyncio.run(work())
    assert len(engine.calls) > before
    model.close()


@pytest.mark.matrix
def test_openvino_compiles(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    engine = load_engine(EngineSpec(onnx_models.affine(tmp_path), engine="openvino", device="cpu"))
    assert engine.capabilities.compiles
    latency = Latency({1: 0.01, 2: 0.01})
    signature = load_engine(EngineSpec(onnx_models.affine(tmp_path), device="cpu")).signature
    assert run_sizes([engine], signature, [], latency, 4, 60) == 0
    assert engine.run({"x": np.ones((3, 3), np.float32)})["y"].tolist() == [[3, 3, 3]] * 3
