"""Ways in which a graph could be silently wrong although some inputs agree; each is refused or exported correctly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ingot
from ingot.errors import ExportError, ParityError
from ingot.export import export_model
from ingot.export.proof.examples import Examples
from ingot.export.proof.independence import unbatchable
from ingot.export.proof.parity import prove
from ingot.runtime import EngineSpec, load_engine
from ingot.tensors import Array, DType, Signature, TensorSpec
from tests.export.models import Function


@pytest.mark.matrix
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_an_example_of_one_value_does_not_hide_that_rows_touch(value: float) -> None:
    archive = export_model(Function(lambda x: x - x.mean(0)), torch.full((4, 3), value))
    assert archive.signature.batch is None


def test_an_example_of_one_value_does_not_hide_a_wrong_graph() -> None:
    signature = Signature((TensorSpec("x", DType.FP32, ("n", 3)),), (TensorSpec("y", DType.FP32, ("n", 3)),))
    examples = Examples(signature.inputs, {}, {"x": np.zeros((4, 3), np.float32)})
    with pytest.raises(ParityError):
        prove(Runs(np.sin), Runs(lambda x: x * 0), signature, examples)


@pytest.mark.matrix
def test_a_trace_of_a_fixed_shape_is_checked_with_other_values() -> None:
    for function in (sort_by_numpy, lambda x: x * 2 if x.sum() > 0 else x * 3):
        with pytest.raises(ExportError):
            export_model(Function(function), inputs="x:float32[4]", capture="trace")


def sort_by_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.sort(x.detach().numpy()))


@pytest.mark.matrix
@pytest.mark.parametrize(
    "condition", [lambda rows: rows > 5000, lambda rows: rows == 100, lambda rows: rows < 3], ids=["far", "one", "few"]
)
def test_a_size_that_the_code_asks_for_is_tried(condition: Callable[[int], bool]) -> None:
    with pytest.raises(ExportError):
        export_model(Function(lambda x: x * 2 if condition(x.shape[0]) else x * 3), inputs="x:float32[batch,2]")


@pytest.mark.matrix
def test_a_dimension_may_be_called_like_a_word_of_python() -> None:
    module = Function(lambda x: torch.nn.functional.interpolate(x[:, None], scale_factor=3.0))
    assert export_model(module, inputs="x:float32[batch,in]").signature.symbols == ("batch", "in")


def test_rounding_excuses_a_little_and_not_much() -> None:
    signature = Signature((TensorSpec("x", DType.FP32, ("n",)),), (TensorSpec("y", DType.FP32, ("n",)),))
    examples = Examples(signature.inputs, {})
    exact = Runs(lambda x: x * 1.05)
    with pytest.raises(ParityError):
        prove(Runs(lambda x: x), Runs(lambda x: x * 1.15), signature, examples, exact=exact)
    (evidence,), _ = prove(Runs(lambda x: x), Runs(lambda x: x * 1.0005), signature, examples, exact=exact)
    assert evidence.tolerance <= 1e-3


def test_half_precision_does_not_hide_that_rows_touch() -> None:
    shape = ("batch", 3)
    signature = Signature((TensorSpec("x", DType.BF16, shape),), (TensorSpec("y", DType.BF16, shape),))
    half = DType.BF16.numpy
    mixing = Runs(lambda x: (x.astype(np.float32) - 0.1 * x.astype(np.float32).mean(0)).astype(half))
    assert unbatchable(mixing, signature, "batch", Examples(signature.inputs, {})) is not None
    assert unbatchable(Runs(lambda x: x), signature, "batch", Examples(signature.inputs, {})) is None


def test_a_parameter_that_is_written_is_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = nn.Parameter(torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.calls.add_(1)
            return x * 2

    with pytest.raises(ExportError, match="changes its parameter calls"):
        export_model(Counting(), inputs="x:float32[batch,2]")


@pytest.mark.matrix
@pytest.mark.parametrize("route", ["auto", "strict"])
def test_a_write_to_the_data_of_a_parameter_is_refused(route: Any) -> None:
    """Captured by torch.export in strict mode, such a write ended the process."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data.mul_(1.0)
            return x * self.weight

    with pytest.raises(ExportError, match="weight"):
        export_model(Scaled(), inputs="x:float32[batch,4]", capture=route)


@pytest.mark.matrix
def test_a_submodule_may_be_called_module() -> None:
    class Wrapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x) * self.weight  # type: ignore[no-any-return]

    module = Wrapping()
    archive = export_model(module, inputs="x:float32[batch,2]")
    engine = load_engine(EngineSpec(archive.variant().path(), device="cpu"))
    x = np.ones((3, 2), np.float32)
    assert np.allclose(engine.run({"x": x})["output"], module(torch.tensor(x)).detach().numpy(), atol=1e-6)
    engine.close()


@pytest.mark.matrix
def test_the_body_of_an_operator_that_decides_by_sizes_is_refused() -> None:
    @ingot.op("soundness::by_size", fake=torch.empty_like)
    def by_size(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 50 else x * 3

    with pytest.raises(ExportError, match="branches on sizes"):
        export_model(Function(lambda x: by_size(x)), inputs="x:float32[batch,2]")


def test_a_state_is_proved_over_several_calls() -> None:
    """Right at the first value of the state and wrong later."""
    specs = (TensorSpec("x", DType.FP32, ("n",)), TensorSpec("s", DType.FP32, ()))
    outputs = (TensorSpec("y", DType.FP32, ("n",)), TensorSpec("s_next", DType.FP32, ()))
    examples = Examples(specs, {}, states={"s": np.zeros((), np.float32)})
    right = Steps(lambda x, s: x + s)
    with pytest.raises(ParityError):
        prove(right, Steps(lambda x, s: x), Signature(specs, outputs), examples)
    assert prove(right, right, Signature(specs, outputs), examples)


class Runs:
    """A function of one array as a model."""

    def __init__(self, function: Callable[[Array], Array]):
        self._function = function

    def run(self, inputs: Any) -> dict[str, Array]:
        return {"y": self._function(inputs["x"])}


class Steps:
    """A function of an input and a state that counts calls."""

    def __init__(self, function: Callable[[Array, Array], Array]):
        self._function = function

    def run(self, inputs: Any) -> dict[str, Array]:
        return {"y": self._function(inputs["x"], inputs["s"]), "s_next": inputs["s"] + np.float32(1)}


@pytest.mark.parametrize(
    ("function", "spec"),
    [
        (lambda x: torch.where(torch.isnan(x).any(), torch.zeros_like(x), x), "x:float32[batch,3]"),
        (lambda x: x / x.abs().max().clamp(min=10), "x:float32[batch,3]"),
        (lambda x: x - x.max(), "x:int64[batch,3]"),
    ],
    ids=["nan", "large", "integers"],
)
@pytest.mark.matrix
def test_rows_that_touch_through_extreme_values_are_not_joined(
    function: Callable[[torch.Tensor], torch.Tensor], spec: str
) -> None:
    archive = export_model(Function(function), inputs=spec)
    assert archive.signature.batch is None


@pytest.mark.matrix
def test_differences_at_extreme_values_are_reported() -> None:
    step = Function(lambda x: torch.nn.functional.max_pool1d(x[:, None], 3, 1)[:, 0])
    archive = export_model(step, inputs="x:float32[batch,9]")
    notes = archive.variant().serving.provenance.notes
    assert [note for note in notes if note.startswith("with a NaN among the inputs, the graph's 'output' differs")]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "function", [lambda x: torch.log1p(x.abs() * 1e-8), lambda x: torch.atan2(torch.zeros_like(x), x) * 1e-7]
)
def test_tiny_answers_are_compared_relative_to_their_size(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    try:
        archive = export_model(Function(function), inputs="x:float32[batch,3]")
    except ParityError:
        return
    x = torch.tensor([[0.5, -1.0, 2.0]])
    (actual,) = load_engine(EngineSpec(archive.variants[0].path())).run({"x": x.numpy()}).values()
    torch.testing.assert_close(torch.from_numpy(actual), function(x), rtol=1e-3, atol=0)


@pytest.mark.matrix
def test_lengths_that_the_example_has_alike_are_varied() -> None:
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(4, 5, batch_first=True)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            y, (h, _) = self.layer(packed)
            total: torch.Tensor = h[-1] + y.data.reshape(-1, 5).mean(0)
            return total  # over packed rows, not padded ones

    example = {"x": torch.randn(3, 7, 4), "lengths": torch.tensor([7, 7, 7])}
    with pytest.raises(ExportError):
        export_model(Leaky().eval(), example, inputs=["x:float32[batch,7,4]", "lengths:int64[batch]"])


@pytest.mark.matrix
def test_an_example_that_permits_no_other_values_is_proved_with_its_own() -> None:
    class Width(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(10, 4)

        def forward(self, box: torch.Tensor) -> torch.Tensor:
            return self.rows(box[:, 1] - box[:, 0])  # type: ignore[no-any-return]

    boxes = torch.tensor([[0, 1], [20, 22], [40, 43], [60, 64]])  # ends of different boxes do not form a box
    archive = export_model(Width(), {"box": boxes}, inputs="box:int64[batch,2]")
    assert archive.variant().serving.evidence.parity[0].cases > 4


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x: x[:, :200].sum(1), "x:float32[batch,n]"),
        (lambda x: x[:, -200:].sum(1), "x:float32[batch,n]"),
        (lambda x: x[:200] * 2, "x:float32[batch,3]"),
        (lambda x: x[:, :100, :60].sum((1, 2)), "x:float32[batch,height,width]"),
        (lambda x: x[:, 50:200].sum(1), "x:float32[batch,n]"),
    ],
    ids=["first", "last", "batch", "crop", "middle"],
)
@pytest.mark.one_case
def test_a_slice_that_small_sizes_do_not_reach_stays_in_the_graph(
    function: Callable[[torch.Tensor], torch.Tensor], inputs: str
) -> None:
    archive = export_model(Function(function), inputs=inputs)
    (spec,) = archive.signature.inputs
    rows = {"batch": 2} if len(archive.signature.symbols) > 1 else {}
    with contextlib.closing(load_engine(EngineSpec(archive.variants[0].path()))) as engine:
        for size in (150, 200, 201, 1000):
            x = torch.randn([rows.get(dim, size) if isinstance(dim, str) else dim for dim in spec.shape])
            (actual,) = engine.run({"x": x.numpy()}).values()
            torch.testing.assert_close(torch.from_numpy(actual), function(x), rtol=1e-4, atol=1e-3)


class Rare(nn.Module):
    """A value that no example has changes all samples of a batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where((x < -1e6).any(), torch.zeros_like(x), x * 2)


@pytest.mark.matrix
@pytest.mark.parametrize("independent", [False, True])
def test_samples_that_rare_values_join_are_not_batched_unless_declared(independent: bool) -> None:
    archive = export_model(Rare(), inputs="x:float32[batch,4]", independent=independent)
    note = next(text for text in archive.variant().serving.provenance.notes if "reduces over the samples" in text)
    assert "(ReduceMax), from test_soundness.py:" in note
    assert archive.signature.batch == ("batch" if independent else None)
    start = "served in batches on the word of its author" if independent else "served without batching"
    assert note.startswith(start)


class Compiled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.compiler.is_exporting() else x * 3


class Seeded(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return x + torch.randn_like(x)


@pytest.mark.matrix
@pytest.mark.parametrize(("module", "cause"), [(Compiled(), "is_exporting"), (Seeded(), "manual_seed")])
def test_code_that_a_capture_runs_in_another_way_is_named(module: nn.Module, cause: str) -> None:
    with pytest.raises(ParityError, match=rf"forward \(test_soundness.py:\d+\) uses {cause}: a "):
        export_model(module, inputs="x:float32[batch,4]")
