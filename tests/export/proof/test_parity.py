from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from ingot.errors import EngineTimeout, ParityError
from ingot.export import program
from ingot.export.proof import extremes
from ingot.export.proof.examples import Edge, Examples
from ingot.export.proof.independence import unbatchable
from ingot.export.proof.parity import prove, tolerance, unrepeated
from ingot.tensors import Array, DType, Range, Shape, Signature, TensorSpec, ValueRange


class Function:
    """A model that is a function of its input x."""

    def __init__(self, function: Callable[[Array], Array]):
        self._function = function

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": self._function(inputs["x"])}


class Endless(Function):
    """A graph whose call on large values ends only if it is terminated."""

    def __init__(self) -> None:
        super().__init__(lambda x: x)
        self._terminated = threading.Event()

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if np.abs(inputs["x"]).max() > 30:
            self._terminated.wait()
            raise EngineTimeout("the call was terminated")
        return super().run(inputs)

    def terminate(self) -> None:
        self._terminated.set()


def signature(
    dtype: DType = DType.FP32, output: DType | None = None, ranges: Mapping[str, Range] | None = None
) -> Signature:
    shape = ("batch", 4)
    return Signature(
        (TensorSpec("x", dtype, shape),), (TensorSpec("y", output or dtype, shape),), "batch", ranges=ranges or {}
    )


def compare(expected: Callable[[Array], Array], actual: Callable[[Array], Array], of: Signature | None = None) -> None:
    of = of or signature()
    prove(Function(expected), Function(actual), of, Examples(of.inputs, of.ranges))


def test_equal_models_give_evidence_and_two_goldens() -> None:
    of = signature()
    double = Function(lambda x: x * 2)
    (evidence,), goldens = prove(double, double, of, Examples(of.inputs, of.ranges))
    assert (evidence.tensor, evidence.error) == ("y", 0)
    assert evidence.cases == len(list(Examples(of.inputs, of.ranges).cases())) > 2
    assert len(goldens) == 2
    for golden in goldens:
        assert np.array_equal(golden.outputs["y"], golden.inputs["x"] * 2)
    assert len({golden.inputs["x"].shape for golden in goldens}) == 2


def test_a_call_on_extreme_values_that_does_not_end_is_ended_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_ENDLESS", 0.01)
    of = signature()
    notes = extremes.remarks(Function(lambda x: x), Endless(), Examples(of.inputs, of.ranges), 1e-4)
    assert next(notes) == "at inputs 50 times as large, the graph does not end where the model does"


def test_rounding_passes_and_more_does_not() -> None:
    compare(lambda x: x, lambda x: x * np.float32(1 + 1e-6))
    with pytest.raises(ParityError, match=r"output 'y' differs by 1\.00e-03 of its largest value, tolerance 1e-04"):
        compare(lambda x: x, lambda x: x * np.float32(1.001))


def test_the_message_names_the_worst_element_and_the_inputs() -> None:
    def off(x: Array) -> Array:
        y = x.copy()
        y[0, 2] += 5
        return y

    with pytest.raises(ParityError, match=r"became \S+ at \[0, 2\] \(inputs: x \[3, 4\]\)"):
        compare(lambda x: x, off)


def test_a_fault_at_one_batch_size_only_is_found() -> None:
    with pytest.raises(ParityError, match=r"x \[1, 4\]"):
        compare(lambda x: x, lambda x: x if len(x) > 1 else -x)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: x[:, :3], r"has shape \[3, 3\] instead of \[3, 4\]"),
        (lambda x: x.astype(np.float64), "is float64 instead of float32"),
        (lambda x: np.where(x == x.max(), np.nan, x), "became nan at"),
        (lambda x: x * np.float32(np.inf), "became -?inf at"),
    ],
)
def test_differing_shapes_types_and_nans_are_reported(wrong: Callable[[Array], Array], message: str) -> None:
    with pytest.raises(ParityError, match=message):
        compare(lambda x: x, wrong)


def test_integers_must_be_equal() -> None:
    of = signature(DType.INT64)
    compare(lambda x: x, lambda x: x, of)
    with pytest.raises(ParityError):
        compare(lambda x: x, lambda x: x + (x == x.max()), of)


def test_a_nondeterministic_model_is_recognized() -> None:
    rng = np.random.default_rng()

    def noisy(x: Array) -> Array:
        return x + rng.standard_normal(x.shape).astype(np.float32)

    of = signature()
    examples = Examples(of.inputs, of.ranges)
    assert unrepeated(Function(noisy), examples) == "y"
    assert unrepeated(Function(lambda x: x * 2), examples) is None


def test_the_least_exact_type_sets_the_tolerance() -> None:
    assert tolerance(signature(DType.FP64)) < tolerance(signature(DType.FP32)) < tolerance(signature(DType.FP16))
    assert tolerance(signature(DType.FP32, DType.BF16)) == tolerance(signature(DType.BF16))
    assert tolerance(signature(DType.INT8)) == tolerance(signature(DType.FP32))


def touch(function: Callable[[Array], Array], batch: Range | None = None) -> str | None:
    of = signature(ranges={"batch": batch} if batch else {})
    return unbatchable(Function(function), of, "batch", Examples(of.inputs, of.ranges))


@pytest.mark.parametrize(
    "mixing",
    [
        lambda x: x - x.mean(0),
        lambda x: x + np.roll(x, 1, 0),
        lambda x: x.argsort(0).astype(np.float32),
        lambda x: x * len(x),
    ],
    ids=["mean", "neighbour", "rank", "count"],
)
def test_rows_that_see_each_other_must_not_be_joined(mixing: Callable[[Array], Array]) -> None:
    assert "depends on the other samples" in (touch(mixing) or "")


def test_rows_that_do_not_may_be() -> None:
    assert touch(lambda x: x - x.mean(1, keepdims=True)) is None


def test_a_batch_of_at_most_one_is_not_dynamic() -> None:
    assert touch(lambda x: x, batch=Range(1, 1)) == "dimension 'batch' is never more than 1"


def test_an_output_without_the_batch_cannot_be_split() -> None:
    of = Signature((TensorSpec("x", DType.FP32, ("batch", 4)),), (TensorSpec("y", DType.FP32, (4,)),))
    reason = unbatchable(Function(lambda x: x.sum(0)), of, "batch", Examples(of.inputs, of.ranges))
    assert reason == "output 'y' has 0 dimensions 'batch', not one"


def test_rows_that_cannot_run_alone_are_not_batched() -> None:
    assert "never 1" in str(touch(lambda x: x - x.mean(0), batch=Range(2, 8)))


def test_an_output_that_compares_the_rows_of_a_batch_is_not_joined() -> None:
    of = Signature((TensorSpec("x", DType.FP32, ("batch", 4)),), (TensorSpec("y", DType.FP32, ("batch", "batch")),))
    reason = unbatchable(Function(lambda x: x @ x.T), of, "batch", Examples(of.inputs, of.ranges))
    assert reason == "output 'y' has 2 dimensions 'batch', not one"


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if not dtype.is_float])
@pytest.mark.parametrize("shape", [("batch",), ("batch", 1), ("batch", 1, 1)])
def test_one_value_a_sample_differs_between_samples(dtype: DType, shape: Shape) -> None:
    of = Signature((TensorSpec("x", dtype, shape),), (TensorSpec("y", dtype, shape),))
    examples = Examples(of.inputs, of.ranges)
    assert unbatchable(Function(lambda x: x), of, "batch", examples) is None
    if dtype is not DType.BYTES:
        reason = unbatchable(Function(lambda x: np.roll(x, 1, 0)), of, "batch", examples)
        assert "depends on the other samples" in str(reason)


def test_equal_samples_name_the_remedy() -> None:
    spec = TensorSpec("x", DType.INT64, ("batch", 1), ValueRange(3, 3))
    of = Signature((spec,), (TensorSpec("y", DType.INT64, ("batch", 1)),))
    reason = unbatchable(Function(lambda x: x), of, "batch", Examples(of.inputs, of.ranges))
    assert "all equal" in str(reason)
    assert "--input 'x:int64[batch,1]=0..120'" in str(reason)


class Masked:
    """The mean of the positions that a mask selects; ``empty`` is the result where it selects none."""

    def __init__(self, empty: float):
        self._empty = empty

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        chosen = inputs["mask"] == 0
        total, count = (inputs["x"] * chosen).sum(1), chosen.sum(1)
        mean = np.where(count, total / np.maximum(count, 1), self._empty)
        return {"y": mean.astype(np.float32)}


def masked(shape: tuple[str, str], given: Mapping[str, Array] | None = None) -> tuple[Signature, Examples]:
    inputs = TensorSpec("x", DType.FP32, shape), TensorSpec("mask", DType.BOOL, shape)
    return Signature(inputs, (TensorSpec("y", DType.FP32, shape[:1]),), "batch"), Examples(inputs, {}, given)


def test_nan_that_a_mask_causes_is_no_difference_and_other_values_are_drawn() -> None:
    of, examples = masked(("batch", "seq"))
    remarks: list[str] = []
    (evidence,), goldens = prove(Masked(np.nan), Masked(0), of, examples, remark=remarks.append)
    assert evidence.cases == len(list(examples.cases()))
    assert not any(np.isnan(golden.outputs["y"]).any() for golden in goldens)
    assert [text.partition(" (")[0] for text in remarks] == [
        "for some of the drawn inputs the model returns NaN in 'y'"
    ]
    with pytest.raises(ParityError, match="differs by"):  # the positions that are defined are compared as well
        prove(Masked(np.nan), Function(lambda x: x.sum(1)), of, examples)


def test_a_size_at_which_no_inputs_are_defined_is_noted() -> None:
    def mean(x: Array, empty: float) -> Array:
        return np.full(len(x), empty, np.float32) if x.shape[1] == 1 else x.mean(1)

    of, examples = masked(("batch", "seq"))
    remarks: list[str] = []
    prove(Function(lambda x: mean(x, np.nan)), Function(lambda x: mean(x, 0)), of, examples, remark=remarks.append)
    assert remarks[-1] == "not compared at seq=1: the model is not defined on any inputs that were drawn at these sizes"


def test_nan_of_ordinary_values_is_a_difference() -> None:
    with pytest.raises(ParityError, match="nan became"), np.errstate(invalid="ignore"):
        compare(lambda x: np.sqrt(x), lambda x: np.sqrt(np.abs(x)))


def test_rounding_that_a_layer_amplifies_is_not_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer divides the rounding of equal values by nearly nothing; other differences of this size still count."""

    def normalized(x: Array) -> Array:
        return np.asarray((x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + np.float32(1e-6)) + 1)

    def shifted(function: Callable[[Array], Array], by: float) -> Function:
        return Function(lambda x: np.asarray(function(x) + np.float32(by if x.std() == 0 else 0)))

    stated = signature()
    examples = Examples(stated.inputs, stated.ranges)
    monkeypatch.setattr(examples, "edges", [Edge({"x": np.full((2, 4), 5, np.float32)})])
    prove(Function(normalized), shifted(normalized, 5e-4), stated, examples)
    with pytest.raises(ParityError, match="does not equal"):
        prove(Function(np.copy), shifted(np.copy, 4e-3), stated, examples)
