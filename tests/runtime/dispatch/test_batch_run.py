from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from ingot.errors import EngineLost, EngineTimeout, InternalError, InvalidArgument
from ingot.runtime import BatchRunner, Entry, Outcome
from ingot.runtime.dispatch import batch_run
from ingot.runtime.dispatch.worker import Worker
from ingot.tensors import Array, DType, Signature, TensorSpec
from tests.runtime.fake_engines import DOUBLER, FunctionEngine


def entry(array: Array) -> Entry:
    return Entry({"x": array}, len(array), lambda outcome: None, 0.0)


def outputs(outcome: Outcome) -> Mapping[str, Array]:
    assert isinstance(outcome, Mapping)
    return outcome


def test_rows_go_back_to_their_requests() -> None:
    engine = FunctionEngine()
    arrays = [np.full((samples, 2), samples, np.float32) for samples in (1, 3, 2)]
    outcomes = BatchRunner(engine, DOUBLER).run([entry(array) for array in arrays])
    assert engine.calls == [6]
    for array, outcome in zip(arrays, outcomes, strict=True):
        assert np.array_equal(outputs(outcome)["y"], array * 2)


def test_a_batch_axis_that_is_not_the_first() -> None:
    signature = Signature(
        (TensorSpec("x", DType.FP32, (2, "batch")),), (TensorSpec("y", DType.FP32, (2, "batch")),), "batch"
    )
    entries = [
        Entry({"x": np.full((2, columns), columns, np.float32)}, columns, lambda outcome: None, 0.0)
        for columns in (1, 3)
    ]
    outcomes = BatchRunner(FunctionEngine(), signature).run(entries)
    assert [outputs(outcome)["y"].tolist() for outcome in outcomes] == [[[2], [2]], [[6, 6, 6], [6, 6, 6]]]


def test_only_the_request_to_blame_fails() -> None:
    def picky(inputs: Mapping[str, Array]) -> dict[str, Array]:
        if (inputs["x"] == 13).any():
            raise InvalidArgument("no thirteens")
        return {"y": inputs["x"]}

    entries = [entry(np.full((1, 2), value, np.float32)) for value in (1, 13, 3)]
    first, bad, last = BatchRunner(FunctionEngine(picky), DOUBLER).run(entries)
    assert outputs(first)["y"].tolist() == [[1, 1]]
    assert isinstance(bad, InvalidArgument)
    assert outputs(last)["y"].tolist() == [[3, 3]]


def test_a_batch_whose_call_was_ended_is_not_tried_again() -> None:
    def ended(inputs: Mapping[str, Array]) -> dict[str, Array]:
        if len(inputs["x"]) == 4:
            raise InternalError("its halves run")
        raise EngineTimeout("the engine call was ended")

    engine = FunctionEngine(ended)
    outcomes = BatchRunner(engine, DOUBLER).run([entry(np.ones((1, 2), np.float32)) for _ in range(4)])
    assert engine.calls == [4, 2]
    assert all(isinstance(outcome, EngineTimeout) for outcome in outcomes)


class TestEndingABatch:
    """A batch is ended by another thread while the engine runs; here by the engine itself, for a certain order."""

    def worker(self, engine: FunctionEngine) -> Worker:
        return Worker(engine, BatchRunner(engine, DOUBLER), lambda *_: None, "test")

    def test_its_requests_fail_with_the_error_given(self) -> None:
        def function(inputs: Mapping[str, Array]) -> dict[str, Array]:
            worker.end(worker.calls, EngineTimeout("took longer than 3s"))
            raise EngineTimeout("the engine call was ended")

        worker = self.worker(FunctionEngine(function))
        outcomes, _, _ = worker.run([entry(np.ones((1, 2), np.float32))])
        assert str(outcomes[0]) == "took longer than 3s"
        worker.close(30)

    def test_a_batch_that_was_not_meant_runs_again(self) -> None:
        def function(inputs: Mapping[str, Array]) -> dict[str, Array]:
            if len(engine.calls) == 1:
                worker.end(worker.calls, EngineTimeout("too late for this one"))
            if len(engine.calls) == 2:
                raise EngineTimeout("the engine call was ended")
            return {"y": inputs["x"] * 2}

        engine = FunctionEngine(function)
        worker = self.worker(engine)
        for value in (1, 2):
            outcomes, _, _ = worker.run([entry(np.full((1, 2), value, np.float32))])
            assert outputs(outcomes[0])["y"].tolist() == [[2 * value] * 2]
        assert len(engine.calls) == 3
        worker.end(2, EngineTimeout("not running any longer"))
        assert engine.terminations == 1
        worker.close(30)


def test_a_batch_that_lost_its_engine_process_is_not_tried_again() -> None:
    def lost(inputs: Mapping[str, Array]) -> dict[str, Array]:
        raise EngineLost("it ended by SIGFPE")

    engine = FunctionEngine(lost)
    outcomes = BatchRunner(engine, DOUBLER).run([entry(np.ones((1, 2), np.float32)) for _ in range(3)])
    assert [type(outcome) for outcome in outcomes] == [EngineLost] * 3
    assert engine.calls == [3]


def test_an_unforeseen_failure_hides_its_text(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run.log, "filters", [])  # of repeated errors, which other tests may have raised

    def broken(inputs: Mapping[str, Array]) -> dict[str, Array]:
        raise ZeroDivisionError("a secret")

    (outcome,) = BatchRunner(FunctionEngine(broken), DOUBLER).run([entry(np.ones((1, 2), np.float32))])
    assert isinstance(outcome, InternalError)
    assert "secret" not in str(outcome)
    assert "a secret" in caplog.text


def test_an_engine_that_returns_too_few_rows_is_not_trusted() -> None:
    engine = FunctionEngine(lambda inputs: {"y": inputs["x"][:1]})
    outcomes = BatchRunner(engine, DOUBLER).run([entry(np.ones((1, 2), np.float32)) for _ in range(3)])
    assert engine.calls == [3, 1, 2, 1, 1]  # joined it lied; alone each is right
    assert all(isinstance(outcome, Mapping) for outcome in outcomes)


def test_an_engine_that_drops_a_row_of_a_single_request_answers_nothing() -> None:
    for samples, returned in ((3, 2), (0, 1), (1, 0)):
        y = np.zeros((returned, 2), np.float32)
        engine = FunctionEngine(lambda inputs, y=y: {"y": y})  # type: ignore[misc]
        [outcome] = BatchRunner(engine, DOUBLER).run([entry(np.ones((samples, 2), np.float32))])
        assert isinstance(outcome, InternalError)
        assert f"float32 [{returned}, 2] for {samples} samples" in str(outcome)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda y: y.astype(np.float64), id="datatype"),
        pytest.param(lambda y: y[..., None], id="rank"),
        pytest.param(lambda y: np.concatenate([y, y[:1]]), id="samples"),
        pytest.param(lambda y: y.T, id="axes"),
    ],
)
def test_what_an_engine_returns_has_the_datatype_rank_and_samples_of_the_signature(
    change: Callable[[Array], Array], count: int
) -> None:
    engine = FunctionEngine(lambda inputs: {"y": change(inputs["x"])})
    outcomes = BatchRunner(engine, DOUBLER).run([entry(np.ones((3, 2), np.float32)) for _ in range(count)])
    for outcome in outcomes:
        assert isinstance(outcome, InternalError)
        assert "the model's signature is y:float32[batch,2]" in str(outcome)


@pytest.mark.parametrize("wrong", [None, 3, [b"a"], bytearray(b"a")], ids=lambda value: type(value).__name__)
def test_an_element_that_is_not_a_text_is_the_engines_fault(wrong: object) -> None:
    """The request is not to blame, and its neighbour is answered."""

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        y = np.array(inputs["x"])
        for index, item in np.ndenumerate(y):
            y[index] = wrong if item == b"odd" else item
        return {"y": y}

    signature = Signature(
        (TensorSpec("x", DType.BYTES, ("batch", 1)),), (TensorSpec("y", DType.BYTES, ("batch", 1)),), "batch"
    )
    odd, good = BatchRunner(FunctionEngine(run, signature), signature).run(
        [entry(np.array([[text]], object)) for text in (b"odd", b"good")]
    )
    assert isinstance(odd, InternalError)
    assert f"elements of the type {type(wrong).__name__} in output 'y'" in str(odd)
    assert outputs(good)["y"].tolist() == [[b"good"]]


def test_outputs_that_the_signature_lacks_are_dropped() -> None:
    engine = FunctionEngine(lambda inputs: {"y": inputs["x"], "more": inputs["x"][:1]})
    outcomes = BatchRunner(engine, DOUBLER).run([entry(np.ones((1, 2), np.float32)) for _ in range(2)])
    assert engine.calls == [2]
    assert [outputs(outcome).keys() for outcome in outcomes] == [{"y"}, {"y"}]


def test_an_output_that_the_engine_does_not_give_is_named() -> None:
    signature = Signature(
        (TensorSpec("x", DType.FP32, ("batch", 2)),),
        (TensorSpec("y", DType.FP32, ("batch", 2)), TensorSpec("z", DType.FP32, ("batch", 2))),
        "batch",
    )
    engine = FunctionEngine(lambda inputs: {"y": inputs["x"]}, signature)
    [outcome] = BatchRunner(engine, signature).run([Entry({"x": np.ones((1, 2), np.float32)}, 1, print, 0.0)])
    assert isinstance(outcome, InternalError)
    assert "'z'" in str(outcome)
