"""Turns of engines on one device, in virtual time, and in the threads of lanes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ingot.errors import TooLarge
from ingot.runtime import EngineSpec, load_engine
from ingot.runtime.gpu.graphs import GraphOptions
from ingot.runtime.gpu.pipeline import Lane, Pipeline
from ingot.runtime.gpu.turns import Share, Turn, Turns, turns_of
from tests import onnx_models
from tests.runtime.engines.test_torch_program import lowered
from tests.runtime.gpu import fake_torch
from tests.runtime.gpu.fake_device import Doubling, FakeDevice
from tests.runtime.gpu.pipelined import SessionDevice, pipelined

pytestmark = pytest.mark.matrix  # against a fake device, until they have run on a GPU


@dataclass
class Engine:
    """An engine whose ``lanes`` each begin a batch when their last one has ended, from ``since`` on."""

    seconds: float
    lanes: int = 3
    since: float = 0.0
    share: Share = field(default_factory=Share)
    asked: int = 0
    stream: deque[tuple[float, Turn]] = field(default_factory=deque)  # batches, with when their turn came
    waits: list[float] = field(default_factory=list)
    busy: float = 0.0


class Gpu:
    """A device that computes one batch at a time: of the streams' first batches, the one that was first for longest."""

    def __init__(self, engines: Sequence[Engine]):
        self.now = 0.0
        self.engines = engines
        self.turns = Turns(lambda: self.now)
        for engine in engines:
            engine.share = self.turns.join()
        self._waiting: list[tuple[Engine, Turn]] = []
        self.most = 0

    def run(self, until: float) -> None:
        while self.now < until:
            self._ask()
            ready = [engine for engine in self.engines if engine.stream]
            if not ready:
                self.now = min(engine.since for engine in self.engines if engine.since > self.now)
                continue
            engine = min(ready, key=lambda each: each.stream[0][0])
            began, end = self.now, self.now + engine.seconds
            for arrival in sorted(each.since for each in self.engines if began < each.since < end):
                self.now = arrival
                self._ask()
            self.now = end
            engine.waits.append(began - engine.stream[0][0])
            _, turn = engine.stream.popleft()
            if engine.stream:  # which is the first of its stream from now on
                engine.stream[0] = (self.now, engine.stream[0][1])
            engine.busy += engine.seconds
            engine.asked -= 1
            self.turns.finish(turn)

    def _ask(self) -> None:
        """Let the lanes that have none ask for a batch, and enqueue those whose turn it is."""
        for engine in self.engines:
            while engine.since <= self.now and engine.asked < engine.lanes:
                engine.asked += 1
                self._waiting.append((engine, self.turns.request(engine.share)))
        for engine, turn in [each for each in self._waiting if each[1].go.is_set()]:
            self._waiting.remove((engine, turn))
            engine.stream.append((self.now, turn))
        self.most = max(self.most, sum(len(engine.stream) for engine in self.engines))


@pytest.mark.parametrize("lanes", [(1, 2), (2, 2), (3, 3)])
def test_long_and_short_batches_get_equal_time(lanes: tuple[int, int]) -> None:
    long, short = Engine(0.010, lanes[0]), Engine(0.001, lanes[1])
    gpu = Gpu([long, short])
    gpu.run(2.0)
    assert long.busy == pytest.approx(short.busy, rel=0.1)
    assert long.busy + short.busy == pytest.approx(2.0, rel=0.02)  # the device never waits
    assert gpu.most <= 4


@pytest.mark.matrix
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(2, 4)), min_size=2, max_size=5))
def test_any_engines_get_equal_time(given: list[tuple[int, int]]) -> None:
    engines = [Engine(seconds / 1000, lanes) for seconds, lanes in given]
    gpu = Gpu(engines)
    gpu.run(5.0)
    longest = max(engine.seconds for engine in engines)
    assert sum(engine.busy for engine in engines) == pytest.approx(gpu.now)
    for engine in engines:
        assert abs(engine.busy - gpu.now / len(engines)) <= 0.05 * gpu.now / len(engines) + 2 * longest
    assert gpu.most <= max(engine.lanes for engine in engines) + len(engines)  # the first had the device alone


def test_an_engine_alone_gets_all_and_waits_for_nothing() -> None:
    alone, idle = Engine(0.010), Engine(0.001, since=1e9)
    gpu = Gpu([alone, idle])
    gpu.run(1.0)
    assert alone.busy == pytest.approx(1.0, rel=0.02)
    assert gpu.most == 3  # all of its lanes


@pytest.mark.parametrize("since", [0.5001, 0.505, 0.5099])
def test_the_first_batch_of_an_idle_engine_waits_for_one_of_the_other(since: float) -> None:
    busy, other = Engine(0.010), Engine(0.001, lanes=1, since=since)
    Gpu([busy, other]).run(0.6)
    assert other.waits[0] <= 0.010


def test_a_pause_earns_no_time() -> None:
    steady, late = Engine(0.002), Engine(0.002, since=1.0)
    gpu = Gpu([steady, late])
    gpu.run(1.0)
    before = steady.busy
    gpu.run(1.4)
    assert steady.busy - before == pytest.approx(late.busy, rel=0.1)


def test_a_device_has_one_order_of_turns_and_needs_it_only_with_several_engines() -> None:
    device = FakeDevice()
    first = Pipeline(device)
    turns = turns_of(device)
    assert first.turns is turns
    assert not turns.shared
    second = Pipeline(device)
    assert turns.shared
    second.close()
    assert not turns.shared
    assert turns_of(FakeDevice()) is not turns
    first.close()


def test_lanes_of_several_engines_take_turns_in_threads() -> None:
    device = FakeDevice()
    pipelines = [Pipeline(device) for _ in range(3)]
    launches = [Doubling(device, pipeline.compute) for pipeline in pipelines]
    lanes = [
        Lane(pipeline, launch, ["x"]) for pipeline, launch in zip(pipelines, launches, strict=True) for _ in range(3)
    ]

    def serve(lane: Lane) -> None:
        for number in range(30):
            values = np.full((2, 3), number, np.float32)
            (result,) = lane.run({"x": values})
            np.testing.assert_array_equal(result, 2 * values)

    with ThreadPoolExecutor(len(lanes)) as threads:
        list(threads.map(serve, lanes))
    launches[0].failing = TooLarge("no memory")
    for _ in range(5):  # a batch that fails ends its turn
        with pytest.raises(TooLarge):
            lanes[0].run({"x": np.zeros((2, 3), np.float32)})
    serve(lanes[-1])
    assert not any(pipeline.share.active for pipeline in pipelines)
    for lane in lanes:
        lane.close()
    for pipeline in pipelines:
        pipeline.close()


def test_models_of_both_engines_take_turns_with_cuda_graphs(tmp_path: Path) -> None:
    device, graphs = SessionDevice(), GraphOptions(most=4, batch="batch", padded=True)
    program, path = lowered(nn.Linear(3, 2), "x:float32[batch,3]"), onnx_models.affine(tmp_path)
    torch_engine = fake_torch.pipelined(program.engine(), device, graphs)
    session = pipelined(path, device, graphs)
    turns = turns_of(device)
    assert turns.shared

    def serve(lane: Any, plain: Any) -> None:
        for seed in range(20):
            feed = {"x": np.full((1 + seed % 5, 3), seed, np.float32)}
            answer = lane.run(feed)
            for name, expected in plain.run(feed).items():
                np.testing.assert_allclose(answer[name], expected, rtol=1e-5)

    lanes: list[Any] = [torch_engine, *torch_engine.more_lanes(1), session]
    plains: list[Any] = [program.engine(), program.engine(), load_engine(EngineSpec(path, device="cpu"))]
    with ThreadPoolExecutor(len(lanes)) as threads:
        list(threads.map(serve, lanes, plains))
    assert isinstance(torch_engine._backend, fake_torch.FakeTorch)
    assert torch_engine._backend.replays > 4
    assert session._session.runs.count(1) > 1
    assert not any(share.active for share in turns._shares)
    for lane in lanes:
        lane.close()
    assert not turns._shares


def test_a_batch_that_never_ends_does_not_stop_other_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.runtime.gpu.turns._PATIENCE", 0.01)
    turns = Turns()
    endless, other = turns.join(), turns.join()
    for _ in range(3):
        turns.enter(endless)
    for _ in range(3):
        turns.finish(turns.enter(other))
    assert not other.active
