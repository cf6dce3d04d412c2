from __future__ import annotations

import threading

import numpy as np

from ingot.runtime.loading.engine_swap import Replaceable
from tests.runtime.fake_engines import DOUBLER, FunctionEngine

X = {"x": np.ones((1, 2), np.float32)}


def tripler() -> FunctionEngine:
    return FunctionEngine(lambda inputs: {"y": inputs["x"] * 3})


def test_it_answers_as_the_engine_in_place_does_and_closes_the_one_before() -> None:
    first, second = FunctionEngine(), tripler()
    engine = Replaceable(first)
    assert (engine.signature, engine.platform, engine.device) == (DOUBLER, "test", "cpu")
    assert engine.run(X)["y"].tolist() == [[2, 2]]
    engine.replace(second)
    assert engine.run(X)["y"].tolist() == [[3, 3]]
    assert (first.closed, second.closed) == (True, False)
    engine.close()
    assert second.closed


def test_no_engine_is_closed_under_a_call() -> None:
    gate = threading.Event()
    first, second = FunctionEngine(gate=gate), tripler()
    engine = Replaceable(first)
    answers: list[object] = []
    call = threading.Thread(target=lambda: answers.append(engine.run(X)["y"].tolist()))
    call.start()
    while not first.calls:
        call.join(0.001)
        assert call.is_alive()
    change = threading.Thread(target=engine.replace, args=(second,))
    change.start()
    change.join(0.05)
    assert change.is_alive()
    assert not first.closed
    gate.set()
    call.join(30)
    change.join(30)
    assert answers == [[[2, 2]]]
    assert first.closed
    assert engine.current is second


def test_an_engine_that_arrives_too_late_is_closed() -> None:
    first, second = FunctionEngine(), tripler()
    engine = Replaceable(first)
    engine.close()
    engine.replace(second)
    assert (first.closed, second.closed) == (True, True)
    assert engine.current is first
