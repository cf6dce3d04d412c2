"""Requests that were running when an engine process ended: innocent ones are answered, the cause is refused."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ingot.errors import EngineLost, InvalidArgument
from ingot.runtime import BatchRunner, Entry
from ingot.runtime.dispatch.suspects import Suspects
from ingot.tensors import Array
from tests.runtime.fake_engines import DOUBLER, FunctionEngine

DEADLY = 13.0


class Mortal(FunctionEngine):
    """Its process ends on every batch that holds DEADLY."""

    def __init__(self) -> None:
        super().__init__(self._double)

    @staticmethod
    def _double(inputs: Mapping[str, Array]) -> dict[str, Array]:
        if (inputs["x"] == DEADLY).any():
            raise EngineLost("it ended by SIGFPE")
        return {"y": inputs["x"] * 2}


def entry(value: float) -> Entry:
    return Entry({"x": np.full((1, 2), value, np.float32)}, 1, lambda outcome: None, 0.0)


def results(runner: BatchRunner, *values: float) -> list[str | float]:
    """Return each request's answer, or the name of its error."""
    outcomes = runner.run([entry(value) for value in values])
    return [outcome["y"][0, 0] if isinstance(outcome, Mapping) else type(outcome).__name__ for outcome in outcomes]


def test_only_the_cause_is_refused() -> None:
    engine = Mortal()
    suspects = Suspects()
    runner = BatchRunner(engine, DOUBLER, suspects=suspects)
    other = BatchRunner(Mortal(), DOUBLER, suspects=suspects)  # another instance of the model
    assert results(runner, 1, DEADLY, 3) == ["EngineLost"] * 3
    engine.calls.clear()
    assert results(runner, 1, 4, DEADLY, 5, 3) == [2, 8, "EngineLost", 10, 6]
    assert engine.calls == [1, 1, 1, 2]  # the suspects alone, and the others together
    engine.calls.clear()
    assert results(other, 1, DEADLY, 3) == [2, "InvalidArgument", 6]
    assert engine.calls == []
    assert results(runner, 1, 3) == [2, 6]
    assert engine.calls == [2]


def test_equal_requests_of_one_batch_count_once() -> None:
    runner = BatchRunner(Mortal(), DOUBLER, suspects=Suspects())
    assert results(runner, 1, 1, DEADLY) == ["EngineLost"] * 3
    assert results(runner, 1) == [2]


def test_a_refused_request_is_tried_again_later() -> None:
    now = 0.0
    runner = BatchRunner(Mortal(), DOUBLER, suspects=Suspects(lambda: now))
    for _ in range(2):
        assert results(runner, DEADLY) == ["EngineLost"]
    (refused,) = runner.run([entry(DEADLY)])
    assert isinstance(refused, InvalidArgument)
    assert str(refused) == (
        "requests with these inputs ended the model's engine process 2 times; they are refused for 10 min"
    )
    now = 601.0
    assert results(runner, DEADLY) == ["EngineLost"]


def test_the_memory_of_suspects_is_bounded() -> None:
    suspects = Suspects()
    for value in range(2000):
        suspects.add([entry(value)])
    assert len(suspects._found) == 1024


def test_equal_requests_end_no_third_process() -> None:
    engine = Mortal()
    runner = BatchRunner(engine, DOUBLER, suspects=Suspects())
    assert results(runner, DEADLY, DEADLY, DEADLY) == ["EngineLost"] * 3
    engine.calls.clear()
    assert results(runner, DEADLY, DEADLY, DEADLY) == ["EngineLost", "InvalidArgument", "InvalidArgument"]
    assert engine.calls == [1]
